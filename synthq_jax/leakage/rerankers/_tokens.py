"""Texts as lists of pieces, each text once."""

from collections.abc import Sequence
from typing import Any

__all__ = ["check_vocabulary", "encode", "joined"]


def encode(vocabulary: Any, texts: Sequence[str]) -> list[list[int]]:
  """Returns the pieces of each text; equal texts are read once.

  Args:
    vocabulary: from `data.vocabulary.load`.
    texts: what is read.
  """
  known = {text: vocabulary.encode(text) for text in dict.fromkeys(texts)}
  return [known[text] for text in texts]


def joined(
  vocabulary: Any,
  queries: Sequence[str],
  documents: Sequence[str],
  *,
  length: int,
  query_length: int,
  before: Sequence[int],
  between: Sequence[int],
  after: Sequence[int],
) -> tuple[list[list[int]], list[int]]:
  """Puts queries and documents into one row each, and cuts the document.

  Args:
    vocabulary: from `data.vocabulary.load`.
    queries: one per row.
    documents: one per row.
    length: pieces of a row at most.
    query_length: pieces of a query that are kept.
    before: pieces that stand before the query.
    between: those between query and document.
    after: those after the document.

  Returns:
    The rows, and where in each of them the document begins.
  """
  rows, starts = [], []
  pairs = zip(
    encode(vocabulary, queries), encode(vocabulary, documents), strict=True
  )
  for query, document in pairs:
    head = [*before, *query[:query_length], *between]
    starts.append(len(head))
    rows.append([*head, *document[: length - len(head) - len(after)], *after])
  return rows, starts


def check_vocabulary(name: str, vocabulary: Any, rows: int) -> None:
  """Refuses a table of embeddings that lacks pieces of the vocabulary.

  Raises:
    ValueError: if it does.
  """
  if rows < vocabulary.vocab_size:
    raise ValueError(
      f"{name}: expected embeddings of the vocabulary's"
      f" {vocabulary.vocab_size} pieces, got {rows} rows: give the vocabulary"
      " that belongs to the model"
    )
