"""Loads the public models that a run starts from and saves trained ones."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from synthq_jax.data import tokenizer_json
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.privacy import rounding
from synthq_jax.runtime import results, workspace
from synthq_jax.storage import artifacts
from synthq_jax.training import distributed

__all__ = [
  "VOCABULARY_NAME",
  "check_t5",
  "check_vocabulary",
  "load_public",
  "refuse_private",
  "save_checkpoint",
  "split_parameters",
  "vocabulary_beside",
]

VOCABULARY_NAME = "vocabulary.model"
"""File of the vocabulary next to the public checkpoint trained with it."""
_OTHER_NAMES = ("spiece.model", "sentencepiece.model")  # Hugging Face's, T5's


def vocabulary_beside(directory: pathlib.Path) -> pathlib.Path:
  """Returns the vocabulary file next to a checkpoint, even if missing."""
  names = (VOCABULARY_NAME, *_OTHER_NAMES)
  paths = [directory / name for name in names]
  return next((path for path in paths if path.is_file()), paths[0])


def load_public(
  directory: pathlib.Path, prepared: results.PublicDocuments
) -> tuple[dict[str, Any], t5_checkpoints.Shape]:
  """Loads the public model that a training starts from.

  Formal guarantee:
    A model trained from it is private only if the checkpoint is public. A
    checkpoint whose own statement says that it is not public is refused. The
    code cannot know what other checkpoints were trained on.

  Args:
    directory: folder of the checkpoint, in any format that
      `t5_checkpoints.load` reads.
    prepared: the documents, whose vocabulary the embedding must have room for.

  Returns:
    Parameters and shape.

  Raises:
    ValueError: if the checkpoint is missing, damaged, not finite, too small for
      the vocabulary, or the result of a training on private queries.
  """
  refuse_private(directory)
  params, model_config = t5_checkpoints.load(
    directory, token_ids=prepared.token_ids
  )
  t5_checkpoints.check_finite(directory, params)
  if model_config.vocab_size < prepared.vocab_size:
    raise ValueError(
      f"{directory}: expected a checkpoint for {prepared.vocab_size} ids, the"
      f" size of the vocabulary, got vocab_size={model_config.vocab_size}: give"
      " its own vocabulary, or a smaller prepare_data.Config.extra_ids"
    )
  return params, model_config


def refuse_private(directory: pathlib.Path) -> None:
  """Refuses a checkpoint whose own statement says that it is not public."""
  result = artifacts.load_kind(directory)
  if result == results.Checkpoint.__name__:
    claim = artifacts.load(directory, results.Checkpoint).statement
  else:  # a checkpoint that no stage made
    claim = t5_checkpoints.claim(directory)
  if claim is not None and not claim.is_public:
    epsilon = rounding.epsilon(claim.epsilon)
    raise ValueError(
      f"{directory}: expected a public checkpoint, got one that was trained on"
      f" private queries ({epsilon=!s}), which no later statement would count:"
      " start from a public one"
    )


def check_t5(
  directory: pathlib.Path, model: t5_config.T5Config | None = None
) -> None:
  """Refuses static vectors in place of a T5, and a shape other than `model`."""
  try:
    shape = t5_checkpoints.load_config(directory)
  except ValueError:
    if model is None:  # the reader's message says more
      return
    raise
  shape = t5_config.require(shape, directory)
  for field in t5_config.SHAPE if model else ():
    expected, actual = getattr(model, field), getattr(shape, field)
    if expected != actual:
      raise ValueError(
        f"{directory}: expected a checkpoint of RunConfig.model with"
        f" {field}={expected}, got {field}={actual}: give another CHECKPOINT, or"
        " the gin file of its size"
      )


def check_vocabulary(
  directory: pathlib.Path,
  space: workspace.Workspace,
  prepared: results.PreparedData,
) -> None:
  """Refuses a checkpoint that was trained with another vocabulary.

  Raises:
    ValueError: if the vocabulary or the tokenizer next to the checkpoint is not
      the one that the data was tokenized with.
  """
  stored = vocabulary_beside(directory)
  used = space.root / prepared.vocabulary
  if stored.is_file() and stored.read_bytes() != used.read_bytes():
    raise ValueError(
      f"{directory}: this checkpoint belongs to {stored.name} beside it, got"
      f" data tokenized with {used}: leave prepare_data.vocabulary empty"
    )
  pieces = vocabulary_lib.SentencePiece(str(used))
  tokenizer_json.find_added(directory, pieces)


def split_parameters(
  params: Mapping[str, Any], pattern: str, name: str, hint: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits parameters by path into trained and fixed ones.

  Args:
    params: arrays by path.
    pattern: regular expression that the whole path of a trained parameter
      matches.
    name: name of the setting, for the message.
    hint: end of the message.

  Raises:
    ValueError: if no path matches.
  """
  trained = {k: v for k, v in params.items() if re.fullmatch(pattern, k)}
  if not trained:
    raise ValueError(
      f"{name} must match a parameter, got trained={pattern!r}; there are"
      f" {', '.join(sorted(params)[:3])}, ...{hint}"
    )
  return trained, {k: v for k, v in params.items() if k not in trained}


def save_checkpoint(
  task: Any,
  directory: pathlib.Path,
  params: Any,
  model_config: t5_checkpoints.Shape,
  *,
  kind: str,
  save: Callable[..., None] = t5_checkpoints.save,
  **fields: Any,
) -> results.Checkpoint:
  """Writes a trained model and returns its result.

  If several processes trained it together, process 0 writes it.

  Args:
    task: a `stage.Task`.
    directory: folder of the model, private or not.
    params: nested dicts of arrays.
    model_config: the shape of the parameters.
    kind: "generator" or "retriever".
    save: function that writes parameters and shape into the directory.
    **fields: the other fields of the result.
  """
  if distributed.is_main():
    save(directory, params, model_config)
  return results.Checkpoint(
    directory=task.folders.relative(directory),
    kind=kind,
    row=task.get_row(),
    **fields,
  )
