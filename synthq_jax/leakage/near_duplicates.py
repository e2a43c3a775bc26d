"""Near-duplicates between a log of queries and a few texts, such as topics.

A detector indexes the smaller side and then reads the other side in chunks, so
ten million queries need no more memory than ten thousand. A match is a
candidate: its precision depends on the threshold. `leakage.calibration` finds
the threshold for a precision from pairs that people labelled.

Formal guarantee:
  None. Matches are functions of single queries, without noise. If one side is
  private, its matches, their number and the set of matched targets are private.

References:
  Broder, "On the Resemblance and Containment of Documents", SEQUENCES 1997.
"""

import collections
import dataclasses
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import checks
from synthq_jax.leakage import set_search, words
from synthq_jax.training import progress as progress_lib

__all__ = [
  "Containment",
  "Detector",
  "Exact",
  "FUNCTION_WORDS",
  "Index",
  "Match",
  "Text",
  "TokenSet",
  "Trigrams",
  "find",
  "pairs",
  "search",
  "share_with_match",
]

FUNCTION_WORDS = words.FUNCTION_WORDS
Matches = set_search.Matches

_CHUNK = 1 << 14  # queries matched together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
  """A query or a topic.

  Attributes:
    id: its identifier.
    text: its words.
  """

  id: str
  text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
  """A query and a target that a detector reports as near-duplicates.

  Attributes:
    query_id: the id of the query.
    query: its text.
    target_id: the id of the target.
    target: its text.
    score: their similarity, at least the detector's threshold.
    detector: the name of the detector.
    relation: one of `words.RELATIONS`, of the query to the target.
  """

  query_id: str
  query: str
  target_id: str
  target: str
  score: float
  detector: str
  relation: str


Index = Callable[[Sequence[str]], Matches]
"""Indexed targets: a function from queries to the pairs that score at least the
detector's threshold. It returns positions of queries and of targets, and scores, in
the order of the queries and then the targets. The matches of a query do not depend
on the other queries."""


class Detector:
  """A similarity of two texts, with the threshold of near-duplicates.

  A detector is a frozen dataclass: `dataclasses.replace` changes the threshold.
  It compares sets of features; subclasses define `_features` and `_measure`.
  """

  __dataclass_fields__: ClassVar[dict[str, Any]]
  name: str
  """Name of the detector in tables and files."""
  threshold: float
  """Least score of a match."""
  _features: Callable[[Sequence[str]], set_search.Bags]
  _measure = staticmethod(set_search.jaccard)

  def __post_init__(self):
    checks.within("(0, 1]", threshold=self.threshold)

  def index(self, targets: Sequence[str]) -> Index:
    """Indexes the targets, the smaller side.

    Args:
      targets: texts of the targets.
    """
    sets = set_search.build(
      self._features(targets), self._measure, self.threshold
    )
    return lambda queries: sets.match(self._features(queries))

  def scores(
    self, left: Sequence[str], right: Sequence[str]
  ) -> Float[np.ndarray, " pair"]:
    """Scores the i-th text of one side with the i-th of the other.

    Args:
      left: texts of one side.
      right: texts of the other side, as many.
    """
    return set_search.pairwise(
      self._features(left), self._features(right), self._measure
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(Detector):
  """Matches texts that are equal once normalised.

  Normalisation removes case, punctuation, needless spaces and Unicode variants.

  >>> Exact().scores(["New-York?"], ["new york"]).tolist()
  [1.0]
  """

  name = "exact"
  threshold = 1.0
  _features = staticmethod(words.extract_whole_text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSet(Detector):
  """Compares sets of stemmed words by Jaccard's coefficient.

  Neither order nor inflection of English words counts.

  >>> TokenSet().scores(["measles outbreaks"], ["an outbreak of measles"]).tolist()
  [0.5]

  Attributes:
    threshold: least share of common words among all words, in (0, 1]; 1 means
      the same words.
    ignored: words that do not count, unless a text has no others, for example
      `FUNCTION_WORDS`. Without it and with a threshold below 1, questions match
      that share only "what is the meaning of".
  """

  threshold: float = 1.0
  ignored: tuple[str, ...] = ()
  name = "token set"

  def _features(self, texts: Sequence[str]) -> set_search.Bags:
    return words.extract_stems(texts, ignored=self.ignored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Containment(Detector):
  """Measures containment: common 4-grams over 4-grams of the smaller text.

  The 4-grams of characters span words. They detect a query in a longer topic,
  also with other inflections or small misspellings. A text of one word, with at
  least 2 characters, is contained in every text with that word.

  >>> Containment().scores(["measles"], ["recent measles outbreaks"]).tolist()
  [1.0]

  Attributes:
    threshold: least share of 4-grams of a match, in (0, 1].
  """

  threshold: float = 0.9
  name = "containment"
  n = 4
  """Characters of a feature."""
  _measure = staticmethod(set_search.containment)
  _features = staticmethod(
    functools.partial(words.extract_character_ngrams, n=n)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trigrams(Detector):
  """Compares sets of three characters, which span words, by Jaccard.

  >>> detector = Trigrams(threshold=0.6)
  >>> detector.scores(["measles outbreak"], ["measles outbreaks"]).round(2).tolist()
  [0.83]

  Attributes:
    threshold: least coefficient of a match, in (0, 1].
  """

  threshold: float = 0.6
  name = "trigrams"
  _features = staticmethod(
    functools.partial(words.extract_character_ngrams, n=3)
  )


def find(
  queries: Iterable[Text],
  targets: Sequence[Text],
  detector: Detector,
) -> Iterator[Match]:
  """Finds the near-duplicates of targets in a stream of queries.

  >>> topics = [Text(id="302", text="Measles outbreaks")]
  >>> log = (Text(id=str(i), text=q) for i, q in enumerate(["jax", "measles"]))
  >>> [match.relation for match in find(log, topics, Containment())]
  ['generalisation']

  Args:
    queries: queries, read once, a chunk at a time.
    targets: the smaller side; it is indexed and stays in memory.
    detector: detector of near-duplicates.

  Yields:
    Matches in the order of the queries, then of the targets.
  """
  for _, matches in search(queries, targets, [detector]):
    yield from matches


def search(
  queries: Iterable[Text],
  targets: Sequence[Text],
  detectors: Sequence[Detector],
  *,
  processes: int = 1,
  progress: bool = False,
) -> Iterator[tuple[list[Text], list[Match]]]:
  """Reads a stream of queries once, for several detectors, on several cores.

  Args:
    queries: queries, read once, a few chunks ahead.
    targets: the smaller side; each process indexes it.
    detectors: detectors of near-duplicates.
    processes: number of processes that match chunks in parallel, >= 1. It
      changes speed and memory only.
    progress: whether to show a progress bar.

  Yields:
    Each chunk of queries, and its matches in the order of the detectors, then
    of the queries, then of the targets.

  Raises:
    ValueError: if `processes` is below 1, or a process is killed.
  """
  checks.at_least(1, processes=processes)
  targets, queries = list(targets), iter(queries)
  chunks = iter(lambda: list(itertools.islice(queries, _CHUNK)), [])
  arguments = [target.text for target in targets], tuple(detectors)
  matched = (
    _match_in_turn(chunks, arguments)
    if processes == 1
    else _match_in_parallel(chunks, arguments, processes)
  )
  with progress_lib.shown(progress):  # not while the caller looks at a pair
    bar = progress_lib.bar("", None, unit=" queries")
  with bar:
    for texts, all_matches in matched:
      yield (
        texts,
        [
          _make_match(detector, texts[query], targets[target], score)
          for detector, matches in zip(detectors, all_matches, strict=True)
          for query, target, score in zip(
            *map(np.ndarray.tolist, matches), strict=True
          )
        ],
      )
      bar.update(len(texts))


def _make_match(detector: Detector, query: Text, target: Text, score) -> Match:
  return Match(
    query_id=query.id,
    query=query.text,
    target_id=target.id,
    target=target.text,
    score=score,
    detector=detector.name,
    relation=words.relation(query.text, target.text),
  )


_indices: list[Index] = []
"""Indices of the detectors, in a worker process."""


def _start_worker(
  targets: Sequence[str], detectors: Sequence[Detector]
) -> None:
  _indices[:] = [detector.index(targets) for detector in detectors]


def _match(queries: Sequence[str]) -> list[Matches]:
  return _match_all(_indices, queries)


def _match_all(
  indices: Sequence[Index], queries: Sequence[str]
) -> list[Matches]:
  texts = words.Texts(queries)
  return [index(texts) for index in indices]


def _match_in_turn(chunks, arguments):
  targets, detectors = arguments
  indices = [detector.index(targets) for detector in detectors]
  for texts in chunks:
    yield texts, _match_all(indices, [query.text for query in texts])


def _match_in_parallel(chunks, arguments, processes: int):
  """Does what `_match_in_turn` does, in several processes; keeps the order."""
  first = list(itertools.islice(chunks, 2))
  if len(first) < 2:  # too short to be worth a process
    yield from _match_in_turn(first, arguments)
    return
  context = multiprocessing.get_context("spawn")  # JAX has threads
  waiting: collections.deque = collections.deque()
  try:
    with futures.ProcessPoolExecutor(
      processes, context, initializer=_start_worker, initargs=arguments
    ) as pool:
      for texts in itertools.chain(first, chunks):
        strings = [query.text for query in texts]
        waiting.append((texts, pool.submit(_match, strings)))
        if len(waiting) > 2 * processes:
          texts, future = waiting.popleft()
          yield texts, future.result()
      for texts, future in waiting:
        yield texts, future.result()
  except futures.BrokenExecutor as error:
    raise ValueError(
      f"expected {processes} processes that live to the end, got a worker that"
      " was killed, likely for memory: set --processes lower"
    ) from error


def pairs(
  queries: Sequence[str], index: Index
) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
  """Returns the positions of queries and of targets that are near-duplicates.

  Args:
    queries: texts of the queries.
    index: targets, from a detector's `index`.

  Returns:
    Two arrays with an entry for each pair, in the order of the queries and then
    the targets.
  """
  none = np.zeros(0, np.int64)
  lefts, rights = [none], [none]
  for start in range(0, len(queries), _CHUNK):
    left, right, _ = index(queries[start : start + _CHUNK])
    lefts.append(start + left)
    rights.append(right)
  return np.concatenate(lefts), np.concatenate(rights)


def share_with_match(
  queries: Sequence[str],
  targets: Sequence[str],
  detector: Detector,
) -> Bool[np.ndarray, " query"]:
  """Marks the queries that have a near-duplicate among the targets.

  >>> share_with_match(["Measles!", "jax"], ["measles"], Exact()).tolist()
  [True, False]

  Args:
    queries: texts of the queries.
    targets: texts of the targets, which are indexed.
    detector: detector of near-duplicates.

  Returns:
    True for each query with a near-duplicate; the mean is the share.
  """
  marked = np.zeros(len(queries), bool)
  marked[pairs(queries, detector.index(targets))[0]] = True
  return marked
