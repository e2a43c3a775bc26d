"""Hugging Face's T5 folders: config.json beside safetensors files.

T5ForConditionalGeneration (1.0: one relu, logits from the embedding; 1.1: gated
gelu, logits of its own) and T5EncoderModel. Their linear layers hold kernels
transposed, their tables of relative positions too; embeddings and norms are as
ours. Names are translated from ours, never the other way round.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from synthq_jax.models import (
  _huggingface_config,
  _safetensors_format,
  _tensors,
  t5_config,
)

__all__ = ["config", "read", "write"]

_CONFIG = "config.json"
_MODEL = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TORCH = "pytorch_model.bin"

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
  return _huggingface_config.from_fields(path, _huggingface_config.load(path))


def read(
  folder: pathlib.Path,
) -> tuple[dict[str, _tensors.Tensor], t5_config.T5Config]:
  """Describes the parameters of a folder, and their shape.

  Raises:
    ValueError: if a file is missing or damaged, or a tensor is missing, unknown
      or of another shape than config.json asks for.
  """
  fields = _huggingface_config.load(folder / _CONFIG)
  shape = _huggingface_config.from_fields(folder / _CONFIG, fields)
  found = _files(folder)
  found.pop(_UNUSED, None)
  _join_embeddings(folder, found)
  decoder = _huggingface_config.has_decoder(fields) or any(
    name.startswith("decoder.block.") for name in found
  )
  if decoder:
    _settle_logits(folder, found, shape)
  else:
    found.pop(_HEAD, None)
  expected = _tensors.shapes(shape, decoder=decoder)
  _tensors.check(
    folder,
    found,
    {
      _name(path): size[::-1] if _is_transposed(path) else size
      for path, size in expected.items()
    },
  )
  return {path: _ours(path, found[_name(path)]) for path in expected}, shape


def _ours(path: str, tensor: _tensors.Tensor) -> _tensors.Tensor:
  return tensor.transposed() if _is_transposed(path) else tensor


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
  """Describes what lies in one file or in several."""
  if (folder / _MODEL).is_file():
    return _safetensors_format.read(folder / _MODEL)
  if not (folder / _INDEX).is_file():
    if (folder / _TORCH).exists() or any(folder.glob("pytorch_model*.bin")):
      raise ValueError(
        f"{folder}: expected {_MODEL}, got {_TORCH}, which runs code when it is"
        " read: convert it where you trust it, with transformers'"
        " T5ForConditionalGeneration.from_pretrained(A).save_pretrained(B)"
      )
    raise ValueError(f"expected a T5 checkpoint, got no file {folder / _MODEL}")
  where = _huggingface_config.load(folder / _INDEX).get("weight_map")
  if not isinstance(where, dict):
    raise ValueError(f"{folder / _INDEX}: expected a weight_map, got none")
  found: dict[str, _tensors.Tensor] = {}
  for file in sorted(set(where.values())):
    if pathlib.PurePath(file).name != file or not (folder / file).is_file():
      raise ValueError(
        f"expected a part of a T5 checkpoint, got no file {folder / file}"
      )
    for name, tensor in _safetensors_format.read(folder / file).items():
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
) -> None:
  """Leaves an lm_head exactly where ours has logits of its own."""
  if _EMBEDDING not in found:
    return  # its absence is reported with the others
  if not shape.logits_via_embedding:
    # Without an lm_head, the embedding serves as one, unscaled.
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
  fields = _huggingface_config.to_fields(
    shape,
    decoder=decoder,
    dtype=kinds.pop() if len(kinds) == 1 else "float32",
  )
  theirs = {_name(path): _ours(path, t) for path, t in tensors.items()}
  shards = _shards(theirs, max_shard_size)
  files = {}
  for number, names in enumerate(shards, 1):
    file = f"model-{number:05}-of-{len(shards):05}.safetensors"
    file = _MODEL if len(shards) == 1 else file
    files |= dict.fromkeys(names, file)
    _safetensors_format.write(
      folder / file, {k: theirs[k] for k in names}, {"format": "pt"}
    )
  if len(shards) > 1:
    total = sum(map(_tensors.num_bytes, theirs.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _write_json(folder / _INDEX, index)
  if decoder:
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    chosen = {name: fields[name] for name in names}
    _write_json(folder / "generation_config.json", chosen)
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
