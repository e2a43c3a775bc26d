"""Refuses names of Hugging Face's hub in place of folders, with the remedy."""

import pathlib
import re
from collections.abc import Mapping

from synthq_jax.cli import flags
from synthq_jax.storage import object_store

__all__ = ["check"]

_HUB_NAME = re.compile(r"[\w.-]*[A-Za-z][\w.-]*/[\w.-]+")


def check(settings: Mapping[str, str | None]) -> None:
  """Refuses missing folders whose names may be models' on a hub.

  Args:
    settings: folders of models, by the flag that sets each.

  Raises:
    UsageError: with the command that downloads the model.
  """
  for setting, value in settings.items():
    path = pathlib.Path(value or "")
    if not value or object_store.is_url(value) or path.exists():
      continue
    if _HUB_NAME.fullmatch(value) and not path.parent.exists():
      folder = f"checkpoints/{path.name}"
      raise flags.UsageError(
        f"{setting}={value}: no such folder; to use this model of Hugging Face's"
        f" hub, run `hf download {value} --local-dir {folder}`, then give"
        f" {setting}={folder}"
      )
