"""Shapes of T5: one frozen dataclass, and the sizes known by name."""

import dataclasses

__all__ = ["SHAPE", "T5Config", "get", "names"]

_COUNTS = (
  "vocab_size",
  "emb_dim",
  "num_heads",
  "head_dim",
  "mlp_dim",
  "num_encoder_layers",
  "num_decoder_layers",
)
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

  def __post_init__(self):
    for field in _COUNTS:
      if getattr(self, field) < 1:
        raise ValueError(
          f"T5Config.{field} must be at least 1, got {getattr(self, field)}"
        )
    if not 0 <= self.dropout_rate < 1:
      raise ValueError(
        "T5Config.dropout_rate must lie in [0, 1), got"
        f" dropout_rate={self.dropout_rate}"
      )
    unknown = set(self.mlp_activations) - {"relu", "gelu", "linear"}
    if unknown:
      raise ValueError(
        "T5Config.mlp_activations knows relu, gelu and linear, got"
        f" {sorted(unknown)}"
      )


def _version_1_0(layers: int, **shape: int) -> T5Config:
  return T5Config(
    vocab_size=32128,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
    mlp_activations=("relu",),
    logits_via_embedding=True,
    **shape,
  )


def _version_1_1(**shape: int) -> T5Config:
  return T5Config(vocab_size=32128, head_dim=64, **shape)


_SIZES = {
  "t5_1_0_small": _version_1_0(
    6, emb_dim=512, num_heads=8, head_dim=64, mlp_dim=2048
  ),
  "t5_1_0_base": _version_1_0(
    12, emb_dim=768, num_heads=12, head_dim=64, mlp_dim=3072
  ),
  "t5_1_0_large": _version_1_0(
    24, emb_dim=1024, num_heads=16, head_dim=64, mlp_dim=4096
  ),
  "t5_1_0_3B": _version_1_0(
    24, emb_dim=1024, num_heads=32, head_dim=128, mlp_dim=16384
  ),
  "t5_1_0_11B": _version_1_0(
    24, emb_dim=1024, num_heads=128, head_dim=128, mlp_dim=65536
  ),
  "t5_1_1_small": _version_1_1(
    emb_dim=512,
    num_heads=6,
    mlp_dim=1024,
    num_encoder_layers=8,
    num_decoder_layers=8,
  ),
  "t5_1_1_base": _version_1_1(
    emb_dim=768,
    num_heads=12,
    mlp_dim=2048,
    num_encoder_layers=12,
    num_decoder_layers=12,
  ),
  "t5_1_1_large": _version_1_1(
    emb_dim=1024,
    num_heads=16,
    mlp_dim=2816,
    num_encoder_layers=24,
    num_decoder_layers=24,
  ),
  "t5_1_1_xl": _version_1_1(
    emb_dim=2048,
    num_heads=32,
    mlp_dim=5120,
    num_encoder_layers=24,
    num_decoder_layers=24,
  ),
  "t5_1_1_xxl": _version_1_1(
    emb_dim=4096,
    num_heads=64,
    mlp_dim=10240,
    num_encoder_layers=24,
    num_decoder_layers=24,
  ),
  "tiny": T5Config(
    vocab_size=128,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
  ),
  # The shipped checkpoint: T5 1.1's gated layers, T5 1.0's tied logits,
  # which make copying from the input easy to learn for a small model.
  "demo": T5Config(
    vocab_size=4096,
    emb_dim=128,
    num_heads=4,
    head_dim=32,
    mlp_dim=384,
    num_encoder_layers=2,
    num_decoder_layers=2,
    logits_via_embedding=True,
  ),
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
