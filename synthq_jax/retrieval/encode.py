"""Vectors of a whole collection, in batches of few fixed shapes."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Int

from synthq_jax import typing
from synthq_jax.models import dual_encoder, length_batches, t5_config

__all__ = ["encode"]

_encode = functools.partial(jax.jit, static_argnames="config")(
  dual_encoder.encode
)


def encode(
  params: typing.Params,
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "row length"],
  *,
  batch_size: int = 256,
  progress: Callable[[int], object] | None = None,
) -> Float[np.ndarray, "row dim"]:
  """Encodes every row of tokens with the dual encoder.

  Rows are batched by length and trimmed of padding; the batches have few
  shapes, so that few are compiled.

  Args:
    params: the parameters of a T5 or of its encoder.
    config: the shape of the T5.
    tokens: tokens, 0 = padding at the end of a row.
    batch_size: rows at a time; changes the speed only.
    progress: called with the number of rows after each batch, for example
      `tqdm.tqdm(...).update`.

  Returns:
    One float32 unit vector per row, in the order of `tokens`; 0 for a row
    that is all padding.

  Raises:
    ValueError: if `tokens` is not a matrix or `batch_size` is below 1.
  """
  params = jax.device_put(dual_encoder.encoder_params(params))
  vectors = np.zeros((len(tokens), config.emb_dim), np.float32)
  for batch in length_batches.split(tokens, batch_size):
    encoded = np.asarray(_encode(params, config=config, tokens=batch.tokens))
    vectors[batch.rows] = encoded[: len(batch.rows)]
    if progress is not None:
      progress(len(batch.rows))
  return vectors
