"""Reads all records of a SeqIO task through a model's feature converter.

The tasks of `tasks` work with seqio.EncDecFeatureConverter and T5X Retrieval's
DualEncoderFeatureConverter.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from synthq_jax import extras

if TYPE_CHECKING:
  import seqio

__all__ = ["read_task"]

_CHUNK = 4096
"""Number of records that are converted together."""


def read_task(
  task: "str | seqio.Task",
  split: str,
  lengths: Mapping[str, int],
  converter: "seqio.FeatureConverter",
  *,
  use_cached: bool = False,
  seed: int = 0,
) -> dict[str, np.ndarray]:
  """Reads each record of a task's split once, as features of a model.

  Samplers ask for records by number. The records are in the order of the task. A
  preprocessor that shuffles gives every machine another order;
  `backends.t5x.batches.in_order` sorts them.

  Args:
    task: the task or its name; no mixture, whose records have no numbers.
    split: a split of the task, e.g. "train".
    lengths: TASK_FEATURE_LENGTHS.
    converter: makes the model's features; it must not pack.
    use_cached: whether to read the cache of seqio's cache_tasks_main.
    seed: seed of preprocessors that draw at random. SeqIO seeds them by a record's
      place, so a record more or less changes those behind it.

  Returns:
    One array for each of the model's features, one row for each record.

  Raises:
    ValueError: if the task is a mixture, the converter packs, or the split has no
      records.
  """
  with extras.required("seqio"):
    import seqio

  task = seqio.get_mixture_or_task(task) if isinstance(task, str) else task
  if isinstance(task, seqio.Mixture):
    raise ValueError(
      f"expected a task, got the mixture {task.name!r}, which repeats and mixes"
      " its records: make one task of them, which holds each record once"
    )
  if converter.pack:
    raise ValueError(
      "expected pack=False, got pack=True: packing joins several records in one"
      " row, which would be clipped as one; set DatasetConfig.pack = False"
    )
  rows = seqio.get_dataset(
    task,
    dict(lengths),
    dataset_split=split,
    shuffle=False,
    num_epochs=1,
    feature_converter=converter,
    use_cached=use_cached,
    seed=seed,
  )
  blocks = list(rows.batch(_CHUNK).as_numpy_iterator())
  if not blocks:
    raise ValueError(
      f"expected records in split {split!r} of task {task.name!r}, got none"
    )
  joined = {n: [block[n] for block in blocks] for n in blocks[0]}
  return {name: np.concatenate(parts) for name, parts in joined.items()}
