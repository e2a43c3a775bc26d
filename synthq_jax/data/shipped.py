"""Where the checkpoint that comes with the package lies."""

import os
import pathlib

from synthq_jax import stores
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = ["DIRECTORY", "EXTRA_IDS", "VOCABULARY", "checkpoint", "vocabulary"]

DIRECTORY = pathlib.Path(__file__).parents[1] / "assets" / "demo_t5"
"""params.safetensors, config.json, vocabulary.model and MODEL_CARD.md."""

VOCABULARY = DIRECTORY / "vocabulary.model"
"""Its SentencePiece vocabulary, trained on public text."""

EXTRA_IDS = 32
"""Sentinels behind the pieces of the vocabulary."""


def checkpoint(named: str) -> pathlib.Path:
  """Returns the folder of a checkpoint; a URL's is downloaded.

  Args:
    named: a path or URL; "": the package's.
  """
  return pathlib.Path(stores.local(named) if named else DIRECTORY)


def vocabulary(
  path: str | os.PathLike | None = None,
) -> vocabulary_lib.SentencePiece:
  """Returns the vocabulary of a file; None: the package's."""
  if path is not None:
    return vocabulary_lib.load(path)
  return vocabulary_lib.load(VOCABULARY, extra_ids=EXTRA_IDS)
