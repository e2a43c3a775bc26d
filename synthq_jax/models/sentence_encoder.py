"""Loads, runs and saves encoders in sentence-transformers folders.

An encoder is a model (BERT and its kin, or T5's encoder) with its pooling, or one
vector for each token; then linear layers. Vectors have length 1, so that dot products
are cosines. In arrays of tokens 0 is padding: a model's padding id is swapped with 0.
Ids of static vectors, which may have no padding, are shifted by one.

References: Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, section 3. Ni et
  al., "Sentence-T5", ACL Findings 2022, section 3 (the layer after the mean).
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
from synthq_jax.storage import artifacts, file_lists

__all__ = [
  "SentenceConfig",
  "add_normalize",
  "add_query_map",
  "check_start",
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
_WIDTH_OF_ONE = 1 << 30  # largest size of a file in bytes
_SETTINGS = frozenset(
  """added_tokens.json config.json config_sentence_transformers.json merges.txt
  generation_config.json modules.json router_config.json special_tokens_map.json
  sentencepiece.bpe.model sentencepiece.model spiece.model vocabulary.model
  tokenizer.json tokenizer.model tokenizer_config.json unigram.json vocab.json
  vocab.txt model.safetensors.index.json LICENSE.txt NOTICE.txt""".split()
)
"""Files that are copied: none of a trainer's logs, or of queries beside a model."""
_ACTIVATIONS = {"identity": lambda x: x, "tanh": jnp.tanh, "relu": jax.nn.relu}
_Model = bert.BertConfig | t5_config.T5Config | static_vectors.StaticConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceConfig:
  """The shape of a sentence-transformers folder, for one role of texts."""

  model: _Model
  """Shape of the model that reads the tokens."""
  pooling: str = "mean"
  """One of `dual_encoder.POOLINGS`."""
  layers: tuple[sentence_folders.Dense | None, ...] = ()
  """Layers after the pooling; None normalizes vectors to length 1."""

  @property
  def emb_dim(self) -> int:
    """Length of a vector."""
    sizes = [layer.out_dim for layer in self.layers if layer is not None]
    return sizes[-1] if sizes else self.model.emb_dim

  @property
  def vocab_size(self) -> int:
    """Number of rows of the table of tokens, including padding."""
    return self.model.vocab_size


def is_folder(folder: str | os.PathLike) -> bool:
  """Returns True if a folder has modules.json, or holds a BERT, so `load` reads
  it."""
  root = pathlib.Path(folder)
  if (root / sentence_folders.MODULES).is_file():
    return True
  try:
    return _get_model_type(root) in bert.KINDS
  except ValueError:
    return False


def load(
  folder: str | os.PathLike, role: str | None = None
) -> tuple[dict[str, Any], SentenceConfig]:
  """Loads an encoder: its model and the layers after it.

  Args:
    folder: a folder of sentence-transformers, or of a model alone, whose outputs are
      averaged.
    role: `sentence_folders.QUERY` or DOCUMENT, if a Router has a route for each;
      None: its default route.

  Returns:
    Parameters, as nested dicts of float32 arrays: "model", and "layer_N" for each
    linear layer; and their shape.

  Raises:
    ValueError: if a file is missing or damaged, or the folder has an unsupported
      module or setting; the message names it.
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
        f"{layer.folder}: expected in_features={width}, the width of the layer"
        f" before, got {layer.in_dim}"
      )
    assert layer.folder is not None  # set by `modules`
    params[f"layer_{number}"] = _load_dense(layer.folder / _MODEL, layer)
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
    params: parameters from `load`; a "projection" (`dual_encoder`) is applied after
      all layers.
    config: the shape of the parameters.
    tokens: tokens with the model's special tokens, 0 = padding at the end of a row.

  Returns:
    One float32 vector per row: of length 1, or 0 for a row of padding.
  """
  pooled = _pool_outputs(params["model"], config, tokens)
  for number, layer in enumerate(config.layers):
    if layer is None:
      pooled = dual_encoder.normalize(pooled)
      continue
    own = params[f"layer_{number}"]
    pooled = pooled @ own["kernel"]
    if layer.has_bias:
      pooled = pooled + own["bias"][None]
    pooled = _ACTIVATIONS[layer.activation](pooled)
  # A bias would make the vector of a row of padding nonzero.
  has_tokens = (tokens != 0).any(axis=1, keepdims=True)
  return dual_encoder.project(params, jnp.where(has_tokens, pooled, 0.0))


def padding_id(chosen: sentence_folders.Modules) -> int | None:
  """Returns the padding id, which is swapped with 0; None: ids are shifted by
  one.

  Args:
    chosen: the modules of a folder.
  """
  if chosen.is_static:
    return None
  fields = _read_settings(chosen.folder)
  first = 1 if _get_model_type(chosen.folder) in bert.COUNTING else 0
  stored = sentence_folders.find_padding(chosen.folder)
  stored = fields.get("pad_token_id", first) if stored is None else stored
  return first if stored is None else int(stored)


def num_positions(chosen: sentence_folders.Modules) -> int | None:
  """Returns the largest number of tokens of a model's input; None: no limit.

  Args:
    chosen: the modules of a folder.
  """
  if chosen.is_static or _get_model_type(chosen.folder) in _T5S:
    return None
  return bert.read_config(chosen.folder).max_length


def check_start(folder: str | os.PathLike) -> None:
  """Refuses a folder from which `save` can write no encoder.

  Args:
    folder: as in `load`.

  Raises:
    ValueError: if the folder has a Router.
  """
  _list_modules(pathlib.Path(folder))


def files(folder: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  """Returns the files of a folder that determine its vectors, in order."""
  root = pathlib.Path(folder)
  return tuple(
    path for path in file_lists.below(root) if _is_used(path.relative_to(root))
  )


def copy_files(
  source: str | os.PathLike, target: str | os.PathLike, *, weights: bool = True
) -> None:
  """Copies the files of a folder that its readers know by name.

  Args:
    source: as in `load`.
    target: the new folder, which is created if it is missing.
    weights: whether to copy tensors, too, or only settings and tokenizer.
  """
  root = pathlib.Path(source)
  for path in files(root):
    is_setting = path.name in _SETTINGS or path.match("sentence_*_config.json")
    if not is_setting and not (weights and path.suffix == ".safetensors"):
      continue
    copy = pathlib.Path(target) / path.relative_to(root)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if path.name in (_CONFIG, "tokenizer_config.json"):
      copy.write_bytes(sentence_folders.drop_paths(path))
    else:
      shutil.copyfile(path, copy)


def save(
  directory: str | os.PathLike,
  params: typing.Params,
  config: SentenceConfig,
  *,
  start: str | os.PathLike,
  texts: sentence_folders.TextSettings,
) -> None:
  """Saves an encoder as a folder of sentence-transformers.

  Args:
    directory: the new folder, which is created if it is missing.
    params: parameters as in `load`, possibly with a "projection".
    config: the shape of the parameters.
    start: the folder from which they were loaded, whose other files are copied.
    texts: settings of texts and prompts, which replace those of `start`.

  Raises:
    ValueError: if the folder has a Router, whose routes have different parameters.
  """
  source, target = pathlib.Path(start), pathlib.Path(directory)
  chosen = sentence_folders.modules(source)
  copy_files(source, target, weights=False)
  folder = target / chosen.folder.relative_to(source)
  _save_model(chosen, folder, params["model"], config.model)
  listed = _list_modules(source)
  for number, layer in enumerate(config.layers):
    if layer is not None:
      assert layer.folder is not None
      path = target / layer.folder.relative_to(source) / _MODEL
      _save_dense(path, params[f"layer_{number}"])
  if dual_encoder.PROJECTION in params:
    listed += _add_projection(target, len(listed), params)
  _write_json(target / sentence_folders.MODULES, listed)
  if not (source / sentence_folders.MODULES).is_file():
    width = {"word_embedding_dimension": config.model.emb_dim}
    mean = {"pooling_mode_mean_tokens": True}
    _write_json(target / _POOLING / _CONFIG, width | mean)
  _write_texts(target, folder, texts, is_static=chosen.is_static)


def add_query_map(
  folder: str | os.PathLike, matrix: Float[np.ndarray, "dim dim"]
) -> None:
  """Adds a linear map of query vectors after the modules of a folder.

  `encode_query` and `encode_document` of sentence-transformers use the route of
  their role; documents keep their vectors.

  Args:
    folder: a folder from `save`.
    matrix: the map; the new vector is vector @ matrix.
  """
  root = pathlib.Path(folder)
  listed = json.loads((root / sentence_folders.MODULES).read_text())
  number = len(listed)
  router = root / _find_free(root, f"{number}_Router")
  types, routes = {}, {}
  for role, kind in (
    (sentence_folders.QUERY, "Dense"),
    (sentence_folders.DOCUMENT, "Normalize"),
  ):
    name = f"{role}_0_{kind}"
    types[name] = f"{_HEAD}{kind}"
    routes[role] = [name]
    (router / name).mkdir(parents=True)
    if role == sentence_folders.QUERY:
      write_dense(router / name, np.asarray(matrix, np.float32))
  parameters = {"default_route": "document", "allow_empty_key": True}
  content = {"types": types, "structure": routes, "parameters": parameters}
  _write_json(router / "router_config.json", content)
  path = _find_free(root, f"{number + 1}_Normalize")
  listed += [
    _make_module(number, "Router", router.name),
    _make_module(number + 1, "Normalize", path),
  ]
  (root / path).mkdir()
  _write_json(root / sentence_folders.MODULES, listed)


def add_normalize(folder: str | os.PathLike) -> None:
  """Adds a Normalize module to a folder whose vectors may have other lengths.

  `encode` normalizes vectors in any case; sentence-transformers does not.

  Args:
    folder: a folder of sentence-transformers.
  """
  root = pathlib.Path(folder)
  listed = json.loads((root / sentence_folders.MODULES).read_text())
  layers = sentence_folders.modules(root).layers
  if layers and layers[-1] is None:
    return
  path = _find_free(root, f"{len(listed)}_Normalize")
  (root / path).mkdir()
  listed.append(_make_module(len(listed), "Normalize", path))
  _write_json(root / sentence_folders.MODULES, listed)


def _find_free(root: pathlib.Path, name: str) -> str:
  """Finds a name for a module's folder; a module that is not listed may have it."""
  while (root / name).exists():
    name += "_"
  return name


def _pool_outputs(
  params: typing.Params,
  config: SentenceConfig,
  tokens: Int[Array, "row length"],
) -> Float[Array, "batch dim"]:
  """Runs the model and pools its outputs."""
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
  """Loads the parameters and the shape of the model that reads tokens."""
  folder, first = chosen.folder, padding_id(chosen)
  if chosen.is_static:
    table = _load_table(folder / _MODEL)
    rows = np.concatenate([np.zeros_like(table[:1]), table])
    size, dim = rows.shape
    shape = static_vectors.StaticConfig(vocab_size=size, emb_dim=dim)
    return {"token_embedder": {"embedding": rows}}, shape
  if _get_model_type(folder) in _T5S:
    described, shape = huggingface.read(folder)
    params = dual_encoder.encoder_params(tensors.fetch(described))
    _swap(params["token_embedder"], "embedding", first)
    return params, shape
  params, shape = bert.load(folder)
  params = {
    k: v for k, v in params.items() if k not in ("pooler", "classifier")
  }
  _swap(params, "word_embedding", first)
  return params, dataclasses.replace(shape, has_pooler=False, num_labels=0)


def _swap(params: dict[str, Any], name: str, row: int | None) -> None:
  """Swaps row 0 of a table with the row of padding."""
  if row:
    table = np.array(params[name])
    table[[0, row]] = table[[row, 0]]
    params[name] = table


def _load_table(path: pathlib.Path) -> np.ndarray:
  """Loads static vectors; model2vec's with its mapping and weights."""
  stored = tensors.read_safetensors(path)
  if "embedding.weight" in stored:
    return np.asarray(stored["embedding.weight"].read(), np.float32)
  if "embeddings" not in stored:
    raise ValueError(
      f"{path}: expected a tensor embedding.weight or embeddings, got"
      f" {', '.join(sorted(stored)) or 'none'}"
    )
  table = np.asarray(stored["embeddings"].read(), np.float32)
  if "mapping" in stored:
    table = table[np.asarray(stored["mapping"].read(), np.int64)]
  if "weights" in stored:
    table = table * np.asarray(stored["weights"].read(), np.float32)[:, None]
  return table


def _load_dense(
  path: pathlib.Path, layer: sentence_folders.Dense
) -> dict[str, np.ndarray]:
  """Loads the weights of a linear layer."""
  stored = tensors.read_safetensors(path)
  expected: dict[str, tuple[int, ...]] = {
    "linear.weight": (layer.out_dim, layer.in_dim)
  }
  if layer.has_bias:
    expected["linear.bias"] = (layer.out_dim,)
  tensors.check(path, stored, expected)
  names = {"linear.weight": "kernel", "linear.bias": "bias"}
  return {
    names[name]: np.asarray(tensor.read(), np.float32).T
    for name, tensor in stored.items()
  }


def _save_dense(path: pathlib.Path, params: typing.Params) -> None:
  tree = {"linear.weight": np.ascontiguousarray(np.asarray(params["kernel"]).T)}
  if "bias" in params:
    tree["linear.bias"] = np.asarray(params["bias"])
  path.parent.mkdir(parents=True, exist_ok=True)
  _write_tensors(path, tensors.of_tree(tree))


def _save_model(
  chosen: sentence_folders.Modules,
  folder: pathlib.Path,
  params: typing.Params,
  shape: _Model,
) -> None:
  """Saves the model that reads tokens, with its folder's names of tensors."""
  params, first = _copy_dicts(params), padding_id(chosen)
  folder.mkdir(parents=True, exist_ok=True)
  if isinstance(shape, static_vectors.StaticConfig):
    table = np.asarray(params["token_embedder"]["embedding"])[1:]
    tree = {"embedding.weight": np.ascontiguousarray(table)}
    _write_tensors(folder / _MODEL, tensors.of_tree(tree))
    return
  if isinstance(shape, t5_config.T5Config):
    _swap(params["token_embedder"], "embedding", first)
    written = folder / "made"
    written.mkdir()
    huggingface.write(written, tensors.of_tree(params), shape, _WIDTH_OF_ONE)
    for path in written.glob("model*"):
      path.replace(folder / path.name)
    shutil.rmtree(written)
    return
  _swap(params, "word_embedding", first)
  _write_tensors(
    folder / _MODEL, bert.with_params(chosen.folder, params, shape)
  )


def _write_tensors(path: pathlib.Path, stored: Any) -> None:
  tensors.write_safetensors(path, stored, {"format": "pt"})


def _copy_dicts(tree: Any) -> Any:
  """Copies nested dicts without copying their arrays."""
  if isinstance(tree, dict):
    return {name: _copy_dicts(value) for name, value in tree.items()}
  return tree


def _list_modules(source: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the modules of a folder, in the form of modules.json."""
  path = source / sentence_folders.MODULES
  if not path.is_file():
    kinds = [("Transformer", ""), ("Pooling", _POOLING)]
    return [_make_module(number, *kind) for number, kind in enumerate(kinds)]
  listed = json.loads(path.read_text())
  if any(module["type"].endswith(".Router") for module in listed):
    raise ValueError(
      f"{source}: expected one model for queries and documents, got a Router:"
      " train another start (of an exported adapter, the encoder that it maps)"
    )
  return listed


def _make_module(number: int, kind: str, path: str) -> dict[str, Any]:
  return {
    "idx": number,
    "name": str(number),
    "path": path,
    "type": f"{_HEAD}{kind}",
  }


def _add_projection(
  target: pathlib.Path, number: int, params: typing.Params
) -> list[dict[str, Any]]:
  """Writes a projection as the last linear layer and returns its modules."""
  folder = target / f"{number}_Dense"
  write_dense(folder, params[dual_encoder.PROJECTION]["kernel"])
  return [
    _make_module(number, "Dense", folder.name),
    _make_module(number + 1, "Normalize", f"{number + 1}_Normalize"),
  ]


def write_dense(folder: pathlib.Path, kernel: Any) -> None:
  """Writes a linear layer without a bias as a module.

  Args:
    folder: the module's folder.
    kernel: the kernel [in, out]; the new vector is vector @ kernel.
  """
  _save_dense(folder / _MODEL, {"kernel": kernel})
  in_dim, out_dim = kernel.shape
  settings = {
    "in_features": in_dim,
    "out_features": out_dim,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
  }
  _write_json(folder / _CONFIG, settings)


def _write_texts(
  target: pathlib.Path,
  folder: pathlib.Path,
  texts: sentence_folders.TextSettings,
  *,
  is_static: bool,
) -> None:
  """Writes the settings of texts and their prompts."""
  if is_static:  # StaticEmbedding leaves truncation to the tokenizer
    path = folder / "tokenizer.json"
    truncation = {"max_length": texts.max_length, "stride": 0}
    truncation |= {"direction": "Right", "strategy": "LongestFirst"}
    _write_json(path, json.loads(path.read_text()) | {"truncation": truncation})
  path = folder / sentence_folders.TEXTS
  fields = json.loads(path.read_text()) if path.is_file() else {}
  fields["max_seq_length"] = texts.max_length
  if texts.query_length is not None:
    fields["query_length"] = texts.query_length
  _write_json(path, fields | {"do_lower_case": texts.lower_case})
  path = target / sentence_folders.PROMPTS
  fields = json.loads(path.read_text()) if path.is_file() else {}
  names = sentence_folders.DOCUMENT_PROMPTS  # only the first is written
  prompts = {k: v for k, v in (fields.get("prompts") or {}).items()
             if k not in names}  # fmt: skip
  if fields.get("default_prompt_name") in names:
    fields["default_prompt_name"] = sentence_folders.DOCUMENT
  prompts |= {
    sentence_folders.QUERY: texts.query_prompt,
    sentence_folders.DOCUMENT: texts.document_prompt,
  }
  _write_json(path, fields | {"prompts": prompts})


def _write_json(path: pathlib.Path, content: Any) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  artifacts.write_atomically(path, json.dumps(content, indent=1) + "\n")


def _read_settings(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the config.json of a model."""
  return sentence_folders.read_fields(folder / _CONFIG)


def _get_model_type(folder: pathlib.Path) -> str:
  return str(_read_settings(folder).get("model_type"))


def _is_used(path: pathlib.Path) -> bool:
  """Returns True for a file that `load` or the tokenizer reads."""
  hidden = any(
    part.startswith((".", "onnx", "openvino")) for part in path.parts
  )
  own = path.suffix in (".json", ".txt", ".model")
  own = own or path.match("model*.safetensors")
  return own and not hidden and path.name not in (
    artifacts.RESULT_NAME, artifacts.FILES_NAME,
  )  # fmt: skip
