"""Decides how per-example clipping handles each parameter.

The gradient of a parameter that is used in matrix products and lookups alone
can be kept in factors. The gradient of a parameter with any other use (scales,
biases, convolutions) is formed for each example. Forming is right for every use
and cheap for small parameters; large ones are logged.
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
from synthq_jax.privacy import batches

__all__ = [
  "FLOPS_PER_BYTE",
  "LARGE",
  "Plan",
  "Use",
  "collect_uses",
  "compute_squares",
  "compute_weighted_sums",
  "count_factor_bytes",
  "get_sizes",
  "make",
  "make_example_loss",
  "make_from_trace",
  "must_swap",
]

_log = logging.getLogger(__name__)

LARGE = 1 << 16
"""Parameters with this many entries are logged when used in an odd way."""

FLOPS_PER_BYTE = 300.0
"""Cost of a kept byte in FLOPs, about: in the time in which a TPU v4 moves a
byte once, the chip multiplies 230 times."""

Use = rules.Outer | rules.Rows


class Plan(NamedTuple):
  """Handling of each parameter; its numbers index the flattened parameters."""

  closed: Any  # the loss of one example, as a closed jaxpr
  followed: tuple[int, ...]  # parameters whose gradient stays in factors
  formed: tuple[int, ...]  # parameters whose gradient is formed per example
  dtypes: tuple[Any, ...]  # dtypes that formed gradients are kept in
  sites: tuple[use_sites.Site, ...]  # uses of the followed parameters

  def zeros(self, leaves: frozenset[int] = frozenset()) -> list[jax.Array]:
    """Returns zero perturbations for all sites but those of `leaves`."""
    return [
      jnp.zeros(site.output.shape, site.output.dtype)
      for site in self.sites
      if site.leaf not in leaves
    ]

  def run(
    self,
    tracer: trace.ParameterTracer,
    leaves: Sequence[jax.Array],
    formed: Sequence[jax.Array],
    arguments: Any,
  ) -> jax.Array:
    """Evaluates the trace and returns its value.

    Args:
      tracer: a new tracer.
      leaves: all parameters.
      formed: values that replace the parameters whose gradient is formed.
      arguments: arguments of one example.
    """
    values = list(leaves)
    for index, value in zip(self.formed, formed, strict=True):
      values[index] = value
    values += jax.tree.leaves(arguments)
    (value,) = tracer.run(self.closed, values, self.followed)
    return value

  def rounded(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Casts formed gradients to the dtypes that they are kept in."""
    pairs = zip(gradients, self.dtypes, strict=True)
    return [gradient.astype(dtype) for gradient, dtype in pairs]


def make_example_loss(
  loss_fn: Any,
) -> Callable[[typing.Params, Any], jax.Array]:
  """Makes the loss of one example from a loss of batches.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].

  Returns:
    `(params, arguments)` to a scalar, where `arguments` is `(example,)` or
    `(example, key)`, without the batch axis.
  """

  def loss(params: typing.Params, arguments: Any) -> jax.Array:
    batch = jax.tree.map(lambda x: x[None], arguments[0])
    try:
      losses = loss_fn(params, batch, *arguments[1:])
    except KeyError as error:
      if error.args == (batches.IS_PADDING,):
        error.add_note(
          "expected a loss without the padding mask, got one that reads it: clipped"
          " gradients leave padding out themselves; mask losses outside of loss_fn"
        )
      raise
    if (shape := jnp.shape(losses)) != (1,):
      hint = "do not average over it"
      if shape[:1] == (1,):
        hint = "add up its other axes, or take [:, 0] of one that is 1"
      elif not shape:
        hint += ", and squeeze no axis but by its number"
      raise ValueError(
        "expected a loss_fn that returns losses [batch], got"
        f" {shape=} for a batch of one: {hint}"
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
  """Traces the loss of one example and decides how to handle each parameter.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    params: the parameters.
    arguments: `(batch,)` or `(batch, keys)`, with the batch axis.
    keep_ratio: a gradient is formed per example if its bytes are at most this
      times those of its factors, or of the pairs of its lookups. In
      rematerialised parts the ratio is at most 1. 0: only if it must be formed.
    saves_work: whether a gradient in half precision is also formed if that
      saves much work, as it does where factors are kept; not with a ratio of 0.

  Returns:
    The plan.
  """
  example = devices.get_first_example(arguments)
  closed = jax.make_jaxpr(make_example_loss(loss_fn))(params, example)
  return make_from_trace(
    closed, params, keep_ratio=keep_ratio, saves_work=saves_work
  )


def make_from_trace(
  closed: Any,
  params: typing.Params,
  *,
  keep_ratio: float,
  saves_work: bool = False,
) -> Plan:
  """Decides how to handle each parameter of a function that is already traced.

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
  formed: dict[int, Any] = {}  # dtypes by parameter
  while True:
    followed = [i for i in range(len(shapes)) if i not in formed]
    tracer = trace.ParameterTracer()
    jax.eval_shape(
      lambda *values, tracer=tracer, followed=followed: tracer.run(
        closed, values, followed
      ),
      *[devices.get_shape(aval) for aval in closed.in_avals],
    )
    dtypes = {index: _get_dtype(index, tracer) for index in followed}
    newly_formed = {
      i: dtype
      for i, dtype in dtypes.items()
      if _must_form(
        i, tracer, names[i], shapes[i], dtype, keep_ratio, saves_work
      )
    }
    formed |= newly_formed
    # A parameter whose gradient is formed is no longer joined to others.
    if not (newly_formed and tracer.joins):
      break
  return Plan(
    closed=closed,
    followed=tuple(i for i in range(len(shapes)) if i not in formed),
    formed=tuple(sorted(formed)),
    dtypes=tuple(formed[index] for index in sorted(formed)),
    sites=tuple(site for site in tracer.sites if site.leaf not in formed),
  )


def _get_dtype(leaf: int, tracer: trace.ParameterTracer) -> Any:
  """Returns the dtype that holds a formed gradient without loss.

  If a parameter is cast to half precision and used once, its gradient has no
  more bits than the cast.
  """
  sites = [site for site in tracer.sites if site.leaf == leaf]
  once = leaf not in tracer.odd and len(sites) == 1 and not sites[0].is_shared
  if once and sites[0].scale == 1.0 and sites[0].dtype == jnp.bfloat16:
    return jnp.dtype(jnp.bfloat16)
  return jnp.dtype(jnp.float32)


def _must_form(
  leaf: int,
  tracer: trace.ParameterTracer,
  name: str,
  shape: tuple[int, ...],
  dtype: Any,
  keep_ratio: float,
  saves_work: bool,
) -> bool:
  """Decides whether a parameter's gradient is formed for each example."""
  size = math.prod(shape)
  sites = [site for site in tracer.sites if site.leaf == leaf]
  if leaf in tracer.odd:
    if size >= LARGE:
      _log_formed(name, shape, f"it is used in {tracer.odd[leaf]!r}")
    return True
  if not sites:
    return False
  if any(_get_alignment(site, sites) is None for site in sites):
    if size >= LARGE:
      _log_formed(name, shape, "its uses contract different axes")
    return True
  factors = sum(count_factor_bytes(site) for site in sites)
  # Norms from factors compare all pairs of lookups.
  pairs = sum(4 * site.positions**2 for site in sites if site.is_lookup)
  # A loop adds to the gradient in every iteration.
  turns = max(site.turns for site in sites)
  if leaf in tracer.recomputed:  # rematerialisation is there to save memory
    keep_ratio, saves_work = min(keep_ratio, 1.0), False
  if turns * size * dtype.itemsize <= keep_ratio * max(factors, pairs):
    return True
  is_half = dtype == jnp.bfloat16 and not sites[0].is_lookup
  return bool(saves_work and keep_ratio) and is_half and _saves_work(sites[0])


def _saves_work(site: use_sites.Site) -> bool:
  """Checks whether forming a gradient in half precision is worth its memory.

  From factors in half precision the weighted sum takes two products
  (`rules._sum_outer`) and the norm a third; a formed gradient takes one.
  """
  groups, positions, rows, columns = get_sizes(site)
  formed = 2 * groups * rows * columns
  saved = positions * formed
  saved += rules.count_flops_from_factors(groups, positions, rows, columns)
  return saved >= FLOPS_PER_BYTE * (formed - count_factor_bytes(site))


@functools.cache
def _log_formed(name: str, shape: tuple[int, ...], reason: str) -> None:
  """Logs once that the gradient of a large parameter is formed."""
  _log.warning(
    "the gradient of %s %s is formed for each example: %s", name, shape, reason
  )


def count_factor_bytes(site: use_sites.Site) -> int:
  """Returns the bytes of both factors of one use, for one example."""
  groups, positions, rows, columns = get_sizes(site)
  return groups * positions * (rows + columns) * site.output.dtype.itemsize


def get_sizes(site: use_sites.Site) -> tuple[int, int, int, int]:
  """Returns (groups, positions, rows, columns) of one use's gradient.

  A lookup counts no rows: its other factor is an id for each position.
  """
  groups = math.prod(size for _, size in site.layout.groups)
  rows = 0 if site.is_lookup else site.layout.num_rows
  return groups, site.positions, rows, site.layout.num_columns


def _get_reference_layout(sites: Sequence[use_sites.Site]) -> use_sites.Layout:
  """Returns the common layout of a parameter's uses: that of a lookup if any."""
  lookups = [site for site in sites if site.is_lookup]
  return (lookups or list(sites))[0].layout


def _get_alignment(
  site: use_sites.Site, sites: Sequence[use_sites.Site]
) -> bool | None:
  """Returns True if a use fits the others when transposed, None if it never does."""
  layout = _get_reference_layout(sites)
  if site.layout == layout:
    return False
  swaps = not site.is_lookup and site.layout.swap() == layout
  return True if swaps else None


def must_swap(sites: Sequence[use_sites.Site]) -> bool:
  """Checks whether some use has to be transposed to fit the parameter's others."""
  return any(_get_alignment(site, sites) for site in sites)


def compute_squares(
  uses: Mapping[int, Sequence[tuple[use_sites.Layout, Use]]],
  formed: Iterable[jax.Array],
) -> list[jax.Array]:
  """Returns the squared norms of every parameter's gradients, [batch] each.

  Args:
    uses: from `collect_uses`.
    formed: formed gradients [batch, ...].
  """
  return [
    *[
      rules.compute_squared_norms([u for _, u in pairs])
      for pairs in uses.values()
    ],
    *map(rules.sum_of_squares, formed),
  ]


def compute_weighted_sums(
  shapes: Sequence[tuple[int, ...]],
  uses: Mapping[int, Sequence[tuple[use_sites.Layout, Use]]],
  formed: Mapping[int, jax.Array],
  weights: jax.Array,
) -> list[jax.Array]:
  """Returns the weighted sum over examples of every parameter's gradient.

  Args:
    shapes: shapes of all flattened parameters.
    uses: from `collect_uses`, by the position of the parameter.
    formed: formed gradients [batch, ...], by the position of the parameter.
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
    summed = rules.compute_weighted_sum(
      [use for _, use in pairs], weights, shape
    )
    total[leaf] = layout.restore(summed, shapes[leaf])
  for leaf, gradient in formed.items():
    total[leaf] = sums.weigh(gradient, weights)
  return total


def collect_uses(
  sites: Sequence[use_sites.Site],
  records: Sequence[jax.Array],
  cotangents: Sequence[jax.Array],
) -> dict[int, list[tuple[use_sites.Layout, Use]]]:
  """Collects the uses of each parameter in one common layout.

  Args:
    sites: all sites of the parameters in question.
    records: records of the tracer, with a leading axis [batch].
    cotangents: cotangents of the perturbations, with a leading axis [batch].

  Returns:
    The uses of each parameter, by position, each with the common layout.
  """
  by_leaf: dict[int, list[tuple[use_sites.Layout, Use]]] = {}
  for site, record, cotangent in zip(sites, records, cotangents, strict=True):
    others = [other for other in sites if other.leaf == site.leaf]
    right = _narrow(jax.vmap(site.columns)(cotangent))
    if site.is_lookup:
      use = rules.Rows(record, right)
    elif _get_alignment(site, others):
      use = rules.Outer(right, _narrow(record))
    else:
      use = rules.Outer(_narrow(record), right)
    layout = _get_reference_layout(others)
    by_leaf.setdefault(site.leaf, []).append((layout, use))
  return by_leaf


def _narrow(factor: jax.Array) -> jax.Array:
  """Rounds float64 to float32, in which norms and sums are computed."""
  return factor.astype(jnp.float32) if factor.dtype == jnp.float64 else factor
