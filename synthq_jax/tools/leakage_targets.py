"""Reads the targets of a leakage check: test queries, variants, known pairs."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from synthq_jax.data import files, query_pairs, sources
from synthq_jax.leakage import near_duplicates, words

__all__ = ["Listed", "Target", "is_source", "listed", "queries", "read"]

_Text = near_duplicates.Text
_FIELDS = ("title", "description")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A text that queries are compared with.

  Attributes:
    text: its id and what it says.
    topic: the topic or query it belongs to; several texts may.
    collection: the test set, or "" where there is one.
  """

  text: near_duplicates.Text
  topic: str
  collection: str


def read(
  place: str, *, split: str | None = None, variants: str | None = None
) -> list[Target]:
  """Reads what queries are compared with: topics of TREC, or queries.

  Args:
    place: JSONL with "topic", "title" and "description", both of which are
      compared; or a log, as `queries` takes it.
    split: of a source.
    variants: a file of more texts, by the id of the test query.

  Returns:
    The texts; of equal ones of a topic the first.

  Raises:
    ValueError: if a file is missing, empty or malformed, or has variants of no
      test query.
  """
  known = [*_targets(place, split)]
  if not known:
    raise ValueError(f"{place}: expected a target, got none; add some")
  if variants is not None:
    collections_of = collections.defaultdict(dict)
    for target in known:
      collections_of[target.topic][target.collection] = None
    added = [
      Target(
        text=_Text(id=f"{topic} variant", text=text),
        topic=topic,
        collection=collection,
      )
      for topic, text in query_pairs.variants(variants)
      for collection in collections_of.get(topic, ())
    ]
    if not added:
      raise ValueError(
        f"{variants}: expected variants of test queries, got ids of none; check"
        " that the ids are those of --test"
      )
    known += added
  distinct = {(x.topic, x.collection, x.text.text): x for x in known[::-1]}
  return [*distinct.values()][::-1]


def _targets(place: str, split: str | None) -> Iterator[Target]:
  if _is_topics(place):
    for topic in query_pairs.topics(place):
      for field in _FIELDS:
        yield Target(
          text=_Text(id=f"{topic.number} {field}", text=getattr(topic, field)),
          topic=topic.number,
          collection=topic.collection,
        )
    return
  for name, text in queries(place, split):
    yield Target(text=_Text(id=name, text=text), topic=name, collection="")


def _is_topics(place: str) -> bool:
  if ".jsonl" not in place or is_source(place):
    return False
  return any(
    "topic" in line for _, line in itertools.islice(files.json_lines(place), 1)
  )


def is_source(place: str) -> bool:
  """Tests for a source of collections, as opposed to a file.

  >>> is_source("beir:DIR"), is_source("log.tsv")
  (True, False)
  """
  return place.partition(":")[0] in sources.KINDS


def queries(place: str, split: str | None) -> Iterator[tuple[str, str]]:
  """Yields ids and texts of the queries of a source or a file.

  Args:
    place: a source, or a file as `query_pairs.query_log` reads it.
    split: of a source: whose judged queries; None: all.

  Raises:
    ValueError: if the file is missing or malformed, or has no splits.
  """
  if is_source(place):
    return sources.open(place, "--train and --test").queries(split)
  if split is not None:
    raise ValueError(
      f"{place}: expected a source of collections with a split, got a file and"
      f" the split {split!r}; leave the split out"
    )
  return query_pairs.query_log(place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
  """Pairs that a file lists, beside those that detectors find.

  Attributes:
    places: of the log's query, by id: the numbers of its targets.
    name: as a detector has one, for counts and files.
    threshold: the same.
  """

  places: dict[str, list[int]]
  name: str = "known"
  threshold: float = 1.0

  def matches(
    self, texts: Sequence[near_duplicates.Text], known: Sequence[Target]
  ) -> Iterator[near_duplicates.Match]:
    """Yields the pairs of some queries of the log.

    Args:
      texts: these queries.
      known: all targets.
    """
    for text in texts:
      for place in self.places.get(text.id, ()):
        target = known[place].text.text
        yield near_duplicates.Match(
          query_id=text.id,
          query=text.text,
          target_id=str(place),
          target=target,
          score=1.0,
          detector=self.name,
          relation=words.relation(text.text, target),
        )


def listed(path: str, known: Sequence[Target]) -> Listed:
  """Reads pairs that people judged, by `query_pairs.verified`.

  Args:
    path: the file.
    known: all targets, of which a pair has its topic's first in each collection.

  Raises:
    ValueError: if a line is malformed, or no pair has a topic of the targets.
  """
  first = {}
  for place, target in enumerate(known):
    first.setdefault(target.topic, {}).setdefault(target.collection, place)
  places = collections.defaultdict(list)
  for topic, query in dict.fromkeys(query_pairs.verified(path)):
    places[query] += first.get(topic, {}).values()
  if not any(places.values()):
    raise ValueError(
      f"{path}: expected pairs with test queries, got ids of none; check that"
      " the first ids are those of --test"
    )
  return Listed(places=dict(places))
