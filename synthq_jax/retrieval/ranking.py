"""Ranks the results of BM25 and a retriever by a weighted sum of features.

This is linear learning to rank. The features of a document are several BM25 scores
(of the whole text, its beginning, pairs of words, parts of words), its length, and
the retriever's score. So few weights can be learned with a small privacy budget
(`stages.learn_to_rank`).

Formal guarantee: none of its own. The features of a query's documents are a
function of the documents and of that query alone.

References:
  Liu, "Learning to Rank for Information Retrieval", Foundations and Trends in
  Information Retrieval, 2009, section 1.3 (features of a query and a document).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks
from synthq_jax.data import word_patterns
from synthq_jax.retrieval import bm25, fusion, trec

__all__ = [
  "FEATURES",
  "FIELDS",
  "Candidates",
  "Features",
  "Field",
  "described",
  "rank",
  "scored",
  "start",
]


class Field(NamedTuple):
  """A part of a document, and the BM25 settings that read it."""

  name: str
  reads: bm25.BM25
  words: int | None = None
  """The number of first words that are read; None: all words."""


def _make_pattern_reader(pattern: str) -> bm25.BM25:
  return bm25.BM25(stemmer="", stopwords="", pattern=pattern)


FIELDS = (
  Field("words", bm25.BM25()),
  Field("words, whatever the length", bm25.BM25(b=0.0)),
  Field("words, counted once", bm25.BM25(k1=0.0)),
  Field("first 40 words", bm25.BM25(), 40),
  Field("first 12 words", bm25.BM25(), 12),
  Field("stop words, too", bm25.BM25(stopwords="")),
  Field("pairs of words", _make_pattern_reader(r"(?<!\S)(?=(\S+ \S+))")),
  Field("four letters", _make_pattern_reader(r"(?=(\S{4}))")),
)
"""The fields of `_space_words` text; lookahead patterns give overlapping parts."""
FEATURES = (*(field.name for field in FIELDS), "length", "retriever")
"""The columns of `Candidates.values`, each in [0, 1]."""
_WORD = re.compile(word_patterns.WORD)
_LEXICAL, _DENSE = 0, len(FEATURES) - 1


class Candidates(NamedTuple):
  """The candidate documents of a query, with their features."""

  ids: tuple[str, ...]
  """Ids of the documents: BM25's results in order, then further ones of the
  retriever in order."""
  positions: Int[np.ndarray, " candidate"]
  """Positions of these documents in the collection."""
  values: Float[np.ndarray, "candidate feature"]
  """Features in [0, 1], in the order of `FEATURES`."""


@dataclasses.dataclass(frozen=True)
class Features:
  """Indexes of the collection, one for each of `FIELDS`.

  >>> texts = ["red apples", "green apples and pears", "plums"]
  >>> features = Features.build(["a", "b", "c"], texts)
  >>> lexical, dense = {"a": 0.5, "b": 0.4}, {"c": 0.9, "a": 0.7}
  >>> [candidates] = features.of(["red pears"], [lexical], [dense])
  >>> candidates.ids, candidates.values.shape
  (('a', 'b', 'c'), (3, 10))
  >>> candidates.values[:, -1].tolist()  # the retriever's, least to best
  [0.0, 0.0, 1.0]

  Attributes:
    positions: document id -> position in the collection.
    lengths: log(1 + number of words) of each document, divided by the largest.
    indexes: an index for each field; None for a field without a word in any
      document.
  """

  positions: Mapping[str, int]
  lengths: Float[np.ndarray, " document"]
  indexes: tuple[bm25.Index | None, ...]

  @classmethod
  def build(cls, ids: Sequence[str], texts: Iterable[str]) -> "Features":
    """Indexes documents, in one pass.

    Args:
      ids: one per document.
      texts: the texts of the documents; may be an iterator.

    Raises:
      ValueError: unless there is one id per document.
    """
    # Fields that weigh the same words differently share one reader.
    readers = {
      (_get_reading(f), f.words): bm25.Reader(_get_reading(f)) for f in FIELDS
    }
    counts: list[int] = []
    for chunk in bm25.chunks(texts):
      counts += [len(text.split()) for text in chunk]
      spaced = [_space_words(text) for text in chunk]
      for (_, words), reader in readers.items():
        reader.read([_cut_words(text, words) for text in spaced])
    if len(counts) != len(ids):
      raise ValueError(
        f"expected one id per document, got {len(ids)} ids and {len(counts)}"
        " documents; check the collection"
      )
    lengths = np.log1p(counts)
    return cls(
      {id_: position for position, id_ in enumerate(ids)},
      (lengths / max(lengths.max(initial=0.0), 1e-9)).astype(np.float32),
      tuple(
        _build_index(readers[_get_reading(field), field.words], field, ids)
        for field in FIELDS
      ),
    )

  def of(
    self,
    queries: Sequence[str],
    lexical: Sequence[Mapping[str, float]],
    dense: Sequence[Mapping[str, float]],
  ) -> list[Candidates]:
    """Computes the candidates of each query, with their features.

    The candidates are the results of both systems. A BM25 score is divided by the
    best score among the candidates. A retriever score is scaled from 0, its least,
    to 1, its best; documents that the retriever does not find get 0.

    Args:
      queries: the texts of the queries.
      lexical: for each query, document id -> score of BM25.
      dense: for each query, document id -> score of the retriever.
    """
    candidates: list[Candidates] = []
    for spaced in bm25.chunks(map(_space_words, queries)):
      readings = {*map(_get_reading, FIELDS)}
      words = {reading: reading.words(spaced) for reading in readings}
      columns = zip(
        *(words[_get_reading(field)] for field in FIELDS), strict=True
      )
      part = slice(len(candidates), len(candidates) + len(spaced))
      candidates += map(
        self._make_candidates, columns, lexical[part], dense[part]
      )
    return candidates

  def _make_candidates(
    self,
    query_words: Sequence[Sequence[str]],
    lexical: Mapping[str, float],
    dense: Mapping[str, float],
  ) -> Candidates:
    """Makes the candidates of a query from its words in each field."""
    dense = _sort(dense)
    ids = tuple({**_sort(lexical), **dense})
    values = np.zeros((len(ids), len(FEATURES)), np.float32)
    positions = np.array([self.positions[id_] for id_ in ids], np.int64)
    for column, (index, words) in enumerate(
      zip(self.indexes, query_words, strict=True)
    ):
      if index is not None and len(ids):
        scores = index.scores_at(words, positions)
        values[:, column] = scores / max(scores.max(), 1e-9)
    values[:, _DENSE - 1] = self.lengths[positions]
    scaled = fusion.scale(dense)
    values[:, _DENSE] = [scaled.get(id_, 0.0) for id_ in ids]
    return Candidates(ids, positions, values)


def _sort(scores: Mapping[str, float]) -> dict[str, float]:
  return {id_: scores[id_] for id_ in trec.ranking(scores)}


def _space_words(text: str) -> str:
  """Joins the words of a text with single spaces, and drops all else."""
  return " ".join(_WORD.findall(word_patterns.compose(text)))


def _cut_words(text: str, words: int | None) -> str:
  return text if words is None else " ".join(text.split()[:words])


def _get_reading(field: Field) -> bm25.BM25:
  """Returns a field's settings for reading words, without those for weighing."""
  return dataclasses.replace(field.reads, k1=0.0, b=0.0)


def _build_index(
  reader: bm25.Reader, field: Field, ids: Sequence[str]
) -> bm25.Index | None:
  try:
    return reader.build(ids, field.reads)
  except ValueError:  # no document has, say, two words
    return None


def described(weights: Sequence[float]) -> list[dict[str, Any]]:
  """Describes features and weights as JSON values, for other programs.

  Args:
    weights: the weights of `FEATURES`, in order.

  Returns:
    For each feature its "name" and "weight", and for a field its settings as
    "bm25".
  """
  read = {
    field.name: {**dataclasses.asdict(field.reads), "first_words": field.words}
    for field in FIELDS
  }
  return [
    {"name": name, "weight": float(weight)}
    | ({"bm25": read[name]} if name in read else {})
    for name, weight in zip(FEATURES, weights, strict=True)
  ]


def start(lexical: float) -> Float[np.ndarray, " feature"]:
  """Returns the initial weights of learning, which rank as BM25 does.

  Args:
    lexical: the weight of BM25; the larger, the sharper its distribution.
  """
  weights = np.zeros(len(FEATURES), np.float32)
  weights[_LEXICAL] = lexical
  return weights


def rank(
  candidates: Mapping[str, Candidates],
  weights: Sequence[float],
  depth: int,
) -> trec.Run:
  """Ranks the candidates of each query, best first.

  Equal scores keep the order of the candidates.

  >>> pair = Candidates(("a", "b"), np.arange(2), np.eye(2, len(FEATURES)))
  >>> rank({"q": pair}, [1.0, 2.0, *[0.0] * (len(FEATURES) - 2)], 1)
  {'q': {'b': 2.0}}

  Args:
    candidates: query id -> candidates.
    weights: the weights of `FEATURES`, finite.
    depth: the most documents of each query, >= 1.

  Raises:
    ValueError: if the number of weights is wrong, or one is not finite.
  """
  checks.at_least(1, depth=depth)
  run: trec.Run = {}
  for query, documents in candidates.items():
    scores = scored(documents.values, weights)
    best = np.argsort(-scores, kind="stable")[:depth]
    run[query] = {documents.ids[i]: float(scores[i]) for i in best}
  return run


def scored(
  values: Float[np.ndarray, "*rows feature"], weights: Sequence[float]
) -> Float[np.ndarray, "*rows"]:
  """Computes the weighted sum of features of each row.

  The sum of a row does not depend on other rows, to the last bit.

  Args:
    values: features, in the order of `FEATURES`.
    weights: the weights of `FEATURES`, finite.

  Raises:
    ValueError: if the number of weights is wrong, or one is not finite.
  """
  array = np.asarray(weights, np.float64)
  if array.shape != (len(FEATURES),) or not np.isfinite(array).all():
    raise ValueError(
      f"expected {len(FEATURES)} finite weights, one of each of"
      f" {', '.join(FEATURES)}, got {array.tolist()}"
    )
  return (values.astype(np.float64) * array).sum(axis=-1)
