"""Decides what is done with each parameter under per-example clipping.

A parameter that is used in matrix products and lookups alone has a gradient
that can be kept in factors. One that is used in any other way (scales, biases,
convolutions) has its gradient formed for each example as it stands, which is
right for everything and cheap for small parameters; a large one is logged.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices, rules, sums, trace, use_sites

__all__ = [
  "FLOPS_PER_BYTE",
  "LARGE",
  "Plan",
  "Use",
  "factor_bytes",
  "from_trace",
  "loss_of_one",
  "make",
  "matrices",
  "must_swap",
  "squares",
  "uses",
  "weighted_sums",
]

_log = logging.getLogger(__name__)

LARGE = 1 << 16
"""Parameters with this many entries are logged when used in an odd way."""

FLOPS_PER_BYTE = 300.0
"""What a byte that is kept costs in work, about: in the time in which a TPU v4
moves it once, the chip multiplies 230 times."""

Use = rules.Outer | rules.Rows


class Plan(NamedTuple):
  """What to do with each parameter; all lists run over flattened parameters."""

  closed: Any  # the loss of one example, as a closed jaxpr
  followed: tuple[int, ...]  # parameters whose gradient stays in factors
  formed: tuple[int, ...]  # parameters whose gradient is formed per example
  dtypes: tuple[Any, ...]  # that the formed gradients are kept in
  sites: tuple[use_sites.Site, ...]  # uses of the followed ones

  def zeros(self, leaves: frozenset[int] = frozenset()) -> list[jax.Array]:
    """Returns perturbations for all sites but those of some parameters."""
    return [
      jnp.zeros(site.output.shape, site.output.dtype)
      for site in self.sites
      if site.leaf not in leaves
    ]

  def run(
    self,
    walk: trace.Walk,
    leaves: Sequence[jax.Array],
    formed: Sequence[jax.Array],
    arguments: Any,
  ) -> jax.Array:
    """Returns the value of a walk through the trace.

    Args:
      walk: one that has not begun.
      leaves: all parameters.
      formed: those whose gradient is formed, which take the place of theirs.
      arguments: of one example.
    """
    values = list(leaves)
    for index, value in zip(self.formed, formed, strict=True):
      values[index] = value
    values += jax.tree.leaves(arguments)
    (value,) = walk.run(self.closed, values, self.followed)
    return value

  def rounded(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns formed gradients in the dtypes that they are kept in."""
    pairs = zip(gradients, self.dtypes, strict=True)
    return [gradient.astype(dtype) for gradient, dtype in pairs]


def loss_of_one(loss_fn: Any) -> Callable[[typing.Params, Any], jax.Array]:
  """Returns the loss of one example.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].

  Returns:
    `(params, arguments)` to a scalar, where `arguments` is `(example,)` or
    `(example, key)`, without the batch axis.
  """

  def loss(params: typing.Params, arguments: Any) -> jax.Array:
    batch = jax.tree.map(lambda x: x[None], arguments[0])
    losses = loss_fn(params, batch, *arguments[1:])
    if jnp.shape(losses) != (1,):
      raise ValueError(
        "expected a loss_fn that returns losses [batch], got shape="
        f"{jnp.shape(losses)} for a batch of one: do not average over it"
      )
    return losses[0]

  return loss


def make(
  loss_fn: Any,
  params: typing.Params,
  arguments: Any,
  *,
  keep_ratio: float,
  saves_work: bool = False,
) -> Plan:
  """Traces the loss of one example and decides what to do with each leaf.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    params: the parameters.
    arguments: `(batch,)` or `(batch, keys)`, with the batch axis.
    keep_ratio: a gradient is formed per example if it takes at most this times
      the bytes of its factors, or of the pairs of its lookups, and in
      rematerialised parts no more than these. 0: only if it must be.
    saves_work: in half precision one is also formed if that saves much work,
      as it does where factors are kept; not with a ratio of 0.

  Returns:
    The plan.
  """
  example = devices.first_of(arguments)
  closed = jax.make_jaxpr(loss_of_one(loss_fn))(params, example)
  return from_trace(
    closed, params, keep_ratio=keep_ratio, saves_work=saves_work
  )


def from_trace(
  closed: Any,
  params: typing.Params,
  *,
  keep_ratio: float,
  saves_work: bool = False,
) -> Plan:
  """Decides what to do with each leaf of a function that is already traced.

  Args:
    closed: a jaxpr whose first arguments are the parameters' leaves.
    params: the parameters.
    keep_ratio, saves_work: as in `make`.

  Returns:
    The plan.
  """
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  shapes = [jnp.shape(leaf) for _, leaf in paths]
  formed: dict[int, Any] = {}  # and the dtype of each
  while True:
    followed = [i for i in range(len(shapes)) if i not in formed]
    walk = trace.Walk()
    jax.eval_shape(
      lambda *values, walk=walk, followed=followed: walk.run(
        closed, values, followed
      ),
      *[devices.shape_of(aval) for aval in closed.in_avals],
    )
    dtypes = {index: _dtype(index, walk) for index in followed}
    more = {
      i: dtype
      for i, dtype in dtypes.items()
      if _must_form(i, walk, names[i], shapes[i], dtype, keep_ratio, saves_work)
    }
    formed |= more
    # Those that are joined to one whose gradient is formed are joined no more.
    if not (more and walk.joins):
      break
  return Plan(
    closed=closed,
    followed=tuple(i for i in range(len(shapes)) if i not in formed),
    formed=tuple(sorted(formed)),
    dtypes=tuple(formed[index] for index in sorted(formed)),
    sites=tuple(site for site in walk.sites if site.leaf not in formed),
  )


def _dtype(leaf: int, walk: trace.Walk) -> Any:
  """Returns the dtype that holds a formed gradient without loss.

  The gradient of a parameter that is cast to half precision and used once has
  no more bits than the cast.
  """
  sites = [site for site in walk.sites if site.leaf == leaf]
  once = leaf not in walk.odd and len(sites) == 1 and not sites[0].is_shared
  if once and sites[0].scale == 1.0 and sites[0].dtype == jnp.bfloat16:
    return jnp.dtype(jnp.bfloat16)
  return jnp.dtype(jnp.float32)


def _must_form(
  leaf: int,
  walk: trace.Walk,
  name: str,
  shape: tuple[int, ...],
  dtype: Any,
  keep_ratio: float,
  saves_work: bool,
) -> bool:
  """Says whether a parameter's gradient is to be formed for each example."""
  size = math.prod(shape)
  sites = [site for site in walk.sites if site.leaf == leaf]
  if leaf in walk.odd:
    if size >= LARGE:
      _log_formed(name, shape, f"it is used in {walk.odd[leaf]!r}")
    return True
  if not sites:
    return False
  if any(_aligned(site, sites) is None for site in sites):
    if size >= LARGE:
      _log_formed(name, shape, "its uses contract different axes")
    return True
  kept = sum(factor_bytes(site) for site in sites)
  # Norms from factors compare all pairs of lookups.
  pairs = sum(4 * site.positions**2 for site in sites if site.is_lookup)
  # In a loop it is added to in every turn.
  turns = max(site.turns for site in sites)
  if leaf in walk.recomputed:  # whoever computes again wants the memory
    keep_ratio, saves_work = min(keep_ratio, 1.0), False
  if turns * size * dtype.itemsize <= keep_ratio * max(kept, pairs):
    return True
  is_half = dtype == jnp.bfloat16 and not sites[0].is_lookup
  return bool(saves_work and keep_ratio) and is_half and _saves_work(sites[0])


def _saves_work(site: use_sites.Site) -> bool:
  """Says whether forming a gradient in half precision is worth its memory.

  From factors, in half precision, the weighted sum is two products
  (`rules._outer_sum`) and the norm a third; formed, it is one.
  """
  groups, positions, rows, columns = matrices(site)
  formed = 2 * groups * rows * columns
  saved = positions * formed
  saved += rules.flops_from_factors(groups, positions, rows, columns)
  return saved >= FLOPS_PER_BYTE * (formed - factor_bytes(site))


@functools.cache
def _log_formed(name: str, shape: tuple[int, ...], reason: str) -> None:
  """Logs, once, that a large parameter costs memory."""
  _log.warning(
    "the gradient of %s %s is formed for each example: %s", name, shape, reason
  )


def factor_bytes(site: use_sites.Site) -> int:
  """Returns the bytes of both factors of one use, for one example."""
  groups, positions, rows, columns = matrices(site)
  return groups * positions * (rows + columns) * site.output.dtype.itemsize


def matrices(site: use_sites.Site) -> tuple[int, int, int, int]:
  """Returns groups, positions, rows and columns of one use's gradient.

  A lookup counts no rows: its other factor is an id for each position.
  """
  groups = math.prod(size for _, size in site.layout.groups)
  rows = 0 if site.is_lookup else site.layout.num_rows
  return groups, site.positions, rows, site.layout.num_columns


def _reference(sites: Sequence[use_sites.Site]) -> use_sites.Layout:
  """Returns the layout for all uses of a parameter: a lookup's if any."""
  lookups = [site for site in sites if site.is_lookup]
  return (lookups or list(sites))[0].layout


def _aligned(
  site: use_sites.Site, sites: Sequence[use_sites.Site]
) -> bool | None:
  """Says if a use must be transposed to align with the others; None: cannot."""
  layout = _reference(sites)
  if site.layout == layout:
    return False
  swaps = not site.is_lookup and site.layout.swap() == layout
  return True if swaps else None


def must_swap(sites: Sequence[use_sites.Site]) -> bool:
  """Says if some use of one parameter must be transposed to fit the others."""
  return any(_aligned(site, sites) for site in sites)


def squares(
  uses: Mapping[int, Sequence[tuple[use_sites.Layout, Use]]],
  formed: Iterable[jax.Array],
) -> list[jax.Array]:
  """Returns the squared norms of every parameter's gradients, [batch] each.

  Args:
    uses: from `uses`.
    formed: gradients as they stand [batch, ...].
  """
  return [
    *[rules.squared_norms([u for _, u in pairs]) for pairs in uses.values()],
    *map(rules.sum_of_squares, formed),
  ]


def weighted_sums(
  shapes: Sequence[tuple[int, ...]],
  uses: Mapping[int, Sequence[tuple[use_sites.Layout, Use]]],
  formed: Mapping[int, jax.Array],
  weights: jax.Array,
) -> list[jax.Array]:
  """Returns the weighted sum over examples of every parameter's gradient.

  Args:
    shapes: of all parameters, flat.
    uses: from `uses`, by the number of the parameter.
    formed: gradients as they stand [batch, ...], the same.
    weights: float32 [batch]; an example with weight zero contributes exactly
      zero, whatever its factors hold.

  Returns:
    float32, in the order of `shapes`; zero for a parameter in neither.
  """
  total = [jnp.zeros(shape, jnp.float32) for shape in shapes]
  for leaf, pairs in uses.items():
    layout = pairs[0][0]
    groups = math.prod(size for _, size in layout.groups)
    shape = (groups, layout.num_rows, layout.num_columns)
    summed = rules.weighted_sum([use for _, use in pairs], weights, shape)
    total[leaf] = layout.restore(summed, shapes[leaf])
  for leaf, gradient in formed.items():
    total[leaf] = sums.weigh(gradient, weights)
  return total


def uses(
  sites: Sequence[use_sites.Site],
  records: Sequence[jax.Array],
  cotangents: Sequence[jax.Array],
) -> dict[int, list[tuple[use_sites.Layout, Use]]]:
  """Collects each parameter's uses in its one layout.

  Args:
    sites: all sites of the parameters in question.
    records: what the walk recorded, with a leading axis [batch].
    cotangents: those of the perturbations, with a leading axis [batch].

  Returns:
    For each parameter its uses, all in the layout they come with.
  """
  found: dict[int, list[tuple[use_sites.Layout, Use]]] = {}
  for site, record, cotangent in zip(sites, records, cotangents, strict=True):
    others = [other for other in sites if other.leaf == site.leaf]
    right = jax.vmap(site.columns)(cotangent)
    if site.is_lookup:
      use = rules.Rows(record, right)
    elif _aligned(site, others):
      use = rules.Outer(right, record)
    else:
      use = rules.Outer(record, right)
    found.setdefault(site.leaf, []).append((_reference(others), use))
  return found
