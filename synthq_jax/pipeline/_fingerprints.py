"""What results depend on beyond their settings: files and versions."""

import hashlib
import os
import pathlib

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import t5_checkpoints

__all__ = ["of_checkpoint", "of_file", "versions"]


def versions() -> str:
  """Names what draws batches and noise: another version, another release."""
  return f"jax {jax.__version__}, numpy {np.__version__}"


def of_checkpoint(directory: pathlib.Path) -> str:
  """Fingerprints the public checkpoint that a stage starts from."""
  return artifacts.fingerprint(*map(of_file, t5_checkpoints.files(directory)))


def of_file(path: str | os.PathLike) -> str:
  """Digests a file; "train" stands for a vocabulary that is made."""
  path = pathlib.Path(path)
  if path == pathlib.Path("train"):
    return "train"
  if not path.is_file():
    raise ValueError(
      f"expected a file of a checkpoint, got no file {path}: check CHECKPOINT"
      " and VOCABULARY"
    )
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
