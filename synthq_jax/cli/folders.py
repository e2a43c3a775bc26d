"""Refuses missing folders for which it has a suggestion; others pass."""

import argparse
import difflib
import pathlib
import re
from typing import Any

from synthq_jax.cli import flags
from synthq_jax.storage import object_store

__all__ = ["check_flags", "check_run", "explain_missing"]

_HUB_NAME = re.compile(r"[\w.-]*[A-Za-z][\w.-]*/[\w.-]+")
_FOLDERS = ("checkpoint", "bert", "queries", "ranking", "workdir", "workdirs")
"""Flags of tools whose values are folders."""
_MODELS = ("checkpoint", "bert")
"""Flags whose value may be a model's name on Hugging Face's hub, by mistake."""


def check_run(config: Any) -> None:
  """Refuses missing checkpoints of a run, if there is a suggestion to make.

  Args:
    config: a `plan.RunConfig`.

  Raises:
    UsageError: if a similar folder exists, or the name may be a model's on a hub.
  """
  named = {
    "--gin.CHECKPOINT": config.checkpoint,
    "--gin.ENCODER": config.encoder.folder,
  }
  for setting, value in named.items():
    if text := explain_missing(setting, value, is_model=True):
      raise flags.UsageError(text)


def check_flags(options: argparse.Namespace) -> None:
  """Refuses missing folders of a tool's flags, if there is a suggestion to make."""
  for name in _FOLDERS:
    values = getattr(options, name, None) or ()
    for value in [values] if isinstance(values, str) else values:
      text = explain_missing(f"--{name}", value, is_model=name in _MODELS)
      if text:
        raise flags.UsageError(text)


def explain_missing(setting: str, value: str, *, is_model: bool = False) -> str:
  """Returns one line on a missing folder, with a suggestion.

  Args:
    setting: the flag, for the message.
    value: the folder.
    is_model: whether the value may be a model's name on Hugging Face's hub.

  Returns:
    The line; "" if the folder exists, is a URL, or nothing can be suggested.
  """
  path = pathlib.Path(value)
  if not value or object_store.is_url(value) or path.exists():
    return ""
  if near := _list_near(path):
    return (
      f"{setting}={value}: no such folder; did you mean {' or '.join(near)}?"
    )
  if is_model and _HUB_NAME.fullmatch(value) and not path.parent.exists():
    folder = f"checkpoints/{path.name}"
    return (
      f"{setting}={value}: no such folder; to use this model of Hugging Face's"
      f" hub, run `hf download {value} --local-dir {folder}`, then give"
      f" {setting}={folder}"
    )
  return ""


def _list_near(path: pathlib.Path) -> list[str]:
  """Returns paths in which a similar folder replaces the first missing part."""
  missing = path
  while not missing.parent.exists():
    missing = missing.parent
  if not missing.parent.is_dir():
    return []
  try:
    siblings = [
      entry.name for entry in missing.parent.iterdir() if entry.is_dir()
    ]
  except OSError:
    return []
  rest = path.relative_to(missing)
  similar = difflib.get_close_matches(missing.name, sorted(siblings), 3)
  return [str(missing.with_name(name) / rest) for name in similar]
