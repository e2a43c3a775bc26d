"""DP-Adafactor's step beside optax's Adafactor, on 77 million parameters.

The parameters are those of T5 1.1 Small. Both steps are compiled, run in turn
and timed on this machine; the private one takes a clipped sum, draws noise for
every coordinate and divides. Prints one JSON document. Bar: 1.5 times the time.

  python tests/benchmarks/optimizer_overhead.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import optax

from synthq_jax import optim
from synthq_jax.models import t5, t5_config

LIMIT = 1.5
RATE = 1e-3


def transforms() -> dict[str, optax.GradientTransformation]:
  """Returns the optimizers, the one to compare with first."""
  private = {
    "l2_sensitivity": 0.1,
    "denominator": 1024.0,
    "key": jax.random.key(0),
  }
  return {
    "optax.adafactor": optax.adafactor(RATE),
    "adafactor": optim.adafactor(RATE),
    "dp_adafactor without noise": optim.dp_adafactor(
      RATE, noise_multiplier=0.0, **private
    ),
    "dp_adafactor": optim.dp_adafactor(RATE, noise_multiplier=1.0, **private),
  }


def stepper(tx: optax.GradientTransformation) -> Callable[..., Any]:
  """Returns one compiled step that reuses its parameters' and state's memory."""

  def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step, donate_argnums=(0, 1))


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--model", default="t5_1_1_small")
  parser.add_argument("--repeats", type=int, default=11)
  options = parser.parse_args()
  config = t5_config.get(options.model)
  params = jax.jit(lambda key: t5.init_params(config, key))(jax.random.key(1))
  gradients = jax.tree.map(lambda x: 1e-2 * x, params)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  runs: dict[str, Any] = {}
  for name, tx in transforms().items():
    mine = jax.tree.map(jnp.copy, params)
    runs[name] = [stepper(tx), mine, tx.init(mine), []]
  for _ in range(options.repeats + 1):  # the first one compiles
    for one in runs.values():
      start = time.perf_counter()
      one[1], one[2] = one[0](one[1], one[2], gradients)
      jax.block_until_ready(one[1])
      one[3].append(time.perf_counter() - start)
  seconds = {name: one[3][1:] for name, one in runs.items()}
  base = seconds["optax.adafactor"]
  ratios = {
    name: statistics.median(a / b for a, b in zip(times, base, strict=True))
    for name, times in seconds.items()
  }
  result = {
    "parameters": size,
    "median_s": {k: round(statistics.median(v), 4) for k, v in seconds.items()},
    "time_ratio": {k: round(v, 3) for k, v in ratios.items()},
    "limit": LIMIT,
  }
  passed = ratios["dp_adafactor"] <= LIMIT
  return measuring.finish("optimizer_overhead", result, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
