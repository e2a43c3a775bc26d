"""Rows of a Poisson batch, for one host of several."""

from collections.abc import Mapping

import numpy as np

from synthq_jax.privacy import sampling

__all__ = ["EXAMPLE_ID", "IS_PADDING", "host_rows", "without_examples"]

EXAMPLE_ID = "example_id"
"""Feature [batch] int32 that names an example; of padding it is 0."""
IS_PADDING = "is_padding_example"
"""Feature [batch] bool."""


def host_rows(
  records: Mapping[str, np.ndarray],
  drawn: sampling.Batch,
  *,
  shard: int,
  num_shards: int,
) -> dict[str, np.ndarray]:
  """Returns a host's part of the batch that all hosts drew alike.

  >>> drawn = sampling.Batch(np.array([2, 0, -1, -1]),
  ...                        np.array([False, False, True, True]))
  >>> host_rows({"x": np.array([[5], [6], [7]])}, drawn, shard=1, num_shards=2)
  {'x': array([[0],
         [0]]), 'example_id': array([0, 0], dtype=int32), \
'is_padding_example': array([ True,  True])}

  Args:
    records: arrays with one row per record, the same on every host.
    drawn: the whole batch.
    shard: which part, from 0.
    num_shards: how many parts of equal size.

  Returns:
    The rows of each feature, zeros for padding, with their ids and a mask.
  """
  size = len(drawn.indices) // num_shards
  part = slice(shard * size, (shard + 1) * size)
  is_padding = drawn.is_padding[part]
  ids = np.where(is_padding, 0, drawn.indices[part]).astype(np.int32)
  rows = {name: values[ids] for name, values in records.items()}
  for values in rows.values():
    values[is_padding] = 0
  return rows | {EXAMPLE_ID: ids, IS_PADDING: is_padding}


def without_examples(
  records: Mapping[str, np.ndarray], size: int
) -> dict[str, np.ndarray]:
  """Returns `size` rows of padding.

  Args:
    records: as in `host_rows`.
    size: rows of one host.
  """
  drawn = sampling.Batch(np.full(size, -1), np.ones(size, bool))
  return host_rows(records, drawn, shard=0, num_shards=1)
