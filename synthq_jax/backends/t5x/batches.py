"""Rows of a Poisson batch, for one host of several."""

import hashlib
from collections.abc import Mapping

import numpy as np

from synthq_jax.privacy import sampling

__all__ = [
  "EXAMPLE_ID",
  "IS_PADDING",
  "host_rows",
  "in_order",
  "with_ids",
  "without_examples",
]

EXAMPLE_ID = "example_id"
"""Feature [batch] int32 that names an example; of padding it is 0."""
IS_PADDING = sampling.IS_PADDING
"""Feature [batch] bool."""


def in_order(
  records: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], str]:
  """Sorts records by a hash of their features.

  A source may give them in another order on every machine, and at every start:
  one machine's third record would be another's seventh, and both would draw it.

  Args:
    records: arrays with one row per record.

  Returns:
    The records, and a hash of all of them, as private as they are, whatever
    order they were given in.
  """
  digests = _digests(records)
  order = sorted(range(len(digests)), key=digests.__getitem__)
  whole = hashlib.sha256(" ".join(sorted(records)).encode())
  for at in order:
    whole.update(digests[at])
  ordered = {name: values[order] for name, values in records.items()}
  return ordered, whole.hexdigest()


def with_ids(records: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Adds EXAMPLE_ID, a hash of each record's own features.

  A number by place, be it in the batch or in the data, would give all records
  behind one that is removed another id, and another dropout mask.

  Formal guarantee: an id depends on its record alone. Ids are as private as
  their records; equal records have equal ids, and so may different ones.

  Args:
    records: arrays with one row per record.
  """
  words = b"".join(digest[:4] for digest in _digests(records))
  return {**records, EXAMPLE_ID: np.frombuffer(words, "<i4").astype(np.int32)}


def _digests(records: Mapping[str, np.ndarray]) -> list[bytes]:
  """Returns a hash of each record."""
  names = sorted(records)
  rows = zip(*(np.ascontiguousarray(records[n]) for n in names), strict=True)
  return [
    hashlib.sha256(b"".join(x.tobytes() for x in row)).digest() for row in rows
  ]


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
  >>> host_rows({"x": np.array([[5], [6], [7]])}, drawn, shard=0, num_shards=2)
  {'x': array([[7],
         [5]]), 'is_padding_example': array([False, False])}

  Args:
    records: arrays with one row per record, the same on every host; from
      `with_ids` for `gradients.split`.
    drawn: the whole batch.
    shard: which part, from 0.
    num_shards: how many parts of equal size.

  Returns:
    The rows of each feature, zeros for padding, and a mask.
  """
  size = len(drawn.indices) // num_shards
  part = slice(shard * size, (shard + 1) * size)
  is_padding = drawn.is_padding[part]
  chosen = np.where(is_padding, 0, drawn.indices[part])
  rows = {name: values[chosen] for name, values in records.items()}
  for values in rows.values():
    values[is_padding] = 0
  return rows | {IS_PADDING: is_padding}


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
