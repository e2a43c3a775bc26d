"""Hands a checkpoint on: another format, its vocabulary and its claim beside it.

What was trained on private queries without differential privacy lies under
`private/`, and does not leave it by accident.
"""

import json
import os
import pathlib

from synthq_jax import artifacts
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import inputs, results
from synthq_jax.privacy import rounding
from synthq_jax.privacy import statement as statement_lib

__all__ = ["CLAIM", "run"]

CLAIM = "PRIVACY.txt"
"""In the exported folder: what may be claimed about the model, in words."""

_NAMES = {"huggingface": "spiece.model"}


def run(
  checkpoint: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  step: int = 0,
  allow_private: bool = False,
) -> str:
  """Writes a checkpoint in another format, with what belongs to it.

  Formal guarantee: post-processing. The export is as private as the
  checkpoint, for the same unit and relation; it reads no private record.

  Args:
    checkpoint: a folder of any format that `t5_checkpoints.load` reads.
    to: the new folder, not there yet or empty (T5X: the parent of the step).
    format: one of `t5_checkpoints.FORMATS`.
    step: the step that a T5X checkpoint gets.
    allow_private: exports also what must not be shared.

  Returns:
    What was written and what holds for it, in words.

  Raises:
    ValueError: if the checkpoint must not be shared and `allow_private` does
      not say otherwise, or `t5_checkpoints.convert` refuses.
  """
  source = pathlib.Path(checkpoint)
  result = _result(source)
  hidden = _must_not_be_shared(source, result)
  if hidden and not allow_private:
    raise ValueError(
      f"{source}: expected a checkpoint that may be shared, got one under"
      f" {results.PRIVATE}/, trained on private queries without differential"
      " privacy: --allow_private exports it all the same"
    )
  made = t5_checkpoints.convert(source, to, format=format, step=step)
  vocabulary = _vocabulary(source, result)
  if vocabulary is not None:
    name = _NAMES.get(format, inputs.VOCABULARY_NAME)
    artifacts.write_atomically(made / name, vocabulary.read_bytes())
  if result is not None:
    words = statement_lib.in_words(result.statement)
    artifacts.write_atomically(made / CLAIM, f"{words}\n")
  return _summary(made, hidden, vocabulary, result)


def _summary(made, hidden: bool, vocabulary, result) -> str:
  """Says what was written, and what may be done with it."""
  lines = [f"written: {made}"]
  if vocabulary is None:
    lines.append("no vocabulary lies beside the checkpoint: add its own")
  if hidden:
    lines.append("PRIVATE: it gives private queries away; do not share it")
  elif result is None:
    lines.append("nothing is known here about the privacy of its training")
  else:
    claim = result.statement
    lines.append(
      f"epsilon = {rounding.epsilon(claim.epsilon)},"
      f" delta = {rounding.delta(claim.delta)} for one {claim.unit}: see {CLAIM}"
    )
  return "\n".join(lines)


def _result(source: pathlib.Path) -> results.Checkpoint | None:
  """Reads what a run says about its checkpoint.

  Returns None where no run made it, or one that pre-trained on public text.
  """
  if artifacts.read_fingerprint(source) is None:
    return None
  content = json.loads((source / artifacts.RESULT_NAME).read_text())
  if content["result"].get("_type") != results.Checkpoint.__name__:
    return None
  return artifacts.load(source, results.Checkpoint)


def _must_not_be_shared(
  source: pathlib.Path, result: results.Checkpoint | None
) -> bool:
  """Goes by the folder, wherever it was moved to, and by the claim."""
  if results.is_private_path(source.resolve().as_posix()):
    return True
  if result is None:
    return False
  return not results.is_shareable(result)


def _vocabulary(
  source: pathlib.Path, result: results.Checkpoint | None
) -> pathlib.Path | None:
  """Finds the vocabulary beside a checkpoint, or that of its run."""
  places = [inputs.vocabulary_beside(source)]
  if result is not None:
    depth = len(pathlib.PurePosixPath(result.directory).parts)
    root = source.resolve().parents[depth - 1]
    places.append(root / "prepare_data" / inputs.VOCABULARY_NAME)
  return next((place for place in places if place.is_file()), None)
