"""Reads the modules, text settings and prompts of sentence-transformers folders.

Layers and settings that this library does not support are refused by name: to
ignore them would silently change the vectors.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from synthq_jax.storage import artifacts

__all__ = [
  "DOCUMENT",
  "DOCUMENT_PROMPTS",
  "MODULES",
  "QUERY",
  "Dense",
  "Modules",
  "TextSettings",
  "check_texts",
  "drop_paths",
  "find_padding",
  "model_settings",
  "modules",
  "read_fields",
  "says_cosine",
  "text_settings",
]

QUERY, DOCUMENT = "query", "document"
"""Roles of a text."""
MODULES = "modules.json"
"""Name of the file that lists the modules of a folder."""
PROMPTS = "config_sentence_transformers.json"
"""Name of the file with prompts and the similarity of vectors."""
TEXTS = "sentence_bert_config.json"
"""Name of the file with the settings of texts, such as their length."""
_ROUTER = "router_config.json"
_TEXTS = (
  TEXTS,
  "sentence_roberta_config.json",
  "sentence_distilbert_config.json",
  "sentence_mpnet_config.json",
  "sentence_xlm-roberta_config.json",
)
_UNREAD = (
  "config_args",
  "config_kwargs",
  "tokenizer_args",
  "processor_kwargs",
  "processing_kwargs",
  "query_expansion",
  "document_length",
)
_OUTPUT = "last_hidden_state"
"""Name of a model's output for each token."""
_OWN = "sentence_transformers."
"""Beginning of a module's class; others, such as custom_st.Transformer, run code."""
_POOLINGS = {"mean": "mean", "mean_tokens": "mean"} | {
  name: "first" for name in ("cls", "cls_token")
}
_ACTIVATIONS = {
  "torch.nn.modules.linear.Identity": "identity",
  "torch.nn.modules.activation.Tanh": "tanh",
  "torch.nn.modules.activation.ReLU": "relu",
}
_SAVED_FROM = (
  "_name_or_path",
  "name_or_path",
  "special_tokens_map_file",
  "tokenizer_file",
)
DOCUMENT_PROMPTS = (DOCUMENT, "passage", "corpus")
"""Names of a document's prompt; the first that is not empty is used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
  """Settings by which sentence-transformers prepares texts for a model."""

  prompt: str = ""
  """Default prompt, before texts without a role."""
  query_prompt: str = ""
  """Prompt before queries."""
  document_prompt: str = ""
  """Prompt before documents."""
  lower_case: bool = False
  """Whether texts are lower-cased, whatever the tokenizer does."""
  max_length: int | None = None
  """Largest number of tokens of a text, special ones included; None: the model's."""
  query_length: int | None = None
  """Largest number of tokens of a query, if it is smaller; None: `max_length`."""

  def prompt_of(self, role: str | None) -> str:
    """Returns the prompt before a text.

    Args:
      role: QUERY, DOCUMENT, or None for a text without a role.
    """
    by_role = {QUERY: self.query_prompt, DOCUMENT: self.document_prompt}
    return self.prompt if role is None else by_role[role]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
  """A linear layer after the pooling."""

  folder: pathlib.Path | None = dataclasses.field(default=None, compare=False)
  """The folder with its weights."""
  in_dim: int
  out_dim: int
  has_bias: bool
  activation: str
  """"identity", "tanh" or "relu"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modules:
  """The modules that turn a text into a vector."""

  folder: pathlib.Path
  """The folder of the model, or of the static vectors."""
  is_static: bool = False
  """Whether the folder holds one vector for each token, and no model."""
  pooling: str = "mean"
  """"mean" of the outputs, or the "first" output."""
  layers: tuple[Dense | None, ...] = ()
  """Layers after the pooling; None normalizes vectors to length 1."""


def modules(folder: pathlib.Path, role: str | None = None) -> Modules:
  """Reads the modules of a folder for texts of a role.

  A folder without modules.json counts as a model whose outputs are averaged.

  Args:
    folder: a folder of sentence-transformers, or of a model alone.
    role: QUERY or DOCUMENT, for a Router; None: its default route.

  Raises:
    ValueError: if the folder has unsupported modules, or the files are damaged.
  """
  if not (folder / MODULES).is_file():
    return Modules(folder=folder)
  chosen, layers = Modules(folder=folder), []
  kinds = []
  for kind, path in _list_modules(folder, role):
    if kind == "Transformer" and not kinds:
      chosen = dataclasses.replace(chosen, folder=path)
    elif kind == "StaticEmbedding" and not kinds:
      chosen = dataclasses.replace(chosen, folder=path, is_static=True)
    elif kind == "Pooling" and kinds == ["Transformer"]:
      has_prompt = any(_read_prompts(folder)[0].values())
      pooling = _read_pooling(path / "config.json", has_prompt)
      chosen = dataclasses.replace(chosen, pooling=pooling)
    elif kind == "Normalize":
      layers.append(None)
    elif kind == "Dense":
      layers.append(_read_dense(path))
    else:
      raise ValueError(
        f"{folder / MODULES}: expected a Transformer with its Pooling, or a"
        " StaticEmbedding, and then Dense and Normalize, got another"
        f" module {kind!r}: without it, vectors would differ"
      )
    kinds.append(kind)
  if not chosen.is_static and (kinds + ["Pooling"])[:2] != [
    "Transformer", "Pooling",
  ]:  # fmt: skip
    raise ValueError(
      f"{folder / MODULES}: expected a Transformer and its Pooling first, got"
      f" {', '.join(kinds) or 'nothing'}"
    )
  _check_similarity(folder, layers)
  return dataclasses.replace(chosen, layers=tuple(layers))


def says_cosine(folder: pathlib.Path) -> bool:
  """Tests whether a folder says that its vectors are compared by cosines.

  Folders of models that were trained for dot products, such as Contriever's, often
  say nothing.

  Args:
    folder: as in `modules`.
  """
  layers = modules(folder).layers
  fields = read_fields(folder / PROMPTS, missing_ok=True)
  is_normal = bool(layers) and layers[-1] is None
  return is_normal or fields.get("similarity_fn_name") == "cosine"


def text_settings(folder: pathlib.Path) -> TextSettings:
  """Reads the text settings of a folder, prompts included.

  Args:
    folder: a folder of sentence-transformers, or of a model alone, which has none.

  Raises:
    ValueError: as `modules` and `model_settings` do.
  """
  settings = model_settings(modules(folder).folder)
  prompts, default = _read_prompts(folder)
  named = (prompts[name] for name in DOCUMENT_PROMPTS if prompts.get(name))
  return dataclasses.replace(
    settings,
    prompt=prompts.get(default, ""),
    query_prompt=prompts.get(QUERY, ""),
    document_prompt=next(named, ""),
  )


def model_settings(folder: pathlib.Path) -> TextSettings:
  """Reads the text settings in a model's own folder, which has no prompts.

  Args:
    folder: the folder with config.json and the tokenizer.

  Raises:
    ValueError: if the file is damaged, or a setting is not supported.
  """
  path = next((folder / n for n in _TEXTS if (folder / n).is_file()), None)
  fields = read_fields(path) if path is not None else {}
  if unread := [name for name in _UNREAD if fields.get(name)]:
    raise ValueError(
      f"{path}: expected no {unread[0]}, which would change the model or its input"
      " and is not supported: save the model with these settings in its own files"
    )
  text = (fields.get("modality_config") or {}).get("text") or {}
  output = text.get("method_output_name") or _OUTPUT
  if output != _OUTPUT:
    raise ValueError(
      f"{path}: expected method_output_name={_OUTPUT!r}, which is pooled, got"
      f" {output!r}"
    )
  lower_case = fields.get("do_lower_case")
  lengths = [fields.get(name) for name in ("max_seq_length", "query_length")]
  are_lengths = all(
    length is None or (isinstance(length, int) and length > 0)
    for length in lengths
  )
  if lower_case not in (None, True, False) or not are_lengths:
    raise ValueError(
      f"{path}: expected do_lower_case to be true or false and max_seq_length and"
      f" query_length numbers above 0, got {lower_case!r} and {lengths}"
    )
  return TextSettings(
    lower_case=bool(lower_case), max_length=lengths[0], query_length=lengths[1]
  )


def find_padding(folder: pathlib.Path) -> int | None:
  """Finds the padding id of a tokenizer; None if its files do not name it.

  config.json may name another: a BERT with the pieces of XLM-RoBERTa, such as
  multilingual-e5-small, calls 0 padding, with which each of its texts begins.

  Args:
    folder: the folder with tokenizer.json.

  Raises:
    ValueError: if a file holds no JSON object.
  """
  read = functools.partial(read_fields, missing_ok=True)
  fields = read(folder / "special_tokens_map.json")
  fields |= read(folder / "tokenizer_config.json")
  name = fields.get("pad_token")
  name = name.get("content") if isinstance(name, dict) else name
  ids = {}
  for token in read(folder / "tokenizer.json").get("added_tokens") or ():
    if isinstance(token, dict):
      ids[token.get("content")] = token.get("id")
  return ids.get(name)


def check_texts(folder: pathlib.Path) -> None:
  """Refuses settings of texts that a T5's tokenization would ignore.

  Args:
    folder: the folder of a model whose texts other code prepares, such as a T5.

  Raises:
    ValueError: naming the setting.
  """
  chosen = modules(folder)
  if any(chosen.layers) or chosen.pooling != "mean":
    raise ValueError(
      f"{folder / MODULES}: expected the mean of a model's outputs alone, got"
      " another pooling or a Dense layer: give the folder as ENCODER, whose"
      " modules are all read"
    )
  settings = text_settings(folder)
  if settings.prompt or settings.lower_case:
    name = "do_lower_case=true" if settings.lower_case else "a default prompt"
    raise ValueError(
      f"{folder}: expected a model that reads texts as they are, got {name} of"
      " sentence-transformers: delete the setting, and put a prompt before the"
      " texts"
    )


def _list_modules(
  folder: pathlib.Path, role: str | None
) -> list[tuple[str, pathlib.Path]]:
  """Returns the kind and folder of each module, with a Router's route in its
  place."""
  expected = "a list of objects with type and path"
  try:
    listed = json.loads((folder / MODULES).read_text())
    named = [
      (_get_kind(each["type"]), folder / each["path"]) for each in listed
    ]
  except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
    raise ValueError(
      f"{folder / MODULES}: expected {expected}, got something else"
    ) from None
  flat = []
  for kind, path in named:
    flat += _read_route(path, role) if kind == "Router" else [(kind, path)]
  return flat


def _read_route(
  folder: pathlib.Path, role: str | None
) -> list[tuple[str, pathlib.Path]]:
  """Returns the modules of one route of a Router."""
  path = folder / _ROUTER
  fields = read_fields(path)
  try:
    parameters = fields.get("parameters") or {}
    routes, types = fields["structure"], fields["types"]
    if parameters.get("route_mappings"):
      raise ValueError(
        f"{path}: expected routes by the role of a text alone, got route_mappings"
      )
    default = parameters.get("default_route") or next(iter(routes))
    chosen = routes[role if role in routes else default]
    return [(_get_kind(types[name]), folder / name) for name in chosen]
  except (TypeError, LookupError, AttributeError, StopIteration):
    raise ValueError(
      f"{path}: expected types and a structure of routes, got something else"
    ) from None


def _get_kind(name: str) -> str:
  """Returns the class of a module; one of other code keeps its whole name."""
  return name.rpartition(".")[2] if name.startswith(_OWN) else name


def _read_dense(folder: pathlib.Path) -> Dense:
  """Reads the shape of a Dense module."""
  path = folder / "config.json"
  fields = read_fields(path)
  activation = fields.get("activation_function", "")
  name = "sentence_embedding"
  outputs = fields.get("module_output_name") or name
  inputs = fields.get("module_input_name") or name
  if activation not in _ACTIVATIONS:
    raise ValueError(
      f"{path}: expected an activation among {', '.join(_ACTIVATIONS)}, got"
      f" {activation!r}"
    )
  if fields.get("use_residual") or (inputs, outputs) != (name, name):
    raise ValueError(
      f"{path}: expected a layer of the pooled vector without use_residual, got"
      " another one"
    )
  try:
    return Dense(
      folder=folder,
      in_dim=int(fields["in_features"]),
      out_dim=int(fields["out_features"]),
      has_bias=bool(fields.get("bias", True)),
      activation=_ACTIVATIONS[activation],
    )
  except (KeyError, TypeError, ValueError):
    raise ValueError(
      f"{path}: expected in_features and out_features, got something else"
    ) from None


def _check_similarity(folder: pathlib.Path, layers: list[Any]) -> None:
  """Refuses vectors that are truncated, or not compared by their cosines."""
  path = folder / PROMPTS
  fields = read_fields(path, missing_ok=True)
  if (dim := fields.get("truncate_dim")) is not None:
    raise ValueError(
      f"{path}: expected vectors of all dimensions, got truncate_dim={dim}: delete"
      f" the setting, or add a Dense layer that keeps the first {dim}"
    )
  named = fields.get("similarity_fn_name")
  is_normal = bool(layers) and layers[-1] is None
  if named in (None, "cosine") or (is_normal and named in ("dot", "euclidean")):
    return
  raise ValueError(
    f"{path}: expected vectors that are compared by cosines, got"
    f" similarity_fn_name={named!r}"
    f"{'' if is_normal else ' of vectors of any length'}, which gives other rankings"
  )


def _read_prompts(folder: pathlib.Path) -> tuple[Mapping[str, str], str]:
  """Reads a folder's prompts by name, and the name of its default prompt."""
  path = folder / PROMPTS
  fields = read_fields(path, missing_ok=True)
  prompts, name = fields.get("prompts") or {}, fields.get("default_prompt_name")
  if not isinstance(prompts, dict) or not all(
    isinstance(prompt, (str, type(None))) for prompt in prompts.values()
  ):
    raise ValueError(
      f"{path}: expected prompts as texts by name, got something else"
    )
  if name is not None and not isinstance(prompts.get(name), str):
    raise ValueError(
      f"{path}: expected a prompt named {name!r}, as default_prompt_name says,"
      " got none"
    )
  return {key: text or "" for key, text in prompts.items()}, name or ""


def read_fields(
  path: pathlib.Path, *, missing_ok: bool = False
) -> dict[str, Any]:
  """Reads a file that must hold a JSON object.

  Args:
    path: the file.
    missing_ok: whether a missing file counts as one without fields.

  Raises:
    ValueError: if the file is missing or holds something else.
  """
  if missing_ok and not path.is_file():
    return {}
  try:
    return artifacts.unsealed(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{str(path)!r}: expected a JSON object, got {type(error).__name__}"
    ) from error


def drop_paths(path: pathlib.Path) -> bytes:
  """Reads a file without the fields that name the folder it was saved from.

  transformers writes the folder that a model was loaded from into its settings,
  at any depth, and with it the names of people and projects. No reader needs it.

  Args:
    path: any file; all but a JSON object with such fields is read as it is.
  """
  content = path.read_bytes()
  if not any(f'"{name}"'.encode() in content for name in _SAVED_FROM):
    return content
  fields = json.loads(
    content,
    object_hook=lambda each: {
      name: value for name, value in each.items() if name not in _SAVED_FROM
    },
  )
  return f"{json.dumps(fields, indent=2)}\n".encode()


def _read_pooling(path: pathlib.Path, has_prompt: bool) -> str:
  """Reads the pooling of outputs, from one field (newer files) or else several
  flags."""
  fields = read_fields(path)
  begin = "pooling_mode_"
  flags = [k.removeprefix(begin) for k, v in fields.items() if v is True
           and k.startswith(begin)]  # fmt: skip
  modes: Any = fields.get("pooling_mode") or flags
  modes = modes if isinstance(modes, list) else [modes]
  if len(modes) != 1 or modes[0] not in _POOLINGS:
    raise ValueError(
      f"{path}: expected the mean of all tokens, or the first (cls), got {modes}"
    )
  if has_prompt and fields.get("include_prompt") is False:
    raise ValueError(
      f"{path}: expected the mean of all tokens, got include_prompt=false and a"
      " prompt, whose tokens it leaves out"
    )
  return _POOLINGS[modes[0]]
