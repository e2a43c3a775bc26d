"""Chooses how to clip and how many examples at once, from counted work and memory.

Work is what the products and convolutions of the loss's trace cost; memory is
what clipping keeps beyond ordinary training. Both are counted for one example
from its trace, so a choice takes one tracing and no compilation, and depends on
shapes alone.
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
"""Of the device's memory, what clipping may take beyond ordinary training."""

_GIB = 2**30
_WORD = 4  # bytes of a float32
_FORMED = 3  # passes over a formed gradient: written, read for norm and sum


class _Machine(NamedTuple):
  """Rough speeds; only their ratio matters."""

  flops: float  # in a second
  bandwidth: float  # bytes in a second
  fresh: float = math.inf  # bytes in a second of memory used for the first time
  turn: float = 0.0  # seconds for each equation of a loop's body


# XLA returns a program's memory to the system when it ends: on CPUs every page
# is made anew in the next step, which takes ten times as long as to read it.
_MACHINES = {
  "cpu": _Machine(1.5e11, 2e10, 2e9, 3e-5),
  "gpu": _Machine(4e14, 3e12),
  "tpu": _Machine(2.75e14, 1.2e12),  # v4
}
_UNMEASURED = ("gpu", "tpu")
_LAST = {"cpu": ("ghost",)}
"""Taken only where nothing else fits: its second pass was measured to cost more
than the memory that it saves, which few examples at once save as well."""


class Cost(NamedTuple):
  """What one way of clipping a microbatch costs."""

  flops: float
  """Of matrix products and convolutions, all passes."""
  extra_bytes: float
  """Kept beyond ordinary training."""
  traffic_bytes: float
  """Moved to and from memory: results of products, and what is kept."""

  def times(self, examples: int) -> "Cost":
    """Returns the cost of so many examples, from that of one."""
    return Cost(*(examples * each for each in self))


class Choice(NamedTuple):
  """A way of clipping, and why."""

  strategy: str
  """"bookkeeping", "ghost" or "vmap"."""
  costs: dict[str, Cost]
  """By strategy."""
  reason: str
  """One sentence."""
  microbatch_size: int
  """Examples at once."""


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
  """Chooses the fastest way of clipping that fits.

  Of "bookkeeping", "ghost" and "vmap" those that keep at most half of the
  memory beyond ordinary training; of these the one whose products and memory
  traffic take the least time at the backend's speeds; "ghost" where none fits,
  and on CPUs only there. On CPUs also how many examples are processed at once:
  few, where they have work enough to make up for adding their sum to that of the
  others, because memory that is used again is fast; with convolutions no fewer
  than let the loop be written out, and compiled in seconds. On TPUs and GPUs counts
  are all that is known, and the reason says so.

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
    memory_bytes: of the device; None: `memory` of it.
    microbatch_size: examples at once, a divisor of the batch; None: all, or
      on CPUs what is fastest.

  Returns:
    The choice, with the costs of all strategies for that many examples.
  """
  backend = jax.default_backend() if backend is None else backend
  if memory_bytes is None:
    memory_bytes = memory(backend)
  arguments = (batch,) if keys is None else (batch, keys)
  options = strategies.plan_options
  plan = plans.make(loss_fn, params, arguments, **options("bookkeeping"))
  ghost = plans.from_trace(plan.closed, params, **options("ghost"))
  size = jax.tree.leaves(batch)[0].shape[0]
  machine = _MACHINES.get(backend, _MACHINES["gpu"])
  products = jaxprs.count_products(plan.closed.jaxpr)
  of_one = _costs(plan, ghost, params, products)
  sizes = [microbatch_size or size]
  if microbatch_size is None and machine.turn:
    sizes = [n for n in range(1, size + 1) if size % n == 0]
    if products.convolves:
      most = min(jaxprs.WRITTEN_OUT, jaxprs.COMPILED // products.equations)
      sizes = [n for n in sizes if size // n <= max(most, 1)]
      machine = machine._replace(turn=0.0)
  found = []
  for together in sizes:
    for name, one in of_one.items():
      cost = one.times(together)
      is_last = name in _LAST.get(backend, ())
      if cost.extra_bytes <= SHARE * memory_bytes and not is_last:
        seconds = _seconds(cost, machine, products, params, together, size)
        found.append((seconds, together, name))
  _, together, best = min(found) if found else (0.0, sizes[0], "ghost")
  known = "counted, not measured" if backend in _UNMEASURED else "counted"
  costs = {name: one.times(together) for name, one in of_one.items()}
  reason = (
    f"{best} on {backend} for {together} of {size} examples at once: "
    + ", ".join(
      f"{name} {cost.flops:.2e} FLOPs and {cost.extra_bytes / 2**30:.2f} GiB"
      for name, cost in costs.items()
    )
    + f" ({known})"
  )
  _say(reason)
  return Choice(best, costs, reason, together)


def _seconds(
  cost: Cost,
  machine: _Machine,
  products: jaxprs.Products,
  params: Any,
  together: int,
  size: int,
) -> float:
  """Returns about how long a batch takes in microbatches of some examples."""
  turns = size // together
  kept = cost.extra_bytes + together * products.traffic_bytes
  each = cost.flops / machine.flops + cost.traffic_bytes / machine.bandwidth
  if turns > 1:
    sums = _size(params)
    kept += sums
    # Made, read and added to the sum so far.
    each += 4 * sums / machine.bandwidth
    each += machine.turn * products.equations
  return turns * each + kept / machine.fresh


def _size(params: Any) -> float:
  """Returns the bytes of a float32 gradient."""
  return _WORD * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@functools.cache
def _say(reason: str) -> None:
  _log.info("clipping: %s", reason)


def memory(backend: str | None = None) -> float:
  """Returns the memory of a device in bytes, as `choose` reckons with it.

  In whole GiB, so that a choice does not hang on a page more or less. Whoever
  has to know whether a choice may have been another one keeps this number.

  Args:
    backend: "cpu", "gpu" or "tpu"; None: JAX's default.
  """
  backend = jax.default_backend() if backend is None else backend
  stats = None
  if backend == jax.default_backend():
    stats = jax.local_devices()[0].memory_stats()
  if stats and "bytes_limit" in stats:
    found = stats["bytes_limit"]
  elif backend == "cpu":
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  else:
    found = 30 * _GIB
  return float(max(found // _GIB, 1) * _GIB)


def _costs(
  plan: plans.Plan,
  ghost: plans.Plan,
  params: Any,
  products: jaxprs.Products,
) -> dict[str, Cost]:
  """Counts each strategy for one example.

  Args:
    plan: of book-keeping.
    ghost: the plan of ghost clipping.
    params: the parameters.
    products: of the loss.
  """
  factors = moved = shared = bookkeeping_norms = ghost_norms = 0.0
  for site in plan.sites:
    factors += plans.factor_bytes(site)
    bookkeeping_norms += rules.flops_from_factors(*plans.matrices(site))
  metered = strategies.metered(ghost)
  for site in ghost.sites:
    shape = plans.matrices(site)
    moved += plans.factor_bytes(site)
    norms = rules.flops_from_factors(*shape)
    if site.leaf in metered:
      norms = min(norms, rules.flops_from_product(*shape))
    else:
      shared += plans.factor_bytes(site)
    ghost_norms += norms
  leaves = jax.tree.leaves(params)
  formed, formed_by_ghost = (
    sum(
      math.prod(leaves[index].shape) * dtype.itemsize
      for index, dtype in zip(each.formed, each.dtypes, strict=True)
    )
    for each in (plan, ghost)
  )
  everything = _size(params)
  # A loop adds to the gradients of all examples in each of its turns.
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
  kept = factors + _FORMED * formed
  return {
    "bookkeeping": cost(3, bookkeeping_norms, factors + formed, kept),
    "ghost": cost(5, ghost_norms, formed_by_ghost + shared, moved),
    "vmap": cost(3, 0.0, everything, _FORMED * everything + again),
  }
