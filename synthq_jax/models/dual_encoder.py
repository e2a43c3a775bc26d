"""The dual encoder: T5's encoder, shared by queries and documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.models import t5, t5_config

__all__ = ["encode", "encoder_params"]

_SHARED = ("token_embedder", "encoder")
_SMALLEST_SQUARED_NORM = 1e-12


def encoder_params(params: typing.Params) -> typing.Params:
  """Takes the parameters that `encode` uses out of those of a whole T5.

  Args:
    params: the parameters of `t5.Transformer`, or already their subset.

  Returns:
    A dict with the embedding and the encoder; the arrays are not copied.

  Raises:
    ValueError: if a part is missing.
  """
  missing = [name for name in _SHARED if name not in params]
  if missing:
    raise ValueError(
      f"params must hold {' and '.join(_SHARED)}, got {sorted(params)}"
    )
  return {name: params[name] for name in _SHARED}


def encode(
  params: typing.Params,
  config: t5_config.T5Config,
  tokens: Int[Array, "batch length"],
) -> Float[Array, "batch dim"]:
  """Encodes sequences of tokens as unit vectors.

  The mean of the encoder's outputs over the tokens that are not padding, of
  length 1, so that dot products are cosines (Ni et al. 2021, Sentence-T5). A
  row's vector depends on that row alone.

  Args:
    params: the parameters of a T5 or those that `encoder_params` takes.
    config: the shape of the T5.
    tokens: tokens, 0 = padding.

  Returns:
    One float32 vector per row: of length 1, or 0 where all is padding.

  References:
    Ni et al., Sentence-T5: Scalable Sentence Encoders from Pre-trained
    Text-to-Text Models, section 3 (encoder-only mean).
  """
  outputs = t5.Transformer(config).apply(
    {"params": encoder_params(params)}, tokens, method="encode"
  )
  return _normalize(_mean(outputs.astype(jnp.float32), tokens))


def _mean(
  outputs: Float[Array, "batch length dim"], tokens: Int[Array, "batch length"]
) -> Float[Array, "batch dim"]:
  weights = (tokens != 0).astype(outputs.dtype)
  total = jnp.einsum("bl,bld->bd", weights, outputs)
  return total / jnp.maximum(jnp.sum(weights, axis=1), 1)[:, None]


def _normalize(x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
  # The maximum keeps the gradient of a zero vector finite.
  squared = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))
