"""Shapes of BERT, and how Hugging Face's config.json says them."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

__all__ = ["BertConfig", "from_folder"]

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
_ACTIVATIONS = ("gelu", "gelu_new", "relu")


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
    for field in _COUNTS:
      if getattr(self, field) < 1:
        raise ValueError(
          f"BertConfig.{field} must be at least 1, got {getattr(self, field)}"
        )
    if self.emb_dim % self.num_heads:
      raise ValueError(
        "BertConfig.emb_dim must be a multiple of num_heads, got"
        f" emb_dim={self.emb_dim}, num_heads={self.num_heads}"
      )
    if not 0 <= self.dropout_rate < 1:
      raise ValueError(
        "BertConfig.dropout_rate must lie in [0, 1), got"
        f" dropout_rate={self.dropout_rate}"
      )
    if self.activation not in _ACTIVATIONS:
      raise ValueError(
        f"BertConfig.activation knows {', '.join(_ACTIVATIONS)}, got"
        f" {self.activation!r}"
      )
    if self.num_labels and not self.has_pooler:
      raise ValueError(
        "BertConfig.num_labels above 0 needs has_pooler=True, got False"
      )


def from_folder(folder: pathlib.Path) -> BertConfig:
  """Reads config.json, which does not say whether there is a classifier.

  Raises:
    ValueError: if there is none, or it is no BERT that we can compute.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"expected a folder with a BERT of Hugging Face, got no file {path}"
    )
  try:
    fields = json.loads(path.read_text())
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
    raise ValueError(f"{path}: expected a BERT, got {error}") from error


def _check_kind(fields: Mapping[str, Any]) -> None:
  """Refuses models that only look like a BERT."""
  if fields.get("model_type") != "bert":
    raise ValueError(f"model_type={fields.get('model_type')!r}")
  if fields.get("is_decoder"):
    raise ValueError("is_decoder=true")
  positions = fields.get("position_embedding_type") or "absolute"
  if positions != "absolute":
    raise ValueError(f"position_embedding_type={positions!r}")
