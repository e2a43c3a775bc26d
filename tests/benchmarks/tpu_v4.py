"""The whole private step compiled for slices of TPU v4: does it fit, and how.

No TPU is needed: libtpu (`pip install "libtpu==0.0.42.*"`) compiles ahead of
time for chips that are not there. What is compiled is the step of
`synthq finetune_dp` itself, gradient to new parameters: DP-Adafactor, 384/128
tokens, bfloat16 with float32 parameters, layers as one loop, 1,024 rows, beside
the same step without privacy. Each case runs in a process of its own, and what
is in --output already is not compiled again.

  python tests/benchmarks/tpu_v4.py --cases small base --output=tpu_v4.json

Memory is the compiler's peak, arguments and results included, which it holds
against 30.75 GiB of a device: what needs more is not compiled. FLOPs are
counted from the traced step, since the compiler's own count takes a loop for
one turn of it: those of one device, as written, and weighted by the passes of
the matrix unit (6 for a float32 product in highest precision, 1 for others).
Bytes of collectives are counted from the compiled program, a loop as often as
it turns.
"""

import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from typing import Any

import measuring
import repository

WAYS = ("ordinary", "bookkeeping", "ghost", "vmap")
INPUTS, TARGETS, ROWS = 384, 128, 1024
LIMITS = {"flops_ratio": 1.25, "peak_ratio": 1.2, "peak_gib": 30.75}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A model on a slice."""

  model: str
  topology: str
  mesh: tuple[int, int, int]  # data, fsdp, tensor
  microbatch: int  # rows that a device processes at once
  remat: bool = False


CASES = {
  "small": Case(
    model="t5_1_1_small", topology="v4:2x2x1", mesh=(4, 1, 1), microbatch=32
  ),
  "base": Case(
    model="t5_1_1_base", topology="v4:2x2x1", mesh=(4, 1, 1), microbatch=16
  ),
  "base_fsdp": Case(
    model="t5_1_1_base", topology="v4:2x2x1", mesh=(1, 4, 1), microbatch=16
  ),
  "large": Case(
    model="t5_1_1_large", topology="v4:2x2x4", mesh=(2, 8, 1), microbatch=4
  ),
  "large_remat": Case(
    model="t5_1_1_large",
    topology="v4:2x2x4",
    mesh=(2, 8, 1),
    microbatch=8,
    remat=True,
  ),
  "xl": Case(
    model="t5_1_1_xl", topology="v4:2x4x4", mesh=(1, 16, 2), microbatch=2
  ),
  "xl_remat": Case(
    model="t5_1_1_xl",
    topology="v4:2x4x4",
    mesh=(1, 16, 2),
    microbatch=8,
    remat=True,
  ),
  # As gin_configs/recipes/paper_t5_*.gin have them.
  "paper_small": Case(
    model="t5_1_0_small", topology="v4:2x2x1", mesh=(4, 1, 1), microbatch=32
  ),
  "paper_base": Case(
    model="t5_1_0_base", topology="v4:2x2x1", mesh=(4, 1, 1), microbatch=16
  ),
  "paper_large": Case(
    model="t5_1_0_large", topology="v4:2x2x4", mesh=(2, 8, 1), microbatch=4
  ),
  "paper_xl": Case(
    model="t5_1_0_3B",
    topology="v4:2x2x4",
    mesh=(4, 4, 1),
    microbatch=1,
    remat=True,
  ),
  "paper_xl_copies": Case(
    model="t5_1_0_3B",
    topology="v4:2x2x4",
    mesh=(16, 1, 1),
    microbatch=1,
    remat=True,
  ),
}


def compile_case(name: str, way: str) -> dict[str, Any]:
  """Compiles one step; says what it needs of each device."""
  case = CASES[name]
  devices = measuring.for_tpu(case.topology)
  import jax

  from synthq_jax.training import mesh as mesh_lib

  data, fsdp, tensor = case.mesh
  mesh = mesh_lib.make(
    mesh_lib.Shape(data=data, fsdp=fsdp, tensor=tensor), devices
  )
  step, arguments = make_step(case, way, mesh)
  start = time.perf_counter()
  traced = jax.jit(step, donate_argnums=0).trace(*arguments)
  flops, passes = count(traced.jaxpr.jaxpr)
  row = {
    "tflop": round(flops / tensor / 1e12, 3),
    "tflop_passes": round(passes / tensor / 1e12, 3),
  }
  lowered = traced.lower()
  traced_at = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return row | {"fits": False, "said": str(error).splitlines()[0]}
  memory = compiled.memory_analysis()
  return row | {
    "fits": True,
    "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 3),
    "peak_gib": round(memory.peak_memory_in_bytes / 2**30, 3),
    "collectives_mib": collectives(compiled.as_text()),
    "trace_s": round(traced_at - start),
    "compile_s": round(time.perf_counter() - traced_at),
  }


def make_step(case: Case, way: str, mesh: Any) -> tuple[Any, Any]:
  """Returns the step of a mesh, and the shapes of what it takes."""
  import dp_accounting
  import jax
  import jax.numpy as jnp
  import optax
  from flax import traverse_util

  from synthq_jax import optim
  from synthq_jax.models import t5, t5_config
  from synthq_jax.stages import finetune_dp
  from synthq_jax.training import dp_step
  from synthq_jax.training import mesh as mesh_lib

  model = t5_config.get(case.model)
  settings = finetune_dp.Config(
    dtype="bfloat16",
    scan_layers=True,
    remat=case.remat,
    strategy="bookkeeping" if way == "ordinary" else way,
    microbatch_size=case.microbatch,
  )
  clipped = finetune_dp.grad_fn(settings, {}, model)
  if way == "ordinary":
    grad_fn = Ordinary(clipped.stacked.loss_fn, case.microbatch)
    tx = optax.chain(optax.scale(1 / ROWS), optim.adafactor(1e-3))
  else:
    grad_fn = clipped
    tx = dp_step.Optimizer(
      name="dp_adafactor",
      learning_rate=1e-3,
      steps=1000,
      denominator=ROWS,
    ).build(
      l2_sensitivity=clipped.sensitivity(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      ),
      noise_multiplier=0.554,
    )(jax.random.key(0))
  params = jax.eval_shape(
    lambda key: t5.init_params(model, key), jax.random.key(0)
  )
  params = traverse_util.flatten_dict(params, sep="/")
  state = dp_step.State(params, jax.eval_shape(tx.init, params))
  rows = mesh_lib.batch_sharding(mesh)
  batch = {
    name: jax.ShapeDtypeStruct((ROWS, length), jnp.int32, sharding=rows)
    for name, length in (("inputs", INPUTS), ("targets", TARGETS))
  }
  where = mesh_lib.shardings(state, params, mesh)
  state = jax.tree.map(
    lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
    state,
    where,
  )
  padding = jax.ShapeDtypeStruct((ROWS,), bool, sharding=rows)
  step = dp_step.step(grad_fn, tx, mesh)

  def placed(state, batch, padding):
    after, metrics = step(state, batch, padding)
    return jax.lax.with_sharding_constraint(after, where), metrics

  return placed, (state, batch, padding)


@dataclasses.dataclass(frozen=True)
class Ordinary:
  """The sum of the gradients without clipping, in the same microbatches."""

  loss_fn: Any
  microbatch: int

  def __call__(self, params, batch, *, is_padding_example):
    import jax
    import jax.numpy as jnp

    from synthq_jax.models import scanned
    from synthq_jax.optim import clipping

    def total_loss(params, rows, is_padding):
      losses = jnp.where(is_padding, 0, self.loss_fn(params, rows))
      return jnp.sum(losses), losses

    def body(total, part):
      grads, losses = jax.grad(total_loss, has_aux=True)(stacked, *part)
      return jax.tree.map(jnp.add, total, grads), losses

    stacked = scanned.stack(params)
    parts = jax.tree.map(
      lambda x: x.reshape(-1, self.microbatch, *x.shape[1:]),
      (batch, is_padding_example),
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), stacked)
    total, losses = jax.lax.scan(body, zeros, parts)
    losses = losses.reshape(-1)
    return scanned.unstack(total), clipping.Aux(losses, jnp.zeros_like(losses))


def count(jaxpr: Any) -> tuple[float, float]:
  """Returns the FLOPs of matrix products, as written and times passes."""
  import jax
  import jax.numpy as jnp
  from jax.extend import core

  flops = passes = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      operand = equation.invars[0].aval
      depth = math.prod(operand.shape[axis] for axis in contracted)
      work = 2.0 * depth * equation.outvars[0].aval.size
      highest = jax.lax.Precision.HIGHEST
      is_exact = highest in (equation.params["precision"] or ())
      flops += work
      passes += work * (6 if is_exact and operand.dtype == jnp.float32 else 1)
    for value in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr)),
    ):
      if isinstance(value, core.ClosedJaxpr):
        value = value.jaxpr
      if isinstance(value, core.Jaxpr):
        inner = count(value)
        # Of a condition one branch runs: as often each, as in ghost clipping's
        # two turns, or all are equal, as those for other processors are.
        branches = equation.params.get("branches", (value,))
        times = equation.params.get("length", 1) / len(branches)
        flops, passes = flops + times * inner[0], passes + times * inner[1]
  return flops, passes


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
_COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute",
)  # fmt: skip


def collectives(text: str) -> dict[str, float]:
  """Returns MiB of the results of each kind of collective, on one device.

  Args:
    text: a compiled program.
  """
  bodies: dict[str, list[str]] = {}
  name = entry = ""
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if head:
      name = head[2]
      entry = name if head[1] else entry
      bodies[name] = []
    elif name:
      bodies[name].append(line)
  found: dict[str, float] = {}

  def visit(name: str, times: int) -> None:
    for line in bodies.get(name, ()):
      match = re.search(
        rf" = (.*?) ({'|'.join(_COLLECTIVES)})(-start)?\(", line
      )
      if match:
        size = _bytes(match[1], halves=bool(match[3]))
        found[match[2]] = found.get(match[2], 0) + times * size / 2**20
      turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
      for callee in re.findall(
        r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)",
        line,
      ):
        is_body = f"body=%{callee}" in line or f"body={callee}" in line
        visit(callee, times * (int(turns[1]) if turns and is_body else 1))

  visit(entry, 1)
  return {name: round(size, 1) for name, size in sorted(found.items())}


def _bytes(shapes: str, halves: bool) -> float:
  """Returns the size of a result; a started one names its operands, too."""
  sizes = [
    _BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n)
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    if kind in _BYTES
  ]
  return max(sizes, default=0) if halves else sum(sizes)


def ratios(found: dict[str, Any]) -> None:
  """Adds what each way costs relative to the step without privacy."""
  ordinary = found.get("ordinary")
  for way, row in found.items():
    if not ordinary or way == "ordinary" or "peak_gib" not in row:
      continue
    for name, field in (
      ("flops_ratio", "tflop"),
      ("passes_ratio", "tflop_passes"),
      ("peak_ratio", "peak_gib"),
    ):
      if field in ordinary:
        row[name] = round(row[field] / ordinary[field], 3)


def holds(found: dict[str, Any]) -> bool:
  """Whether book-keeping keeps to the limits in each case it was compiled."""
  rows = [
    ways["bookkeeping"]
    for ways in found.values()
    if {"bookkeeping", "ordinary"} <= ways.keys()
  ]
  return bool(rows) and all(
    row.get(name, math.inf) <= limit
    for row in rows
    for name, limit in LIMITS.items()
  )


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
  parser.add_argument("--output", type=pathlib.Path, help="kept and added to")
  options = parser.parse_args()
  found: dict[str, Any] = {}
  if options.output and options.output.exists():
    found = json.loads(options.output.read_text())["cases"]
  for name in options.cases:
    ways = found.setdefault(name, {})
    for way in options.ways:
      if "fits" in ways.get(way, ()):
        continue
      ways[way] = measuring.in_own_process(compile_case, name, way)
      ways[way]["commit"] = repository.commit()
      ratios(ways)
      measuring.say(name, way, ways[way])
      result = {
        "benchmark": "tpu_v4",
        "tokens": [INPUTS, TARGETS],
        "rows": ROWS,
        "limits": LIMITS,
        "settings": {n: dataclasses.asdict(CASES[n]) for n in found},
        "cases": found,
        "passed": holds(found),
      }
      if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(result, indent=1))
  return 0 if result["passed"] else 1


if __name__ == "__main__":
  sys.exit(main())
