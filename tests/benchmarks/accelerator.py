"""The first ten minutes on an accelerator: clipping, noise, sampling, top-k.

Runs on whatever JAX finds (GPU, TPU, several: rows are divided among them) and
prints one JSON document, and its table on standard error. Each way of clipping
takes the largest power of two of rows that fits on a device, found by bisection,
and says tokens a second, peak memory, and the share of the chip's peak rate that
the products of the plain gradient are (model FLOP utilisation, where the chip is
known). Every case runs in a process of its own, once; with --output, what is
there already is not run again, and what the time is too short for is left to the
next call.

  python tests/benchmarks/accelerator.py --output=accelerator.json
  python tests/benchmarks/accelerator.py --tiny    # seconds, on any CPU
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import clipping_models
import measuring
import numpy as np
import search
import tpu_v4

sys.path.insert(0, str(measuring.ROOT / "launch"))
import estimates  # noqa: E402

SECONDS = 600.0
DEMO_SECONDS = 240.0
WAYS = ("plain", "bookkeeping", "ghost", "vmap", "own", "jax_privacy")
LENGTHS = {"inputs": 384, "targets": 128}
MOST_ROWS = 512
REPEATS = 5
CHIPS = {  # as JAX names them
  "TPU v4": "v4", "TPU v5 lite": "v5litepod", "TPU v5p": "v5p", "TPU v5": "v5p",
  "TPU v6 lite": "v6e", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200",
}  # fmt: skip
CASES = (
  *(f"small {way}" for way in WAYS),
  *(f"base {way}" for way in WAYS),
  "noise",
  "sampling",
  "top-k",
  "demo",
)
TINY = {"small": {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}}
TINY["base"] = TINY["small"] | {"emb_dim": 32}


def config(model: str, tiny: bool) -> Any:
  """Returns the shape of T5 1.1, in bfloat16."""
  import dataclasses

  from synthq_jax.models import t5_config

  shape = dataclasses.replace(
    t5_config.get(f"t5_1_1_{model}"), dtype="bfloat16", dropout_rate=0.0
  )
  if not tiny:
    return shape
  layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
  return dataclasses.replace(shape, vocab_size=128, **layers, **TINY[model])


def parameters(shape: Any) -> Any:
  """Returns numbers of a T5's shapes; to compile its own would take minutes."""
  import jax

  from synthq_jax.models import t5

  rng = np.random.default_rng(0)
  key = jax.random.key(0)
  shapes = jax.eval_shape(lambda key: t5.init_params(shape, key), key)
  return jax.tree.map(
    lambda leaf: jax.device_put(
      0.05 * rng.standard_normal(leaf.shape, np.float32)
    ),
    shapes,
  )


def largest(fits: Callable[[int], bool], most: int) -> int:
  """Returns the largest power of two up to `most` that fits; 0: none does."""
  low, high = -1, int(math.log2(most)) + 1  # 2**low fits, 2**high does not
  while high - low > 1:
    middle = (low + high) // 2
    if fits(2**middle):
      low = middle
    else:
      high = middle
  return 2**low if low >= 0 else 0


def clip(model: str, way: str, tiny: bool) -> dict[str, Any]:
  """Measures one way of clipping at its largest batch."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec

  shape = config(model, tiny)
  lengths = {k: n // 32 for k, n in LENGTHS.items()} if tiny else LENGTHS
  loss_fn = measuring.t5_loss(shape)
  params = parameters(shape)
  of_device = clipping_models.gradient(loss_fn, way)
  devices = jax.devices()
  mesh = jax.sharding.Mesh(np.array(devices), ("data",))
  rows, whole = PartitionSpec("data"), PartitionSpec()

  def summed(params: Any, batch: Any) -> Any:
    return jax.lax.psum(of_device(params, batch), "data")

  step = jax.jit(
    jax.shard_map(
      summed,
      mesh=mesh,
      in_specs=(whole, rows),
      out_specs=whole,
      check_vma=False,
    )
  )
  found: dict[str, Any] = {}

  def batch_of(size: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {k: (size * len(devices), n) for k, n in lengths.items()}
    return {
      k: jnp.asarray(rng.integers(2, shape.vocab_size, one))
      for k, one in shapes.items()
    }

  def fits(size: int) -> bool:
    batch = batch_of(size)
    start = time.perf_counter()
    try:
      compiled = step.lower(params, batch).compile()
      measuring.say(
        f"{model} {way}, {size} rows: compiled in"
        f" {time.perf_counter() - start:.0f} s"
      )
      jax.block_until_ready(compiled(params, batch))
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return False
    times = [
      measuring.timed(compiled, params, batch)["wall_s"] for _ in range(REPEATS)
    ]
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole_memory = kept + memory.temp_size_in_bytes
    peak = memory.peak_memory_in_bytes or whole_memory
    found.update(
      {
        "rows_a_device": size,
        "seconds": round(statistics.median(times), 5),
        "peak_gib": round(peak / 2**30, 3),
      }
    )
    return True

  size = largest(fits, 1 if tiny else MOST_ROWS)
  if not size:
    return {"rows_a_device": 0}
  plain = clipping_models.gradient(loss_fn, "plain")
  tflop = tpu_v4.count(jax.make_jaxpr(plain)(params, batch_of(size)).jaxpr)[0]
  tokens = size * len(devices) * sum(lengths.values())
  chip = estimates.CHIPS.get(CHIPS.get(devices[0].device_kind, ""))
  rate = tflop / 1e12 / len(devices) / found["seconds"]
  return found | {
    "tokens_a_second": round(tokens / found["seconds"]),
    "tflops_a_device": round(rate, 3),
    "utilisation": round(rate / chip.tflops, 4) if chip else None,
  }


def noise(tiny: bool) -> dict[str, Any]:
  """Measures the noise of a whole T5 Base."""
  import jax

  from synthq_jax import optim

  shape = config("base", tiny)
  params = parameters(shape)
  tx = optim.privatize(
    l2_sensitivity=0.1,
    noise_multiplier=1.0,
    denominator=1024.0,
    key=jax.random.key(1),
  )
  step, state = jax.jit(tx.update), tx.init(params)
  jax.block_until_ready(step(params, state))
  times = [measuring.timed(step, params, state)["wall_s"] for _ in range(5)]
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  seconds = statistics.median(times)
  return {
    "seconds": round(seconds, 5),
    "numbers_a_second": round(size / seconds),
  }


def sampling(tiny: bool) -> dict[str, Any]:
  """Measures Poisson batches of MS MARCO's size."""
  from synthq_jax.privacy import sampling as sampling_lib

  n = 10_000 if tiny else 502_939
  sampler = sampling_lib.Poisson.with_margin(
    num_examples=n, expected_batch_size=min(1024, n // 10)
  )
  times = [
    measuring.timed(lambda number=number: sampler.batch(7, number))["wall_s"]
    for number in range(20)
  ]
  return {"seconds": round(statistics.median(times), 6), "records": n}


def top_k(tiny: bool) -> dict[str, Any]:
  """Measures the first 100 of exact search, here and with faiss on the CPU."""
  import jax

  from synthq_jax.retrieval import index

  documents, queries, dim = (2000, 16, 16) if tiny else (500_000, 1000, 768)
  rows = search.generated(documents, queries, dim)
  corpus, asked = rows[:documents], rows[documents:]
  device = jax.jit(lambda c, q: jax.lax.top_k(q @ c.T, 100)[1])
  on_device = jax.device_put(corpus), jax.device_put(asked)
  ours = np.asarray(device(*on_device))
  seconds = min(measuring.timed(device, *on_device)["wall_s"] for _ in range(5))
  exact = index.exact(corpus)
  took = measuring.timed(exact.search, asked, 100)["wall_s"]
  best = exact.search(asked, 100)[1]
  return {
    "seconds": round(seconds, 5),
    "faiss_seconds": round(took, 5),
    "queries_a_second": round(queries / seconds),
    **search.recalls(ours, best),
  }


def demo(tiny: bool) -> dict[str, Any]:
  """Runs the demo, or the tiny one, and says how long each stage took.

  What it has not made after some minutes is left out.
  """
  recipe = "demo_tiny" if tiny else "demo"
  with tempfile.TemporaryDirectory() as place:
    command = [
      sys.executable, "-m", "synthq_jax.cli.main", "run", "--quiet",
      f"--gin_file=gin_configs/recipes/{recipe}.gin", f"--workdir={place}/run",
    ]  # fmt: skip
    start = time.perf_counter()
    try:
      subprocess.run(
        command,
        check=True,
        cwd=measuring.ROOT,
        stdout=sys.stderr,
        timeout=DEMO_SECONDS,
      )
      is_whole = True
    except subprocess.TimeoutExpired:
      is_whole = False
    seconds = time.perf_counter() - start
    stages = {}
    for path in pathlib.Path(place, "run").rglob("result.json"):
      result = json.loads(path.read_text())["result"]
      name = path.parent.relative_to(pathlib.Path(place, "run")).as_posix()
      if isinstance(result, dict) and result.get("seconds"):
        stages[name] = round(result["seconds"], 1)
  return {"seconds": round(seconds, 1), "whole": is_whole, "stages": stages}


def measure(case: str, tiny: bool) -> dict[str, Any]:
  """Measures one case, in the process that calls it."""
  if case in ("noise", "sampling", "top-k", "demo"):
    kinds = {"noise": noise, "sampling": sampling, "top-k": top_k}
    return (kinds | {"demo": demo})[case](tiny)
  return clip(*case.split(), tiny)


def hardware() -> dict[str, Any]:
  """Says what JAX found."""
  import jax

  device = jax.devices()[0]
  memory = (device.memory_stats() or {}).get("bytes_limit")
  return {
    "backend": jax.default_backend(),
    "device": device.device_kind,
    "devices": len(jax.devices()),
    "memory_gib": memory and round(memory / 2**30, 2),
  }


def table(cases: dict[str, Any]) -> str:
  """Returns the cases in Markdown."""
  from synthq_jax import text_tables

  fields = list(dict.fromkeys(k for row in cases.values() for k in row))
  fields = [field for field in fields if field != "stages"]
  rows = tuple(
    (name, *("" if row.get(f) is None else str(row[f]) for f in fields))
    for name, row in cases.items()
  )
  header = ("case", *(field.replace("_", " ") for field in fields))
  return text_tables.Table(
    header=header, rows=rows, numeric=header[1:]
  ).markdown()


def main(argv: list[str] | None = None) -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--seconds", type=float, default=SECONDS)
  parser.add_argument("--tiny", action="store_true", help="shapes for a test")
  parser.add_argument("--output", type=pathlib.Path, help="kept and added to")
  options = parser.parse_args(argv)
  run = measuring.in_own_process
  found = run(hardware) | {"tiny": options.tiny, "cases": {}}
  if options.output and options.output.exists():
    before = json.loads(options.output.read_text())
    different = [k for k in ("device", "tiny") if before[k] != found[k]]
    if different:
      parser.error(f"--output is of another {different[0]}: give another file")
    found["cases"] = before["cases"]
  end, longest = time.monotonic() + options.seconds, 0.0
  for case in options.cases:
    left = end - time.monotonic()
    if case in found["cases"]:
      continue
    if left < longest:  # what took longest would not fit
      measuring.say(f"{case}: left to the next call")
      continue
    start = time.monotonic()
    found["cases"][case] = run(measure, case, options.tiny)
    longest = max(longest, time.monotonic() - start)
    measuring.say(case, found["cases"][case])
    if options.output:
      options.output.write_text(json.dumps(found, indent=1) + "\n")
  measuring.say(table(found["cases"]))
  return measuring.finish("accelerator", found)


if __name__ == "__main__":
  sys.exit(main())
