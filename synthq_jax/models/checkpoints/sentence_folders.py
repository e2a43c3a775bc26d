"""Folders of sentence-transformers: which model they hold, and what comes behind it.

Only what is read here in full is accepted: the mean of a model's outputs. A layer
behind it that nobody reads would give other vectors without a word.
"""

import json
import pathlib

from synthq_jax import artifacts

__all__ = ["mean_pooled"]

_MODULES = "modules.json"


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
      _check_pooling(path / "config.json")
    elif kind != "Normalize":  # lengths change no cosine
      raise ValueError(
        f"{folder / _MODULES}: expected a model and the mean of its outputs, got"
        f" a module {kind!r} besides: without it vectors are others"
      )
  return place


def _check_pooling(path: pathlib.Path) -> None:
  """Refuses anything but the mean; newer files say it in one field."""
  try:
    fields = artifacts.unsealed(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{str(path)!r}: expected a JSON object, got {type(error).__name__}"
    ) from error
  modes = [k for k, v in fields.items() if k.startswith("pooling_mode_") and v]
  if (modes or [fields.get("pooling_mode")]) not in (
    ["pooling_mode_mean_tokens"],
    ["mean"],
  ):
    raise ValueError(f"{path}: expected the mean of all tokens, got {modes}")
