"""Reads all records of a SeqIO task through a model's feature converter.

The tasks of `tasks` work with seqio.EncDecFeatureConverter and T5X Retrieval's
DualEncoderFeatureConverter.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
  leaves_out: bool = False,
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
    leaves_out: whether to leave out every third raw record, from the first on,
      before the task's preprocessors (those behind the cache, if it is read).
      Preprocessors that look at one raw record at a time make the same of the
      others.

  Returns:
    One array for each of the model's features, one row for each record.
    With `leaves_out`, {} if no record is left.

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
  if leaves_out:
    steps = list(task.preprocessors)
    is_cache = [isinstance(x, seqio.CacheDatasetPlaceholder) for x in steps]
    first = is_cache.index(True) + 1 if use_cached and any(is_cache) else 0
    steps.insert(first, _leave_out_thirds)
    task = task.replace(preprocessors=steps)
  rows = seqio.get_dataset(
    task,
    dict(lengths),
    dataset_split=split,
    shuffle=False,
    num_epochs=1,
    feature_converter=converter,
    use_cached=use_cached,
    seed=0,
  )
  blocks = list(rows.batch(_CHUNK).as_numpy_iterator())
  if not blocks and leaves_out:
    return {}
  if not blocks:
    raise ValueError(
      f"expected records in split {split!r} of task {task.name!r}, got none"
    )
  joined = {n: [block[n] for block in blocks] for n in blocks[0]}
  return {name: np.concatenate(parts) for name, parts in joined.items()}


def _leave_out_thirds(rows: Any) -> Any:
  """Leaves out rows 0, 3, 6, ... of a tf.data.Dataset."""
  others = rows.enumerate().filter(lambda number, _: number % 3 > 0)
  return others.map(lambda _, row: row)
