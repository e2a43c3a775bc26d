"""Checks a batch of pairs and puts it into columns."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing
from synthq_jax.optim import clipping

__all__ = [
  "Pairs",
  "mask_finite_rows",
  "read",
  "read_ids",
  "replace_uncounted",
]

_FIELDS = (
  "queries", "documents", "negatives", "has_query", "document_ids",
  "negative_ids", "example_id",
)  # fmt: skip
"""Fields that every method takes."""


class Pairs(NamedTuple):
  """A batch of pairs; columns are the documents, then all hard negatives."""

  queries: Any  # [batch, ...], an array or a tree of arrays
  columns: Any  # [batch * (1 + hard), ...], likewise
  is_padding: jax.Array  # bool [batch]
  has_query: jax.Array  # bool [batch]
  is_duplicate: jax.Array  # bool [batch, batch * (1 + hard)]

  @property
  def size(self) -> int:
    """Number of rows of the batch."""
    return len(self.is_padding)

  @property
  def hard(self) -> int:
    """Number of hard negatives of each row."""
    return self.is_duplicate.shape[1] // self.size - 1

  @property
  def documents(self) -> Any:
    """The rows' own documents [batch, ...]."""
    return jax.tree.map(lambda x: x[: self.size], self.columns)

  @property
  def negatives(self) -> Any:
    """All hard negatives [batch * hard, ...]."""
    return jax.tree.map(lambda x: x[self.size :], self.columns)


def read(
  batch: typing.Batch,
  is_padding_example: jax.Array | None,
  *,
  max_batch_size: int,
  hard_negatives: int = 0,
  more_fields: Collection[str] = (),
) -> Pairs:
  """Checks a batch against its declaration and puts it into columns.

  Args:
    batch: as in `contrastive.ContrastiveGrad`.
    is_padding_example: bool [batch], or None.
    max_batch_size: declared largest number of pairs.
    hard_negatives: declared number for each pair.
    more_fields: names of fields that the method reads itself.

  Returns:
    The pairs; a missing hard negative is a duplicate in every row.

  Raises:
    ValueError: if the batch does not match its declaration.
  """
  _check_fields(batch, (*_FIELDS, *more_fields))
  size, count = (
    clipping.count_rows(batch[name]) for name in ("queries", "documents")
  )
  queries, documents = (
    jax.tree.map(jnp.asarray, batch[name]) for name in ("queries", "documents")
  )
  if count != size:
    raise ValueError(
      f"expected a document for each query, got {size} queries and "
      f"{count} documents: give them one leading axis [batch]"
    )
  if size > max_batch_size:
    raise ValueError(
      f"expected at most max_batch_size={max_batch_size} pairs with padding, "
      f"got a batch of {size}: the noise is made for the declared maximum"
    )
  return Pairs(
    queries,
    _join_columns(documents, batch.get("negatives"), hard_negatives),
    _read_flags(is_padding_example, size, "is_padding_example", False),
    _read_flags(batch.get("has_query"), size, "has_query", True),
    _find_duplicates(batch, size, hard_negatives),
  )


def _check_fields(batch: typing.Batch, fields: Collection[str]) -> None:
  """Refuses a batch that lacks a field, or has one that nothing would read."""
  if not isinstance(batch, Mapping):
    raise ValueError(
      "expected a batch as a mapping of queries, documents and other fields, got"
      f" {type(batch).__name__}: pass a dict"
    )
  missing = [name for name in ("queries", "documents") if name not in batch]
  if missing:
    raise ValueError(
      f"expected a batch with queries and documents, got {sorted(batch)}: add "
      f"{missing[0]}"
    )
  for name in ("queries", "documents"):
    if isinstance(batch[name], list):
      raise ValueError(
        f"expected {name} as an array with a row for each pair, or a dict of"
        " such arrays, got a list: write np.stack, and pad ids to one length"
      )
  unread = sorted(set(batch) - set(fields))
  if unread:
    raise ValueError(
      f"expected fields among {sorted(fields)} with this method, got {unread[0]},"
      " which nothing would read: leave it out, or correct its name"
    )


def _join_columns(
  documents: typing.Params, negatives: typing.Params | None, hard: int
) -> typing.Params:
  """Returns the documents, then the hard negatives of one row after the other."""
  if negatives is None and hard == 0:
    return documents
  shape = jax.tree.map(lambda x: (len(x), hard, *x.shape[1:]), documents)
  got = None if negatives is None else jax.tree.map(jnp.shape, negatives)
  if got != shape:
    raise ValueError(
      f"expected negatives of shape {shape} for a loss with hard_negatives="
      f"{hard}, got shape={got}: declare them, and pad them like documents"
    )
  return jax.tree.map(
    lambda x, more: jnp.concatenate(
      [x, jnp.asarray(more).reshape(-1, *x.shape[1:])]
    ),
    documents,
    negatives,
  )


def _read_flags(
  flags: jax.Array | None, size: int, name: str, default: bool
) -> jax.Array:
  if flags is None:
    return jnp.full(size, default)
  if jnp.shape(flags) != (size,):
    raise ValueError(
      f"expected {name} of shape ({size},), got shape={jnp.shape(flags)}: one "
      "flag for each pair"
    )
  return jnp.asarray(flags, bool)


def _find_duplicates(batch: typing.Batch, size: int, hard: int) -> jax.Array:
  """Masks columns that hold another copy of the row's document, or no document."""
  columns = size * (1 + hard)
  if "document_ids" not in batch:
    return jnp.zeros((size, columns), bool)
  own = read_ids(batch, "document_ids")
  ids = own
  if hard:
    if "negative_ids" not in batch:
      raise ValueError(
        "expected negative_ids [batch, hard] beside document_ids, got "
        f"{sorted(batch)}: give -1 to a negative that is missing"
      )
    negatives = read_ids(batch, "negative_ids").reshape(-1)
    ids = jnp.concatenate([own, negatives])
  same = (own[:, None] == ids[None, :]) & ~jnp.eye(size, columns, dtype=bool)
  # Not "< 0": hashes of 64 bits lose their upper half, and half are negative.
  is_missing = (ids == -1) & (jnp.arange(columns) >= size)  # a negative
  return same | is_missing[None, :]


def read_ids(batch: typing.Batch, name: str) -> jax.Array:
  """Returns a field of ids as int32; refuses ids that are no integers.

  Of larger ids the lower 32 bits stay, which keeps -1.
  """
  ids = batch[name] if hasattr(batch[name], "dtype") else np.array(batch[name])
  if not jnp.issubdtype(ids.dtype, np.integer):
    raise ValueError(
      f"expected integers in {name}, got {ids.dtype}: give an array of a hash of"
      " each id, such as zlib.crc32"
    )
  return jnp.asarray(ids.astype(np.int32))


def mask_finite_rows(vectors: jax.Array) -> jax.Array:
  """Masks the finite vectors: bool [batch]."""
  return jnp.isfinite(vectors).all(axis=1)


def replace_uncounted(examples: Any, counted: jax.Array) -> Any:
  """Replaces examples that do not count by those that do, in turn.

  Examples that do not count may hold anything, and zero times that may be nan.
  They are replaced in turn, so that an encoder that normalises over its batch
  sees the mean of real examples.

  Args:
    examples: arrays with a leading axis [batch].
    counted: bool [batch].
  """
  rows = jnp.arange(len(counted))
  first = jnp.argsort(~counted, stable=True)  # counted examples come first
  in_turn = first[rows % jnp.maximum(counted.sum(), 1)]
  positions = jnp.where(counted, rows, in_turn)
  return jax.tree.map(lambda x: x[positions], examples)
