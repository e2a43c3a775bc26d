"""Defines the shape of a T5 as a frozen dataclass, and named sizes."""

import dataclasses
import os
from typing import Any

from synthq_jax import checks, field_kinds
from synthq_jax.models import token_ids as token_ids_lib

__all__ = ["SHAPE", "T5Config", "get", "names", "require"]

_COUNTS = (
  "vocab_size",
  "emb_dim",
  "num_heads",
  "head_dim",
  "mlp_dim",
  "num_encoder_layers",
  "num_decoder_layers",
)
_DTYPES = ("float32", "bfloat16", "float16")
SHAPE = (*_COUNTS, "mlp_activations", "logits_via_embedding")
"""Fields that fix the shapes and meaning of parameters; others may differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """The shape of a T5 encoder-decoder, with T5X's names for its fields.

  T5 1.1 has a gated feed-forward layer and its own logits layer; T5 1.0 has one
  relu and computes its logits with the embedding (Raffel et al. 2020, and the
  T5 1.1 release notes). The fields below express both.
  """

  vocab_size: int
  """Number of rows of the embedding; a multiple of 128 suits TPUs."""
  emb_dim: int
  """Width of the residual stream (d_model)."""
  num_heads: int
  """Number of attention heads."""
  head_dim: int
  """Width of an attention head (d_kv)."""
  mlp_dim: int
  """Width of the feed-forward layer (d_ff)."""
  num_encoder_layers: int
  """Number of encoder blocks."""
  num_decoder_layers: int
  """Number of decoder blocks."""
  mlp_activations: tuple[str, ...] = ("gelu", "linear")
  """Activations of the feed-forward layer: ("relu",) in T5 1.0, ("gelu", "linear")
  in T5 1.1."""
  logits_via_embedding: bool = False
  """Whether the logits reuse the embedding (T5 1.0)."""
  dropout_rate: float = 0.0
  """Dropout rate in [0, 1); use 0 for private fine-tuning."""
  dtype: str = "float32"
  """Type of the computation; parameters stay float32."""
  remat: bool = False
  """Whether the backward pass recomputes each layer, which saves memory."""
  scan_layers: bool = False
  """Whether layers are one loop over stacked parameters (`scanned`), which
  compiles in a fraction of the time; decoding cannot use it."""
  relative_attention_num_buckets: int = 32
  """Number of buckets of the relative position bias."""
  relative_attention_max_distance: int = 128
  """Distance in tokens from which on all distances share a bucket."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of the model's vocabulary."""

  def __post_init__(self):
    checks.sizes(**{name: getattr(self, name) for name in _COUNTS})
    checks.within("[0, 1)", dropout_rate=self.dropout_rate)
    buckets = self.relative_attention_num_buckets
    if buckets < 4 or self.relative_attention_max_distance <= buckets // 2:
      raise ValueError(
        "T5Config expects at least 4 buckets of relative attention, and a maximum"
        f" distance of more than half as many, got {buckets} and"
        f" {self.relative_attention_max_distance}"
      )
    unknown = set(self.mlp_activations) - {"relu", "gelu", "linear"}
    if unknown:
      raise ValueError(
        "T5Config.mlp_activations knows relu, gelu and linear, got"
        f" {sorted(unknown)}"
      )
    # JAX's types, such as jnp.bfloat16, are admitted, too.
    if getattr(self.dtype, "__name__", str(self.dtype)) not in _DTYPES:
      raise ValueError(
        f"T5Config.dtype knows {', '.join(_DTYPES)}, got {self.dtype!r}"
      )


_T5_1_0 = {"mlp_activations": ("relu",), "logits_via_embedding": True}
_PUBLIC = {
  # emb_dim, num_heads, head_dim, mlp_dim, layers of encoder and of decoder
  "t5_1_0_small": (512, 8, 64, 2048, 6),
  "t5_1_0_base": (768, 12, 64, 3072, 12),
  "t5_1_0_large": (1024, 16, 64, 4096, 24),
  "t5_1_0_3B": (1024, 32, 128, 16384, 24),
  "t5_1_0_11B": (1024, 128, 128, 65536, 24),
  "t5_1_1_small": (512, 6, 64, 1024, 8),
  "t5_1_1_base": (768, 12, 64, 2048, 12),
  "t5_1_1_large": (1024, 16, 64, 2816, 24),
  "t5_1_1_xl": (2048, 32, 64, 5120, 24),
  "t5_1_1_xxl": (4096, 64, 64, 10240, 24),
}


def _make_config(vocab_size: int, *sizes: int, **fields: object) -> T5Config:
  names = ("emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers")
  shape = dict(zip(names, sizes, strict=True))
  shape["num_decoder_layers"] = shape["num_encoder_layers"]
  return T5Config(vocab_size=vocab_size, **shape, **fields)


def _make_small_config(
  width: int, mlp_dim: int, num_encoder_layers: int
) -> T5Config:
  """Makes a small shape with gated layers and tied logits, which learns to
  copy."""
  heads = max(width // 32, 2)
  sizes = (8192, width, heads, width // heads, mlp_dim, 2)
  shape = _make_config(*sizes, logits_via_embedding=True)
  return dataclasses.replace(shape, num_encoder_layers=num_encoder_layers)


_SIZES = {
  **{
    name: _make_config(32128, *sizes, **(_T5_1_0 if "_1_0_" in name else {}))
    for name, sizes in _PUBLIC.items()
  },
  "tiny": _make_config(128, 16, 2, 8, 32, 2),
  "shipped": _make_small_config(192, 512, 4),
  "demo_quarter": _make_small_config(32, 96, 3),
  "demo_half": _make_small_config(64, 192, 3),
  "demo": _make_small_config(128, 384, 3),
  "demo_double": _make_small_config(256, 768, 3),
}


def names() -> tuple[str, ...]:
  """Returns the names of the sizes."""
  return tuple(_SIZES)


def get(name: str) -> T5Config:
  """Returns the configuration of a named size.

  >>> get("t5_1_1_small").num_heads
  6

  Raises:
    ValueError: if no size has that name.
  """
  if name not in _SIZES:
    raise ValueError(
      f"unknown T5 size {name!r}: expected one of {', '.join(_SIZES)}"
    )
  return _SIZES[name]


def require(shape: Any, directory: str | os.PathLike) -> T5Config:
  """Returns the shape of a checkpoint if it is a T5's; refuses other shapes.

  Args:
    shape: the shape of the checkpoint.
    directory: the folder of the checkpoint, for the message.

  Raises:
    ValueError: if it is the shape of static vectors.
  """
  if not isinstance(shape, T5Config):
    raise ValueError(
      f"{directory}: expected a T5, for queries or monoT5, got static vectors:"
      " retrievers start from them as ENCODER, with STATIC_DIM=0"
    )
  return shape
