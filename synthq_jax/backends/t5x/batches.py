"""Records in an order, and with ids, that follow from the records alone."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["EXAMPLE_ID", "in_order", "with_ids"]

EXAMPLE_ID = "example_id"
"""Feature [batch] int32 that names an example; of padding it is 0."""


def in_order(
  records: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], str]:
  """Sorts records by a hash of their features, and adds their EXAMPLE_ID.

  A source may give them in another order on every machine, and at every start:
  one machine's third record would be another's seventh, and both would draw it.

  Args:
    records: arrays with one row per record.

  Returns:
    The records `with_ids`, and a hash of all of them, as private as they are,
    whatever order they were given in.
  """
  digests = _digests(records)
  order = sorted(range(len(digests)), key=digests.__getitem__)
  whole = hashlib.sha256(" ".join(sorted(records)).encode())
  for at in order:
    whole.update(digests[at])
  ordered = {name: values[order] for name, values in records.items()}
  return with_ids(ordered, [digests[at] for at in order]), whole.hexdigest()


def with_ids(
  records: Mapping[str, np.ndarray], digests: Sequence[bytes] | None = None
) -> dict[str, np.ndarray]:
  """Adds EXAMPLE_ID, a hash of each record's own features.

  A number by place, be it in the batch or in the data, would give all records
  behind one that is removed another id, and another dropout mask.

  Formal guarantee: an id depends on its record alone. Ids are as private as
  their records; equal records have equal ids, and so may different ones.

  Args:
    records: arrays with one row per record.
    digests: the records' hashes, where they are known.
  """
  digests = _digests(records) if digests is None else digests
  words = b"".join(digest[:4] for digest in digests)
  return {**records, EXAMPLE_ID: np.frombuffer(words, "<i4").astype(np.int32)}


def _digests(records: Mapping[str, np.ndarray]) -> list[bytes]:
  """Returns a hash of each record."""
  names = sorted(records)
  rows = zip(*(np.ascontiguousarray(records[n]) for n in names), strict=True)
  return [
    hashlib.sha256(b"".join(x.tobytes() for x in row)).digest() for row in rows
  ]
