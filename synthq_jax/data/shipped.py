"""Locates the checkpoint and the vocabulary that come with the package."""

import os
import pathlib

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.storage import object_store, stores

__all__ = [
  "DIRECTORY",
  "EXTRA_IDS",
  "VOCABULARY",
  "checkpoint",
  "vocabulary",
]

DIRECTORY = pathlib.Path(__file__).parents[1] / "assets" / "demo_t5"
"""Folder with params.safetensors, config.json and vocabulary.model.

docs/lab/shipped_t5 has their card, sources and the script that makes them."""

VOCABULARY = DIRECTORY / "vocabulary.model"
"""SentencePiece vocabulary of the checkpoint, trained on public text."""

EXTRA_IDS = 32
"""Number of sentinels behind the pieces of the vocabulary."""


def checkpoint(named: str) -> pathlib.Path:
  """Returns the local folder of a checkpoint and downloads a URL.

  Args:
    named: a path or URL; "": the package's checkpoint.
  """
  if not object_store.is_url(named):
    return pathlib.Path(named or DIRECTORY)
  return pathlib.Path(stores.local(named))


def vocabulary(
  path: str | os.PathLike | None = None,
) -> vocabulary_lib.SentencePiece:
  """Loads the vocabulary of a file; None: the package's vocabulary."""
  if path is not None:
    return vocabulary_lib.load(path)
  return vocabulary_lib.load(VOCABULARY, extra_ids=EXTRA_IDS)
