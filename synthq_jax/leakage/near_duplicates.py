"""Near-duplicates between a log of queries and a few texts, such as topics.

A detector indexes the smaller side and then looks at the other one in pieces, so
that ten million queries need no more memory than ten thousand. What a detector
finds is a candidate: how often it is right depends on the threshold, and
`leakage.calibration` finds the threshold for a wanted precision from pairs that
people labelled.

Formal guarantee:
  None. Matches are functions of single queries, without noise. Where one side
  is private, so are its matches, their number, and which targets have one.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tqdm
from jaxtyping import Bool, Float, Int

from synthq_jax.leakage import (
  _embedding,
  _min_hash,
  _set_search,
  _words,
  relations,
)

__all__ = [
  "Containment",
  "Detector",
  "Embedding",
  "Exact",
  "FUNCTION_WORDS",
  "Index",
  "Match",
  "MinHash",
  "Text",
  "TokenSet",
  "best_of_each_target",
  "find",
  "pairs",
  "share_with_match",
]

FUNCTION_WORDS = _words.FUNCTION_WORDS
Embedding = _embedding.Embedding
MinHash = _min_hash.MinHash
Matches = _set_search.Matches

_CHUNK = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
  """A query or a topic.

  Attributes:
    id: what it is called.
    text: what it says.
  """

  id: str
  text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
  """A query and a target that a detector takes for near-duplicates.

  Attributes:
    query_id: the id of the query.
    query: its text.
    target_id: the id of the target.
    target: its text.
    score: their similarity, at least the detector's threshold.
    detector: its name.
    relation: one of `relations.RELATIONS`, the query seen from the target.
  """

  query_id: str
  query: str
  target_id: str
  target: str
  score: float
  detector: str
  relation: str


class Index(Protocol):
  """Targets that a detector indexed."""

  def match(self, queries: Sequence[str]) -> Matches:
    """Returns the pairs that score at least the detector's threshold.

    Args:
      queries: some of them, as texts. What is found of a query does not depend
        on the others.

    Returns:
      Positions of queries and of targets, and scores, one per pair, in the
      order of the queries and then the targets.
    """


class Detector(Protocol):
  """A similarity of two texts, and the least of a near-duplicate.

  Attributes:
    name: for tables and files.
    threshold: the least score of a match.
  """

  name: str
  threshold: float

  def index(self, targets: Sequence[str]) -> Index:
    """Indexes the smaller side.

    Args:
      targets: their texts.
    """

  def scores(
    self, left: Sequence[str], right: Sequence[str]
  ) -> Float[np.ndarray, " pair"]:
    """Scores the i-th text of one side with the i-th of the other.

    Args:
      left: texts.
      right: as many texts.
    """


@dataclasses.dataclass(frozen=True)
class _SetIndex:
  """Texts as sets."""

  features: _words.Features
  sets: _set_search.Index

  def match(self, queries: Sequence[str]) -> Matches:
    return self.sets.match(self.features(queries))


class _OfSets:
  """What detectors share that compare sets of features.

  Subclasses have `threshold`, `_features` and `_measure`.
  """

  def index(self, targets: Sequence[str]) -> Index:
    sets = self._features(targets)
    index = _set_search.build(sets, self._measure, self.threshold)
    return _SetIndex(self._features, index)

  def scores(self, left, right):
    return _set_search.pairwise(
      self._features(left), self._features(right), self._measure
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(_OfSets):
  """Equal when normalised: case, punctuation, spaces and forms of Unicode.

  >>> Exact().scores(["New-York?"], ["new york"]).tolist()
  [1.0]
  """

  name = "exact"
  threshold = 1.0
  _features = staticmethod(_words.whole)
  _measure = _set_search.Jaccard()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSet(_OfSets):
  """The same words in whatever order and inflection: Jaccard's coefficient.

  >>> TokenSet().scores(["measles outbreaks"], ["an outbreak of measles"]).tolist()
  [0.5]

  Attributes:
    threshold: words in common over all words, in (0, 1]; 1: the same words.
    stemmer: a Snowball algorithm such as "english", or "" for none.
    ignored: words that do not count, unless a text has no others, for example
      `FUNCTION_WORDS`: below a threshold of 1, "what is the meaning of" makes
      near-duplicates of questions that share nothing else.
  """

  threshold: float = 1.0
  stemmer: str = "english"
  ignored: tuple[str, ...] = ()
  name = "token set"
  _measure = _set_search.Jaccard()

  def __post_init__(self):
    """Checks the fields."""
    _set_search.check_threshold(self.threshold)
    _words.check_stemmer(self.stemmer)

  @functools.cached_property
  def _features(self) -> _words.Features:
    return functools.partial(
      _words.stem_sets, stemmer=self.stemmer, ignored=self.ignored
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Containment(_OfSets):
  """One text inside the other: n-grams in common over those of the smaller.

  N-grams of characters, over the borders of words, see a query in a longer
  topic, inflected or misspelt a little. Where one text has a single word, a
  text with that word contains it.

  >>> Containment().scores(["measles"], ["recent measles outbreaks"]).tolist()
  [1.0]

  Attributes:
    threshold: the least share of n-grams, in (0, 1].
    n: characters of an n-gram.
  """

  threshold: float = 0.9
  n: int = 4
  name = "containment"
  _measure = _set_search.Containment()

  def __post_init__(self):
    """Checks the fields."""
    _set_search.check_threshold(self.threshold)
    _words.check_ngrams(self.n)

  @functools.cached_property
  def _features(self) -> _words.Features:
    return functools.partial(_words.character_ngrams, n=self.n)


def find(
  queries: Iterable[Text],
  targets: Sequence[Text],
  detector: Detector,
  *,
  chunk: int = _CHUNK,
  progress: bool = False,
) -> Iterator[Match]:
  """Finds the near-duplicates of targets in a stream of queries.

  >>> topics = [Text(id="302", text="Measles outbreaks")]
  >>> log = (Text(id=str(i), text=q) for i, q in enumerate(["jax", "measles"]))
  >>> [match.relation for match in find(log, topics, Containment())]
  ['generalisation']

  Args:
    queries: read once, a chunk at a time.
    targets: the smaller side; it is indexed and stays in memory.
    detector: what finds them.
    chunk: queries looked at together, >= 1; changes speed and memory only.
    progress: whether a bar is shown.

  Yields:
    Matches in the order of the queries, and for a query in that of the targets.

  Raises:
    ValueError: if `chunk` is below 1.
  """
  _check_positive("chunk", chunk)
  targets = list(targets)
  index = detector.index([target.text for target in targets])
  queries = iter(queries)
  with tqdm.tqdm(unit=" queries", disable=not progress) as bar:
    while texts := list(itertools.islice(queries, chunk)):
      found = index.match([query.text for query in texts])
      for query, target, score in zip(
        *map(np.ndarray.tolist, found), strict=True
      ):
        yield _match(texts[query], targets[target], score, detector.name)
      bar.update(len(texts))


def _match(query: Text, target: Text, score: float, name: str) -> Match:
  return Match(
    query_id=query.id,
    query=query.text,
    target_id=target.id,
    target=target.text,
    score=score,
    detector=name,
    relation=relations.relation(query.text, target.text),
  )


def best_of_each_target(matches: Iterable[Match], k: int) -> list[Match]:
  """Keeps the k queries most similar to each target, such as 100.

  A detector by cosine looks at the nearest targets of a query; with a low
  threshold this turns the question round. Memory holds k matches per target.

  >>> topics = [Text(id="302", text="measles outbreak")]
  >>> log = [Text(id=q, text=q) for q in ("measles", "measles outbreaks", "jax")]
  >>> matches = find(log, topics, TokenSet(threshold=0.1))
  >>> [match.query_id for match in best_of_each_target(matches, k=1)]
  ['measles outbreaks']

  Args:
    matches: from `find`.
    k: of each target, >= 1.

  Returns:
    Matches by target, in the order in which targets first came, the best
    first; of equal ones the earlier.

  Raises:
    ValueError: if k is below 1.
  """
  _check_positive("k", k)
  heaps: dict[str, list[tuple[float, int, Match]]] = {}
  for number, match in enumerate(matches):
    heap = heaps.setdefault(match.target_id, [])
    entry = (match.score, -number, match)
    if len(heap) < k:
      heapq.heappush(heap, entry)
    else:
      heapq.heappushpop(heap, entry)
  return [
    match
    for heap in heaps.values()
    for _, _, match in sorted(heap, key=lambda x: x[:2], reverse=True)
  ]


def pairs(
  queries: Sequence[str], index: Index, *, chunk: int = _CHUNK
) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
  """Returns the positions of queries and of targets that are near-duplicates.

  Args:
    queries: their texts.
    index: the targets, from a detector's `index`.
    chunk: queries looked at together, >= 1: memory is bounded by the pairs.

  Returns:
    One of each a pair, in the order of the queries and then the targets.
  """
  none = np.zeros(0, np.int64)
  lefts, rights = [none], [none]
  for start in range(0, len(queries), chunk):
    left, right, _ = index.match(queries[start : start + chunk])
    lefts.append(start + left)
    rights.append(right)
  return np.concatenate(lefts), np.concatenate(rights)


def share_with_match(
  queries: Sequence[str],
  targets: Sequence[str],
  detector: Detector,
  *,
  chunk: int = _CHUNK,
) -> Bool[np.ndarray, " query"]:
  """Says which queries have a near-duplicate among the targets.

  >>> share_with_match(["Measles!", "jax"], ["measles"], Exact()).tolist()
  [True, False]

  Args:
    queries: their texts.
    targets: theirs; these are indexed.
    detector: what finds near-duplicates.
    chunk: queries looked at together, >= 1.

  Returns:
    For each query whether it has one; the mean is the share.

  Raises:
    ValueError: if `chunk` is below 1.
  """
  _check_positive("chunk", chunk)
  marked = np.zeros(len(queries), bool)
  marked[pairs(queries, detector.index(targets), chunk=chunk)[0]] = True
  return marked


def _check_positive(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f"expected {name} >= 1, got {name}={value}; change it")
