"""Cuts documents into passages: windows of tokens that repeat the title.

Formal guarantee: a document's passages are a function of that document and of
settings. `best` chooses a query's passage by that query and its own document
alone, so that no other record can change it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks, collection, sentence_tokens
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = ["TruncatedRows", "Passages", "best", "cut", "windows"]


class TruncatedRows:
  """Truncates rows of tokens with `vocabulary.cut` when they are read."""

  def __init__(self, rows: blocks.Rows | np.ndarray, length: int):
    """Stores the rows and the number of columns to keep."""
    self._rows = rows
    self.shape = (len(rows), length)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(
    self, rows: Int[np.ndarray, " some"] | slice
  ) -> Int[np.ndarray, "some length"]:
    """Reads and truncates some rows."""
    return vocabulary_lib.cut(self._rows[rows], self.shape[1])


Tokens = blocks.Rows | TruncatedRows | sentence_tokens.TextRows | np.ndarray
"""Rows of tokens, in memory or read lazily from disk."""


@dataclasses.dataclass(frozen=True)
class Passages:
  """The tokenized passages of a collection, which encoders and generators read.

  Attributes:
    ids: document ids, in the order of the collection [document].
    tokens: tokens of the passages, in the order of their documents [passage,
      length]; they stay on disk.
    owners: the position of each passage's document, ascending [passage]; every
      document has at least one passage.
  """

  ids: np.ndarray
  tokens: Tokens
  owners: Int[np.ndarray, " passage"]

  def cut_at(self, length: int) -> "Passages":
    """Returns these passages, each truncated to `length` tokens."""
    if length == self.tokens.shape[1]:
      return self
    return dataclasses.replace(self, tokens=TruncatedRows(self.tokens, length))

  @property
  def are_documents(self) -> bool:
    """True if every document is one passage."""
    return len(self.ids) == len(self.owners)

  def of(
    self, documents: Int[np.ndarray, " some"]
  ) -> tuple[Int[np.ndarray, " some"], Int[np.ndarray, " some"]]:
    """Returns the first passage of each document, and the one past its last."""
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
    title: tokens of the title, possibly none; truncated to half the length, and to
      leave room for the text.
    text: tokens of the text; an empty text has one window.
    length: number of tokens of a window at most, EOS included, at least 2.
    stride: number of text tokens between the starts of two windows, at least 1.
      A stride above the room for text in a window is lowered to that room.
    eos: the id of the EOS token.

  Returns:
    One or more windows, each ending with EOS.
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
  """Tokenizes documents and cuts them into passages.

  Args:
    vocabulary: a vocabulary from `vocabulary.load`.
    documents: some documents of a collection, in its order.
    length: as in `windows`.
    stride: as in `windows`.

  Returns:
    The passages, padded with 0, and the number of passages of each document.
  """
  cuts = [
    windows(
      vocabulary.encode(document.title) if document.title else [],
      vocabulary.encode(document.text) if document.text else [],
      length=length,
      stride=stride,
      eos=vocabulary.eos_id,
    )
    for document in documents
  ]
  rows = [row for passages in cuts for row in passages]
  counts = np.array([len(passages) for passages in cuts], np.int32)
  return vocabulary_lib.pad(rows, length), counts


def best(
  passages: Passages,
  documents: Int[np.ndarray, " query"],
  queries: Int[np.ndarray, "query length"],
) -> Int[np.ndarray, " query"]:
  """Chooses for each query the passage of its document with the most query tokens.

  Args:
    passages: the passages of the collection.
    documents: the position of each query's document.
    queries: tokens of the queries, each ending with EOS.

  Returns:
    The position of a passage for each query: the first passage of its document
    that holds the largest number of the query's distinct tokens.
  """
  first, stop = passages.of(documents)
  if passages.are_documents:
    return first
  chosen = first.copy()
  for i in np.flatnonzero(stop - first > 1):
    query_tokens = np.unique(queries[i][queries[i] > 0][:-1])
    rows = np.asarray(passages.tokens[first[i] : stop[i]])
    shared = [np.isin(query_tokens, row).sum() for row in rows]
    chosen[i] += int(np.argmax(shared))
  return chosen
