"""Per-example clipping beside ordinary training, on ten kinds of networks.

For each network of `clipping_networks` compiles the gradient of one batch
without clipping ("plain"), as the library chooses to clip it ("auto"), with
each strategy, as a user would write it with vmap(grad) and an einsum ("own"),
and with jax_privacy. Runs them in turns and prints one JSON document, and the
table of docs/benchmarks.md on standard error. A time is that of a second run in
a row, since the first pays for what ran before it; ratios are medians over
rounds. Memory is the compiler's: temporaries, and those with arguments and
results.

Bars of the chosen way: 1.15 times the time of the plain gradient and 1.1 times
its whole memory on each network, 1.05 times the time in the median, and never
slower than the user's own.

  python tests/benchmarks/clipping_models.py
  python tests/benchmarks/clipping_models.py --networks gpt_tied@8 \\
    --ways plain auto bookkeeping ghost vmap own jax_privacy
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import measuring

LIMITS = {"time": 1.15, "memory": 1.1, "median_time": 1.05}
WAYS = (
  "plain", "auto", "bookkeeping", "ghost", "vmap", "own", "jax_privacy"
)  # fmt: skip
SLOW = 8.0
"""Times the plain one's: what takes longer is run once."""
LIMIT_GIB = 16.0
"""What would take more is compiled, not run."""
CLIP = 0.1


def gradient(loss_fn: Callable[..., Any], way: str) -> Callable[..., Any]:
  """Returns `(params, batch)` to the sum of gradients."""
  import jax
  import jax.numpy as jnp

  from synthq_jax import optim

  def of_one(params, example):
    return loss_fn(params, jax.tree.map(lambda x: x[None], example))[0]

  def own(params, batch):
    grads = jax.vmap(jax.grad(of_one), (None, 0))(params, batch)
    leaves = jax.tree.leaves(grads)
    squares = [jnp.sum(x.reshape(len(x), -1) ** 2, axis=1) for x in leaves]
    weights = jnp.minimum(1, CLIP / jnp.sqrt(sum(squares)))
    return jax.tree.map(lambda x: jnp.einsum("b,b...->...", weights, x), grads)

  if way == "plain":
    return jax.grad(lambda params, batch: jnp.sum(loss_fn(params, batch)))
  if way == "own":
    return own
  if way == "jax_privacy":
    import jax_privacy

    return jax_privacy.clipped_grad(
      of_one, l2_clip_norm=CLIP, batch_argnums=1, keep_batch_dim=False
    )
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=CLIP, strategy=way)
  return lambda params, batch: grad_fn(params, batch)[0]


def measure(
  name: str, ways: list[str], rounds: int, seconds: float
) -> dict[str, Any]:
  """Compiles and times one network's gradients."""
  import clipping_networks
  import jax

  from synthq_jax.optim import auto

  kind, _, size = name.partition("@")
  problem = clipping_networks.make(kind, int(size) if size else None)
  compiled, found = {}, {}
  for way in ways:
    start = time.perf_counter()
    step = jax.jit(gradient(problem.loss_fn, way))
    compiled[way] = step.lower(problem.params, problem.batch).compile()
    memory = compiled[way].memory_analysis()
    temporaries = memory.temp_size_in_bytes / 2**20
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes
    found[way] = {
      "temporaries_mib": round(temporaries, 1),
      "whole_mib": round(temporaries + whole / 2**20, 1),
      "compile_s": round(time.perf_counter() - start, 1),
      "runs_s": [],
    }
    if temporaries > LIMIT_GIB * 2**10:
      del compiled[way]
  for number in range(rounds):
    if number == 1:  # what is slow has been run
      end = time.perf_counter() + seconds
    for way, run in compiled.items():
      runs = found[way]["runs_s"]
      if runs and runs[0] > SLOW * found["plain"]["runs_s"][0]:
        continue
      if not number or runs[-1] < 1.0:
        took = measuring.timed(run, problem.params, problem.batch)
      if number or took["wall_s"] < 5.0:
        took = measuring.timed(run, problem.params, problem.batch)
      runs.append(round(took["wall_s"], 4))
    if number and time.perf_counter() > end:
      break
  plain = found["plain"]
  for row in found.values():
    if row["runs_s"]:
      pairs = zip(row["runs_s"], plain["runs_s"], strict=False)
      row["time"] = round(statistics.median(a / b for a, b in pairs), 3)
    row["memory"] = round(row["whole_mib"] / plain["whole_mib"], 3)
  choice = auto.choose(problem.loss_fn, problem.params, problem.batch)
  return {
    "parameters": sum(x.size for x in jax.tree.leaves(problem.params)),
    "batch": len(jax.tree.leaves(problem.batch)[0]),
    "chosen": [choice.strategy, choice.microbatch_size],
    "ways": found,
  }


def missed(found: dict[str, Any]) -> list[str]:
  """Returns which bars the chosen way misses, and where."""
  rows = {name: one["ways"] for name, one in found.items()}
  said = []
  for name, ways in rows.items():
    for bar in ("time", "memory"):
      if ways["auto"][bar] > LIMITS[bar]:
        said.append(f"{name}: {bar} {ways['auto'][bar]}")
    if "own" in ways and ways["auto"]["time"] > ways["own"].get("time", 1e9):
      said.append(f"{name}: slower than the user's own")
  middle = statistics.median(ways["auto"]["time"] for ways in rows.values())
  if middle > LIMITS["median_time"]:
    said.append(f"median time {middle}")
  return said


def table(found: dict[str, Any]) -> str:
  """Returns ratios to the plain gradient in Markdown; "-": not run."""
  from synthq_jax import text_tables

  ways = [
    way for way in WAYS if any(way in one["ways"] for one in found.values())
  ]
  others = [way for way in ways if way != "plain"]
  header = (
    *("network", "parameters, millions", "batch", "chosen", "plain, s"),
    *(way.replace("auto", "auto: time") for way in others),
    "auto: memory",
  )
  rows = []
  for name, one in found.items():
    measured = one["ways"]
    strategy, together = one["chosen"]
    times = [measured.get(way, {}).get("time") for way in others]
    rows.append(
      (
        name.partition("@")[0],
        f"{one['parameters'] / 1e6:.2f}",
        str(one["batch"]),
        f"{strategy}, {together or one['batch']} at once",
        f"{statistics.median(measured['plain']['runs_s']):.3f}",
        *("-" if time is None else f"{time:.2f}" for time in times),
        f"{measured['auto']['memory']:.2f}",
      )
    )
  numeric = tuple(set(header) - {"network", "chosen"})
  made = text_tables.Table(header=header, rows=tuple(rows), numeric=numeric)
  return made.markdown()


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--networks", nargs="+", help="NAME or NAME@BATCH")
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument(
    "--seconds", type=float, default=60.0, help="of a network, after one round"
  )
  options = parser.parse_args()
  names = options.networks
  if not names:
    import clipping_networks

    names = list(clipping_networks.NETWORKS)
  found = {}
  for name in names:
    found[name] = measuring.in_own_process(
      measure, name, options.ways, options.rounds, options.seconds
    )
    for way, row in found[name]["ways"].items():
      measuring.say(name, found[name]["chosen"], way, row)
  measuring.say(table(found))
  said = missed(found)
  result = {"limits": LIMITS, "missed": said, "networks": found}
  return measuring.finish("clipping_models", result, passed=not said)


if __name__ == "__main__":
  sys.exit(main())
