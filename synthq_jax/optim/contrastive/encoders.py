"""Computes per-example gradients of an encoder, in factors.

This is book-keeping for a function that returns an embedding instead of a loss.
The encoder of one example is traced and its uses of parameters are perturbed.
One forward pass of all examples gives a pullback of any cotangents of the
embeddings. The pullback returns the per-example gradients of inner products
with the embeddings, in the factors of `rules`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import independence
from synthq_jax.optim.bookkeeping import plans, trace, use_sites

__all__ = [
  "Factors",
  "Part",
  "Tower",
  "Towers",
  "check_cosines",
  "compute_squared_norms",
  "compute_weighted_sums",
  "encode",
  "fix_rounding",
  "linearize",
  "refuse_batch_rules",
  "split",
  "trace_towers",
]

_LONGEST = 1.01
"""Largest length of a vector that counts as a rounded unit vector, in bfloat16,
too."""


def encode(
  encoder: typing.EncodeFn,
  params: typing.Params,
  examples: Any,
  microbatch_size: int | None = None,
  *,
  together: bool = False,
) -> jax.Array:
  """Returns embeddings of length at most 1, float32 [batch, dim].

  The encoder is called with one example at a time, so that no example reaches
  into another's vector. A vector longer than 1 is shortened to 1, so that inner
  products are in [-1, 1]. Unit vectors do not change, up to rounding.

  Args:
    encoder: `(params, examples)` to vectors [batch, dim].
    params: its parameters.
    examples: arrays with a leading axis [batch].
    microbatch_size: examples encoded at once, forward and backward; it need
      not divide the batch. None: all.
    together: whether to call the encoder with all of them, for gradients that
      are clipped as one whatever examples do to each other: a third faster on
      CPUs.
  """
  encode_all = _shorten_vectors(encoder)
  if not together:
    encode_all = jax.vmap(_make_example_encoder(encoder), in_axes=(None, 0))
  size = jax.tree.leaves(examples)[0].shape[0]
  if microbatch_size is None or microbatch_size >= size:
    return encode_all(params, examples)
  encode_block = jax.checkpoint(lambda block: encode_all(params, block))
  blocks = split(examples, size, microbatch_size)
  vectors = jax.lax.map(encode_block, blocks)
  return vectors.reshape(-1, vectors.shape[-1])[:size]


def split(examples: Any, size: int, block: int) -> Any:
  """Splits examples into [blocks, block, ...]; the last example fills up."""
  blocks = -(-size // block)
  positions = jnp.minimum(jnp.arange(blocks * block), size - 1)
  return jax.tree.map(
    lambda x: jnp.asarray(x)[positions].reshape(blocks, block, *x.shape[1:]),
    examples,
  )


def _make_example_encoder(encoder: typing.EncodeFn) -> Callable[..., jax.Array]:
  """Makes the function from one example to its vector [dim]."""
  encode_all = _shorten_vectors(encoder)
  return lambda params, example: encode_all(
    params, jax.tree.map(lambda x: x[None], example)
  )[0]


def _call(
  encoder: typing.EncodeFn, params: typing.Params, examples: Any
) -> jax.Array:
  """Returns an encoder's vectors, float32; refuses anything else."""
  size = jax.tree.leaves(examples)[0].shape[0]
  vectors = encoder(params, examples)
  if not hasattr(vectors, "astype"):
    raise ValueError(
      "expected an encoder to vectors [batch, dim], got"
      f" {type(vectors).__name__}: return the pooled vectors alone"
    )
  if vectors.ndim != 2 or len(vectors) != size:
    raise ValueError(
      "expected an encoder to vectors [batch, dim], got shape="
      f"{vectors.shape} for a batch of {size}: pool over the tokens"
    )
  return vectors.astype(jnp.float32)


def _shorten_vectors(encoder: typing.EncodeFn) -> Callable[..., jax.Array]:
  """Wraps an encoder: its vectors are float32 and shortened to length 1."""

  def encode_all(params: typing.Params, examples: Any) -> jax.Array:
    vectors = _call(encoder, params, examples)
    squared = jnp.sum(vectors * vectors, axis=1, keepdims=True)
    # The maximum, not a branch: nan stays nan, and the gradient is finite.
    return vectors * jax.lax.rsqrt(jnp.maximum(squared, 1.0))

  return encode_all


def check_cosines(
  encoder: typing.EncodeFn, params: typing.Params, examples: Any, name: str
) -> None:
  """Refuses vectors longer than 1, unless they are traced.

  Args:
    encoder: `(params, examples)` to vectors [batch, dim].
    params: its parameters.
    examples: arrays with a leading axis [batch]; the first is checked.
    name: name of the encoder, for the message.

  Raises:
    ValueError: if the first example's vector is longer than 1.
  """
  leaves = jax.tree.leaves((params, examples))
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return
  first = jax.tree.map(lambda x: x[:1], examples)
  length = float(jnp.linalg.norm(_call(encoder, params, first)))
  if length > _LONGEST:
    raise ValueError(
      "expected vectors of length 1, whose inner products are similarities in "
      f"[-1, 1], got longer ones from {name}: divide them by their length"
    )


def refuse_batch_rules(
  encoder: typing.EncodeFn, params: typing.Params, examples: Any
) -> frozenset[int]:
  """Refuses an encoder that may couple examples; see `independence`.

  Returns:
    Positions of the parameters that get no gradient from the encoder.
  """
  encode_one = _make_example_encoder(encoder)
  findings = independence.refuse_batch_rules(
    lambda params, example: jnp.sum(encode_one(params, example)),
    params,
    examples,
  )
  return findings.unmoved


class Factors(NamedTuple):
  """Per-example gradients of inner products with an encoder's vectors."""

  cotangents: list[jax.Array]  # of the perturbations, [batch, ...] each
  formed: list[jax.Array]  # formed gradients, [batch, ...] each


class Tower(NamedTuple):
  """Trace of one encoder, with its plan for each parameter."""

  plan: plans.Plan
  leaves: tuple[jax.Array, ...]  # all parameters, flat

  @property
  def used(self) -> set[int]:
    """Positions of the parameters that some equation reads."""
    used = _find_used(self.plan.closed.jaxpr)
    return {index for index in used if index < len(self.leaves)}


class Towers(NamedTuple):
  """Two encoders that agree on which parameters to keep in factors."""

  query: Tower
  document: Tower

  @property
  def are_disjoint(self) -> bool:
    """True if the encoders share no parameter."""
    return not (self.query.used & self.document.used)


def trace_towers(
  encode_query: typing.EncodeFn,
  encode_document: typing.EncodeFn,
  params: typing.Params,
  queries: Any,
  documents: Any,
  *,
  keep_ratio: float = 2.0,
) -> Towers:
  """Traces both encoders for one example each.

  Args:
    encode_query: encodes a query.
    encode_document: encodes a document.
    params: the parameters.
    queries: arrays or shapes [batch, ...].
    documents: the same.
    keep_ratio: a gradient is formed for each example if its bytes are at most
      this times those of its factors.
  """
  query, document = (
    _make_example_encoder(encode_query),
    _make_example_encoder(encode_document),
  )
  examples = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (queries, documents)
  )
  both = jax.make_jaxpr(
    lambda params, pair: (query(params, pair[0]), document(params, pair[1]))
  )(params, examples)
  # Traced together, so that a parameter of both has one layout.
  plan = plans.make_from_trace(
    both, params, keep_ratio=keep_ratio, saves_work=True
  )
  return Towers(
    _trace_tower(query, params, examples[0], plan),
    _trace_tower(document, params, examples[1], plan),
  )


def _trace_tower(
  encode_one: Callable[..., jax.Array],
  params: typing.Params,
  example: Any,
  plan: plans.Plan,
) -> Tower:
  closed: Any = jax.make_jaxpr(encode_one)(params, example)
  tracer = trace.ParameterTracer()
  jax.eval_shape(
    lambda *values: tracer.run(closed, values, plan.followed),
    *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals],
  )
  used = _find_used(closed.jaxpr)
  own = plan._replace(
    closed=closed,
    formed=tuple(i for i in plan.formed if i in used),
    sites=tuple(tracer.sites),
  )
  return Tower(own, tuple(map(jnp.asarray, jax.tree.leaves(params))))


def _find_used(jaxpr: Any) -> set[int]:
  """Returns the positions of the arguments that some equation reads."""
  positions = {var: index for index, var in enumerate(jaxpr.invars)}
  atoms = [atom for equation in jaxpr.eqns for atom in equation.invars]
  # Literals are not hashable in all versions, variables are.
  atoms = [atom for atom in atoms + jaxpr.outvars if not hasattr(atom, "val")]
  return {positions[atom] for atom in atoms if atom in positions}


def linearize(
  tower: Tower, examples: Any
) -> tuple[jax.Array, list[jax.Array], Callable[[jax.Array], Factors]]:
  """Encodes examples and returns a pullback for any number of backward passes.

  Args:
    tower: the encoder.
    examples: arrays with a leading axis [batch].

  Returns:
    The vectors [batch, dim]; the records of the sites, with a leading [batch];
    and the pullback, a pytree of its residuals. It maps cotangents [batch, dim]
    to the factors of the gradient of each example's <vector, cotangent>.
  """
  zeros = tower.plan.zeros()
  formed = [tower.leaves[index] for index in tower.plan.formed]
  structure = None

  def linearize_one(
    example: Any,
  ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    nonlocal structure

    def vector(
      zeros: list[jax.Array], formed: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
      tracer = trace.ParameterTracer(zeros)
      result = tower.plan.run(tracer, tower.leaves, formed, example)
      return result, tracer.records

    result, pull, records = jax.vjp(vector, zeros, formed, has_aux=True)
    residuals, structure = jax.tree.flatten(pull)
    return result, records, residuals

  # Residuals that all examples share, as a kernel, are not kept for each: a product
  # with copies is many small products.
  example = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples
  )
  closed = jax.make_jaxpr(lambda example: linearize_one(example)[2])(example)
  axes = [0 if differs else None for differs in _find_dependent(closed.jaxpr)]
  vectors, records, residuals = jax.vmap(linearize_one, out_axes=(0, 0, axes))(
    examples
  )

  def pull_one(residuals: list[jax.Array], cotangent: jax.Array) -> Factors:
    pull = jax.tree.unflatten(structure, residuals)
    return Factors(*pull(cotangent.astype(jnp.float32)))  # as the vectors are

  return (
    vectors,
    records,
    jax.tree_util.Partial(jax.vmap(pull_one, in_axes=(axes, 0)), residuals),
  )


def _find_dependent(jaxpr: Any) -> list[bool]:
  """Checks for each output whether it may depend on the inputs."""
  seen = set(jaxpr.invars)
  for equation in jaxpr.eqns:
    if any(_is_in(atom, seen) for atom in equation.invars):
      seen.update(equation.outvars)
  return [_is_in(atom, seen) for atom in jaxpr.outvars]


def _is_in(atom: Any, seen: set[Any]) -> bool:
  # Literals are not hashable in all versions, variables are.
  return not hasattr(atom, "val") and atom in seen


Part = tuple[Tower, Sequence[jax.Array], Factors]
"""An encoder, the records and the factors of its examples, [batch] each."""


def fix_rounding(parts: Sequence[Part]) -> list[Part]:
  """Returns parts whose factors have the same values for norms and for sums.

  Otherwise a compiler may use factors in half precision before they are rounded
  for the one, and after it for the other.
  """
  towers = [tower for tower, _, _ in parts]
  factors = jax.lax.optimization_barrier([part[1:] for part in parts])
  return [(tower, *each) for tower, each in zip(towers, factors, strict=True)]


def compute_squared_norms(parts: Sequence[Part], size: int) -> jax.Array:
  """Returns the squared norms of sums of gradients, float32 [size].

  Args:
    parts: the gradients that are summed for each example: of one encoder, or of
      both, whose common parameters are taken together.
    size: the number of examples.
  """
  squares = plans.compute_squares(
    _collect_uses(parts), _sum_formed(parts).values()
  )
  return sum(squares, jnp.zeros(size, jnp.float32))


def compute_weighted_sums(
  parts: Sequence[Part], weights: jax.Array
) -> list[jax.Array]:
  """Returns the weighted sums of gradients over examples.

  Args:
    parts: as in `compute_squared_norms`, at least one.
    weights: float32 [batch]; an example with weight zero contributes exactly
      zero, whatever its factors hold.

  Returns:
    float32, for every parameter in order.
  """
  shapes = [leaf.shape for leaf in parts[0][0].leaves]
  return plans.compute_weighted_sums(
    shapes, _collect_uses(parts), _sum_formed(parts), weights
  )


def _sum_formed(parts: Sequence[Part]) -> dict[int, jax.Array]:
  """Adds up the formed gradients of each parameter, over all parts."""
  formed: dict[int, jax.Array] = {}
  for tower, _, factors in parts:
    for leaf, gradient in zip(tower.plan.formed, factors.formed, strict=True):
      gradient = gradient.astype(jnp.float32)
      formed[leaf] = formed[leaf] + gradient if leaf in formed else gradient
  return formed


def _collect_uses(
  parts: Sequence[Part],
) -> dict[int, list[tuple[use_sites.Layout, plans.Use]]]:
  """Collects the uses of each parameter in factors, over all parts."""
  sites = [site for tower, _, _ in parts for site in tower.plan.sites]
  records = [record for _, records, _ in parts for record in records]
  cotangents = [each for _, _, factors in parts for each in factors.cotangents]
  return plans.collect_uses(sites, records, cotangents)
