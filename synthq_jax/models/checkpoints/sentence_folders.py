"""Folders of sentence-transformers: which model they hold, and how texts reach it.

Only what is read here in full is accepted: the mean of a model's outputs. A layer
behind it that nobody reads, or a setting of texts, would give other vectors without
a word.
"""

import dataclasses
import json
import pathlib
from typing import Any

from synthq_jax.storage import artifacts

__all__ = [
  "TextSettings",
  "check_texts",
  "mean_pooled",
  "model_settings",
  "text_settings",
]

_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_TEXTS = (
  "sentence_bert_config.json",
  "sentence_roberta_config.json",
  "sentence_distilbert_config.json",
)
_UNREAD = (
  "tokenizer_args",
  "processor_kwargs",
  "processing_kwargs",
  "query_expansion",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
  """What sentence-transformers does to a text before a model reads it."""

  prompt: str = ""
  """Stands before every text: the folder's default prompt."""
  lower_case: bool = False
  """Whether texts are lower-cased, whatever the tokenizer does."""
  max_length: int | None = None
  """Tokens of a text, special ones included; None: as many as the model reads."""


def mean_pooled(folder: pathlib.Path) -> pathlib.Path:
  """Returns where the model lies whose mean outputs are the vectors.

  A folder without their files is taken for a model whose outputs are averaged.

  Args:
    folder: of sentence-transformers, or of a model alone.

  Raises:
    ValueError: if vectors are made otherwise, or the files are damaged.
  """
  if not (folder / _MODULES).is_file():
    return folder
  place = folder
  try:
    modules = json.loads((folder / _MODULES).read_text())
    named = [(one["type"].rpartition(".")[2], one["path"]) for one in modules]
    places = [(kind, folder / path) for kind, path in named]
  except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
    raise ValueError(
      f"{folder / _MODULES}: expected a list of objects with type and path, got"
      " something else"
    ) from None
  for kind, path in places:
    if kind == "Transformer":
      place = path
    elif kind == "Pooling":
      _check_pooling(path / "config.json", has_prompt=bool(_prompt(folder)))
    elif kind != "Normalize":  # lengths change no cosine
      raise ValueError(
        f"{folder / _MODULES}: expected a model and the mean of its outputs, got"
        f" a module {kind!r} besides: without it vectors are others"
      )
  return place


def text_settings(folder: pathlib.Path) -> TextSettings:
  """Reads what a folder says of texts, its default prompt included.

  Args:
    folder: of sentence-transformers, or of a model alone, which says nothing.

  Raises:
    ValueError: as `mean_pooled` and `model_settings` do.
  """
  settings = model_settings(mean_pooled(folder))
  return dataclasses.replace(settings, prompt=_prompt(folder))


def model_settings(place: pathlib.Path) -> TextSettings:
  """Reads what stands beside a model and its tokenizer, without a prompt.

  Args:
    place: of config.json and the tokenizer.

  Raises:
    ValueError: if the file is damaged, or a setting is not read here.
  """
  path = next((place / n for n in _TEXTS if (place / n).is_file()), None)
  fields = _load(path) if path is not None else {}
  if unread := [name for name in _UNREAD if fields.get(name)]:
    raise ValueError(
      f"{path}: expected no {unread[0]}, which would change what the model reads"
      " and is not read here: save the model with these settings in its tokenizer"
    )
  lower_case, length = fields.get("do_lower_case"), fields.get("max_seq_length")
  is_length = isinstance(length, int) and length > 0
  if lower_case not in (None, True, False) or not (length is None or is_length):
    raise ValueError(
      f"{path}: expected do_lower_case to be true or false and max_seq_length a"
      f" number above 0, got {lower_case!r} and {length!r}"
    )
  return TextSettings(lower_case=bool(lower_case), max_length=length)


def check_texts(folder: pathlib.Path) -> None:
  """Refuses settings of texts where these are tokenized without them.

  Args:
    folder: of a model whose texts other code prepares, as a T5's are.

  Raises:
    ValueError: naming the setting.
  """
  found = text_settings(folder)
  if found.prompt or found.lower_case:
    name = "do_lower_case=true" if found.lower_case else "a default prompt"
    raise ValueError(
      f"{folder}: expected a model that reads texts as they are, got {name} of"
      " sentence-transformers: delete the setting, and put a prompt before the"
      " texts"
    )


def _prompt(folder: pathlib.Path) -> str:
  """Returns the prompt that stands before texts unless a caller names another."""
  path = folder / _PROMPTS
  fields = _load(path) if path.is_file() else {}
  name = fields.get("default_prompt_name")
  if name is None:
    return ""
  prompts = fields.get("prompts")
  prompt = prompts.get(name) if isinstance(prompts, dict) else None
  if not isinstance(prompt, str):
    raise ValueError(
      f"{path}: expected a prompt named {name!r}, as default_prompt_name says,"
      " got none"
    )
  return prompt


def _load(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that must hold a JSON object."""
  try:
    return artifacts.unsealed(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{str(path)!r}: expected a JSON object, got {type(error).__name__}"
    ) from error


def _check_pooling(path: pathlib.Path, *, has_prompt: bool) -> None:
  """Refuses anything but the mean; newer files say it in one field."""
  fields = _load(path)
  modes = [k for k, v in fields.items() if k.startswith("pooling_mode_") and v]
  if (modes or [fields.get("pooling_mode")]) not in (
    ["pooling_mode_mean_tokens"],
    ["mean"],
  ):
    raise ValueError(f"{path}: expected the mean of all tokens, got {modes}")
  if has_prompt and fields.get("include_prompt") is False:
    raise ValueError(
      f"{path}: expected the mean of all tokens, got include_prompt=false beside"
      " a default prompt, whose tokens it leaves out"
    )
