"""Chooses a clipping strategy and a microbatch size by counted work and memory.

Work is the cost of the products and convolutions in the loss's trace; memory is
what clipping keeps beyond ordinary training. Both are counted for one example,
in one tracing and no compilation. A choice depends on shapes, backend and memory.
"""

import functools
import logging
import math
import os
from typing import Any, NamedTuple

import jax

from synthq_jax import typing
from synthq_jax.optim import strategies
from synthq_jax.optim.bookkeeping import jaxprs, plans, rules

__all__ = ["Choice", "Cost", "choose", "memory"]

_log = logging.getLogger(__name__)

SHARE = 0.5
"""Share of the device's memory that clipping may take beyond ordinary training."""

_GIB = 2**30
_WORD = 4  # bytes of a float32
_FORMED = 3  # passes over a formed gradient: written, read for norm and sum


class _Machine(NamedTuple):
  """Rough speeds of a backend; only their ratios matter."""

  flops: float  # FLOPs per second
  bandwidth: float  # bytes per second
  fresh: float = math.inf  # bytes per second of memory used for the first time
  turn: float = 0.0  # seconds for each equation of a loop's body


# XLA returns a program's memory to the system when the program ends. On CPUs every
# page is mapped anew in the next step, which takes ten times as long as reading it.
_MACHINES = {
  "cpu": _Machine(1.5e11, 2e10, 2e9, 3e-5),
  "gpu": _Machine(4e14, 3e12),
  "tpu": _Machine(2.75e14, 1.2e12),  # v4
}
_UNMEASURED = ("gpu", "tpu")
_LAST = {"cpu": ("ghost",)}
"""Strategies taken only if no other fits. Measured on CPUs, the second pass of
"ghost" costs more than its memory is worth: small microbatches save as much."""


class Cost(NamedTuple):
  """Cost of a strategy for a number of examples."""

  flops: float
  """FLOPs of matrix products and convolutions, all passes."""
  extra_bytes: float
  """Bytes kept beyond ordinary training."""
  traffic_bytes: float
  """Bytes moved to and from memory: results of products, and kept arrays."""

  def times(self, examples: int) -> "Cost":
    """Returns the cost of a number of examples, from that of one."""
    return Cost(*(examples * each for each in self))


class Choice(NamedTuple):
  """A strategy and a microbatch size, with the reason."""

  strategy: str
  """"bookkeeping", "ghost" or "vmap"."""
  costs: dict[str, Cost]
  """Costs of one microbatch by strategy."""
  reason: str
  """One sentence for the log."""
  microbatch_size: int
  """Examples processed at once."""


def choose(
  loss_fn: Any,
  params: typing.Params,
  batch: typing.Batch,
  keys: jax.Array | None = None,
  *,
  backend: str | None = None,
  memory_bytes: float | None = None,
  microbatch_size: int | None = None,
) -> Choice:
  """Chooses the fastest strategy and microbatch size that fit.

  A strategy fits if it keeps at most half of the device's memory beyond
  ordinary training. Of those that fit, the choice is the one whose products and
  memory traffic take the least time at the backend's speeds. If none fits it is
  "ghost", and on CPUs only then.

  On CPUs the microbatch size is chosen, too. Small microbatches are fast
  because they reuse memory, if each has enough work to pay for the addition of
  its sum. With convolutions they are large enough that the loop can be unrolled
  and compiles in seconds. On TPUs and GPUs the speeds are not measured, and the
  reason says so.

  >>> import jax.numpy as jnp
  >>> def loss_fn(params, batch):
  ...   return jnp.sum((batch["x"] @ params) ** 2, axis=(1, 2))
  >>> batch = {"x": jnp.ones((8, 4, 256))}
  >>> choose(loss_fn, jnp.ones((256, 256)), batch, backend="cpu").strategy
  'bookkeeping'

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    params: the parameters; arrays or shapes.
    batch: arrays or shapes with a leading axis [batch].
    keys: one key per example, or None.
    backend: "cpu", "gpu" or "tpu"; None: JAX's default.
    memory_bytes: memory of the device; None: that of `memory`.
    microbatch_size: examples at once, a divisor of the batch; None: all, or on
      CPUs the fastest number.

  Returns:
    The choice, with the costs of all strategies for one microbatch.
  """
  backend = jax.default_backend() if backend is None else backend
  if memory_bytes is None:
    memory_bytes = memory(backend)
  arguments = (batch,) if keys is None else (batch, keys)
  options = strategies.get_plan_options
  plan = plans.make(loss_fn, params, arguments, **options("bookkeeping"))
  ghost = plans.make_from_trace(plan.closed, params, **options("ghost"))
  size = jax.tree.leaves(batch)[0].shape[0]
  machine = _MACHINES.get(backend, _MACHINES["gpu"])
  products = jaxprs.count_products(plan.closed.jaxpr)
  example_costs = _count_costs(plan, ghost, params, products)
  sizes = [microbatch_size or size]
  if microbatch_size is None and machine.turn:
    sizes = [n for n in range(1, size + 1) if size % n == 0]
    if products.convolves:
      most = min(
        jaxprs.MAX_UNROLLED, jaxprs.MAX_EQUATIONS // products.equations
      )
      sizes = [n for n in sizes if size // n <= max(most, 1)]
      machine = machine._replace(turn=0.0)
  candidates = []
  for num_at_once in sizes:
    for name, example_cost in example_costs.items():
      cost = example_cost.times(num_at_once)
      is_last = name in _LAST.get(backend, ())
      if cost.extra_bytes <= SHARE * memory_bytes and not is_last:
        seconds = _estimate_seconds(
          cost, machine, products, params, num_at_once, size
        )
        candidates.append((seconds, num_at_once, name))
  _, num_at_once, best = (
    min(candidates) if candidates else (0.0, sizes[0], "ghost")
  )
  basis = "counted, not measured" if backend in _UNMEASURED else "counted"
  costs = {
    name: cost.times(num_at_once) for name, cost in example_costs.items()
  }
  reason = (
    f"{best} on {backend} for {num_at_once} of {size} examples at once: "
    + ", ".join(
      f"{name} {cost.flops:.2e} FLOPs and {cost.extra_bytes / 2**30:.2f} GiB"
      for name, cost in costs.items()
    )
    + f" ({basis})"
  )
  _log_once(reason)
  return Choice(best, costs, reason, num_at_once)


def _estimate_seconds(
  cost: Cost,
  machine: _Machine,
  products: jaxprs.Products,
  params: Any,
  num_at_once: int,
  size: int,
) -> float:
  """Estimates the seconds of a batch in microbatches of `num_at_once` examples."""
  turns = size // num_at_once
  fresh_bytes = cost.extra_bytes + num_at_once * products.traffic_bytes
  each = cost.flops / machine.flops + cost.traffic_bytes / machine.bandwidth
  if turns > 1:
    sums = _count_gradient_bytes(params)
    fresh_bytes += sums
    # Written, read and added to the running sum.
    each += 4 * sums / machine.bandwidth
    each += machine.turn * products.equations
  return turns * each + fresh_bytes / machine.fresh


def _count_gradient_bytes(params: Any) -> float:
  """Returns the bytes of a float32 gradient."""
  return _WORD * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@functools.cache
def _log_once(reason: str) -> None:
  _log.info("clipping: %s", reason)


def memory(backend: str | None = None) -> float:
  """Returns a device's memory in bytes, as `choose` counts it: in whole GiB.

  Rounding keeps a choice from depending on a few pages. A fingerprint of a
  choice has to include this number.

  Args:
    backend: "cpu", "gpu" or "tpu"; None: JAX's default.
  """
  backend = jax.default_backend() if backend is None else backend
  stats = None
  if backend == jax.default_backend():
    stats = jax.local_devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    total = stats["bytes_limit"]
  elif backend == "cpu":
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  else:
    total = 30 * _GIB
  return float(max(total // _GIB, 1) * _GIB)


def _count_costs(
  plan: plans.Plan,
  ghost: plans.Plan,
  params: Any,
  products: jaxprs.Products,
) -> dict[str, Cost]:
  """Counts the cost of each strategy for one example.

  Args:
    plan: the plan of book-keeping.
    ghost: the plan of ghost clipping.
    params: the parameters.
    products: the counted products of the loss.
  """
  factors = moved = shared = bookkeeping_norms = ghost_norms = 0.0
  for site in plan.sites:
    factors += plans.count_factor_bytes(site)
    bookkeeping_norms += rules.count_flops_from_factors(*plans.get_sizes(site))
  probed = strategies.get_probed(ghost)
  for site in ghost.sites:
    shape = plans.get_sizes(site)
    moved += plans.count_factor_bytes(site)
    norms = rules.count_flops_from_factors(*shape)
    if site.leaf in probed:
      norms = min(norms, rules.count_flops_from_product(*shape))
    else:
      shared += plans.count_factor_bytes(site)
    ghost_norms += norms
  leaves = jax.tree.leaves(params)
  formed, formed_by_ghost = (
    sum(
      math.prod(leaves[index].shape) * dtype.itemsize
      for index, dtype in zip(each.formed, each.dtypes, strict=True)
    )
    for each in (plan, ghost)
  )
  everything = _count_gradient_bytes(params)
  # Each iteration of a loop adds to the gradients of all examples.
  again = sum(
    2 * _WORD * (site.turns - 1) * math.prod(leaves[site.leaf].shape)
    for site in plan.sites
  )

  def cost(passes: int, norms: float, extra: float, moved: float) -> Cost:
    return Cost(
      flops=passes * products.flops + norms,
      extra_bytes=extra,
      traffic_bytes=passes * products.traffic_bytes + moved,
    )

  # Passes: forward, to the inputs, to the weights. Ordinary training makes and
  # reads the factors too, so norms read them once more.
  moved_by_bookkeeping = factors + _FORMED * formed
  return {
    "bookkeeping": cost(
      3, bookkeeping_norms, factors + formed, moved_by_bookkeeping
    ),
    "ghost": cost(5, ghost_norms, formed_by_ghost + shared, moved),
    "vmap": cost(3, 0.0, everything, _FORMED * everything + again),
  }
