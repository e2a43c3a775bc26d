"""The dual encoder: T5's encoder, which queries and documents may share.

Optionally with a square linear map after the mean, as Sentence-T5 and GTR have
one: small enough to be trained alone, where the noise on everything else would
cost more than it teaches.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.models import t5, t5_config

__all__ = [
  "POOLINGS",
  "PROJECTION",
  "encode",
  "encoder_params",
  "normalize",
  "pool",
  "projected",
  "with_projection",
]

POOLINGS = ("mean", "first")
"""How the outputs of a sequence become one: their mean, or the first."""

PROJECTION = "projection"
"""The part of the parameters that holds the map's kernel, [dim, dim]."""

_SHARED = ("token_embedder", "encoder")
_SMALLEST_SQUARED_NORM = 1e-12


def encoder_params(params: typing.Params) -> typing.Params:
  """Takes the parameters that `encode` uses out of those of a whole T5.

  Args:
    params: the parameters of `t5.Transformer`, or already their subset.

  Returns:
    A dict with the embedding and the encoder, and the projection where there
    is one; the arrays are not copied.

  Raises:
    ValueError: if a part is missing.
  """
  missing = [name for name in _SHARED if name not in params]
  if missing:
    raise ValueError(
      f"params must hold {' and '.join(_SHARED)}, got {sorted(params)}"
    )
  kept = [name for name in (*_SHARED, PROJECTION) if name in params]
  return {name: params[name] for name in kept}


def with_projection(params: typing.Params, dim: int) -> typing.Params:
  """Adds a linear map that changes nothing yet, where there is none.

  Args:
    params: those of an encoder of tokens.
    dim: numbers of its vectors.

  Returns:
    A dict with the identity as its projection.
  """
  if PROJECTION in params:
    return params
  kernel = np.eye(dim, dtype=np.float32)
  return {**params, PROJECTION: {"kernel": kernel}}


def encode(
  params: typing.Params,
  config: t5_config.T5Config,
  tokens: Int[Array, "batch length"],
  *,
  pooling: str = "mean",
) -> Float[Array, "batch dim"]:
  """Encodes sequences of tokens as unit vectors.

  The mean of the encoder's outputs over the tokens that are not padding, of
  length 1, so that dot products are cosines (Ni et al. 2021, Sentence-T5);
  after the projection where there is one. A row's vector depends on that row
  alone.

  Args:
    params: the parameters of a T5 or those that `encoder_params` takes.
    config: the shape of the T5.
    tokens: tokens, 0 = padding at the end of a row.
    pooling: one of `POOLINGS`; "first" takes the first token's output, which
      has attended to all the others, in place of the mean.

  Returns:
    One float32 vector per row: of length 1, or 0 where all is padding.

  Raises:
    ValueError: if the pooling is unknown or a part of `params` is missing.

  References:
    Ni et al., Sentence-T5: Scalable Sentence Encoders from Pre-trained
    Text-to-Text Models, section 3 (encoder-only mean, and first).
  """
  if pooling not in POOLINGS:
    raise ValueError(f"expected pooling among {POOLINGS}, got {pooling=}")
  params = encoder_params(params)
  outputs = t5.Transformer(config).apply(
    {"params": {name: params[name] for name in _SHARED}},
    tokens,
    method="encode",
  )
  return projected(params, pool(outputs.astype(jnp.float32), tokens, pooling))


def projected(
  params: typing.Params, pooled: Float[Array, "batch dim"]
) -> Float[Array, "batch dim"]:
  """Returns the map of pooled outputs where there is one, of length 1."""
  if PROJECTION in params:
    pooled = pooled @ params[PROJECTION]["kernel"].astype(jnp.float32)
  return normalize(pooled)


def pool(
  outputs: Float[Array, "batch length dim"],
  tokens: Int[Array, "batch length"],
  pooling: str,
) -> Float[Array, "batch dim"]:
  """Returns one vector for each row: 0 where all is padding.

  Args:
    outputs: of each token; half precision is added up in float32.
    tokens: 0 = padding at the end of a row.
    pooling: one of `POOLINGS`.
  """
  outputs = _at_least_float32(outputs)
  if pooling == "first":
    return jnp.where(tokens[:, :1] != 0, outputs[:, 0], 0.0)
  weights = (tokens != 0).astype(outputs.dtype)
  total = jnp.einsum("bl,bld->bd", weights, outputs)
  return total / jnp.maximum(jnp.sum(weights, axis=1), 1)[:, None]


def normalize(x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
  """Returns vectors of length 1, in the type of x; one that is 0 stays 0."""
  wide = _at_least_float32(x)
  # The maximum keeps the gradient of a zero vector finite.
  squared = jnp.sum(wide * wide, axis=-1, keepdims=True)
  scale = jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))
  return (wide * scale).astype(x.dtype)


def _at_least_float32(x: Array) -> Array:
  """Returns half precision as float32, whose squares and sums have a range."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
