"""Writes a collection's documents in one pass that holds a few of them."""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import blocks, collection, token_cache
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = ["CORPUS_NAME", "Written", "read", "write"]

CORPUS_NAME = "corpus.jsonl"
_CACHE_NAME = "documents"
_TOKENS, _IDS = "tokens", "ids"

_CHUNK = 4096
"""Documents in memory at the same time."""


class Written(NamedTuple):
  """What was seen while the documents were written."""

  cut: float  # share of the documents that are longer than `length`
  chosen: list[collection.Document]  # in the order they were asked for


def write(
  documents: Iterable[collection.Document],
  folder: pathlib.Path,
  vocabulary,
  *,
  length: int,
  choose: Sequence[int],
  digest: Callable[[bytes], object],
) -> Written:
  """Writes texts, tokens and ids, in the order of the documents.

  Args:
    documents: read once.
    folder: gets corpus.jsonl and a token cache, which `read` opens.
    vocabulary: from `vocabulary.load`.
    length: tokens of a document, EOS included.
    choose: positions of the documents that are handed back.
    digest: called with the content of each document.

  Returns:
    What was seen on the way.
  """
  slots = {int(position): slot for slot, position in enumerate(choose)}
  chosen: list[collection.Document | None] = [None] * len(slots)
  documents, first, cut = iter(documents), 0, 0
  with (
    artifacts.replacing(folder / CORPUS_NAME) as corpus,
    token_cache.writing(
      folder / _CACHE_NAME,
      {_TOKENS: length},
      vocab_size=vocabulary.vocab_size,
      names=[_IDS],
    ) as cache,
  ):
    while chunk := list(itertools.islice(documents, _CHUNK)):
      corpus.writelines(map(_line, chunk))
      rows, num_cut = vocabulary_lib.tokenize_and_count(
        vocabulary, [d.contents for d in chunk], length=length
      )
      cache.append({_TOKENS: rows}, {_IDS: [d.id for d in chunk]})
      cut += num_cut
      for position, document in enumerate(chunk, first):
        digest(f"{document.id}\0{document.contents}\0".encode())
        if position in slots:
          chosen[slots[position]] = document
      first += len(chunk)
  return Written(cut / first, chosen)


def read(
  folder: pathlib.Path,
) -> tuple[np.ndarray, blocks.Rows]:
  """Opens what `write` wrote: ids [document], tokens [document, length].

  Raises:
    ValueError: if it is missing or damaged.
  """
  cache = token_cache.load(folder / _CACHE_NAME)
  return np.array(cache.names[_IDS][:]), cache.columns[_TOKENS]


def _line(document: collection.Document) -> bytes:
  fields = {
    "_id": document.id, "title": document.title, "text": document.text
  }  # fmt: skip
  return f"{json.dumps(fields)}\n".encode()
