"""BERT in Flax Linen, with the numbers of Hugging Face's.

References:
  Devlin, Chang, Lee, Toutanova: BERT: Pre-training of Deep Bidirectional
  Transformers for Language Understanding. NAACL 2019.
  Reimers, Gurevych: Sentence-BERT. EMNLP 2019, section 3 (the mean of the
  outputs).
"""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.models import _bert_format, bert_config

__all__ = ["Bert", "encode", "init_params", "load", "load_encoder"]

_MASKED = -1e10
_INITIAL = nn.initializers.normal(0.02)
_SMALLEST_SQUARED_NORM = 1e-12
_ACTIVATIONS = {
  "gelu": functools.partial(nn.gelu, approximate=False),
  "gelu_new": functools.partial(nn.gelu, approximate=True),
  "relu": nn.relu,
}


def load(
  folder: str | os.PathLike,
) -> tuple[typing.Params, bert_config.BertConfig]:
  """Reads a BERT of Hugging Face: config.json and model.safetensors.

  The shape says what is there: `has_pooler`, and `num_labels` where a
  classifier is.

  Args:
    folder: of BertModel or BertForSequenceClassification.

  Returns:
    Nested dicts of float32 arrays, and their shape.

  Raises:
    ValueError: if a file is missing or damaged, it is no BERT, or a tensor is
      not as config.json says.
  """
  return _bert_format.read(pathlib.Path(folder))


def load_encoder(
  folder: str | os.PathLike,
) -> tuple[typing.Params, bert_config.BertConfig]:
  """Reads a BERT whose mean outputs are vectors of sentences, for `encode`.

  Args:
    folder: of sentence-transformers, or as in `load`.

  Returns:
    As `load`.

  Raises:
    ValueError: as in `load`, or if vectors are made otherwise than as a mean.
  """
  return load(_bert_format.mean_pooled(pathlib.Path(folder)))


class Layer(nn.Module):
  """Self-attention and feed-forward, each with a residual and then a norm."""

  config: bert_config.BertConfig

  @nn.compact
  def __call__(self, x, mask, *, deterministic: bool):
    config = self.config
    drop = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    heads = (config.num_heads, config.emb_dim // config.num_heads)

    def dense(features: int, name: str, inputs: Array) -> Array:
      return nn.Dense(features, kernel_init=_INITIAL, name=name)(inputs)

    # [batch, length, heads, head_dim]
    query, key, value = (
      dense(config.emb_dim, name, x).reshape(*x.shape[:2], *heads)
      for name in ("query", "key", "value")
    )
    # [batch, heads, query, key]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(heads[1])
    scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, _MASKED)
    weights = drop(nn.softmax(scores))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
    h = drop(dense(config.emb_dim, "out", mixed))
    x = _norm(config, "attention_norm")(x + h)
    h = _ACTIVATIONS[config.activation](dense(config.mlp_dim, "wi", x))
    h = drop(dense(config.emb_dim, "wo", h))
    return _norm(config, "mlp_norm")(x + h)


class Bert(nn.Module):
  """The encoder, and the labels where there is a classifier."""

  config: bert_config.BertConfig

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch label"]]:
    """Returns the states, and the logits of the labels, none if there are none.

    Args:
      tokens: 0 = padding at the end of a row, which nothing looks at.
      segments: the segment of each token.
      deterministic: whether dropout is off.
    """
    config = self.config
    sizes = {
      "word_embedding": config.vocab_size,
      "position_embedding": config.max_length,
      "segment_embedding": config.num_segments,
    }
    words, positions, kinds = (
      self.param(name, _INITIAL, (size, config.emb_dim))
      for name, size in sizes.items()
    )
    # [batch, length, dim]
    x = words[tokens] + positions[None, : tokens.shape[1]] + kinds[segments]
    x = _norm(config, "embedding_norm")(x)
    drop = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    x = drop(x)
    mask = (tokens != 0)[:, None, None, :]
    for index in range(config.num_layers):
      layer = Layer(config, name=f"layers_{index}")
      x = layer(x, mask, deterministic=deterministic)
    first = x[:, 0]
    if config.has_pooler:
      pooler = nn.Dense(config.emb_dim, kernel_init=_INITIAL, name="pooler")
      first = nn.tanh(pooler(first))
    if not config.num_labels:
      return x, jnp.zeros((len(x), 0))
    labels = nn.Dense(
      config.num_labels, kernel_init=_INITIAL, name="classifier"
    )
    return x, labels(drop(first))


def init_params(
  config: bert_config.BertConfig, key: jax.Array
) -> typing.Params:
  """Returns fresh parameters, a nested dict of float32 arrays."""
  return _init(key, config=config)


@functools.partial(jax.jit, static_argnames="config")
def _init(key: jax.Array, *, config: bert_config.BertConfig) -> typing.Params:
  tokens = jnp.ones((1, 1), jnp.int32)
  return Bert(config).init(key, tokens, jnp.zeros_like(tokens))["params"]


def encode(
  params: typing.Params,
  config: bert_config.BertConfig,
  tokens: Int[Array, "batch length"],
) -> Float[Array, "batch dim"]:
  """Encodes sequences of tokens as unit vectors: the mean of the outputs.

  Args:
    params: from `load_encoder`.
    config: their shape.
    tokens: with the first and the last token of BERT, 0 = padding.

  Returns:
    One float32 vector per row: of length 1, or 0 where all is padding.
  """
  states, _ = Bert(config).apply(
    {"params": params}, tokens, jnp.zeros_like(tokens)
  )
  weights = (tokens != 0).astype(states.dtype)
  # The division by the number of tokens is lost in the length of 1.
  total = jnp.einsum("bl,bld->bd", weights, states)
  squared = jnp.sum(total * total, axis=-1, keepdims=True)
  return total * jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))


def _norm(config: bert_config.BertConfig, name: str) -> nn.LayerNorm:
  # The fast variance is a difference of squares, and loses digits.
  return nn.LayerNorm(config.norm_epsilon, use_fast_variance=False, name=name)
