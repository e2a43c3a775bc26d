"""Clipped gradients of contrastive losses beside the ordinary step.

Compiles one gradient of a batch of n pairs for each method, runs them in turn
with the ordinary gradient, and writes one JSON document; the table goes to the
standard error. Time is the least CPU time of the runs, of all threads, and the
least wall time beside it; memory is the compiler's count of temporaries. Bars:
Logit's norms take at most 1.3 min(n, dim) times the ordinary step, 4 times for
the head and the net at n = 256; Row without gradients of negatives 1.5 times.

  python tests/benchmarks/contrastive.py > contrastive.json
  python tests/benchmarks/contrastive.py --cases head --sizes 16 256
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import numpy as np

from synthq_jax import optim, typing
from synthq_jax.data import shipped
from synthq_jax.losses import contrastive as losses
from synthq_jax.models import dual_encoder, image_encoders, t5_checkpoints
from synthq_jax.optim import contrastive

ORDINARY = "ordinary"
SIZES = tuple(2**k for k in range(4, 10))
QUERY_TOKENS, DOCUMENT_TOKENS = 24, 64
TEMPERATURE = 0.1
PASS_LIMIT, SMALL_LIMIT, CHEAP_LIMIT = 1.3, 4.0, 1.5
MEMORY_LIMIT_GIB = 6.0
"""Ways whose temporaries would be larger are compiled, not run."""
SLOW_S = 10.0
"""Ways that take longer are run once, and that run counts."""

_LOGIT = {
  f"logit {norms}": contrastive.Logit(norms=norms)
  for norms in ("exact", "bound")
}
_ROWS = {
  f"row {negatives} {gradients}": contrastive.Row(
    negatives=negatives, gradients=gradients
  )
  for negatives in ("batch", "public")
  for gradients in ("all", "pair", "query")
}
_METHODS = {
  **_LOGIT,
  **_ROWS,
  "group": contrastive.Group(size=8),
  "batch": contrastive.Batch(),
}


class Case(NamedTuple):
  """An encoder with its parameters and pairs."""

  encode: typing.EncodeFn
  params: Any
  batch: Callable[[int], Any]
  dim: int
  methods: tuple[str, ...]
  is_small: bool


def _tokens(size: int) -> Any:
  """Returns pairs that share words, and public negatives, of the demo's size."""
  rng = np.random.default_rng(size)
  documents = rng.integers(3, 4000, (2 * size, DOCUMENT_TOKENS))
  fields = {
    "queries": documents[:size, :QUERY_TOKENS],
    "documents": documents[:size],
    "public_negatives": documents[size:],
  }
  fields = {k: jnp.asarray(v, jnp.int32) for k, v in fields.items()}
  return fields | {"example_id": jnp.arange(size, dtype=jnp.int32)}


def _images(size: int) -> Any:
  rng = np.random.default_rng(size)
  images = rng.normal(size=(size, 32, 32, 3))
  others = images + 0.5 * rng.normal(size=images.shape)
  return {
    "queries": jnp.asarray(images, jnp.float32),
    "documents": jnp.asarray(others, jnp.float32),
  }


def _t5() -> Case:
  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  params = jax.tree.map(jnp.asarray, dual_encoder.encoder_params(params))
  return Case(
    lambda params, x: dual_encoder.encode(params, config, x),
    params,
    _tokens,
    config.emb_dim,
    tuple(_METHODS),
    False,
  )


def _head() -> Case:
  """A linear map of the frozen T5's vectors."""
  t5 = _t5()

  def encode(kernel: jax.Array, tokens: jax.Array) -> jax.Array:
    vectors = t5.encode(t5.params, tokens) @ kernel
    return vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)

  noise = jax.random.normal(jax.random.key(0), (t5.dim, t5.dim))
  kernel = jnp.eye(t5.dim) + 0.05 * noise
  return Case(encode, kernel, _tokens, t5.dim, tuple(_LOGIT), True)


def _net() -> Case:
  net = image_encoders.EmbeddingNet()
  params = net.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))["params"]
  return Case(
    lambda params, x: net.apply({"params": params}, x),
    params,
    _images,
    net.dim,
    tuple(_LOGIT),
    True,
  )


CASES = {"t5": _t5, "head": _head, "net": _net}


def gradient(case: Case, way: str, size: int) -> Callable[..., Any]:
  """Returns the gradient of a batch's loss, clipped by a method or not."""
  if way == ORDINARY:

    def loss(params: Any, batch: Any) -> jax.Array:
      q = case.encode(params, batch["queries"])
      d = case.encode(params, batch["documents"])
      return jnp.sum(losses.softmax(q @ d.T, temperature=TEMPERATURE))

    return jax.grad(loss)
  return optim.contrastive_clipped_grad(
    case.encode,
    case.encode,
    loss=losses.Softmax(temperature=TEMPERATURE),
    l2_clip_norm=0.5,
    method=_METHODS[way],
    max_batch_size=size,
  )


def measure(name: str, case: Case, size: int, options: Any) -> dict[str, Any]:
  """Compiles and times all ways for one size, in turns."""
  batch = case.batch(size)
  ways = [w for w in case.methods if not options.ways or w in options.ways]
  found: dict[str, Any] = {}
  compiled = {}
  for way in (ORDINARY, *ways):
    function = jax.jit(gradient(case, way, size))
    try:
      compiled[way] = function.lower(case.params, batch).compile()
    except ValueError as error:
      found[way] = {"refused": str(error)}
      continue
    memory = compiled[way].memory_analysis().temp_size_in_bytes
    found[way] = {"temporaries": memory, "wall_s": [], "cpu_s": []}
  for number in range(options.repeats + 1):  # the first is not counted
    for way in list(compiled):
      skipped = _skipped(found, way, size, options) if number == 0 else ""
      if skipped:
        found[way]["left_out"] = skipped
        del compiled[way]
        continue
      if number and found[way]["wall_s"][-1] > SLOW_S:
        continue
      took = measuring.timed(compiled[way], case.params, batch)
      for clock, seconds in took.items():
        found[way][clock].append(seconds)
  for way, values in found.items():
    _summarize(values, found[ORDINARY])
    measuring.say(_line(name, size, case.dim, way, values))
  return {
    "case": name,
    "size": size,
    "dim": case.dim,
    "parameters": sum(x.size for x in jax.tree.leaves(case.params)),
    "is_small": case.is_small,
    "ways": found,
  }


def _skipped(found: Any, way: str, size: int, options: Any) -> str:
  """Says why a way is not run, if it would take too long or too much memory."""
  if found[way]["temporaries"] > MEMORY_LIMIT_GIB * 2**30:
    return f"temporaries above {MEMORY_LIMIT_GIB} GiB"
  before = options.before.get(way)
  if before is None:
    return ""
  last, seconds = before
  if seconds * (size / last) ** 2 > options.limit_seconds:
    return f"more than {options.limit_seconds:g} s expected"
  return ""


def _summarize(values: dict[str, Any], ordinary: dict[str, Any]) -> None:
  """Keeps the least of the runs after the first, beside the ordinary step."""
  for clock in ("wall_s", "cpu_s"):
    runs = values.pop(clock, [])
    if not runs:
      continue
    values[clock] = round(min(runs[1:] or runs), 5)
    values[f"{clock[:-2]}_ratio"] = round(values[clock] / ordinary[clock], 3)


def _line(name: str, size: int, dim: int, way: str, values: Any) -> str:
  start = f"{name:5} {size:4} {way:18}"
  if "cpu_s" not in values:
    return f"{start} {values.get('left_out') or values.get('refused')}"
  bar = limit(name != "t5", way, size, dim)
  return (
    f"{start} {values['cpu_s']:9.3f} s CPU {values['cpu_ratio']:8.2f}x"
    f" wall {values['wall_s']:9.3f} s {values['wall_ratio']:8.2f}x"
    f" bar {bar or '-':>6} {values['temporaries'] / 2**20:9.1f} MiB"
  )


def limit(is_small: bool, way: str, size: int, dim: int) -> float | None:
  """Returns the most that a way may take of the ordinary step, if set."""
  if way in ("logit exact", "logit bound"):
    passes = round(PASS_LIMIT * min(size, dim), 1)
    return min(passes, SMALL_LIMIT) if is_small and size == 256 else passes
  if way.startswith("row") and not way.endswith("all"):
    return CHEAP_LIMIT
  return None


def verdicts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns each ratio for which there is a bar, by CPU time."""
  return [
    {
      "case": one["case"], "size": one["size"], "way": way, "limit": bar,
      "ratio": values.get("cpu_ratio"),
      "passed": "cpu_ratio" in values and values["cpu_ratio"] <= bar,
    }
    for one in found
    for way, values in one["ways"].items()
    if (bar := limit(one["is_small"], way, one["size"], one["dim"]))
  ]  # fmt: skip


def growth(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns by how much temporaries grow from a size to twice that."""
  by = {(one["case"], one["size"]): one for one in found}
  rows = []
  for (case, size), one in by.items():
    twice = by.get((case, 2 * size))
    for way, values in one["ways"].items():
      if not twice or "temporaries" not in twice["ways"].get(way, {}):
        continue
      grown = twice["ways"][way]["temporaries"]
      rows.append(
        {
          "case": case, "way": way, "from": size, "to": 2 * size,
          "ratio": round(grown / max(values["temporaries"], 1), 3),
          "temporaries": grown,
          "pairs_times_parameters": 4 * (2 * size) ** 2 * one["parameters"],
        }
      )  # fmt: skip
  return rows


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--cases", nargs="*", choices=CASES, default=tuple(CASES))
  parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
  parser.add_argument("--ways", nargs="*", choices=tuple(_METHODS))
  parser.add_argument("--repeats", type=int, default=4)
  parser.add_argument(
    "--limit_seconds",
    type=float,
    default=300.0,
    help="a way is left out if the size before says that it takes longer",
  )
  options = parser.parse_args()
  found: list[dict[str, Any]] = []
  try:
    for name in options.cases:
      case, options.before = CASES[name](), {}
      for size in options.sizes:
        one = measure(name, case, size, options)
        found.append(one)
        for way, values in one["ways"].items():
          if "wall_s" in values:
            options.before[way] = (size, values["wall_s"])
  except KeyboardInterrupt:
    measuring.say("interrupted: the sizes that are done are printed")
  bars = verdicts(found)
  return measuring.finish(
    "contrastive",
    {"cases": found, "bars": bars, "growth": growth(found)},
    passed=all(bar["passed"] for bar in bars),
  )


if __name__ == "__main__":
  sys.exit(main())
