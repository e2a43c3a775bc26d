"""Reads the targets of a leakage check: test queries, variants, known pairs."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from synthq_jax.data import files, ids, query_pairs, sources
from synthq_jax.leakage import near_duplicates, words

__all__ = [
  "KnownPairs",
  "Target",
  "is_source",
  "read",
  "read_known_pairs",
  "read_queries",
]

_Text = near_duplicates.Text
_FIELDS = ("title", "description")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A text to compare with the log's queries.

  Attributes:
    text: id and text.
    topic: id of its topic or test query, which several targets may share.
    collection: name of the test set; "" if there is only one.
  """

  text: near_duplicates.Text
  topic: str
  collection: str


def read(
  location: str, *, split: str | None = None, variants: str | None = None
) -> list[Target]:
  """Reads the targets of a check: TREC topics, or test queries.

  Args:
    location: JSONL with "topic", "title" and "description", where title and
      description become targets; or a log, as `read_queries` takes it.
    split: split of a source.
    variants: a file of more texts, by id of a test query.

  Returns:
    The targets. If texts of a topic are equal, only the first is a target.

  Raises:
    ValueError: if a file is missing, empty or malformed, or no variant belongs to
      a test query.
  """
  targets = [*_read_targets(location, split)]
  if not targets:
    raise ValueError(f"{location}: expected a target, got none; add some")
  if variants is not None:
    collections_of = collections.defaultdict(dict)
    for target in targets:
      collections_of[target.topic][target.collection] = None
    variant_targets = [
      Target(
        text=_Text(id=f"{topic} variant", text=text),
        topic=topic,
        collection=collection,
      )
      for topic, text in query_pairs.variants(variants)
      for collection in collections_of.get(topic, ())
    ]
    if not variant_targets:
      raise ValueError(
        f"{variants}: expected variants of test queries, got ids of none; check"
        " that the ids are those of --test"
      )
    targets += variant_targets
  distinct = {(x.topic, x.collection, x.text.text): x for x in targets[::-1]}
  return [*distinct.values()][::-1]


def _read_targets(location: str, split: str | None) -> Iterator[Target]:
  if _is_topics(location):
    yield from _read_topics(location)
    return
  for name, text in read_queries(location, split):
    yield Target(text=_Text(id=name, text=text), topic=name, collection="")


def _read_topics(path: str) -> Iterator[Target]:
  """Yields titles and descriptions of TREC topics, each topic of a collection
  once."""
  seen: set[tuple[str, str]] = set()
  for where, line in files.json_lines(path):
    collection = files.field(where, line, "collection")
    topic = ids.get_field(where, line, "topic", "topic")
    if (collection, topic) in seen:
      raise ValueError(
        f"{where}: expected each topic once, got {topic} of {collection} again;"
        " remove one"
      )
    seen.add((collection, topic))
    for name in _FIELDS:
      text = _Text(id=f"{topic} {name}", text=files.field(where, line, name))
      yield Target(text=text, topic=topic, collection=collection)


def _is_topics(location: str) -> bool:
  if ".jsonl" not in location or is_source(location):
    return False
  return any(
    "topic" in line
    for _, line in itertools.islice(files.json_lines(location), 1)
  )


def is_source(location: str) -> bool:
  """Tests whether a location is a source of collections, not a file.

  >>> is_source("beir:DIR"), is_source("log.tsv")
  (True, False)
  """
  return location.partition(":")[0] in sources.KINDS


def read_queries(location: str, split: str | None) -> Iterator[tuple[str, str]]:
  """Yields (id, text) of each query of a source or a file.

  Args:
    location: a source, or a file that `query_pairs.query_log` reads.
    split: split of a source, whose judged queries are read; None: all queries.

  Raises:
    ValueError: if the file is missing or malformed, or a file is to have a split.
  """
  if is_source(location):
    return sources.open(location, "--train and --test").queries(split)
  if split is not None:
    raise ValueError(
      f"{location}: expected a source of collections with a split, got a file and"
      f" the split {split!r}; leave the split out"
    )
  return query_pairs.query_log(location)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownPairs:
  """Pairs that people judged to be near-duplicates; counts like a detector.

  Attributes:
    target_numbers: positions of the targets, by id of the log's query.
    name: name in place of a detector's, in counts and files.
    threshold: threshold in place of a detector's.
  """

  target_numbers: dict[str, list[int]]
  name: str = "known"
  threshold: float = 1.0

  def matches(
    self, texts: Sequence[near_duplicates.Text], targets: Sequence[Target]
  ) -> Iterator[near_duplicates.Match]:
    """Yields the known pairs of some of the log's queries.

    Args:
      texts: the queries.
      targets: all targets.
    """
    for text in texts:
      for number in self.target_numbers.get(text.id, ()):
        target = targets[number].text.text
        yield near_duplicates.Match(
          query_id=text.id,
          query=text.text,
          target_id=str(number),
          target=target,
          score=1.0,
          detector=self.name,
          relation=words.relation(text.text, target),
        )


def read_known_pairs(path: str, targets: Sequence[Target]) -> KnownPairs:
  """Reads a file of known near-duplicates; see `query_pairs.verified`.

  Args:
    path: the file.
    targets: all targets. A pair gets the first target of its topic in each
      collection.

  Raises:
    ValueError: if a line is malformed, or no pair has a topic of the targets.
  """
  first_numbers = {}
  for number, target in enumerate(targets):
    first_numbers.setdefault(target.topic, {}).setdefault(
      target.collection, number
    )
  target_numbers = collections.defaultdict(list)
  for topic, query in query_pairs.verified(path):
    target_numbers[query] += first_numbers.get(topic, {}).values()
  if not any(target_numbers.values()):
    raise ValueError(
      f"{path}: expected pairs with test queries, got ids of none; check that"
      " the first ids are those of --test"
    )
  return KnownPairs(target_numbers=dict(target_numbers))
