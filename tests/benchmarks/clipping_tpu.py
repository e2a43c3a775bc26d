"""Per-example clipping compiled for TPU v4: FLOPs, temporaries, what fits.

No TPU is needed: libtpu (`pip install "jax[tpu]"`) compiles ahead of time for
one that is not there. Each step is compiled for two batch sizes; temporaries in
between and beyond are taken to be linear, which gives the largest microbatch of
a device; what does not fit at all is said to. Prints one JSON document. Some
minutes for each compilation.

  python tests/benchmarks/clipping_tpu.py --models t5_1_1_small t5_1_1_base
"""

import dataclasses
import sys
import time
from typing import Any

import measuring

WAYS = ("ordinary", "bookkeeping", "ghost", "vmap")
INPUTS, TARGETS = 384, 128
BATCHES = (8, 32)
DEVICE_GIB = 30.0
TOPOLOGY = "v4:2x2x1"
LIMITS = {"flops_ratio": 1.25, "temporaries_ratio": 1.45}


def compile_step(model: str, way: str, batch: int) -> dict[str, Any]:
  """Compiles one gradient in bfloat16; counts what it does and needs."""
  device = measuring.for_tpu(TOPOLOGY)[0]
  import jax
  import jax.numpy as jnp

  from synthq_jax import optim
  from synthq_jax.models import t5, t5_config

  config = dataclasses.replace(t5_config.get(model), dtype=jnp.bfloat16)
  loss_fn = measuring.t5_loss(config)

  def step(params: Any, batch: Any) -> Any:
    if way == "ordinary":
      return jax.grad(lambda params: jnp.sum(loss_fn(params, batch)))(params)
    return optim.clipped_grad(loss_fn, l2_clip_norm=0.1, strategy=way)(
      params, batch
    )[0]

  place = jax.sharding.SingleDeviceSharding(device)

  def on_device(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

  key = jax.random.key(0)
  params = jax.eval_shape(lambda key: t5.init_params(config, key), key)
  rows = {
    "inputs": jax.ShapeDtypeStruct((batch, INPUTS), jnp.int32),
    "targets": jax.ShapeDtypeStruct((batch, TARGETS), jnp.int32),
  }
  start = time.perf_counter()
  arguments = jax.tree.map(on_device, (params, rows))
  lowered = jax.jit(step).lower(*arguments)
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return {"batch": batch, "fits": False}
  memory = compiled.memory_analysis()
  return {
    "batch": batch,
    "tflop": round(compiled.cost_analysis()["flops"] / 1e12, 3),
    "temporaries_gib": round(memory.temp_size_in_bytes / 2**30, 3),
    "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 3),
    "outputs_gib": round(memory.output_size_in_bytes / 2**30, 3),
    "compile_s": round(time.perf_counter() - start),
  }


def largest_microbatch(found: list[dict[str, Any]]) -> int:
  """Returns how many examples fit, from temporaries at two batch sizes."""
  small, large = found
  slope = large["temporaries_gib"] - small["temporaries_gib"]
  slope /= large["batch"] - small["batch"]
  fixed = small["temporaries_gib"] - slope * small["batch"]
  room = DEVICE_GIB - small["arguments_gib"] - small["outputs_gib"] - fixed
  return int(room / slope) if slope > 0 else 0


def measure(
  model: str, ways: list[str], batches: list[int]
) -> dict[str, dict[str, Any]]:
  """Compiles every way, each in a process of its own."""
  found = {}
  for way in ways:
    compiled = []
    for batch in batches:
      compiled.append(measuring.in_own_process(compile_step, model, way, batch))
      measuring.say(model, way, compiled[-1])
    found[way] = {"compiled": compiled}
    if not all(one.get("fits", True) for one in compiled):
      continue
    if len(batches) == 2:
      found[way]["largest_microbatch"] = largest_microbatch(compiled)
    ordinary = found[ways[0]]["compiled"][-1]
    for name, field in (
      ("flops_ratio", "tflop"),
      ("temporaries_ratio", "temporaries_gib"),
    ):
      found[way][name] = round(compiled[-1][field] / ordinary[field], 3)
  return found


def main() -> int:
  parser = measuring.parser(__doc__)
  models = ["t5_1_1_small", "t5_1_1_base"]
  parser.add_argument("--models", nargs="+", default=models)
  parser.add_argument("--ways", nargs="+", default=list(WAYS))
  parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
  options = parser.parse_args()
  found = {
    model: measure(model, options.ways, options.batches)
    for model in options.models
  }
  books = [
    ways["bookkeeping"] for ways in found.values() if "bookkeeping" in ways
  ]
  passed = all(
    one.get(name, float("inf")) <= limit
    for one in books
    for name, limit in LIMITS.items()
  )
  result = {
    "topology": TOPOLOGY,
    "tokens": [INPUTS, TARGETS],
    "limits": LIMITS,
    "models": found,
  }
  return measuring.finish("clipping_tpu", result, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
