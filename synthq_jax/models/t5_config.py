"""Shapes of T5: one frozen dataclass, and the sizes known by name."""

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
"""The fields that parameters must agree on; the others change how they are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """The shape of a T5 encoder-decoder, with T5X's names for its fields.

  T5 1.1 has a gated feed-forward layer and logits of its own; T5 1.0 has one
  relu and takes its logits from the embedding (Raffel et al. 2020, and the
  T5 1.1 release notes). Both are values of the fields below.
  """

  vocab_size: int
  """Rows of the embedding; a multiple of 128 suits TPUs."""
  emb_dim: int
  """Width of the residual stream (d_model)."""
  num_heads: int
  """Attention heads."""
  head_dim: int
  """Width of a head (d_kv)."""
  mlp_dim: int
  """Width of the feed-forward layer (d_ff)."""
  num_encoder_layers: int
  """Encoder blocks."""
  num_decoder_layers: int
  """Decoder blocks."""
  mlp_activations: tuple[str, ...] = ("gelu", "linear")
  """("relu",) for T5 1.0, ("gelu", "linear") for T5 1.1."""
  logits_via_embedding: bool = False
  """Whether the logits reuse the embedding (T5 1.0)."""
  dropout_rate: float = 0.0
  """Dropout in [0, 1); 0 is what private fine-tuning wants."""
  dtype: str = "float32"
  """Type of the computation; parameters stay float32."""
  remat: bool = False
  """Whether each layer is computed again on the way back: less memory."""
  scan_layers: bool = False
  """Whether layers are one loop over stacked parameters (`scanned`), which
  compiles in a fraction of the time; not for decoding."""
  relative_attention_num_buckets: int = 32
  """Buckets of the relative position bias."""
  relative_attention_max_distance: int = 128
  """Distances beyond this share a bucket."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of its vocabulary."""

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
    # JAX's own types, such as jnp.bfloat16, will do as well.
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


def _sized(vocab_size: int, *sizes: int, **fields: object) -> T5Config:
  names = ("emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers")
  shape = dict(zip(names, sizes, strict=True))
  shape["num_decoder_layers"] = shape["num_encoder_layers"]
  return T5Config(vocab_size=vocab_size, **shape, **fields)


def _small(width: int, mlp_dim: int, num_encoder_layers: int) -> T5Config:
  """T5 1.1's gated layers, T5 1.0's tied logits: copying is learned easily."""
  heads = max(width // 32, 2)
  sizes = (8192, width, heads, width // heads, mlp_dim, 2)
  shape = _sized(*sizes, logits_via_embedding=True)
  return dataclasses.replace(shape, num_encoder_layers=num_encoder_layers)


_SIZES = {
  **{
    name: _sized(32128, *sizes, **(_T5_1_0 if "_1_0_" in name else {}))
    for name, sizes in _PUBLIC.items()
  },
  "tiny": _sized(128, 16, 2, 8, 32, 2),
  "shipped": _small(192, 512, 4),
  "demo_quarter": _small(32, 96, 3),
  "demo_half": _small(64, 192, 3),
  "demo": _small(128, 384, 3),
  "demo_double": _small(256, 768, 3),
}


def names() -> tuple[str, ...]:
  """Returns the sizes that `get` knows."""
  return tuple(_SIZES)


def get(name: str) -> T5Config:
  """Returns the configuration of a size known by name.

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
  """Returns a shape that is a T5's.

  Args:
    shape: of the checkpoint.
    directory: where it lies.

  Raises:
    ValueError: if it is that of static vectors.
  """
  if not isinstance(shape, T5Config):
    raise ValueError(
      f"{directory}: expected a T5, for queries or monoT5, got static vectors:"
      " retrievers start from them as ENCODER, with STATIC_DIM=0"
    )
  return shape
