"""Encodes texts with T5's encoder, which queries and documents may share.

An optional square linear map follows the mean, as in Sentence-T5 and GTR. It is
small enough to be trained by itself, if noise on all parameters would cost more than
their training gains.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from synthq_jax import typing
from synthq_jax.models import t5, t5_config

__all__ = [
  "POOLINGS",
  "PROJECTION",
  "encode",
  "encoder_params",
  "find_tokens",
  "normalize",
  "pool",
  "project",
  "with_projection",
]

POOLINGS = ("mean", "first")
"""Ways to pool the outputs of a sequence: their mean, or the first output."""

PROJECTION = "projection"
"""Name of the parameters of the map, with its kernel [dim, dim]."""

_SHARED = ("token_embedder", "encoder")
_SMALLEST_SQUARED_NORM = 1e-12


def encoder_params(params: typing.Params) -> typing.Params:
  """Selects the parameters of a T5 that `encode` uses.

  Args:
    params: the parameters of `t5.Transformer`, or already their subset.

  Returns:
    A dict with the embedding and the encoder, and the projection if there is one;
    the arrays are not copied.

  Raises:
    ValueError: if a part is missing.
  """
  missing = [name for name in _SHARED if name not in params]
  if missing:
    raise ValueError(
      f"params must hold {' and '.join(_SHARED)}, got {sorted(params)}"
    )
  names = [name for name in (*_SHARED, PROJECTION) if name in params]
  return {name: params[name] for name in names}


def with_projection(params: typing.Params, dim: int) -> typing.Params:
  """Adds an identity projection if there is no projection.

  Args:
    params: parameters of an encoder of tokens.
    dim: length of the encoder's vectors.

  Returns:
    A dict of all parameters with a projection.
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

  A vector is the mean of the encoder's outputs over tokens that are not
  padding, projected if there is a projection. It has length 1, so that dot
  products are cosines (Ni et al. 2021, Sentence-T5). A row's vector depends on
  that row alone.

  Args:
    params: the parameters of a T5, or the subset of `encoder_params`.
    config: the shape of the T5.
    tokens: tokens, 0 = padding at the end of a row.
    pooling: one of `POOLINGS`; "first" replaces the mean by the first token's
      output, which has attended to all other tokens.

  Returns:
    One float32 vector per row: of length 1, or 0 for a row of padding.

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
  return project(params, pool(outputs.astype(jnp.float32), tokens, pooling))


def project(
  params: typing.Params, pooled: Float[Array, "batch dim"]
) -> Float[Array, "batch dim"]:
  """Projects pooled outputs if there is a projection, and normalizes them."""
  if PROJECTION in params:
    pooled = pooled @ params[PROJECTION]["kernel"].astype(jnp.float32)
  return normalize(pooled)


def find_tokens(
  tokens: Int[Array, "batch length"],
) -> Bool[Array, "batch length"]:
  """Marks the tokens of each row, up to the padding at its end.

  A zero before the last token is a token: of BERT, a text that holds "[PAD]".

  >>> print(find_tokens(jnp.array([[7, 0, 9, 0], [0, 0, 0, 0]])))
  [[ True  True  True False]
   [False False False False]]
  """
  places = jnp.arange(1, tokens.shape[1] + 1)
  ends = jnp.max(jnp.where(tokens != 0, places, 0), axis=1, initial=0)
  return places[None] <= ends[:, None]


def pool(
  outputs: Float[Array, "batch length dim"],
  tokens: Int[Array, "batch length"],
  pooling: str,
) -> Float[Array, "batch dim"]:
  """Pools the outputs of each row to one vector: 0 for a row of padding.

  Args:
    outputs: the output of each token; half precision is summed in float32.
    tokens: tokens, 0 = padding at the end of a row.
    pooling: one of `POOLINGS`.
  """
  outputs, is_token = _widen(outputs), find_tokens(tokens)
  if pooling == "first":
    return jnp.where(is_token[:, :1], outputs[:, 0], 0.0)
  weights = is_token.astype(outputs.dtype)
  total = jnp.einsum("bl,bld->bd", weights, outputs)
  return total / jnp.maximum(jnp.sum(weights, axis=1), 1)[:, None]


def normalize(x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
  """Normalizes vectors to length 1, in the type of x; a zero vector stays 0."""
  wide = _widen(x)
  # The maximum keeps the gradient of a zero vector finite.
  squared = jnp.sum(wide * wide, axis=-1, keepdims=True)
  scale = jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))
  return (wide * scale).astype(x.dtype)


def _widen(x: Array) -> Array:
  """Converts half precision to float32, whose squares and sums do not
  overflow."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
