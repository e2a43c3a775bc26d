"""Reads and writes Hugging Face's T5 folders: config.json and safetensors files.

They hold T5ForConditionalGeneration (1.0: one relu, logits from the embedding; 1.1:
gated gelu, its own logits layer), T5EncoderModel, or mT5's classes, which are read
and written as T5 1.1. Kernels of linear layers and tables of relative positions are
transposed; embeddings and norms are as ours. Names are translated from ours, never
the other way round.

Two fields of config.json define the logits, and depend on the version. Up to
transformers 4, `tie_word_embeddings` means that logits are tied to the embedding and
scaled by d_model**-0.5. Transformers 5 always writes it as true, means the same with
`scale_decoder_outputs`, and ties the logits unless there is another lm_head.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from synthq_jax.models import t5, t5_config
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.models.checkpoints import tensors as _tensors
from synthq_jax.storage import artifacts

__all__ = ["config", "read", "write"]

_CONFIG = "config.json"
_MODEL = "model.safetensors"
_GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"
_TORCH = "pytorch_model.bin"

# gelu_new is the approximation by tanh, as our gelu is; their gelu is exact.
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
_TOKEN_IDS = {
  "decoder_start_token_id": 0,
  "eos_token_id": 1,
  "pad_token_id": 0,
}
_EPSILON = 1e-6
_ENCODER = "T5EncoderModel"  # and the end of MT5EncoderModel
_MT5 = "mt5"  # a T5 1.1 of 101 languages; it never scales its logits
_MT5_DEFAULTS = {"feed_forward_proj": "gated-gelu"}

_EMBEDDING = "shared.weight"
_EMBEDDINGS = (
  _EMBEDDING,
  "encoder.embed_tokens.weight",
  "decoder.embed_tokens.weight",
)
_HEAD, _OUR_HEAD = "lm_head.weight", "decoder/logits_dense/kernel"
_OUTSIDE = {"token_embedder/embedding": _EMBEDDING, _OUR_HEAD: _HEAD}
# A tensor of old conversions from Mesh TensorFlow, which no T5 uses.
_UNUSED = (
  "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
)
_PLACES = {
  "encoder": {
    "attention": "layer.0.SelfAttention",
    "pre_attention_layer_norm": "layer.0.layer_norm",
    "mlp": "layer.1.DenseReluDense",
    "pre_mlp_layer_norm": "layer.1.layer_norm",
  },
  "decoder": {
    "self_attention": "layer.0.SelfAttention",
    "pre_self_attention_layer_norm": "layer.0.layer_norm",
    "encoder_decoder_attention": "layer.1.EncDecAttention",
    "pre_cross_attention_layer_norm": "layer.1.layer_norm",
    "mlp": "layer.2.DenseReluDense",
    "pre_mlp_layer_norm": "layer.2.layer_norm",
  },
}
_PARTS = {"query": "q", "key": "k", "value": "v", "out": "o"}


def config(folder: pathlib.Path) -> t5_config.T5Config:
  """Reads the shape of a T5 from its config.json.

  Raises:
    ValueError: if the model is no T5, or has settings that we do not support.
  """
  path = folder / _CONFIG
  return _make_config(path, _read_json(path))


def read(
  folder: pathlib.Path,
) -> tuple[dict[str, _tensors.Tensor], t5_config.T5Config]:
  """Describes the tensors of a folder without reading them, and returns the
  shape.

  Raises:
    ValueError: if a file is missing or damaged, or a tensor is missing,
      unknown or of another shape than config.json asks for.
  """
  fields = _read_json(folder / _CONFIG)
  shape = _make_config(folder / _CONFIG, fields)
  stored = _read_files(folder)
  stored.pop(_UNUSED, None)
  _join_embeddings(folder, stored)
  decoder = _has_decoder(fields) or any(
    name.startswith("decoder.block.") for name in stored
  )
  if decoder:
    # In transformers 4 such a model has an lm_head: a missing one is lost.
    is_own = fields.get("tie_word_embeddings", True) is False
    _settle_logits(folder, stored, shape, needs_head=is_own)
  else:
    stored.pop(_HEAD, None)
  expected = t5.shapes(shape, decoder=decoder)
  tensors = _tensors.rename(
    folder, stored, expected, _translate_name, _is_transposed
  )
  return tensors, shape


def _is_transposed(path: str) -> bool:
  return path.endswith(("/kernel", "/rel_embedding"))


def _translate_name(path: str) -> str:
  """Translates one of our paths to Hugging Face's name.

  >>> _translate_name("encoder/layers_3/attention/query/kernel")
  'encoder.block.3.layer.0.SelfAttention.q.weight'
  """
  if path in _OUTSIDE:
    return _OUTSIDE[path]
  stack, part, *rest = path.split("/")
  if part == "relpos_bias":
    inner = "layer.0.SelfAttention.relative_attention_bias"
    return f"{stack}.block.0.{inner}.weight"
  if part == f"{stack}_norm":
    return f"{stack}.final_layer_norm.weight"
  names = [f"{stack}.block.{part.removeprefix('layers_')}"]
  names.append(_PLACES[stack][rest[0]])
  names += [_PARTS.get(name, name) for name in rest[1:-1]]
  return ".".join((*names, "weight"))


def _read_files(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  _tensors.refuse_adapter(folder)
  if (folder / _MODEL).is_file():
    return _tensors.read_safetensors(folder / _MODEL)
  if not (folder / _INDEX).is_file():
    if (folder / _TORCH).exists() or any(folder.glob("pytorch_model*.bin")):
      raise ValueError(
        f"{folder}: expected {_MODEL}, got {_TORCH}, which runs code when it is"
        " read: convert it if you trust it, with transformers'"
        " T5ForConditionalGeneration.from_pretrained(A).save_pretrained(B)"
      )
    raise ValueError(f"expected a T5 checkpoint, got no file {folder / _MODEL}")
  where = _read_json(folder / _INDEX).get("weight_map")
  if not isinstance(where, dict) or not all(
    isinstance(file, str) for file in where.values()
  ):
    raise ValueError(
      f"{folder / _INDEX}: expected a weight_map from tensors to names of files,"
      f" got {str(where)[:40]}"
    )
  tensors: dict[str, _tensors.Tensor] = {}
  for file in sorted(set(where.values())):
    if pathlib.PurePath(file).name != file or not (folder / file).is_file():
      raise ValueError(
        f"expected a part of a T5 checkpoint, got no file {folder / file}"
      )
    for name, tensor in _tensors.read_safetensors(folder / file).items():
      if where.get(name) != file:
        raise ValueError(
          f"{folder / file}: expected the tensors that {_INDEX} lists, got"
          f" {name}, listed in {where.get(name)}"
        )
      tensors[name] = tensor
  lost = sorted(set(where) - set(tensors))
  if lost:
    file = folder / where[lost[0]]
    raise ValueError(f"{file}: expected tensor {lost[0]}, got none")
  return tensors


def _join_embeddings(
  folder: pathlib.Path, stored: dict[str, _tensors.Tensor]
) -> None:
  """Keeps one name of the embedding; refuses different tensors under its
  names."""
  names = [name for name in _EMBEDDINGS if name in stored]
  tensors = [stored.pop(name) for name in names]
  for name, tensor in list(zip(names, tensors, strict=True))[1:]:
    if not _tensors.are_equal(tensors[0], tensor):
      raise ValueError(
        f"{folder}: expected one embedding, got different tensors {names[0]}"
        f" and {name}"
      )
  if tensors:
    stored[_EMBEDDING] = tensors[0]


def _settle_logits(
  folder: pathlib.Path,
  stored: dict[str, _tensors.Tensor],
  shape: t5_config.T5Config,
  *,
  needs_head: bool,
) -> None:
  """Makes the tensors hold an lm_head exactly if our model has a logits
  layer."""
  if _EMBEDDING not in stored:
    return  # the check of all tensors reports it
  if not shape.logits_via_embedding:
    if not needs_head:  # transformers 5 uses the embedding, unscaled
      stored.setdefault(_HEAD, stored[_EMBEDDING])
    return
  head = stored.pop(_HEAD, None)
  if head is not None and not _tensors.are_equal(head, stored[_EMBEDDING]):
    raise ValueError(
      f"{folder}: expected tied logits, as config.json says, got a tensor"
      f" {_HEAD} that differs from {_EMBEDDING}: correct tie_word_embeddings"
      " and scale_decoder_outputs to false, or delete the tensor"
    )


def write(
  folder: pathlib.Path,
  tensors: Mapping[str, _tensors.Tensor],
  shape: t5_config.T5Config,
  max_shard_size: int,
) -> None:
  """Writes a folder that transformers loads.

  Args:
    folder: an empty folder.
    tensors: the checked parameters by path; they are read one at a time.
    shape: the shape of the model.
    max_shard_size: largest size of a file in bytes; a larger tensor gets a file of
      its own.

  Raises:
    ValueError: if transformers has no such T5.
  """
  decoder = any(path.startswith("decoder/") for path in tensors)
  kinds = {tensor.dtype.name for tensor in tensors.values()}
  fields = _make_fields(
    shape,
    decoder=decoder,
    dtype=kinds.pop() if len(kinds) == 1 else "float32",
  )
  renamed = {
    _translate_name(path): tensor.transpose()
    if _is_transposed(path)
    else tensor
    for path, tensor in tensors.items()
  }
  shards = _group_into_shards(renamed, max_shard_size)
  files = {}
  for number, names in enumerate(shards, 1):
    file = f"model-{number:05}-of-{len(shards):05}.safetensors"
    file = _MODEL if len(shards) == 1 else file
    files |= dict.fromkeys(names, file)
    _tensors.write_safetensors(
      folder / file, {k: renamed[k] for k in names}, {"format": "pt"}
    )
  if len(shards) > 1:
    total = sum(map(_tensors.num_bytes, renamed.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _write_json(folder / _INDEX, index)
  if decoder:
    chosen = {name: fields[name] for name in _TOKEN_IDS}
    _write_json(folder / _GENERATION, chosen)
  _write_json(folder / _CONFIG, fields)


def _write_json(path: pathlib.Path, content: Any) -> None:
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _group_into_shards(
  tensors: Mapping[str, _tensors.Tensor], max_shard_size: int
) -> list[list[str]]:
  """Groups names, in order, into files of at most `max_shard_size` bytes."""
  shards: list[list[str]] = []
  free = 0
  for name, tensor in sorted(tensors.items()):
    size = _tensors.num_bytes(tensor)
    if not shards or size > free:
      shards.append([])
      free = max_shard_size
    shards[-1].append(name)
    free -= size
  return shards


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that must hold a JSON object."""
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    return artifacts.unsealed(path.read_bytes())
  except ValueError as error:
    raise ValueError(
      f"{path}: expected JSON of a model, got something else ({error})"
    ) from error


def _make_config(
  path: pathlib.Path, fields: Mapping[str, Any]
) -> t5_config.T5Config:
  """Makes a shape from the fields of config.json; `path` is for messages."""
  _check_kind(path, fields)
  if fields["model_type"] == _MT5:
    fields = {**_MT5_DEFAULTS, **fields, "scale_decoder_outputs": False}
  missing = [name for name in _FIELDS.values() if name not in fields]
  if missing:
    raise ValueError(f"{path}: expected a T5 shape, got no {missing[0]}")
  values = {ours: fields[key] for ours, key in _FIELDS.items()}
  values |= {name: fields.get(name, value) for name, value in _OPTIONAL.items()}
  layers = fields.get("num_decoder_layers")
  try:
    return t5_config.T5Config(
      **values,
      num_decoder_layers=fields["num_layers"] if layers is None else layers,
      mlp_activations=_get_activations(fields),
      logits_via_embedding=_is_tied(fields),
      token_ids=_get_token_ids(path, fields),
    )
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path}: expected a T5 shape, got {error}") from error


def _check_kind(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  """Refuses models that are no T5 or have another epsilon."""
  kind = fields.get("model_type")
  if kind not in ("t5", _MT5):
    raise ValueError(
      f"{path}: expected model_type=t5 or {_MT5}, got model_type={kind}: give a"
      " T5, T5 1.1 or mT5"
    )
  epsilon = fields.get("layer_norm_epsilon", _EPSILON)
  if epsilon != _EPSILON:
    raise ValueError(
      f"{path}: expected layer_norm_epsilon={_EPSILON}, the one T5 was trained"
      f" with, got layer_norm_epsilon={epsilon}"
    )


def _get_token_ids(
  path: pathlib.Path, fields: Mapping[str, Any]
) -> token_ids_lib.TokenIds:
  """Returns the special ids of the files; missing ones are transformers'
  defaults."""
  generation_path = path.with_name(_GENERATION)
  generation_fields = (
    _read_json(generation_path) if generation_path.is_file() else {}
  )
  needed, ids_by_name = _has_decoder(fields), {}
  for name, default in _TOKEN_IDS.items():
    default = None if needed and name in fields else default
    stored = [_as_list(file.get(name)) for file in (fields, generation_fields)]
    chosen = next((ids[0] for ids in stored if ids), default)
    if chosen is None:
      raise ValueError(f"{name}=null, which no T5 can be without: write its id")
    if needed and any(chosen not in ids for ids in stored if ids):
      raise ValueError(
        f"{name}={chosen} there and {stored[1][0]} in {_GENERATION}: correct the"
        " wrong one"
      )
    ids_by_name[name] = chosen
  if ids_by_name["decoder_start_token_id"]:
    raise ValueError(
      f"decoder_start_token_id={ids_by_name['decoder_start_token_id']}, but only"
      " models are supported whose decoder starts with id 0"
    )
  return token_ids_lib.TokenIds(
    pad=ids_by_name["pad_token_id"], eos=ids_by_name["eos_token_id"]
  )


def _as_list(value: Any) -> list[Any]:
  """Returns ids as a list; several ids may end a text, the first is its EOS."""
  if isinstance(value, list):
    return value
  return [] if value is None else [value]


def _get_activations(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Translates the feed-forward layer: relu, gated-gelu and the like."""
  feed_forward = str(fields.get("feed_forward_proj", "relu"))
  name = feed_forward.removeprefix("gated-")
  if feed_forward == "gated-gelu":
    name = "gelu_new"  # transformers means gelu_new by this name
  name = str(fields.get("dense_act_fn", name))
  if name not in _ACTIVATIONS:
    raise ValueError(
      f"feed_forward_proj={feed_forward} with activation {name}, which is none of"
      f" {', '.join(_ACTIVATIONS)}"
    )
  gated = fields.get("is_gated_act", feed_forward.startswith("gated-"))
  return (_ACTIVATIONS[name], "linear") if gated else (_ACTIVATIONS[name],)


def _is_tied(fields: Mapping[str, Any]) -> bool:
  """Returns True if logits are scaled, hence computed by the embedding (T5
  1.0)."""
  tied = fields.get("tie_word_embeddings", True)
  return bool(fields.get("scale_decoder_outputs", tied))


def _has_decoder(fields: Mapping[str, Any]) -> bool:
  kinds = fields.get("architectures")
  is_encoder = isinstance(kinds, list) and any(
    str(kind).endswith(_ENCODER) for kind in kinds
  )
  return bool(fields.get("is_encoder_decoder", True)) and not is_encoder


def _make_fields(
  shape: t5_config.T5Config, *, decoder: bool, dtype: str
) -> dict[str, Any]:
  """Makes the fields of config.json, for transformers 4 and 5."""
  if shape.mlp_activations not in _FEED_FORWARDS:
    raise ValueError(
      f"transformers has no T5 with mlp_activations={shape.mlp_activations}:"
      f" expected one of {', '.join(map(str, _FEED_FORWARDS))}"
    )
  name = "T5ForConditionalGeneration" if decoder else _ENCODER
  tied = shape.logits_via_embedding
  return {
    **{name_: getattr(shape, ours) for ours, name_ in _FIELDS.items()},
    **{field: getattr(shape, field) for field in _OPTIONAL},
    "architectures": [name],
    "decoder_start_token_id": 0,
    "dtype": dtype,
    "eos_token_id": shape.token_ids.eos,
    "feed_forward_proj": _FEED_FORWARDS[shape.mlp_activations],
    "is_encoder_decoder": decoder,
    "layer_norm_epsilon": _EPSILON,
    "model_type": "t5",
    "num_decoder_layers": shape.num_decoder_layers,
    "pad_token_id": shape.token_ids.pad,
    "scale_decoder_outputs": tied,
    "tie_word_embeddings": tied,
  }
