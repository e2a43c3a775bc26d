"""Loads and runs BERT and its kin in Flax Linen, from Hugging Face's folders.

Supported are BertModel, with or without its pooler, BertForSequenceClassification,
DistilBERT, RoBERTa, XLM-RoBERTa and MPNet. Outputs equal those of transformers.
Heads of the pre-training are ignored.

References:
  Devlin, Chang, Lee, Toutanova: BERT: Pre-training of Deep Bidirectional
  Transformers for Language Understanding. NAACL 2019.
  Sanh, Debut, Chaumond, Wolf: DistilBERT. arXiv:1910.01108 (no segments).
  Liu et al.: RoBERTa. arXiv:1907.11692 (positions begin after that of padding).
  Song, Tan, Qin, Lu, Liu: MPNet. NeurIPS 2020 (T5's buckets of relative positions).
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import checks, extras, typing
from synthq_jax.models import dual_encoder, t5_layers
from synthq_jax.models.checkpoints import tensors
from synthq_jax.storage import artifacts

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "Bert",
  "COUNTING",
  "KINDS",
  "BertConfig",
  "init_params",
  "load",
  "read_config",
  "tensor_name",
  "with_params",
]

_MASKED = -1e10
_FARTHEST = 128  # distance from which on MPNet's last bucket counts
_INITIAL = nn.initializers.normal(0.02)
_MODEL, _MODULES = "model.safetensors", "modules.json"
_POOLER = "pooler/kernel"
_CLASSIFIER = "classifier/kernel"
_BUCKETS = "relative_bias"
_TABLES = {
  "word_embedding": "embeddings.word_embeddings",
  "position_embedding": "embeddings.position_embeddings",
  "segment_embedding": "embeddings.token_type_embeddings",
  _BUCKETS: "encoder.relative_attention_bias",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
  """The differences of one kind of model from BERT in its files."""

  prefix: str
  """Prefix of the names of tensors in models with a head."""
  ignored: tuple[str, ...] = ("cls.",)
  """Prefixes of the names of ignored tensors."""
  layers: str = "encoder.layer"
  parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Names of a layer's parts that differ from BERT's."""
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Names in config.json that differ from BERT's."""
  has_segments: bool = True
  has_labels: bool = False
  """Whether a classifier is loaded."""
  counts_padding: bool = False
  """Whether the first token has the position after that of padding."""
  buckets: str = ""
  """The field with the number of buckets of relative positions."""


_ROBERTA = _Kind(prefix="roberta.", ignored=("lm_head.",), counts_padding=True)
KINDS = {
  "bert": _Kind(prefix="bert.", has_labels=True),
  "roberta": _ROBERTA,
  "xlm-roberta": _ROBERTA,
  "distilbert": _Kind(
    prefix="distilbert.",
    ignored=("vocab_",),
    layers="transformer.layer",
    parts={
      "query": "attention.q_lin",
      "key": "attention.k_lin",
      "value": "attention.v_lin",
      "out": "attention.out_lin",
      "attention_norm": "sa_layer_norm",
      "wi": "ffn.lin1",
      "wo": "ffn.lin2",
      "mlp_norm": "output_layer_norm",
    },
    fields={
      "emb_dim": "dim",
      "num_heads": "n_heads",
      "mlp_dim": "hidden_dim",
      "num_layers": "n_layers",
      "activation": "activation",
      "dropout_rate": "dropout",
    },
    has_segments=False,
  ),
  "mpnet": _Kind(
    prefix="mpnet.",
    ignored=("lm_head.",),
    parts={
      "query": "attention.attn.q",
      "key": "attention.attn.k",
      "value": "attention.attn.v",
      "out": "attention.attn.o",
      "attention_norm": "attention.LayerNorm",
    },
    has_segments=False,
    counts_padding=True,
    buckets="relative_attention_num_buckets",
  ),
}
"""Kinds of models by the `model_type` of config.json."""
COUNTING = frozenset(k for k, kind in KINDS.items() if kind.counts_padding)
"""Kinds whose padding is token 1 instead of 0, unless config.json sets another."""
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in old files
_COUNTS = (
  *("vocab_size", "emb_dim", "num_heads", "mlp_dim", "num_layers"),
  "max_length",
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
  """Number of rows of the table of tokens."""
  emb_dim: int
  """Width of the states, a multiple of `num_heads`."""
  num_heads: int
  """Number of attention heads."""
  mlp_dim: int
  """Width of the feed-forward layer."""
  num_layers: int
  """Number of encoder layers."""
  max_length: int = 512
  """Largest number of tokens of an input, which have position vectors."""
  first_position: int = 0
  """Position of the first token; earlier positions are unused."""
  num_segments: int = 2
  """Number of segments with a vector; 0: the model has no segments."""
  num_buckets: int = 0
  """Number of T5's buckets of relative positions; 0: the model has none."""
  activation: str = "gelu"
  """"gelu" (exact), "gelu_new" (its approximation by tanh) or "relu"."""
  dropout_rate: float = 0.1
  """Dropout in [0, 1), also of the weights of attention."""
  norm_epsilon: float = 1e-12
  """Constant that norms add to variances."""
  has_pooler: bool = True
  """Whether there is a layer between the first token and the labels."""
  num_labels: int = 0
  """Number of labels of the classifier; 0 if there is none."""
  kind: str = "bert"
  """The `model_type` of config.json, which determines the names of tensors."""

  def __post_init__(self):
    checks.sizes(**{name: getattr(self, name) for name in _COUNTS})
    checks.at_least(
      0,
      num_segments=self.num_segments,
      num_buckets=self.num_buckets,
      first_position=self.first_position,
    )
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
  """Loads a BERT or its kin from Hugging Face's config.json and model.safetensors.

  `has_pooler` and `num_labels` of the shape tell which heads the folder holds.

  Args:
    folder: a folder of BertModel, BertForSequenceClassification, DistilBertModel,
      RobertaModel, XLMRobertaModel or MPNetModel.

  Returns:
    Nested dicts of float32 arrays, and their shape.

  Raises:
    ValueError: if a file is missing or damaged, the model is no BERT, or a tensor
      does not fit config.json.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder)
  tensors.refuse_adapter(folder)
  path = folder / _MODEL
  if not path.is_file():
    others = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
    saver = "transformers' AutoModel.from_pretrained(A)"
    if any((each / _MODULES).is_file() for each in (folder, folder.parent)):
      # It saves the pooling, too.
      saver = "sentence-transformers' SentenceTransformer(A)"
    raise ValueError(
      f"expected a file {path}, got {', '.join(others) or 'none'}: save the"
      f" model as one file if you trust it, with {saver}.save_pretrained(B)"
    )
  kind = KINDS[config.kind]
  stored = {
    _normalize_name(name, kind.prefix): tensor
    for name, tensor in tensors.read_safetensors(path).items()
  }
  stored = {
    name: tensor
    for name, tensor in stored.items()
    if not name.startswith((*kind.ignored, "embeddings.position_ids"))
  }
  name = functools.partial(tensor_name, config.kind)
  classifier = stored.get(name(_CLASSIFIER)) if kind.has_labels else None
  config = dataclasses.replace(
    config,
    has_pooler=name(_POOLER) in stored,
    num_labels=0 if classifier is None else classifier.shape[0],
  )
  expected = tensors.get_shapes(functools.partial(init_params, config))
  described = tensors.rename(path, stored, expected, name, _is_transposed)
  return tensors.fetch(described), config


def with_params(
  folder: pathlib.Path, params: typing.Params, config: BertConfig
) -> dict[str, tensors.Tensor]:
  """Replaces the values of a folder's tensors and keeps their names.

  Args:
    folder: as in `load`.
    params: nested dicts of arrays; other tensors keep their values.
    config: the shape of the parameters.
  """
  ours = {
    tensor_name(config.kind, path): tensor.transpose()
    if _is_transposed(path)
    else tensor
    for path, tensor in tensors.of_tree(params).items()
  }
  prefix = KINDS[config.kind].prefix
  stored = tensors.read_safetensors(folder / _MODEL)
  return {
    name: ours.get(_normalize_name(name, prefix), tensor)
    for name, tensor in stored.items()
  }


class Layer(nn.Module):
  """Computes self-attention and feed-forward, each with a residual and then a
  norm."""

  config: BertConfig

  @nn.compact
  def __call__(self, x, mask, bias=None, *, deterministic: bool):
    config = self.config
    drop = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    heads = (config.num_heads, config.emb_dim // config.num_heads)

    def dense(features: int, name: str, inputs: Array) -> Array:
      # One batch axis: XLA on CPUs copies both factors of a kernel's gradient that
      # sums over two.
      layer = nn.Dense(features, kernel_init=_INITIAL, name=name)
      y = layer(inputs.reshape(-1, inputs.shape[-1]))
      return y.reshape(*inputs.shape[:-1], features)

    # [batch, heads, length, head_dim]; with heads before lengths, and the sum of
    # the weights divided out of the small product, XLA takes .91 of the time on CPUs.
    query, key, value = (
      dense(config.emb_dim, name, x).reshape(*x.shape[:2], *heads)
      for name in ("query", "key", "value")
    )
    query, key, value = (
      jnp.swapaxes(each, 1, 2) for each in (query, key, value)
    )
    # [batch, heads, query, key]
    scores = jnp.einsum("bhqd,bhkd->bhqk", query / jnp.sqrt(heads[1]), key)
    if bias is not None:
      scores = scores + bias
    scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, _MASKED)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", drop(weights), value) / total
    mixed = jnp.swapaxes(mixed, 1, 2).reshape(x.shape)
    h = drop(dense(config.emb_dim, "out", mixed))
    x = _make_norm(config, "attention_norm")(x + h)
    h = _ACTIVATIONS[config.activation](dense(config.mlp_dim, "wi", x))
    h = drop(dense(config.emb_dim, "wo", h))
    return _make_norm(config, "mlp_norm")(x + h)


class Bert(nn.Module):
  """Runs the encoder, and the classifier if there is one."""

  config: BertConfig

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch label"]]:
    """Returns the states and the logits of the labels, [batch, 0] without labels.

    Args:
      tokens: tokens, 0 = padding at the end of a row, which attention ignores.
      segments: the segment of each token.
      deterministic: whether dropout is off.
    """
    config = self.config
    positions = config.first_position + np.arange(tokens.shape[1])
    rows = {
      "word_embedding": (config.vocab_size, tokens),
      "position_embedding": (
        config.first_position + config.max_length,
        positions[None],
      ),
      "segment_embedding": (config.num_segments, segments),
    }
    # [batch, length, dim]
    x = sum(
      self.param(name, _INITIAL, (size, config.emb_dim))[chosen]
      for name, (size, chosen) in rows.items()
      if size
    )
    x = _make_norm(config, "embedding_norm")(x)
    drop = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    x = drop(x)
    mask = dual_encoder.find_tokens(tokens)[:, None, None, :]
    bias = self._bias(positions) if config.num_buckets else None
    for index in range(config.num_layers):
      layer = Layer(config, name=f"layers_{index}")
      x = layer(x, mask, bias, deterministic=deterministic)
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

  def _bias(self, positions: np.ndarray) -> Float[Array, "1 head query key"]:
    """Returns the bias of scores by the distance of two tokens."""
    config = self.config
    shape = (config.num_buckets, config.num_heads)
    table = self.param(_BUCKETS, _INITIAL, shape)
    bucket = t5_layers.relative_position_bucket(
      positions[None, :] - positions[:, None],
      bidirectional=True,
      num_buckets=config.num_buckets,
      max_distance=_FARTHEST,
    )
    return jnp.moveaxis(table[bucket], -1, 0)[None]


@functools.partial(jax.jit, static_argnames="config")
def init_params(config: BertConfig, key: jax.Array) -> typing.Params:
  """Initializes parameters as a nested dict of float32 arrays."""
  tokens = jnp.ones((1, 1), jnp.int32)
  return Bert(config).init(key, tokens, jnp.zeros_like(tokens))["params"]


def _make_norm(config: BertConfig, name: str) -> nn.LayerNorm:
  # The fast variance is a difference of squares, which loses digits.
  return nn.LayerNorm(config.norm_epsilon, use_fast_variance=False, name=name)


def read_config(folder: pathlib.Path) -> BertConfig:
  """Reads the shape in config.json, which does not tell of a classifier.

  Args:
    folder: a folder that `load` reads.

  Raises:
    ValueError: if the file is missing, damaged or of another kind of model.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"expected a folder with a BERT of Hugging Face, got no file {path}"
    )
  try:
    fields = artifacts.unsealed(path.read_bytes())
    kind = _check_kind(fields)
    names = _FIELDS | {k: v for k, v in kind.fields.items() if k in _FIELDS}
    values = {ours: fields[name] for ours, name in names.items()}
    for ours, (name, default) in _OPTIONAL.items():
      values[ours] = fields.get(kind.fields.get(ours, name), default)
    if not kind.has_segments:
      values["num_segments"] = 0
    if kind.buckets:
      values["num_buckets"] = fields.get(kind.buckets, 32)
    if kind.counts_padding:
      first = fields.get("pad_token_id", 1) + 1
      values["first_position"] = first
      values["max_length"] -= first
    return BertConfig(**values, kind=fields["model_type"])
  except KeyError as error:
    raise ValueError(f"{path}: expected a BERT, got no {error}") from error
  except (ValueError, TypeError, AttributeError) as error:
    got = " ".join(str(error).split())
    raise ValueError(f"{path}: expected a BERT, got {got}") from error


def _check_kind(fields: Mapping[str, Any]) -> _Kind:
  """Returns the kind of a model; refuses unsupported kinds."""
  kind = KINDS.get(fields.get("model_type"))
  if kind is None:
    kinds = ", ".join(KINDS)
    raise ValueError(
      f"model_type={fields.get('model_type')!r}, none of {kinds}"
    )
  if fields.get("is_decoder"):
    raise ValueError("is_decoder=true")
  positions = fields.get("position_embedding_type") or "absolute"
  if positions != "absolute":
    raise ValueError(f"position_embedding_type={positions!r}")
  return kind


def _normalize_name(name: str, prefix: str) -> str:
  """Removes the prefix of models with a head and replaces old names of
  norms."""
  name = name.removeprefix(prefix)
  for old, new in _OLD_NAMES.items():
    if name.endswith(old):
      return name.removesuffix(old) + new
  return name


def _is_transposed(path: str) -> bool:
  return path.endswith("/kernel")


def tensor_name(kind: str, path: str) -> str:
  """Translates the path of a parameter to Hugging Face's name.

  >>> tensor_name("bert", "layers_3/query/kernel")
  'encoder.layer.3.attention.self.query.weight'
  >>> tensor_name("distilbert", "layers_3/query/kernel")
  'transformer.layer.3.attention.q_lin.weight'

  Args:
    kind: `BertConfig.kind`.
    path: the path of a parameter, joined by "/".
  """
  if path in _TABLES:
    return f"{_TABLES[path]}.weight"
  *parents, leaf = path.split("/")
  if len(parents) == 1:
    return f"{_OUTSIDE[parents[0]]}.{_LEAVES[leaf]}"
  layer = parents[0].removeprefix("layers_")
  parts = _PARTS | KINDS[kind].parts
  name = f"{KINDS[kind].layers}.{layer}.{parts[parents[1]]}"
  return f"{name}.{_LEAVES[leaf]}"
