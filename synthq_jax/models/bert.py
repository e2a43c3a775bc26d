"""BERT in Flax Linen, read from Hugging Face's folders, with their numbers.

BertModel, with its pooler or without, BertForSequenceClassification, and what
sentence-transformers makes of them. Heads of the pre-training are passed over.

References:
  Devlin, Chang, Lee, Toutanova: BERT: Pre-training of Deep Bidirectional
  Transformers for Language Understanding. NAACL 2019.
  Reimers, Gurevych: Sentence-BERT. EMNLP 2019, section 3 (the mean of the
  outputs).
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from synthq_jax import checks, extras, typing
from synthq_jax.models import dual_encoder
from synthq_jax.models.checkpoints import sentence_folders, tensors
from synthq_jax.storage import artifacts

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "Bert",
  "BertConfig",
  "encode",
  "init_params",
  "load",
  "load_encoder",
]

_MASKED = -1e10
_INITIAL = nn.initializers.normal(0.02)
_MODEL = "model.safetensors"
_PREFIX = "bert."
_POOLER = "pooler/kernel"
_CLASSIFIER = "classifier/kernel"
_IGNORED = ("cls.", "embeddings.position_ids")
_TABLES = {
  "word_embedding": "embeddings.word_embeddings",
  "position_embedding": "embeddings.position_embeddings",
  "segment_embedding": "embeddings.token_type_embeddings",
}
_OUTSIDE = {
  "embedding_norm": "embeddings.LayerNorm",
  "pooler": "pooler.dense",
  "classifier": "classifier",
}
_PARTS = {
  "query": "attention.self.query",
  "key": "attention.self.key",
  "value": "attention.self.value",
  "out": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "wi": "intermediate.dense",
  "wo": "output.dense",
  "mlp_norm": "output.LayerNorm",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, until 2019
_COUNTS = (
  *("vocab_size", "emb_dim", "num_heads", "mlp_dim", "num_layers"),
  *("max_length", "num_segments"),
)
_FIELDS = {
  "vocab_size": "vocab_size",
  "emb_dim": "hidden_size",
  "num_heads": "num_attention_heads",
  "mlp_dim": "intermediate_size",
  "num_layers": "num_hidden_layers",
}
_OPTIONAL = {
  "max_length": ("max_position_embeddings", 512),
  "num_segments": ("type_vocab_size", 2),
  "activation": ("hidden_act", "gelu"),
  "dropout_rate": ("hidden_dropout_prob", 0.1),
  "norm_epsilon": ("layer_norm_eps", 1e-12),
}
# BERT's gelu is the exact one; gelu_new is its approximation by tanh.
_ACTIVATIONS = {
  "gelu": functools.partial(nn.gelu, approximate=False),
  "gelu_new": functools.partial(nn.gelu, approximate=True),
  "relu": nn.relu,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
  """The shape of a BERT encoder; token 0 is padding."""

  vocab_size: int
  """Rows of the table of tokens."""
  emb_dim: int
  """Width of the states, a multiple of `num_heads`."""
  num_heads: int
  """Attention heads."""
  mlp_dim: int
  """Width of the feed-forward layer."""
  num_layers: int
  """Encoder layers."""
  max_length: int = 512
  """Positions that have a vector: the longest input."""
  num_segments: int = 2
  """Segments that have a vector."""
  activation: str = "gelu"
  """"gelu" (exact), "gelu_new" (its approximation by tanh) or "relu"."""
  dropout_rate: float = 0.1
  """Dropout in [0, 1), also of the weights of attention."""
  norm_epsilon: float = 1e-12
  """Added to variances."""
  has_pooler: bool = True
  """Whether a layer stands between the first token and the labels."""
  num_labels: int = 0
  """Labels of the classifier; 0 where there is none."""

  def __post_init__(self):
    checks.sizes(**{name: getattr(self, name) for name in _COUNTS})
    if self.emb_dim % self.num_heads:
      raise ValueError(
        "BertConfig.emb_dim must be a multiple of num_heads, got"
        f" emb_dim={self.emb_dim}, num_heads={self.num_heads}"
      )
    checks.within("[0, 1)", dropout_rate=self.dropout_rate)
    if self.activation not in _ACTIVATIONS:
      raise ValueError(
        f"BertConfig.activation knows {', '.join(_ACTIVATIONS)}, got"
        f" {self.activation!r}"
      )
    if self.num_labels and not self.has_pooler:
      raise ValueError(
        "BertConfig.num_labels above 0 needs has_pooler=True, got False"
      )


def load(
  folder: str | os.PathLike,
) -> tuple[typing.Params, BertConfig]:
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
  folder = pathlib.Path(folder)
  config = _config(folder)
  path = folder / _MODEL
  if not path.is_file():
    others = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
    raise ValueError(
      f"expected a file {path}, got {', '.join(others) or 'none'}: save the"
      " model as one file where you trust it, with transformers'"
      " AutoModel.from_pretrained(A).save_pretrained(B)"
    )
  found = {
    _current(name): tensor
    for name, tensor in tensors.read_safetensors(path).items()
    if not _current(name).startswith(_IGNORED)
  }
  classifier = found.get(_name(_CLASSIFIER))
  config = dataclasses.replace(
    config,
    has_pooler=_name(_POOLER) in found,
    num_labels=0 if classifier is None else classifier.shape[0],
  )
  expected = tensors.shapes_of(functools.partial(init_params, config))
  described = tensors.renamed(path, found, expected, _name, _is_transposed)
  return tensors.fetch(described), config


def load_encoder(
  folder: str | os.PathLike,
) -> tuple[typing.Params, BertConfig]:
  """Reads a BERT whose mean outputs are vectors of sentences, for `encode`.

  Args:
    folder: of sentence-transformers, or as in `load`.

  Returns:
    As `load`.

  Raises:
    ValueError: as in `load`, or if vectors are made otherwise than as a mean.
  """
  return load(sentence_folders.mean_pooled(pathlib.Path(folder)))


class Layer(nn.Module):
  """Self-attention and feed-forward, each with a residual and then a norm."""

  config: BertConfig

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

  config: BertConfig

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


@functools.partial(jax.jit, static_argnames="config")
def init_params(config: BertConfig, key: jax.Array) -> typing.Params:
  """Returns fresh parameters, a nested dict of float32 arrays."""
  tokens = jnp.ones((1, 1), jnp.int32)
  return Bert(config).init(key, tokens, jnp.zeros_like(tokens))["params"]


def encode(
  params: typing.Params,
  config: BertConfig,
  tokens: Int[Array, "batch length"],
  *,
  pooling: str = "mean",
) -> Float[Array, "batch dim"]:
  """Encodes sequences of tokens as unit vectors.

  Args:
    params: from `load_encoder`.
    config: their shape.
    tokens: with the first and the last token of BERT, 0 = padding.
    pooling: one of `dual_encoder.POOLINGS`: the mean of the outputs, or that of
      [CLS], the first.

  Returns:
    One float32 vector per row: of length 1, or 0 where all is padding.
  """
  states, _ = Bert(config).apply(
    {"params": params}, tokens, jnp.zeros_like(tokens)
  )
  return dual_encoder.normalize(dual_encoder.pool(states, tokens, pooling))


def _norm(config: BertConfig, name: str) -> nn.LayerNorm:
  # The fast variance is a difference of squares, and loses digits.
  return nn.LayerNorm(config.norm_epsilon, use_fast_variance=False, name=name)


def _config(folder: pathlib.Path) -> BertConfig:
  """Reads config.json, which does not say whether there is a classifier."""
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"expected a folder with a BERT of Hugging Face, got no file {path}"
    )
  try:
    fields = artifacts.unsealed(path.read_bytes())
    _check_kind(fields)
    values = {ours: fields[theirs] for ours, theirs in _FIELDS.items()}
    values |= {
      ours: fields.get(theirs, default)
      for ours, (theirs, default) in _OPTIONAL.items()
    }
    return BertConfig(**values)
  except KeyError as error:
    raise ValueError(f"{path}: expected a BERT, got no {error}") from error
  except (ValueError, TypeError, AttributeError) as error:
    got = " ".join(str(error).split())
    raise ValueError(f"{path}: expected a BERT, got {got}") from error


def _check_kind(fields: Mapping[str, Any]) -> None:
  """Refuses models that only look like a BERT."""
  if fields.get("model_type") != "bert":
    raise ValueError(f"model_type={fields.get('model_type')!r}")
  if fields.get("is_decoder"):
    raise ValueError("is_decoder=true")
  positions = fields.get("position_embedding_type") or "absolute"
  if positions != "absolute":
    raise ValueError(f"position_embedding_type={positions!r}")


def _current(name: str) -> str:
  """Drops the prefix of models with a head, and old names of norms."""
  name = name.removeprefix(_PREFIX)
  for old, new in _OLD_NAMES.items():
    if name.endswith(old):
      return name.removesuffix(old) + new
  return name


def _is_transposed(path: str) -> bool:
  return path.endswith("/kernel")


def _name(path: str) -> str:
  """Translates one of our paths.

  >>> _name("layers_3/query/kernel")
  'encoder.layer.3.attention.self.query.weight'
  """
  if path in _TABLES:
    return f"{_TABLES[path]}.weight"
  *parents, leaf = path.split("/")
  if len(parents) == 1:
    return f"{_OUTSIDE[parents[0]]}.{_LEAVES[leaf]}"
  layer = parents[0].removeprefix("layers_")
  return f"encoder.layer.{layer}.{_PARTS[parents[1]]}.{_LEAVES[leaf]}"
