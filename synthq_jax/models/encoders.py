"""Turns batches of inputs into unit vectors by one protocol, whatever the net.

`of` finds the encoder of a shape: a T5, a BERT, a table of vectors or a net for
images. Training, search, leakage and federated code take any of them.
"""

import dataclasses
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from synthq_jax import extras, typing
from synthq_jax.models import bert, dual_encoder, static_vectors, t5_config

with extras.required("run"):
  from flax import linen as nn

__all__ = ["T5", "Bert", "Encoder", "Images", "Static", "of"]


class Encoder(Protocol):
  """Inputs to vectors, as a function of parameters; hashable, for `jax.jit`."""

  @property
  def dim(self) -> int:
    """Numbers of a vector."""

  def select(self, params: typing.Params) -> typing.Params:
    """Returns the part of some parameters that `encode` uses."""

  def encode(
    self, params: typing.Params, inputs: Any
  ) -> Float[Array, "batch dim"]:
    """Returns a vector of length 1 for each input, 0 where it is all padding.

    A vector depends on its own input alone.
    """


class _Whole:
  """An encoder that uses all of its parameters."""

  def select(self, params: typing.Params) -> typing.Params:
    return params


class _OfTokens:
  """An encoder of tokens: a shape, `config`, whose outputs are pooled."""

  config: bert.BertConfig | t5_config.T5Config
  pooling: str

  def __post_init__(self):
    if self.pooling not in dual_encoder.POOLINGS:
      raise ValueError(
        f"expected pooling among {dual_encoder.POOLINGS}, got"
        f" pooling={self.pooling!r}"
      )

  @property
  def dim(self) -> int:
    return self.config.emb_dim


@dataclasses.dataclass(frozen=True)
class Bert(_OfTokens, _Whole):
  """A BERT's outputs, pooled; see `bert.encode`."""

  config: bert.BertConfig
  """Its shape."""
  pooling: str = "mean"
  """One of `dual_encoder.POOLINGS`; "first" is [CLS]."""

  def encode(
    self, params: typing.Params, inputs: Int[Array, "batch length"]
  ) -> Float[Array, "batch dim"]:
    return bert.encode(params, self.config, inputs, pooling=self.pooling)


@dataclasses.dataclass(frozen=True)
class T5(_OfTokens):
  """The encoder of a T5, pooled; see `dual_encoder.encode`."""

  config: t5_config.T5Config
  """Its shape."""
  pooling: str = "mean"
  """One of `dual_encoder.POOLINGS`."""

  def select(self, params: typing.Params) -> typing.Params:
    return dual_encoder.encoder_params(params)

  def encode(
    self, params: typing.Params, inputs: Int[Array, "batch length"]
  ) -> Float[Array, "batch dim"]:
    return dual_encoder.encode(
      params, self.config, inputs, pooling=self.pooling
    )


@dataclasses.dataclass(frozen=True)
class Static(_Whole):
  """Means of tokens' vectors; see `static_vectors.encode`."""

  config: static_vectors.StaticConfig
  """The table's shape."""

  @property
  def dim(self) -> int:
    return self.config.emb_dim

  def encode(
    self, params: typing.Params, inputs: Int[Array, "batch length"]
  ) -> Float[Array, "batch dim"]:
    return static_vectors.encode(params, self.config, inputs)


@dataclasses.dataclass(frozen=True)
class Images(_Whole):
  """A Flax module from images to unit vectors; see `image_encoders`."""

  net: nn.Module
  """With an attribute `dim`."""

  @property
  def dim(self) -> int:
    return self.net.dim

  def encode(
    self,
    params: typing.Params,
    inputs: Float[Array, "batch height width channels"],
  ) -> Float[Array, "batch dim"]:
    return self.net.apply({"params": params}, inputs)


def of(shape: Any, *, pooling: str = "mean") -> Encoder:
  """Returns the encoder of a shape.

  Args:
    shape: a T5Config, a BertConfig, a StaticConfig, a Flax module for images, or
      an encoder, which is returned as it is.
    pooling: one of `dual_encoder.POOLINGS`; other than "mean" for a T5 or a
      BERT.

  Raises:
    ValueError: if the pooling is unknown, or not for this shape.
  """
  if isinstance(shape, t5_config.T5Config):
    return T5(shape, pooling)
  if isinstance(shape, bert.BertConfig):
    return Bert(shape, pooling)
  if pooling != "mean":
    raise ValueError(
      f"expected pooling='mean' for what is no T5 and no BERT, got {pooling=}"
    )
  if isinstance(shape, static_vectors.StaticConfig):
    return Static(shape)
  return Images(shape) if isinstance(shape, nn.Module) else shape
