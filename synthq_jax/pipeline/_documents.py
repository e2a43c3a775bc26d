"""Writes a collection's documents in one pass that holds a few of them."""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import collection
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = ["CORPUS_NAME", "IDS_NAME", "TOKENS_NAME", "Written", "write"]

CORPUS_NAME = "corpus.jsonl"
TOKENS_NAME = "documents.npy"
IDS_NAME = "document_ids.npy"

_CHUNK = 4096
"""Documents in memory at the same time."""


class Written(NamedTuple):
  """What was seen while the documents were written."""

  cut: float  # share of the documents that are longer than `length`
  chosen: list[collection.Document]  # in the order they were asked for


def write(
  documents: Iterable[collection.Document],
  ids: Sequence[str],
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
    ids: theirs.
    folder: gets corpus.jsonl, documents.npy ([document, length] int32, to be
      memory-mapped) and document_ids.npy.
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
  # Plain writes, not a map: a full disk is an error there, and a crash here.
  with (
    artifacts.replacing(folder / CORPUS_NAME) as corpus,
    artifacts.replacing(folder / TOKENS_NAME) as tokens,
  ):
    np.lib.format.write_array_header_1_0(
      tokens,
      {"descr": "<i4", "fortran_order": False, "shape": (len(ids), length)},
    )
    while chunk := list(itertools.islice(documents, _CHUNK)):
      corpus.writelines(map(_line, chunk))
      rows = vocabulary_lib.tokenize(
        vocabulary, [d.contents for d in chunk], length=length + 1
      )  # one token more shows who was cut
      longer = rows[:, -1] > 0
      rows[longer, length - 1] = vocabulary_lib.EOS_ID
      tokens.write(rows[:, :length].astype("<i4").tobytes())
      cut += int(np.sum(longer))
      for position, document in enumerate(chunk, first):
        digest(f"{document.id}\0{document.contents}\0".encode())
        if position in slots:
          chosen[slots[position]] = document
      first += len(chunk)
  with artifacts.replacing(folder / IDS_NAME) as stream:
    np.save(stream, np.array(ids))
  return Written(cut / len(ids), chosen)


def _line(document: collection.Document) -> bytes:
  fields = {
    "_id": document.id, "title": document.title, "text": document.text
  }  # fmt: skip
  return f"{json.dumps(fields)}\n".encode()
