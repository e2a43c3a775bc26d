"""Saves, reads and measures sets of queries.

Formal guarantee:
  Post-processing of synthetic queries, public documents and public seeds, which
  is all that this module reads. The exception is `texts`: it reads the folder
  it is given, which may hold private queries.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from synthq_jax import field_kinds, memory
from synthq_jax.data import files
from synthq_jax.generation import text_measures
from synthq_jax.retrieval import bm25
from synthq_jax.runtime import config_types, prepared_files
from synthq_jax.storage import array_files, artifacts

__all__ = [
  "Config",
  "decode",
  "get_forbidden_ids",
  "index_of",
  "measure",
  "read_document_texts",
  "save",
  "texts",
]

_index_cache: memory.Kept[bm25.Index] = memory.Kept(
  most_bytes=2**28, size=lambda index: index.num_bytes, most=1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings that every stage that makes queries shares; all are public."""

  gauge_queries: int = 1000
  """Maximum number of queries that BM25 searches for the gauge."""
  seed: int = 0
  """Seed of all draws: queries of the gauge and of the examples, and others."""
  batch_size: int = field_kinds.speed_only(256)
  """Rows that the model reads at once."""

  def __post_init__(self):
    """Refuses values out of range."""
    config_types.at_least(self, 1, "gauge_queries", "batch_size")
    config_types.at_least(self, 0, "seed")


def save(
  directory: pathlib.Path,
  names: Sequence[str],
  queries: Sequence[str],
  owners: np.ndarray,
  ids: Sequence[str] | np.ndarray,
  tokens: np.ndarray,
  passages: np.ndarray,
) -> None:
  """Writes queries.jsonl and tokens.npz; `owners`, positions in `ids`, ascend."""
  lines = [
    json.dumps({"_id": name, "text": query, "document": str(ids[owner])})
    for name, query, owner in zip(names, queries, owners, strict=True)
  ]
  artifacts.write_atomically(
    directory / "queries.jsonl", "\n".join(lines) + "\n"
  )
  array_files.save_npz(
    directory / "tokens.npz",
    {"tokens": tokens, "documents": owners, "passages": passages},
  )


def texts(
  directory: pathlib.Path, names: Iterable[str] | None = None
) -> list[str]:
  """Reads the texts of queries; they are as private as their file.

  Args:
    directory: holds queries.jsonl.
    names: ids of the queries to read, in this order; None: all, in the order of
      the file.

  Raises:
    ValueError: if the file is missing, or a line is damaged.
    KeyError: if no query has one of the names.
  """
  lines = files.json_lines(files.find(directory, "queries.jsonl"))
  if names is None:
    return [line["text"] for _, line in lines]
  names = [*map(str, names)]
  requested = frozenset(names)
  by_name = {
    line["_id"]: line["text"] for _, line in lines if line["_id"] in requested
  }
  return [by_name[name] for name in names]


def index_of(
  ids: Iterable[Any],
  corpus: pathlib.Path,
) -> bm25.Index:
  """Returns a BM25 index of whole documents, not cut at an encoder's length.

  The index of the last collection is cached if it is small: several stages use
  it.

  Args:
    ids: ids of the documents.
    corpus: file of their texts, in the same order.
  """
  names = tuple(map(str, ids))
  key = (corpus.resolve(), files.state(corpus), names)
  return _index_cache.get(
    key, lambda: bm25.BM25().build(names, prepared_files.document_texts(corpus))
  )


def measure(
  queries: Sequence[str],
  owners: np.ndarray,
  *,
  index: bm25.Index,
  corpus: pathlib.Path,
  config: Config,
  num_examples: int,
) -> dict[str, Any]:
  """Computes the fields of `results.SyntheticQueries` that describe queries.

  Args:
    queries: their texts, at least one.
    owners: the position of each query's document, ascending.
    index: BM25 over all documents.
    corpus: the texts of the documents.
    config: number of queries for the gauge, and the seed.
    num_examples: number of (query, document) pairs to return.
  """
  sample = _sample(config.seed, len(queries), config.gauge_queries)
  gauge = text_measures.own_document_gauge(
    [queries[i] for i in sample], [index.ids[owners[i]] for i in sample], index
  )
  return {
    "num_queries": len(queries),
    "gauge": float(np.mean(gauge)),
    "copy_rate": float(
      text_measures.copy_rate(queries, read_document_texts(corpus, owners))
    ),
    "mean_words": text_measures.mean_length(queries),
    "examples": _examples(config.seed, num_examples, queries, owners, corpus),
  }


def get_forbidden_ids(vocabulary: Any, vocab_size: int) -> tuple[int, ...]:
  """Returns the ids that no query may hold: unknown, sentinels, unused ids."""
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  own = vocabulary.sentinels  # mT5's
  return (vocabulary.unk_id, *own, *range(first_extra, vocab_size))


def decode(vocabulary: Any, row: np.ndarray) -> str:
  """Decodes a written row to text, without EOS and padding."""
  return vocabulary.decode([int(t) for t in row if t])


def read_document_texts(
  corpus: pathlib.Path, owners: Iterable[int]
) -> Iterator[str]:
  """Yields the document text at each position in `owners`, which ascend."""
  texts = enumerate(prepared_files.document_texts(corpus))
  position, text = -1, ""
  for owner in owners:
    while position < owner:
      position, text = next(texts)
    yield text


def _examples(
  seed: int, count: int, queries, owners, corpus
) -> tuple[tuple[str, str], ...]:
  """Returns some queries, each with the beginning of its document."""
  shown = _sample(seed, len(queries), count)
  texts = prepared_files.texts(corpus)
  return tuple((queries[i], texts[owners[i]][:400]) for i in shown.tolist())


def _sample(seed: int, total: int, count: int) -> np.ndarray:
  return np.random.default_rng([seed, 3]).permutation(total)[:count]
