"""Sets of queries: how they are saved and read, and what is said of them.

Formal guarantee:
  Post-processing of synthetic queries, public documents and public seeds, which are
  all that is read here; but for `texts`, which reads whatever it is told to, private
  queries among it.
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
from synthq_jax.runtime import config_types, inputs
from synthq_jax.storage import array_files, artifacts

__all__ = [
  "Config",
  "decoded",
  "forbidden",
  "index_of",
  "measured",
  "save",
  "texts",
  "texts_of",
]

_kept: memory.Kept[bm25.Index] = memory.Kept(
  most_bytes=2**28, size=lambda index: index.num_bytes, most=1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What every stage that makes queries is set by; every value is public."""

  gauge_queries: int = 1000
  """Queries that BM25 is asked for the gauge, at most."""
  seed: int = 0
  """Of what is drawn: queries of the gauge and of the examples, and others."""
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
  """Reads the texts of queries, as private as these.

  Args:
    directory: holds queries.jsonl.
    names: which ones, in this order; None: all, in the order of the file.

  Raises:
    ValueError: if there is no such file, or a line is damaged.
    KeyError: if there is no query of a name.
  """
  lines = files.json_lines(files.find(directory, "queries.jsonl"))
  if names is None:
    return [line["text"] for _, line in lines]
  names = [*map(str, names)]
  asked = frozenset(names)
  by_name = {
    line["_id"]: line["text"] for _, line in lines if line["_id"] in asked
  }
  return [by_name[name] for name in names]


def index_of(
  ids: Iterable[Any],
  corpus: pathlib.Path,
) -> bm25.Index:
  """Returns BM25 over all documents, whole, not cut at an encoder's length.

  The last collection's index is kept where it is small: stages ask for it again.

  Args:
    ids: of the documents.
    corpus: their texts, in the same order.
  """
  names = tuple(map(str, ids))
  key = (corpus.resolve(), files.state(corpus), names)
  return _kept.get(
    key, lambda: bm25.BM25().build(names, inputs.document_texts(corpus))
  )


def measured(
  queries: Sequence[str],
  owners: np.ndarray,
  *,
  index: bm25.Index,
  corpus: pathlib.Path,
  config: Config,
  num_examples: int,
) -> dict[str, Any]:
  """Returns the fields of `results.SyntheticQueries` that describe queries.

  Args:
    queries: their texts, at least one.
    owners: the position of each query's document, ascending.
    index: BM25 over all documents.
    corpus: the texts of the documents.
    config: how many queries are asked, and which are shown.
    num_examples: pairs of query and document that are returned.
  """
  asked = _sample(config.seed, len(queries), config.gauge_queries)
  gauge = text_measures.own_document_gauge(
    [queries[i] for i in asked], [index.ids[owners[i]] for i in asked], index
  )
  return {
    "num_queries": len(queries),
    "gauge": float(np.mean(gauge)),
    "copy_rate": float(
      text_measures.copy_rate(queries, texts_of(corpus, owners), 4)
    ),
    "mean_words": text_measures.mean_length(queries),
    "examples": _examples(config.seed, num_examples, queries, owners, corpus),
  }


def forbidden(vocabulary: Any, vocab_size: int) -> tuple[int, ...]:
  """Returns the ids that no query may hold: unknown, sentinels, no pieces."""
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  own = vocabulary.sentinels  # mT5's
  return (vocabulary.unk_id, *own, *range(first_extra, vocab_size))


def decoded(vocabulary: Any, row: np.ndarray) -> str:
  """Returns the text of a written row, without EOS and padding."""
  return vocabulary.decode([int(t) for t in row if t])


def texts_of(corpus: pathlib.Path, owners: Iterable[int]) -> Iterator[str]:
  """Yields the text of each position in `owners`, which ascend."""
  texts = enumerate(inputs.document_texts(corpus))
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
  texts = inputs.texts(corpus)
  return tuple((queries[i], texts[owners[i]][:400]) for i in shown.tolist())


def _sample(seed: int, total: int, count: int) -> np.ndarray:
  return np.random.default_rng([seed, 3]).permutation(total)[:count]
