"""Sorts records and gives them ids, as functions of the records alone."""

import collections
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["EXAMPLE_ID", "count_records", "in_order", "with_ids"]

EXAMPLE_ID = "example_id"
"""Name of the feature [batch] int32 with an example's id, 0 for padding."""


def in_order(
  records: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], str]:
  """Sorts records by a hash of their features and adds their EXAMPLE_ID.

  A source may yield records in another order on every machine and at every start:
  one machine's third record would be another's seventh, and both would draw it.

  Args:
    records: arrays with one row per record.

  Returns:
    The records with ids, and a hash of all records that does not depend on their
    order. The hash is as private as the records.
  """
  digests = _compute_digests(records)
  order = sorted(range(len(digests)), key=digests.__getitem__)
  total = hashlib.sha256(" ".join(sorted(records)).encode())
  for row in order:
    total.update(digests[row])
  ordered = {name: values[order] for name, values in records.items()}
  return with_ids(ordered, [digests[row] for row in order]), total.hexdigest()


def with_ids(
  records: Mapping[str, np.ndarray], digests: Sequence[bytes] | None = None
) -> dict[str, np.ndarray]:
  """Adds EXAMPLE_ID, a hash of each record's own features.

  If a position in the batch or in the data were the id, removing a record would
  change the ids of all later records, and so their dropout masks.

  Formal guarantee: an id depends on its record alone. Ids are as private as
  their records. Equal records have equal ids; different records may have, too.

  Args:
    records: arrays with one row per record.
    digests: the hashes of the records, if they are known.
  """
  digests = _compute_digests(records) if digests is None else digests
  words = b"".join(digest[:4] for digest in digests)
  return {**records, EXAMPLE_ID: np.frombuffer(words, "<i4").astype(np.int32)}


def count_records(
  records: Mapping[str, np.ndarray],
) -> collections.Counter[bytes]:
  """Counts equal records, by a hash of their features without EXAMPLE_ID.

  Args:
    records: arrays with one row per record; {}: no record.
  """
  features = {n: x for n, x in records.items() if n != EXAMPLE_ID}
  return collections.Counter(_compute_digests(features))


def _compute_digests(records: Mapping[str, np.ndarray]) -> list[bytes]:
  """Computes a hash of each record."""
  names = sorted(records)
  rows = zip(*(np.ascontiguousarray(records[n]) for n in names), strict=True)
  return [
    hashlib.sha256(b"".join(x.tobytes() for x in row)).digest() for row in rows
  ]
