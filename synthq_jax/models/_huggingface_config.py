"""config.json of Hugging Face's T5, in our words and back.

How the logits are made stands in two fields that changed their meaning: up to
transformers 4 `tie_word_embeddings` says whether they are tied to the embedding
and scaled by d_model**-0.5; transformers 5 writes it as true always, says
`scale_decoder_outputs` instead, and ties unless the file has another lm_head.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from synthq_jax.models import t5_config

__all__ = ["from_fields", "has_decoder", "load", "to_fields"]

# gelu_new is the approximation by tanh, which our gelu is too; gelu is not.
_ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu", "linear": "linear"}
_FEED_FORWARDS = {
  ("relu",): "relu",
  ("gelu",): "gelu_new",
  ("relu", "linear"): "gated-relu",
  ("gelu", "linear"): "gated-gelu",
}
_FIELDS = {
  "vocab_size": "vocab_size",
  "emb_dim": "d_model",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
  "num_heads": "num_heads",
  "num_encoder_layers": "num_layers",
}
_OPTIONAL = {
  "relative_attention_num_buckets": 32,
  "relative_attention_max_distance": 128,
  "dropout_rate": 0.1,
}
_EPSILON = 1e-6
_ENCODER = "T5EncoderModel"


def load(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that must hold a JSON object."""
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    fields = json.loads(path.read_text())
    if not isinstance(fields, dict):
      raise ValueError(f"a {type(fields).__name__}, not an object")
  except ValueError as error:
    raise ValueError(f"{path}: expected JSON, got {error}") from error
  return fields


def from_fields(
  path: pathlib.Path, fields: Mapping[str, Any]
) -> t5_config.T5Config:
  """Translates the fields of a config.json.

  Args:
    path: where they are from, for messages.
    fields: as `load` gives them.

  Raises:
    ValueError: if it is no T5, or one that we cannot compute.
  """
  _check_kind(path, fields)
  missing = [name for name in _FIELDS.values() if name not in fields]
  if missing:
    raise ValueError(f"{path}: expected a T5 shape, got no {missing[0]}")
  values = {ours: fields[theirs] for ours, theirs in _FIELDS.items()}
  values |= {name: fields.get(name, value) for name, value in _OPTIONAL.items()}
  layers = fields.get("num_decoder_layers")
  try:
    return t5_config.T5Config(
      **values,
      num_decoder_layers=fields["num_layers"] if layers is None else layers,
      mlp_activations=_activations(fields),
      logits_via_embedding=_is_tied(fields),
    )
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path}: expected a T5 shape, got {error}") from error


def _check_kind(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  """Refuses models that only look like a T5."""
  kind = fields.get("model_type")
  if kind != "t5":
    raise ValueError(f"{path}: expected model_type=t5, got model_type={kind}")
  epsilon = fields.get("layer_norm_epsilon", _EPSILON)
  if epsilon != _EPSILON:
    raise ValueError(
      f"{path}: expected layer_norm_epsilon={_EPSILON}, the one T5 was trained"
      f" with, got layer_norm_epsilon={epsilon}"
    )


def _activations(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Translates the feed-forward layer: relu, gated-gelu and the like."""
  written = fields.get("feed_forward_proj", "relu")
  name = written.removeprefix("gated-")
  if written == "gated-gelu":
    name = "gelu_new"  # what the name has always meant there
  name = fields.get("dense_act_fn", name)
  if name not in _ACTIVATIONS:
    raise ValueError(
      f"feed_forward_proj={written} with activation {name}, which is none of"
      f" {', '.join(_ACTIVATIONS)}"
    )
  gated = fields.get("is_gated_act", written.startswith("gated-"))
  return (_ACTIVATIONS[name], "linear") if gated else (_ACTIVATIONS[name],)


def _is_tied(fields: Mapping[str, Any]) -> bool:
  """Whether logits are scaled, hence taken from the embedding (T5 1.0)."""
  tied = fields.get("tie_word_embeddings", True)
  return bool(fields.get("scale_decoder_outputs", tied))


def has_decoder(fields: Mapping[str, Any]) -> bool:
  """Whether a decoder ought to be there."""
  kinds = fields.get("architectures") or ()
  return fields.get("is_encoder_decoder", True) and _ENCODER not in kinds


def to_fields(
  shape: t5_config.T5Config, *, decoder: bool, dtype: str
) -> dict[str, Any]:
  """Builds what config.json says, for transformers 4 and 5.

  Args:
    shape: the shape of the model.
    decoder: whether its decoder is written too.
    dtype: the type of the tensors.

  Raises:
    ValueError: if transformers has no such T5.
  """
  if shape.mlp_activations not in _FEED_FORWARDS:
    raise ValueError(
      f"transformers has no T5 with mlp_activations={shape.mlp_activations}:"
      f" expected one of {', '.join(map(str, _FEED_FORWARDS))}"
    )
  name = "T5ForConditionalGeneration" if decoder else _ENCODER
  tied = shape.logits_via_embedding
  return {
    **{theirs: getattr(shape, ours) for ours, theirs in _FIELDS.items()},
    **{field: getattr(shape, field) for field in _OPTIONAL},
    "architectures": [name],
    "decoder_start_token_id": 0,
    "dtype": dtype,
    "eos_token_id": 1,
    "feed_forward_proj": _FEED_FORWARDS[shape.mlp_activations],
    "is_encoder_decoder": decoder,
    "layer_norm_epsilon": _EPSILON,
    "model_type": "t5",
    "num_decoder_layers": shape.num_decoder_layers,
    "pad_token_id": 0,
    "scale_decoder_outputs": tied,
    "tie_word_embeddings": tied,
  }
