"""Cuts documents into passages: windows of tokens that repeat the title.

Formal guarantee: a document's passages are a function of that document and of
settings. `best` chooses one for a query by that query and its own document alone,
so that a record's passage moves with no other record.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks, collection, sentence_tokens
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = ["Cut", "Passages", "best", "cut", "windows"]


class Cut:
  """Rows of tokens on disk that are read to fewer columns, as `vocabulary.cut`."""

  def __init__(self, rows: blocks.Rows | np.ndarray, length: int):
    """Keeps where rows are read, and how many columns of them."""
    self._rows = rows
    self.shape = (len(rows), length)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(
    self, rows: Int[np.ndarray, " some"] | slice
  ) -> Int[np.ndarray, "some length"]:
    """Reads some rows."""
    return vocabulary_lib.cut(self._rows[rows], self.shape[1])


Tokens = blocks.Rows | Cut | sentence_tokens.TextRows | np.ndarray
"""Rows of tokens, in memory or read from disk where they are used."""


@dataclasses.dataclass(frozen=True)
class Passages:
  """A collection as encoders and generators read it.

  Attributes:
    ids: of the documents, in the order of the collection [document].
    tokens: of the passages, in the order of their documents [passage, length];
      they stay on disk.
    owners: the position of each passage's document, ascending [passage]; every
      document has one.
  """

  ids: np.ndarray
  tokens: Tokens
  owners: Int[np.ndarray, " passage"]

  def cut_at(self, length: int) -> "Passages":
    """Returns the same collection with so many tokens of each passage."""
    if length == self.tokens.shape[1]:
      return self
    return dataclasses.replace(self, tokens=Cut(self.tokens, length))

  @property
  def are_documents(self) -> bool:
    """Whether every document is one passage."""
    return len(self.ids) == len(self.owners)

  def of(
    self, documents: Int[np.ndarray, " some"]
  ) -> tuple[Int[np.ndarray, " some"], Int[np.ndarray, " some"]]:
    """Returns the first passage of documents, and the one past their last."""
    return (
      np.searchsorted(self.owners, documents, side="left"),
      np.searchsorted(self.owners, documents, side="right"),
    )


def windows(
  title: Sequence[int],
  text: Sequence[int],
  *,
  length: int,
  stride: int,
  eos: int,
) -> list[list[int]]:
  """Cuts the tokens of one document into windows that all begin with its title.

  The last window ends with the text, so that no token is lost.

  >>> windows([7], [11, 12, 13, 14, 15], length=5, stride=2, eos=1)
  [[7, 11, 12, 13, 1], [7, 13, 14, 15, 1]]

  Args:
    title: its tokens; cut at half the length, and so that the text has room.
      May be empty.
    text: the tokens of the text. May be empty: then there is one window.
    length: tokens of a window at most, EOS included, at least 2.
    stride: tokens of the text from the beginning of a window to that of the
      next, at least 1; at most those that a window has room for are skipped.
    eos: the id that ends a text.

  Returns:
    At least one window, each ending with EOS.
  """
  head = list(title[: min(length // 2, length - 2)])
  room = length - len(head) - 1
  step = min(stride, room)
  count = 1 + max(0, -(-(len(text) - room) // step))
  starts = range(0, count * step, step)
  return [[*head, *text[start : start + room], eos] for start in starts]


def cut(
  vocabulary: Any,
  documents: Sequence[collection.Document],
  *,
  length: int,
  stride: int,
) -> tuple[Int[np.ndarray, "passage length"], Int[np.ndarray, " document"]]:
  """Tokenizes documents and cuts them.

  Args:
    vocabulary: from `vocabulary.load`.
    documents: some of a collection, in its order.
    length: as in `windows`.
    stride: as in `windows`.

  Returns:
    The passages, padded with 0, and how many each document has.
  """
  cuts = [
    windows(
      vocabulary.encode(one.title) if one.title else [],
      vocabulary.encode(one.text) if one.text else [],
      length=length,
      stride=stride,
      eos=vocabulary.eos_id,
    )
    for one in documents
  ]
  rows = [row for passages in cuts for row in passages]
  counts = np.array([len(passages) for passages in cuts], np.int32)
  return vocabulary_lib.pad(rows, length), counts


def best(
  passages: Passages,
  documents: Int[np.ndarray, " query"],
  queries: Int[np.ndarray, "query length"],
) -> Int[np.ndarray, " query"]:
  """Chooses for each query the passage of its document that has most of it.

  Args:
    passages: of the collection.
    documents: the position of each query's document.
    queries: their tokens, each with its EOS last.

  Returns:
    Positions of passages: the first of those that hold most of the query's
    different tokens.
  """
  first, stop = passages.of(documents)
  if passages.are_documents:
    return first
  chosen = first.copy()
  for i in np.flatnonzero(stop - first > 1):
    wanted = np.unique(queries[i][queries[i] > 0][:-1])
    rows = np.asarray(passages.tokens[first[i] : stop[i]])
    shared = [np.isin(wanted, row).sum() for row in rows]
    chosen[i] += int(np.argmax(shared))
  return chosen
