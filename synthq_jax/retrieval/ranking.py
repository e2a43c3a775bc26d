"""Ranks what BM25 and a retriever find by a weighted sum of some scores.

Linear learning to rank: of every document that BM25 or the retriever finds, what
several BM25s say of it (the whole text, its beginning, pairs of words, parts of
words), its length, and the retriever's score. So few weights can be learned with
little privacy (`stages.learn_to_rank`).

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
  """A part of a document, and how BM25 reads it."""

  name: str
  reads: bm25.BM25
  words: int | None = None
  """How many of its first words; None: all of them."""


def _parts(pattern: str) -> bm25.BM25:
  return bm25.BM25(stemmer="", stopwords="", pattern=pattern)


FIELDS = (
  Field("words", bm25.BM25()),
  Field("words, whatever the length", bm25.BM25(b=0.0)),
  Field("words, counted once", bm25.BM25(k1=0.0)),
  Field("first 40 words", bm25.BM25(), 40),
  Field("first 12 words", bm25.BM25(), 12),
  Field("stop words, too", bm25.BM25(stopwords="")),
  Field("pairs of words", _parts(r"(?<!\S)(?=(\S+ \S+))")),
  Field("four letters", _parts(r"(?=(\S{4}))")),
)
"""What is read of `_spaced` text; a pattern in a lookahead gives what overlaps."""
FEATURES = (*(field.name for field in FIELDS), "length", "retriever")
"""The columns of `Candidates.values`, each in [0, 1]."""
_WORD = re.compile(word_patterns.WORD)
_LEXICAL, _DENSE = 0, len(FEATURES) - 1


class Candidates(NamedTuple):
  """The documents that a query's features are of."""

  ids: tuple[str, ...]
  """As BM25 ranks them, then as the retriever does."""
  places: Int[np.ndarray, " candidate"]
  """Of these documents in the collection."""
  values: Float[np.ndarray, "candidate feature"]
  """In [0, 1], in the order of `FEATURES`."""


@dataclasses.dataclass(frozen=True)
class Features:
  """The collection, read in each of `FIELDS`.

  >>> texts = ["red apples", "green apples and pears", "plums"]
  >>> features = Features.build(["a", "b", "c"], texts)
  >>> lexical, dense = {"a": 0.5, "b": 0.4}, {"c": 0.9, "a": 0.7}
  >>> [found] = features.of(["red pears"], [lexical], [dense])
  >>> found.ids, found.values.shape
  (('a', 'b', 'c'), (3, 10))
  >>> found.values[:, -1].tolist()  # the retriever's, least to best
  [0.0, 0.0, 1.0]

  Attributes:
    positions: of the documents, by id.
    lengths: words of each document, log(1 + n), over those of the longest.
    indexes: one for each field; None for one that no document has a word of.
  """

  positions: Mapping[str, int]
  lengths: Float[np.ndarray, " document"]
  indexes: tuple[bm25.Index | None, ...]

  @classmethod
  def build(cls, ids: Sequence[str], texts: Iterable[str]) -> "Features":
    """Indexes documents, in one pass.

    Args:
      ids: one per document.
      texts: of the documents; an iterator will do.

    Raises:
      ValueError: if there is not one id per document.
    """
    # Fields that weigh the same words in other ways read them once.
    readers = {(_how(f), f.words): bm25.Reader(_how(f)) for f in FIELDS}
    counts: list[int] = []
    for chunk in bm25.chunks(texts):
      counts += [len(text.split()) for text in chunk]
      spaced = [_spaced(text) for text in chunk]
      for (_, words), reader in readers.items():
        reader.read([_first(text, words) for text in spaced])
    if len(counts) != len(ids):
      raise ValueError(
        f"expected one id per document, got {len(ids)} ids and {len(counts)}"
        " documents; check the collection"
      )
    lengths = np.log1p(counts)
    return cls(
      {id_: place for place, id_ in enumerate(ids)},
      (lengths / max(lengths.max(initial=0.0), 1e-9)).astype(np.float32),
      tuple(
        _index(readers[_how(field), field.words], field, ids)
        for field in FIELDS
      ),
    )

  def of(
    self,
    queries: Sequence[str],
    lexical: Sequence[Mapping[str, float]],
    dense: Sequence[Mapping[str, float]],
  ) -> list[Candidates]:
    """Returns the features of what two systems find for each query.

    A score of BM25 is divided by the best of the candidates, one of the retriever
    goes from its least, 0, to its best, 1; 0 is what it does not find.

    Args:
      queries: their texts.
      lexical: of each, document id -> score of BM25.
      dense: of each, document id -> score of the retriever.
    """
    made: list[Candidates] = []
    for spaced in bm25.chunks(map(_spaced, queries)):
      words = {how: how.words(spaced) for how in {*map(_how, FIELDS)}}
      asked = zip(*(words[_how(field)] for field in FIELDS), strict=True)
      part = slice(len(made), len(made) + len(spaced))
      made += map(self._of, asked, lexical[part], dense[part])
    return made

  def _of(
    self,
    asked: Sequence[Sequence[str]],
    lexical: Mapping[str, float],
    dense: Mapping[str, float],
  ) -> Candidates:
    """Returns the features of a query, whose words each field has."""
    dense = _ordered(dense)
    ids = tuple({**_ordered(lexical), **dense})
    values = np.zeros((len(ids), len(FEATURES)), np.float32)
    places = np.array([self.positions[id_] for id_ in ids], np.int64)
    for column, (index, words) in enumerate(
      zip(self.indexes, asked, strict=True)
    ):
      if index is not None and len(ids):
        scores = index.scores_at(words, places)
        values[:, column] = scores / max(scores.max(), 1e-9)
    values[:, _DENSE - 1] = self.lengths[places]
    scaled = fusion.Convex().values(dense, dense=True)
    values[:, _DENSE] = [scaled.get(id_, 0.0) for id_ in ids]
    return Candidates(ids, places, values)


def _ordered(scores: Mapping[str, float]) -> dict[str, float]:
  return {id_: scores[id_] for id_ in trec.ranking(scores)}


def _spaced(text: str) -> str:
  """Returns the words of a text with a space between them and nothing else."""
  return " ".join(_WORD.findall(word_patterns.compose(text)))


def _first(text: str, words: int | None) -> str:
  return text if words is None else " ".join(text.split()[:words])


def _how(field: Field) -> bm25.BM25:
  """Returns how a field finds words, whatever it makes of them."""
  return dataclasses.replace(field.reads, k1=0.0, b=0.0)


def _index(
  reader: bm25.Reader, field: Field, ids: Sequence[str]
) -> bm25.Index | None:
  try:
    return reader.build(ids, field.reads)
  except ValueError:  # no document has, say, two words
    return None


def described(weights: Sequence[float]) -> list[dict[str, Any]]:
  """Returns what is weighed as JSON holds it, for other programs.

  Args:
    weights: of `FEATURES`, in order.

  Returns:
    For each its "name" and "weight", and under "bm25" how a field is read.
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
  """Returns the weights that rank as BM25 does: where learning starts.

  Args:
    lexical: BM25's weight: how sharply scores are told apart.
  """
  weights = np.zeros(len(FEATURES), np.float32)
  weights[_LEXICAL] = lexical
  return weights


def rank(
  found: Mapping[str, Candidates],
  weights: Sequence[float],
  depth: int,
) -> trec.Run:
  """Returns the candidates of each query, best first.

  Equal scores stand in the order of the candidates.

  >>> found = {"q": Candidates(("a", "b"), np.arange(2), np.eye(2, len(FEATURES)))}
  >>> rank(found, [1.0, 2.0, *[0.0] * (len(FEATURES) - 2)], 1)
  {'q': {'b': 2.0}}

  Args:
    found: candidates by query.
    weights: of `FEATURES`, finite.
    depth: documents of each query, at most, >= 1.

  Raises:
    ValueError: if the number of weights is another one, or one is not finite.
  """
  checks.at_least(1, depth=depth)
  run: trec.Run = {}
  for query, one in found.items():
    scores = scored(one.values, weights)
    best = np.argsort(-scores, kind="stable")[:depth]
    run[query] = {one.ids[i]: float(scores[i]) for i in best}
  return run


def scored(
  values: Float[np.ndarray, "*rows feature"], weights: Sequence[float]
) -> Float[np.ndarray, "*rows"]:
  """Returns the weighted sum of features, each row's its own to the last bit.

  Args:
    values: in the order of `FEATURES`.
    weights: of these, finite.

  Raises:
    ValueError: if the number of weights is another one, or one is not finite.
  """
  array = np.asarray(weights, np.float64)
  if array.shape != (len(FEATURES),) or not np.isfinite(array).all():
    raise ValueError(
      f"expected {len(FEATURES)} finite weights, one of each of"
      f" {', '.join(FEATURES)}, got {array.tolist()}"
    )
  return (values.astype(np.float64) * array).sum(axis=-1)
