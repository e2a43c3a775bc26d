"""Caches the tokens of SeqIO tasks.

The cache itself is `token_cache`; this module needs SeqIO.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from synthq_jax import extras
from synthq_jax.data import token_cache
from synthq_jax.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
  import seqio

__all__ = ["from_task"]

_CHUNK = 4096
"""Records in memory at the same time."""


def from_task(
  directory: str | os.PathLike,
  task: "str | seqio.Task",
  split: str,
  lengths: Mapping[str, int],
  *,
  names: Iterable[str] = ("query_id", "passage_id"),
  facts: Mapping[str, Any] | None = None,
  progress: Callable[[int], object] | None = None,
) -> token_cache.Cache:
  """Caches a split of a SeqIO task, in the order of its source.

  Args:
    directory: a folder that does not exist yet.
    task: the task or its name; no mixture, which has no end of its own.
    split: of the task, e.g. "train".
    lengths: TASK_FEATURE_LENGTHS: tokens of each feature, EOS included.
    names: features of the task that are strings.
    facts: noted in the manifest, with the names of task and split.
    progress: called with the number of records after each block.

  Returns:
    The finished cache, its columns named as the features are.

  Raises:
    ValueError: if the folder exists, it is a mixture, or the task lacks a
      feature, name or split.
  """
  with extras.required("seqio"):
    import seqio

  task = seqio.get_mixture_or_task(task) if isinstance(task, str) else task
  names = tuple(names)
  if isinstance(task, seqio.Mixture):
    raise ValueError(
      f"expected a task, got the mixture {task.name!r}: cache its tasks one by"
      f" one, {', '.join(each.name for each in task.tasks)}"
    )
  sizes = [f.vocabulary.vocab_size for f in task.output_features.values()]
  if task.output_features.keys() != lengths.keys() or split not in task.splits:
    raise ValueError(
      f"expected lengths of {sorted(task.output_features)} and a split of"
      f" {sorted(task.splits)} for task {task.name!r}, got lengths of"
      f" {sorted(lengths)} and split={split!r}"
    )
  rows = task.get_dataset(dict(lengths), split, shuffle=False, num_epochs=1)
  absent = set(names) - set(rows.element_spec)
  if absent:
    raise ValueError(
      f"expected names among the features {sorted(rows.element_spec)} of task"
      f" {task.name!r}, got {sorted(absent)}"
    )
  noted = {**(facts or {}), "task": task.name, "split": split}
  with token_cache.writing(
    directory, lengths, vocab_size=max(sizes), names=names, facts=noted
  ) as writer:
    rows = rows.as_numpy_iterator()
    while chunk := list(itertools.islice(rows, _CHUNK)):
      writer.append(
        {
          name: vocabulary_lib.pad([row[name] for row in chunk], length)
          for name, length in lengths.items()
        },
        {name: [row[name].decode() for row in chunk] for name in names},
      )
      if progress is not None:
        progress(len(chunk))
  return token_cache.load(directory)
