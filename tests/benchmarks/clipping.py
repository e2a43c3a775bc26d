"""Per-example clipping beside ordinary training: time and memory on this CPU.

Compiles one gradient of the same T5 and batch for each way of clipping, and
without clipping, runs them in turn, and prints one JSON document. Memory is the
compiler's count of temporaries. Bars: book-keeping takes at most 1.25 times the
time of the ordinary gradient and 1.2 times its memory in the first two cases.

  python tests/benchmarks/clipping.py
  python tests/benchmarks/clipping.py --cases=growth   # batch and model sizes
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import numpy as np

from synthq_jax import optim
from synthq_jax.models import t5, t5_config

ORDINARY = "ordinary"
STRATEGIES = ("bookkeeping", "ghost", "vmap")
TIME_LIMIT, MEMORY_LIMIT = 1.25, 1.2
SLOW_S = 10.0
"""Ways that take longer are run once, and that run counts."""
LIMIT_GIB = 14.0
"""Cases whose temporaries would be larger are compiled, not run."""


class Case(NamedTuple):
  """A batch and a model of the shape of T5 1.1."""

  batch: int
  inputs: int
  targets: int
  dim: int = 256
  layers: int = 4
  vocab: int = 32_128

  def config(self) -> t5_config.T5Config:
    return t5_config.T5Config(
      vocab_size=self.vocab,
      emb_dim=self.dim,
      num_heads=self.dim // 64,
      head_dim=64,
      mlp_dim=4 * self.dim,
      num_encoder_layers=self.layers,
      num_decoder_layers=self.layers,
      mlp_activations=("gelu", "linear"),
      logits_via_embedding=False,
    )


BARS = (Case(16, 384, 32), Case(16, 128, 32))
GROWTH = (
  *(Case(batch, 128, 32) for batch in (8, 32, 64, 128, 256)),
  Case(16, 128, 32, dim=128, layers=2),
  Case(16, 128, 32, dim=512, layers=8),
)
SMOKE = (Case(4, 16, 8, dim=64, layers=1, vocab=128),)


def problem(case: Case) -> tuple[Callable[..., jax.Array], Any, Any]:
  """Returns loss, parameters and batch."""
  config = case.config()
  rng = np.random.default_rng(0)
  batch = {
    name: jnp.asarray(rng.integers(2, case.vocab, (case.batch, length)))
    for name, length in (("inputs", case.inputs), ("targets", case.targets))
  }
  params = t5.init_params(config, jax.random.key(0))
  return measuring.t5_loss(config), params, batch


def gradient(loss_fn: Callable[..., jax.Array], way: str) -> Callable[..., Any]:
  """Returns the gradient of the batch, clipped for each example or not."""
  if way == ORDINARY:
    return jax.grad(lambda params, batch: jnp.sum(loss_fn(params, batch)))
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=0.1, strategy=way)
  return lambda params, batch: grad_fn(params, batch)[0]


def measure(case: Case, ways: tuple[str, ...], repeats: int) -> dict[str, Any]:
  """Times one case, one run of each way after the other."""
  loss_fn, params, batch = problem(case)
  compiled, found = {}, {}
  for way in ways:
    start = time.perf_counter()
    lowered = jax.jit(gradient(loss_fn, way)).lower(params, batch)
    compiled[way] = lowered.compile()
    temporaries = compiled[way].memory_analysis().temp_size_in_bytes / 2**30
    found[way] = {
      "temporaries_gib": round(temporaries, 3),
      "compile_s": round(time.perf_counter() - start, 1),
      "runs_s": [],
    }
    measuring.say(
      f"{case.batch} x {case.inputs}/{case.targets} {way}: {found[way]}"
    )
    if temporaries > LIMIT_GIB:
      del compiled[way]
  for number in range(repeats + 1):  # the first is not counted
    for way, run in compiled.items():
      if number and found[way]["runs_s"][-1] > SLOW_S:
        continue
      took = measuring.timed(run, params, batch)
      found[way]["runs_s"].append(round(took["wall_s"], 4))
      measuring.say(f"{way} {found[way]['runs_s'][-1]} s")
  for values in found.values():
    values["runs_s"] = values["runs_s"][1:] or values["runs_s"]
    if values["runs_s"]:
      values["median_s"] = statistics.median(values["runs_s"])
      pairs = zip(values["runs_s"], found[ORDINARY]["runs_s"], strict=False)
      values["time_ratio"] = round(
        statistics.median(a / b for a, b in pairs), 3
      )
    memory = found[ORDINARY]["temporaries_gib"]
    values["memory_ratio"] = round(
      values["temporaries_gib"] / max(memory, 1e-3), 3
    )
  leaves = jax.tree.leaves(params)
  return {
    "case": case._asdict(),
    "parameters": sum(leaf.size for leaf in leaves),
    "ways": found,
  }


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument(
    "--cases", choices=("bars", "growth", "smoke"), default="bars"
  )
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
  options = parser.parse_args()
  cases = {"bars": BARS, "growth": GROWTH, "smoke": SMOKE}[options.cases]
  ways = (ORDINARY, *options.strategies)
  found = [measure(case, ways, options.repeats) for case in cases]
  books = [one["ways"].get("bookkeeping", {}) for one in found]
  passed = all(
    one.get("time_ratio", 0) <= TIME_LIMIT
    and one.get("memory_ratio", 0) <= MEMORY_LIMIT
    for one in books
  )
  result = {
    "limits": {"time_ratio": TIME_LIMIT, "memory_ratio": MEMORY_LIMIT},
    "cases": found,
  }
  has_bars = options.cases == "bars"
  return measuring.finish(
    "clipping", result, passed=passed if has_bars else None
  )


if __name__ == "__main__":
  sys.exit(main())
