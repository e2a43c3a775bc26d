"""Reads sentence-transformers folders as encoders, and writes them again.

A model (BERT and its kin, or T5's encoder) with its pooling, or one vector for each
token; then linear layers. Vectors have length 1, so that dot products are cosines.
In arrays of tokens 0 is padding: what a model calls padding changes places with 0,
and the tokens of static vectors, which may have no padding, are one more.

References:
  Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, section 3.
  Ni et al., "Sentence-T5", ACL Findings 2022, section 3 (the layer behind the mean).
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.models import bert, dual_encoder, static_vectors, t5, t5_config
from synthq_jax.models.checkpoints import (
  huggingface,
  sentence_folders,
  tensors,
)
from synthq_jax.storage import artifacts

__all__ = [
  "SentenceConfig",
  "add_query_map",
  "copy_files",
  "encode",
  "files",
  "is_folder",
  "load",
  "num_positions",
  "padding_id",
  "save",
  "write_dense",
]

_MODEL, _CONFIG = "model.safetensors", "config.json"
_POOLING = "1_Pooling"
_HEAD = "sentence_transformers.models."
_T5S = ("t5", "mt5")
_WIDTH_OF_ONE = 1 << 30  # bytes of a file
_COPIED = (".json", ".txt", ".model")
"""Ends of the names of files that go with weights."""
_ACTIVATIONS = {"identity": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}
_Model = bert.BertConfig | t5_config.T5Config | static_vectors.StaticConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceConfig:
  """The shape of a sentence-transformers folder, for one role of texts."""

  model: _Model
  """What reads the tokens."""
  pooling: str = "mean"
  """One of `dual_encoder.POOLINGS`."""
  layers: tuple[sentence_folders.Dense | None, ...] = ()
  """What follows the pooling; None: vectors get length 1."""

  @property
  def emb_dim(self) -> int:
    """Numbers of a vector."""
    sizes = [layer.out_dim for layer in self.layers if layer is not None]
    return sizes[-1] if sizes else self.model.emb_dim

  @property
  def vocab_size(self) -> int:
    """Rows of the table of tokens, that of padding among them."""
    return self.model.vocab_size


def is_folder(folder: str | os.PathLike) -> bool:
  """Says whether `load` is meant for a folder: it has modules.json, or a BERT."""
  root = pathlib.Path(folder)
  if (root / sentence_folders.MODULES).is_file():
    return True
  try:
    return _model_type(root) in bert.KINDS
  except ValueError:
    return False


def load(
  folder: str | os.PathLike, role: str | None = None
) -> tuple[dict[str, Any], SentenceConfig]:
  """Reads an encoder: its model and the layers behind it.

  Args:
    folder: of sentence-transformers, or of a model alone, whose outputs are
      averaged.
    role: `sentence_folders.QUERY` or DOCUMENT, where a Router has a route for
      each; None: its default route.

  Returns:
    "model", and "layer_N" for each linear layer, nested dicts of float32 arrays;
    and their shape.

  Raises:
    ValueError: if a file is missing or damaged, or the folder asks for what is
      not computed here; the message names it.
  """
  root = pathlib.Path(folder)
  chosen = sentence_folders.modules(root, role)
  model, shape = _load_model(chosen)
  params: dict[str, Any] = {"model": model}
  width = shape.emb_dim
  for number, layer in enumerate(chosen.layers):
    if layer is None:
      continue
    if layer.in_dim != width:
      raise ValueError(
        f"{layer.place}: expected in_features={width}, the width of what comes"
        f" before, got {layer.in_dim}"
      )
    assert layer.place is not None  # it was read
    params[f"layer_{number}"] = _load_dense(layer.place / _MODEL, layer)
    width = layer.out_dim
  config = SentenceConfig(
    model=shape, pooling=chosen.pooling, layers=chosen.layers
  )
  return params, config


def encode(
  params: typing.Params,
  config: SentenceConfig,
  tokens: Int[Array, "batch length"],
) -> Float[Array, "batch dim"]:
  """Encodes sequences of tokens as unit vectors.

  A row's vector depends on that row alone.

  Args:
    params: from `load`; a "projection" (`dual_encoder`) comes after all layers.
    config: their shape.
    tokens: with the model's special tokens, 0 = padding at the end of a row.

  Returns:
    One float32 vector per row: of length 1, or 0 where all is padding.
  """
  pooled = _pooled(params["model"], config, tokens)
  for number, layer in enumerate(config.layers):
    if layer is None:
      pooled = dual_encoder.normalize(pooled)
      continue
    own = params[f"layer_{number}"]
    pooled = pooled @ own["kernel"]
    if layer.has_bias:
      pooled = pooled + own["bias"][None]
    pooled = _ACTIVATIONS[layer.activation](pooled)
  is_there = (tokens != 0).any(axis=1, keepdims=True)  # a bias moves padding
  return dual_encoder.projected(params, jnp.where(is_there, pooled, 0.0))


def padding_id(chosen: sentence_folders.Modules) -> int | None:
  """Returns the id that changes places with 0; None: ids here are one more.

  Args:
    chosen: the modules of a folder.
  """
  if chosen.is_static:
    return None
  fields = _settings(chosen.place)
  first = 1 if _model_type(chosen.place) in bert.COUNTING else 0
  found = fields.get("pad_token_id", first)
  return first if found is None else int(found)


def num_positions(chosen: sentence_folders.Modules) -> int | None:
  """Returns how many tokens a model reads; None where nothing ends them.

  Args:
    chosen: the modules of a folder.
  """
  if chosen.is_static or _model_type(chosen.place) in _T5S:
    return None
  return bert.read_config(chosen.place).max_length


def files(folder: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  """Returns the files on which vectors of a folder rest, in order."""
  root = pathlib.Path(folder)
  return tuple(
    path
    for path in sorted(root.rglob("*"))
    if path.is_file() and _belongs(path.relative_to(root))
  )


def copy_files(
  source: str | os.PathLike, target: str | os.PathLike, *, weights: bool = True
) -> None:
  """Copies what vectors of a folder rest on.

  Args:
    source: as in `load`.
    target: made where it is missing.
    weights: whether tensors are copied, too, or settings and tokenizer alone.
  """
  root = pathlib.Path(source)
  for path in files(root):
    if weights or path.suffix in _COPIED:
      place = pathlib.Path(target) / path.relative_to(root)
      place.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(path, place)


def save(
  directory: str | os.PathLike,
  params: typing.Params,
  config: SentenceConfig,
  *,
  start: str | os.PathLike,
  texts: sentence_folders.TextSettings,
) -> None:
  """Writes an encoder as sentence-transformers reads it.

  Args:
    directory: made where it is missing.
    params: as `load` returns them, perhaps with a "projection".
    config: their shape.
    start: the folder that they were read from, whose other files are copied.
    texts: how texts are cut, and their prompts; these take the place of those in
      `start`.

  Raises:
    ValueError: if the folder has a Router, whose routes have other parameters.
  """
  source, target = pathlib.Path(start), pathlib.Path(directory)
  chosen = sentence_folders.modules(source)
  copy_files(source, target, weights=False)
  place = target / chosen.place.relative_to(source)
  _save_model(chosen, place, params["model"], config.model)
  listed = _module_list(source)
  for number, layer in enumerate(config.layers):
    if layer is not None:
      assert layer.place is not None
      own = target / layer.place.relative_to(source) / _MODEL
      _save_dense(own, params[f"layer_{number}"])
  if dual_encoder.PROJECTION in params:
    listed += _add_projection(target, len(listed), params)
  _write_json(target / sentence_folders.MODULES, listed)
  if not (source / sentence_folders.MODULES).is_file():
    width = {"word_embedding_dimension": config.model.emb_dim}
    mean = {"pooling_mode_mean_tokens": True}
    _write_json(target / _POOLING / _CONFIG, width | mean)
  _write_texts(target, place, texts, is_static=chosen.is_static)


def add_query_map(
  folder: str | os.PathLike, matrix: Float[np.ndarray, "dim dim"]
) -> None:
  """Puts a linear map of queries' vectors behind the modules of a folder.

  `encode_query` and `encode_document` of sentence-transformers take the route of
  their role; documents keep their vectors.

  Args:
    folder: as `save` writes it.
    matrix: by which a vector is multiplied from the left.
  """
  root = pathlib.Path(folder)
  listed = json.loads((root / sentence_folders.MODULES).read_text())
  number = len(listed)
  place = root / f"{number}_Router"
  types, routes = {}, {}
  for role, kind in (
    (sentence_folders.QUERY, "Dense"),
    (sentence_folders.DOCUMENT, "Normalize"),
  ):
    name = f"{role}_0_{kind}"
    types[name] = f"{_HEAD}{kind}"
    routes[role] = [name]
    (place / name).mkdir(parents=True)
    if role == sentence_folders.QUERY:
      write_dense(place / name, np.asarray(matrix, np.float32))
  parameters = {"default_route": "document", "allow_empty_key": True}
  content = {"types": types, "structure": routes, "parameters": parameters}
  _write_json(place / "router_config.json", content)
  listed += [
    _module(number, "Router", place.name),
    _module(number + 1, "Normalize", f"{number + 1}_Normalize"),
  ]
  (root / f"{number + 1}_Normalize").mkdir()
  _write_json(root / sentence_folders.MODULES, listed)


def _pooled(
  params: typing.Params,
  config: SentenceConfig,
  tokens: Int[Array, "row length"],
) -> Float[Array, "batch dim"]:
  """Returns what the pooling makes of the model's outputs."""
  shape = config.model
  if isinstance(shape, static_vectors.StaticConfig):
    table = params["token_embedder"]["embedding"]
    return dual_encoder.pool(table[tokens], tokens, "mean")
  if isinstance(shape, bert.BertConfig):
    kinds = jnp.zeros_like(tokens)
    outputs, _ = bert.Bert(shape).apply({"params": params}, tokens, kinds)
  else:
    own = dual_encoder.encoder_params(params)
    outputs = t5.Transformer(shape).apply(
      {"params": own}, tokens, method="encode"
    )
  return dual_encoder.pool(outputs, tokens, config.pooling)


def _load_model(
  chosen: sentence_folders.Modules,
) -> tuple[dict[str, Any], _Model]:
  """Reads the parameters of what reads tokens, and its shape."""
  place, first = chosen.place, padding_id(chosen)
  if chosen.is_static:
    table = _load_table(place / _MODEL)
    rows = np.concatenate([np.zeros_like(table[:1]), table])
    size, dim = rows.shape
    shape = static_vectors.StaticConfig(vocab_size=size, emb_dim=dim)
    return {"token_embedder": {"embedding": rows}}, shape
  if _model_type(place) in _T5S:
    found, shape = huggingface.read(place)
    params = dual_encoder.encoder_params(tensors.fetch(found))
    _swap(params["token_embedder"], "embedding", first)
    return params, shape
  params, shape = bert.load(place)
  params = {
    k: v for k, v in params.items() if k not in ("pooler", "classifier")
  }
  _swap(params, "word_embedding", first)
  return params, dataclasses.replace(shape, has_pooler=False, num_labels=0)


def _swap(params: dict[str, Any], name: str, row: int | None) -> None:
  """Lets row 0 of a table change places with that of padding."""
  if row:
    table = np.array(params[name])
    table[[0, row]] = table[[row, 0]]
    params[name] = table


def _load_table(path: pathlib.Path) -> np.ndarray:
  """Reads static vectors, model2vec's with its mapping and weights."""
  found = tensors.read_safetensors(path)
  if "embedding.weight" in found:
    return np.asarray(found["embedding.weight"].whole(), np.float32)
  if "embeddings" not in found:
    raise ValueError(
      f"{path}: expected a tensor embedding.weight or embeddings, got"
      f" {', '.join(sorted(found)) or 'none'}"
    )
  table = np.asarray(found["embeddings"].whole(), np.float32)
  if "mapping" in found:
    table = table[np.asarray(found["mapping"].whole(), np.int64)]
  if "weights" in found:
    table = table * np.asarray(found["weights"].whole(), np.float32)[:, None]
  return table


def _load_dense(
  path: pathlib.Path, layer: sentence_folders.Dense
) -> dict[str, np.ndarray]:
  """Reads the weights of a linear layer."""
  found = tensors.read_safetensors(path)
  expected: dict[str, tuple[int, ...]] = {
    "linear.weight": (layer.out_dim, layer.in_dim)
  }
  if layer.has_bias:
    expected["linear.bias"] = (layer.out_dim,)
  tensors.check(path, found, expected)
  names = {"linear.weight": "kernel", "linear.bias": "bias"}
  return {
    names[name]: np.asarray(one.whole(), np.float32).T
    for name, one in found.items()
  }


def _save_dense(path: pathlib.Path, params: typing.Params) -> None:
  tree = {"linear.weight": np.ascontiguousarray(np.asarray(params["kernel"]).T)}
  if "bias" in params:
    tree["linear.bias"] = np.asarray(params["bias"])
  path.parent.mkdir(parents=True, exist_ok=True)
  _write_tensors(path, tensors.of_tree(tree))


def _save_model(
  chosen: sentence_folders.Modules,
  place: pathlib.Path,
  params: typing.Params,
  shape: _Model,
) -> None:
  """Writes the parameters of what reads tokens, under the names of its folder."""
  params, first = _copied(params), padding_id(chosen)
  place.mkdir(parents=True, exist_ok=True)
  if isinstance(shape, static_vectors.StaticConfig):
    table = np.asarray(params["token_embedder"]["embedding"])[1:]
    tree = {"embedding.weight": np.ascontiguousarray(table)}
    _write_tensors(place / _MODEL, tensors.of_tree(tree))
    return
  if isinstance(shape, t5_config.T5Config):
    _swap(params["token_embedder"], "embedding", first)
    made = place / "made"
    made.mkdir()
    huggingface.write(made, tensors.of_tree(params), shape, _WIDTH_OF_ONE)
    for path in made.glob("model*"):
      path.replace(place / path.name)
    shutil.rmtree(made)
    return
  _swap(params, "word_embedding", first)
  _write_tensors(place / _MODEL, bert.with_params(chosen.place, params, shape))


def _write_tensors(path: pathlib.Path, found: Any) -> None:
  tensors.write_safetensors(path, found, {"format": "pt"})


def _copied(tree: Any) -> Any:
  """Returns nested dicts anew, whose arrays are shared."""
  if isinstance(tree, dict):
    return {name: _copied(value) for name, value in tree.items()}
  return tree


def _module_list(source: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the modules of a folder as its file lists them."""
  path = source / sentence_folders.MODULES
  if not path.is_file():
    kinds = [("Transformer", ""), ("Pooling", _POOLING)]
    return [_module(number, *one) for number, one in enumerate(kinds)]
  listed = json.loads(path.read_text())
  if any(one["type"].endswith(".Router") for one in listed):
    raise ValueError(
      f"{source}: expected one model for queries and documents, got a Router:"
      " train another start, or search with it as it is"
    )
  return listed


def _module(number: int, kind: str, path: str) -> dict[str, Any]:
  return {
    "idx": number,
    "name": str(number),
    "path": path,
    "type": f"{_HEAD}{kind}",
  }


def _add_projection(
  target: pathlib.Path, number: int, params: typing.Params
) -> list[dict[str, Any]]:
  """Writes a projection as a last linear layer; returns its modules."""
  place = target / f"{number}_Dense"
  write_dense(place, params[dual_encoder.PROJECTION]["kernel"])
  return [
    _module(number, "Dense", place.name),
    _module(number + 1, "Normalize", f"{number + 1}_Normalize"),
  ]


def write_dense(place: pathlib.Path, kernel: Any) -> None:
  """Writes a linear layer without a bias as a module of its own.

  Args:
    place: the module's folder.
    kernel: [in, out]; a vector is multiplied from the left.
  """
  _save_dense(place / _MODEL, {"kernel": kernel})
  in_dim, out_dim = kernel.shape
  settings = {
    "in_features": in_dim,
    "out_features": out_dim,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
  }
  _write_json(place / _CONFIG, settings)


def _write_texts(
  target: pathlib.Path,
  place: pathlib.Path,
  texts: sentence_folders.TextSettings,
  *,
  is_static: bool,
) -> None:
  """Writes how texts are cut, and their prompts."""
  if is_static:  # its reader cuts where the tokenizer does
    path = place / "tokenizer.json"
    cut = {"max_length": texts.max_length, "stride": 0}
    cut |= {"direction": "Right", "strategy": "LongestFirst"}
    _write_json(path, json.loads(path.read_text()) | {"truncation": cut})
  path = place / sentence_folders.TEXTS
  fields = json.loads(path.read_text()) if path.is_file() else {}
  fields["max_seq_length"] = texts.max_length
  if texts.query_length is not None:
    fields["query_length"] = texts.query_length
  _write_json(path, fields | {"do_lower_case": texts.lower_case})
  path = target / sentence_folders.PROMPTS
  fields = json.loads(path.read_text()) if path.is_file() else {}
  prompts = dict(fields.get("prompts") or {})
  prompts |= {
    sentence_folders.QUERY: texts.query_prompt,
    sentence_folders.DOCUMENT: texts.document_prompt,
  }
  _write_json(path, fields | {"prompts": prompts})


def _write_json(path: pathlib.Path, content: Any) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  artifacts.write_atomically(path, json.dumps(content, indent=1) + "\n")


def _settings(place: pathlib.Path) -> dict[str, Any]:
  """Reads the config.json of a model."""
  return sentence_folders.read_fields(place / _CONFIG)


def _model_type(place: pathlib.Path) -> str:
  return str(_settings(place).get("model_type"))


def _belongs(path: pathlib.Path) -> bool:
  """Whether a file of a folder is read by `load`, or by its tokenizer."""
  hidden = any(
    part.startswith((".", "onnx", "openvino")) for part in path.parts
  )
  own = path.suffix in _COPIED or path.match("model*.safetensors")
  return own and not hidden and path.name not in (
    artifacts.RESULT_NAME, artifacts.FILES_NAME,
  )  # fmt: skip
