"""Turns batches of inputs into unit vectors by one protocol for all models.

`of` returns the encoder of a shape: a T5, a BERT, a table of vectors or a net for
images. Training, search, leakage and federated code accept any of them.
"""

import dataclasses
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from synthq_jax import extras, typing
from synthq_jax.models import (
  bert,
  dual_encoder,
  sentence_encoder,
  static_vectors,
  t5_config,
)

with extras.required("run"):
  from flax import linen as nn

__all__ = ["Encoder", "of"]


class Encoder(Protocol):
  """Maps parameters and inputs to vectors; hashable, for `jax.jit`."""

  @property
  def dim(self) -> int:
    """Length of a vector."""

  def select(self, params: typing.Params) -> typing.Params:
    """Returns the parameters that `encode` uses."""

  def encode(
    self, params: typing.Params, inputs: Any
  ) -> Float[Array, "batch dim"]:
    """Returns a vector of length 1 for each input, or 0 for an input of padding.

    A vector depends on its own input alone.
    """


def _encode_bert(
  params: typing.Params,
  shape: bert.BertConfig,
  tokens: Int[Array, "batch length"],
  *,
  pooling: str = "mean",
) -> Float[Array, "batch dim"]:
  """Encodes with a BERT as with a folder that holds it and a pooling alone."""
  config = sentence_encoder.SentenceConfig(model=shape, pooling=pooling)
  return sentence_encoder.encode({"model": params}, config, tokens)


_OF_TOKENS = {
  t5_config.T5Config: dual_encoder.encode,
  bert.BertConfig: _encode_bert,
  static_vectors.StaticConfig: static_vectors.encode,
  sentence_encoder.SentenceConfig: sentence_encoder.encode,
}
"""The function that encodes with each shape of a model for texts."""


@dataclasses.dataclass(frozen=True)
class _OfShape:
  """Encodes inputs with the model of a shape, or with a Flax module for images.

  Fingerprints of vectors may hold the name of this class.
  """

  shape: Any
  pooling: str = "mean"

  @property
  def dim(self) -> int:
    is_net = isinstance(self.shape, nn.Module)
    return self.shape.dim if is_net else self.shape.emb_dim

  def select(self, params: typing.Params) -> typing.Params:
    is_t5 = isinstance(self.shape, t5_config.T5Config)
    return dual_encoder.encoder_params(params) if is_t5 else params

  def encode(
    self, params: typing.Params, inputs: Any
  ) -> Float[Array, "batch dim"]:
    if isinstance(self.shape, nn.Module):
      return self.shape.apply({"params": params}, inputs)
    pooling = {} if self.pooling == "mean" else {"pooling": self.pooling}
    encode = _OF_TOKENS[type(self.shape)]
    return encode(params, self.shape, inputs, **pooling)


def of(shape: Any, *, pooling: str = "mean") -> Encoder:
  """Returns the encoder of a shape.

  Args:
    shape: a T5Config, a BertConfig, a StaticConfig, a SentenceConfig, a Flax module
      for images, or an encoder, which is returned as it is.
    pooling: one of `dual_encoder.POOLINGS`; only a T5 or a BERT may have another
      one than "mean".

  Raises:
    ValueError: if the pooling is unknown, or the shape does not support it.
  """
  if isinstance(shape, (t5_config.T5Config, bert.BertConfig)):
    if pooling not in dual_encoder.POOLINGS:
      raise ValueError(
        f"expected pooling among {dual_encoder.POOLINGS}, got {pooling=}"
      )
  elif pooling != "mean":
    raise ValueError(
      f"expected pooling='mean' for a shape other than T5 or BERT, got {pooling=}"
    )
  is_shape = isinstance(shape, (*_OF_TOKENS, nn.Module))
  return _OfShape(shape, pooling) if is_shape else shape
