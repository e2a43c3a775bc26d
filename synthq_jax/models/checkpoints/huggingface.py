"""Hugging Face's T5 folders: config.json beside safetensors files.

T5ForConditionalGeneration (1.0: one relu, logits from the embedding; 1.1: gated
gelu, logits of its own), T5EncoderModel, and mT5's, which are 1.1's and are
written as such. Their linear layers hold kernels
transposed, their tables of relative positions too; embeddings and norms are as
ours. Names are translated from ours, never the other way round.

How the logits are made stands in two fields of config.json that changed their
meaning: up to transformers 4 `tie_word_embeddings` says whether they are tied to
the embedding and scaled by d_model**-0.5; transformers 5 writes it as true always,
says `scale_decoder_outputs` instead, and ties unless there is another lm_head.
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
_TOKEN_IDS = {
  "decoder_start_token_id": 0,
  "eos_token_id": 1,
  "pad_token_id": 0,
}
_EPSILON = 1e-6
_ENCODER = "T5EncoderModel"  # and mT5's
_MT5 = "mt5"  # a T5 1.1 of 101 languages; its logits are its own, never scaled
_MT5_DEFAULTS = {"feed_forward_proj": "gated-gelu"}

_EMBEDDING = "shared.weight"
_EMBEDDINGS = (
  _EMBEDDING,
  "encoder.embed_tokens.weight",
  "decoder.embed_tokens.weight",
)
_HEAD, _OUR_HEAD = "lm_head.weight", "decoder/logits_dense/kernel"
_OUTSIDE = {"token_embedder/embedding": _EMBEDDING, _OUR_HEAD: _HEAD}
# Old conversions from Mesh TensorFlow hold it; no T5 uses it.
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
    ValueError: if it is no T5, or one that we cannot compute.
  """
  path = folder / _CONFIG
  return _from_fields(path, _load(path))


def read(
  folder: pathlib.Path,
) -> tuple[dict[str, _tensors.Tensor], t5_config.T5Config]:
  """Describes the parameters of a folder, and their shape.

  Raises:
    ValueError: if a file is missing or damaged, or a tensor is missing,
      unknown or of another shape than config.json asks for.
  """
  fields = _load(folder / _CONFIG)
  shape = _from_fields(folder / _CONFIG, fields)
  found = _files(folder)
  found.pop(_UNUSED, None)
  _join_embeddings(folder, found)
  decoder = _has_decoder(fields) or any(
    name.startswith("decoder.block.") for name in found
  )
  if decoder:
    # transformers 4 has no such model without an lm_head: it was lost.
    is_own = fields.get("tie_word_embeddings", True) is False
    _settle_logits(folder, found, shape, needs_head=is_own)
  else:
    found.pop(_HEAD, None)
  expected = t5.shapes(shape, decoder=decoder)
  tensors = _tensors.renamed(folder, found, expected, _name, _is_transposed)
  return tensors, shape


def _is_transposed(path: str) -> bool:
  return path.endswith(("/kernel", "/rel_embedding"))


def _name(path: str) -> str:
  """Translates one of our paths.

  >>> _name("encoder/layers_3/attention/query/kernel")
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


def _files(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  if (folder / _MODEL).is_file():
    return _tensors.read_safetensors(folder / _MODEL)
  if not (folder / _INDEX).is_file():
    if (folder / _TORCH).exists() or any(folder.glob("pytorch_model*.bin")):
      raise ValueError(
        f"{folder}: expected {_MODEL}, got {_TORCH}, which runs code when it is"
        " read: convert it where you trust it, with transformers'"
        " T5ForConditionalGeneration.from_pretrained(A).save_pretrained(B)"
      )
    raise ValueError(f"expected a T5 checkpoint, got no file {folder / _MODEL}")
  where = _load(folder / _INDEX).get("weight_map")
  if not isinstance(where, dict) or not all(
    isinstance(file, str) for file in where.values()
  ):
    raise ValueError(
      f"{folder / _INDEX}: expected a weight_map from tensors to names of files,"
      f" got {str(where)[:40]}"
    )
  found: dict[str, _tensors.Tensor] = {}
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
      found[name] = tensor
  lost = sorted(set(where) - set(found))
  if lost:
    file = folder / where[lost[0]]
    raise ValueError(f"{file}: expected tensor {lost[0]}, got none")
  return found


def _join_embeddings(
  folder: pathlib.Path, found: dict[str, _tensors.Tensor]
) -> None:
  """Keeps one of the names under which the embedding may be stored."""
  names = [name for name in _EMBEDDINGS if name in found]
  tensors = [found.pop(name) for name in names]
  for name, tensor in list(zip(names, tensors, strict=True))[1:]:
    if not _tensors.same(tensors[0], tensor):
      raise ValueError(
        f"{folder}: expected one embedding, got different tensors {names[0]}"
        f" and {name}"
      )
  if tensors:
    found[_EMBEDDING] = tensors[0]


def _settle_logits(
  folder: pathlib.Path,
  found: dict[str, _tensors.Tensor],
  shape: t5_config.T5Config,
  *,
  needs_head: bool,
) -> None:
  """Leaves an lm_head exactly where ours has logits of its own."""
  if _EMBEDDING not in found:
    return  # its absence is reported with the others
  if not shape.logits_via_embedding:
    if not needs_head:  # transformers 5 takes the embedding, unscaled
      found.setdefault(_HEAD, found[_EMBEDDING])
    return
  head = found.pop(_HEAD, None)
  if head is not None and not _tensors.same(head, found[_EMBEDDING]):
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
    tensors: the parameters by path, checked, read one at a time.
    shape: the shape they belong to.
    max_shard_size: bytes of a file; a larger tensor has one of its own.

  Raises:
    ValueError: if transformers has no such T5.
  """
  decoder = any(path.startswith("decoder/") for path in tensors)
  kinds = {tensor.dtype.name for tensor in tensors.values()}
  fields = _to_fields(
    shape,
    decoder=decoder,
    dtype=kinds.pop() if len(kinds) == 1 else "float32",
  )
  theirs = {
    _name(path): tensor.transposed() if _is_transposed(path) else tensor
    for path, tensor in tensors.items()
  }
  shards = _shards(theirs, max_shard_size)
  files = {}
  for number, names in enumerate(shards, 1):
    file = f"model-{number:05}-of-{len(shards):05}.safetensors"
    file = _MODEL if len(shards) == 1 else file
    files |= dict.fromkeys(names, file)
    _tensors.write_safetensors(
      folder / file, {k: theirs[k] for k in names}, {"format": "pt"}
    )
  if len(shards) > 1:
    total = sum(map(_tensors.num_bytes, theirs.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _write_json(folder / _INDEX, index)
  if decoder:
    chosen = {name: fields[name] for name in _TOKEN_IDS}
    _write_json(folder / _GENERATION, chosen)
  _write_json(folder / _CONFIG, fields)


def _write_json(path: pathlib.Path, content: Any) -> None:
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _shards(
  tensors: Mapping[str, _tensors.Tensor], max_shard_size: int
) -> list[list[str]]:
  """Groups names, in order, into files of at most so many bytes."""
  if max_shard_size < 1:
    raise ValueError(
      f"max_shard_size must be at least 1 byte, got {max_shard_size}"
    )
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


def _load(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that must hold a JSON object."""
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    return artifacts.unsealed(path.read_bytes())
  except ValueError as error:
    raise ValueError(
      f"{path}: expected JSON of a model, got something else ({error})"
    ) from error


def _from_fields(
  path: pathlib.Path, fields: Mapping[str, Any]
) -> t5_config.T5Config:
  """Translates the fields of a config.json, named in messages by its path."""
  _check_kind(path, fields)
  if fields["model_type"] == _MT5:
    fields = {**_MT5_DEFAULTS, **fields, "scale_decoder_outputs": False}
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
      token_ids=_token_ids(path, fields),
    )
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path}: expected a T5 shape, got {error}") from error


def _check_kind(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  """Refuses models that only look like a T5."""
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


def _token_ids(
  path: pathlib.Path, fields: Mapping[str, Any]
) -> token_ids_lib.TokenIds:
  """Reads the special ids; what no file says is transformers' default."""
  beside = path.with_name(_GENERATION)
  other = _load(beside) if beside.is_file() else {}
  needed, found = _has_decoder(fields), {}
  for name, default in _TOKEN_IDS.items():
    default = None if needed and name in fields else default
    stored = [_listed(file.get(name)) for file in (fields, other)]
    chosen = next((ids[0] for ids in stored if ids), default)
    if chosen is None:
      raise ValueError(f"{name}=null, which no T5 can be without: write its id")
    if needed and any(chosen not in ids for ids in stored if ids):
      raise ValueError(
        f"{name}={chosen} there and {stored[1][0]} in {_GENERATION}: correct the"
        " wrong one"
      )
    found[name] = chosen
  if found["decoder_start_token_id"]:
    raise ValueError(
      f"decoder_start_token_id={found['decoder_start_token_id']}, where only"
      " models are read whose decoder starts with id 0"
    )
  return token_ids_lib.TokenIds(
    pad=found["pad_token_id"], eos=found["eos_token_id"]
  )


def _listed(value: Any) -> list[Any]:
  """Returns ids as a list: writing may stop at several, the text's end first."""
  if isinstance(value, list):
    return value
  return [] if value is None else [value]


def _activations(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Translates the feed-forward layer: relu, gated-gelu and the like."""
  written = str(fields.get("feed_forward_proj", "relu"))
  name = written.removeprefix("gated-")
  if written == "gated-gelu":
    name = "gelu_new"  # what the name has always meant there
  name = str(fields.get("dense_act_fn", name))
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


def _has_decoder(fields: Mapping[str, Any]) -> bool:
  kinds = fields.get("architectures")
  is_encoder = isinstance(kinds, list) and any(
    str(kind).endswith(_ENCODER) for kind in kinds
  )
  return bool(fields.get("is_encoder_decoder", True)) and not is_encoder


def _to_fields(
  shape: t5_config.T5Config, *, decoder: bool, dtype: str
) -> dict[str, Any]:
  """Builds what config.json says, for transformers 4 and 5."""
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
