"""Reads a SeqIO task whole, as a model's feature converter shows it.

Tasks of `tasks` need no converter of ours: seqio.EncDecFeatureConverter and T5X
Retrieval's DualEncoderFeatureConverter take them as they are.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from synthq_jax import extras

if TYPE_CHECKING:
  import seqio

__all__ = ["read_task"]

_CHUNK = 4096
"""Records that are converted together."""


def read_task(
  task: "str | seqio.Task",
  split: str,
  lengths: Mapping[str, int],
  converter: "seqio.FeatureConverter",
  *,
  use_cached: bool = False,
) -> dict[str, np.ndarray]:
  """Reads a split of a task once, as a model's converter shows it.

  For samplers that ask for records by number: each record once, in the order in
  which the task gives them. A preprocessor that shuffles gives every machine
  another one; `backends.t5x.batches.in_order` sorts them.

  Args:
    task: the task or its name; no mixture, whose records have no numbers.
    split: of the task, e.g. "train".
    lengths: TASK_FEATURE_LENGTHS.
    converter: makes the model's features; it must not pack.
    use_cached: whether to read what seqio's cache_tasks_main wrote.

  Returns:
    One array for each of the model's features, one row for each record.

  Raises:
    ValueError: if it is a mixture, records are to be packed, or there are none.
  """
  with extras.required("seqio"):
    import seqio

  task = seqio.get_mixture_or_task(task) if isinstance(task, str) else task
  if isinstance(task, seqio.Mixture):
    raise ValueError(
      f"expected a task, got the mixture {task.name!r}, which repeats and mixes"
      " its records: make one task of them, so that each is there once"
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
    seed=0,
  )
  blocks = list(rows.batch(_CHUNK).as_numpy_iterator())
  if not blocks:
    raise ValueError(
      f"expected records in split {split!r} of task {task.name!r}, got none"
    )
  joined = {n: [block[n] for block in blocks] for n in blocks[0]}
  return {name: np.concatenate(parts) for name, parts in joined.items()}
