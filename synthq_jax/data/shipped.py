"""Where the checkpoint that comes with the package lies."""

import os
import pathlib
import re
import shutil

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.storage import object_store, stores

__all__ = [
  "DIRECTORY",
  "EXTRA_IDS",
  "VOCABULARY",
  "checkpoint",
  "vocabulary",
]

_STEP = re.compile(r"checkpoint_\d+")

DIRECTORY = pathlib.Path(__file__).parents[1] / "assets" / "demo_t5"
"""params.safetensors, config.json and vocabulary.model; docs/lab/shipped_t5 has
the card, the sources and the script that makes them."""

VOCABULARY = DIRECTORY / "vocabulary.model"
"""Its SentencePiece vocabulary, trained on public text."""

EXTRA_IDS = 32
"""Sentinels behind the pieces of the vocabulary."""


def checkpoint(named: str) -> pathlib.Path:
  """Returns the folder of a checkpoint; a URL's is downloaded, with the claim
  beside it, so that no private one passes for a public one.

  Args:
    named: a path or URL; "": the package's.
  """
  if not object_store.is_url(named):
    return pathlib.Path(named or DIRECTORY)
  folder = pathlib.Path(stores.local(named))
  parent, _, name = named.rstrip("/").rpartition("/")
  if _STEP.fullmatch(name):  # T5X's: what was promised lies in MODEL_DIR
    from synthq_jax.models import t5_checkpoints  # loads JAX, for URLs alone

    for beside in t5_checkpoints.CLAIM_FILES:
      found = pathlib.Path(stores.local(f"{parent}/{beside}", missing_ok=True))
      if found.is_file():
        (folder / beside).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, folder / beside)
  return folder


def vocabulary(
  path: str | os.PathLike | None = None,
) -> vocabulary_lib.SentencePiece:
  """Returns the vocabulary of a file; None: the package's."""
  if path is not None:
    return vocabulary_lib.load(path)
  return vocabulary_lib.load(VOCABULARY, extra_ids=EXTRA_IDS)
