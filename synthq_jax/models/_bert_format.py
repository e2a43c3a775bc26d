"""Hugging Face's BERT folders: config.json beside model.safetensors.

BertModel, with its pooler or without, BertForSequenceClassification, and what
sentence-transformers makes of them. Heads of the pre-training are passed over.
"""

import dataclasses
import json
import pathlib
from typing import Any

from synthq_jax.models import _safetensors_format, _tensors, bert_config

__all__ = ["mean_pooled", "read", "shapes"]

_MODEL = "model.safetensors"
_MODULES = "modules.json"
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


def read(folder: pathlib.Path) -> tuple[dict[str, Any], bert_config.BertConfig]:
  """Reads parameters and their shape.

  Raises:
    ValueError: if a file is missing or damaged, or a tensor is missing, unknown
      or of another shape than config.json asks for.
  """
  config = bert_config.from_folder(folder)
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
    for name, tensor in _safetensors_format.read(path).items()
    if not _current(name).startswith(_IGNORED)
  }
  classifier = found.get(_name(_CLASSIFIER))
  config = dataclasses.replace(
    config,
    has_pooler=_name(_POOLER) in found,
    num_labels=0 if classifier is None else classifier.shape[0],
  )
  expected = shapes(config)
  _tensors.check(
    path,
    found,
    {
      _name(ours): size[::-1] if _is_transposed(ours) else size
      for ours, size in expected.items()
    },
  )
  tensors = {
    ours: found[_name(ours)].transposed()
    if _is_transposed(ours)
    else found[_name(ours)]
    for ours in expected
  }
  return _tensors.fetch(tensors, None, "float32"), config


def shapes(config: bert_config.BertConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every parameter, by its path."""
  dim, mlp = config.emb_dim, config.mlp_dim
  found = {
    "word_embedding": (config.vocab_size, dim),
    "position_embedding": (config.max_length, dim),
    "segment_embedding": (config.num_segments, dim),
    "embedding_norm/scale": (dim,),
    "embedding_norm/bias": (dim,),
  }
  dense = {name: (dim, dim) for name in ("query", "key", "value", "out")}
  dense |= {"wi": (dim, mlp), "wo": (mlp, dim)}
  layers = [f"layers_{i}/" for i in range(config.num_layers)]
  sizes = {head + name: size for head in layers for name, size in dense.items()}
  if config.has_pooler:
    sizes["pooler"] = (dim, dim)
  if config.num_labels:
    sizes["classifier"] = (dim, config.num_labels)
  for name, size in sizes.items():
    found |= {f"{name}/kernel": size, f"{name}/bias": size[1:]}
  for head in layers:
    for norm in ("attention_norm", "mlp_norm"):
      found |= {f"{head}{norm}/{part}": (dim,) for part in ("scale", "bias")}
  return found


def mean_pooled(folder: pathlib.Path) -> pathlib.Path:
  """Returns where the BERT of a sentence-transformers folder lies.

  A folder without their files is taken for a BERT whose outputs are averaged.

  Raises:
    ValueError: if its vectors are made in another way.
  """
  if not (folder / _MODULES).is_file():
    return folder
  place = folder
  for module in json.loads((folder / _MODULES).read_text()):
    kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
    if kind == "Transformer":
      place = path
    elif kind == "Pooling":
      _check_pooling(path / "config.json")
    elif kind != "Normalize":  # lengths change no cosine
      raise ValueError(
        f"{folder / _MODULES}: expected a BERT and the mean of its outputs, got"
        f" a module {kind} besides"
      )
  return place


def _check_pooling(path: pathlib.Path) -> None:
  """Refuses anything but the mean; newer files say it in one field."""
  fields = json.loads(path.read_text())
  modes = [k for k, v in fields.items() if k.startswith("pooling_mode_") and v]
  if (modes or [fields.get("pooling_mode")]) not in (
    ["pooling_mode_mean_tokens"],
    ["mean"],
  ):
    raise ValueError(f"{path}: expected the mean of all tokens, got {modes}")


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
