"""What several stages read of prepared data and checkpoints."""

import json
import pathlib

import numpy as np
from jaxtyping import Int

from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import results, workspace

__all__ = [
    "checkpoint_directory",
    "documents",
    "is_private",
    "load_public",
    "test_set",
    "vocabulary",
    "with_prefix",
]


def is_private(path: str) -> bool:
  """Whether a path of a result must not be shared."""
  return pathlib.PurePosixPath(path).parts[0] == results.PRIVATE


def documents(space: workspace.Workspace, prepared: results.PreparedData):
  """Returns ids [document], tokens [document, length] and texts."""
  folder = space.root / prepared.directory
  arrays = np.load(folder / "documents.npz")
  texts = []
  with open(folder / "corpus.jsonl", encoding="utf-8") as stream:
    for line in stream:
      entry = json.loads(line)
      texts.append(f"{entry['title']} {entry['text']}".strip())
  return arrays["ids"], arrays["tokens"], texts


def vocabulary(space: workspace.Workspace, prepared: results.PreparedData):
  """Loads the vocabulary of the run."""
  return vocabulary_lib.load(
      space.root / prepared.vocabulary, extra_ids=prepared.extra_ids
  )


def with_prefix(
    tokens: Int[np.ndarray, "row length"], vocabulary, prefix: str
) -> Int[np.ndarray, "row longer"]:
  """Puts the ids of the prefix before every row; rows grow by that much."""
  head = np.array(vocabulary.encode(prefix), np.int32)
  head = np.broadcast_to(head, (len(tokens), len(head)))
  return np.concatenate([head, tokens], axis=1)


def checkpoint_directory(
    space: workspace.Workspace, checkpoint: results.Checkpoint | None
) -> pathlib.Path:
  """Returns where a checkpoint lies; None is the shipped one."""
  if checkpoint is None:
    return shipped.DIRECTORY
  return space.root / checkpoint.directory


def load_public(checkpoint: str, prepared: results.PreparedData):
  """Loads the public T5 that a training starts from.

  Args:
    checkpoint: its directory; empty: the shipped one.
    prepared: whose vocabulary it must have room for.

  Returns:
    Parameters and shape.

  Raises:
    ValueError: if it is missing, damaged or too small for the vocabulary.
  """
  directory = pathlib.Path(checkpoint or shipped.DIRECTORY)
  params, model_config = t5_checkpoints.load(directory)
  if model_config.vocab_size < prepared.vocab_size:
    raise ValueError(
        f"{directory}: expected a checkpoint for {prepared.vocab_size} ids, the"
        f" size of the vocabulary, got vocab_size={model_config.vocab_size}:"
        " give the vocabulary that belongs to it"
    )
  return params, model_config
