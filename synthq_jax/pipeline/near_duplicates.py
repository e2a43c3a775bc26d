"""Leaks between a query log and a few texts: `synthq leakage near_duplicates`.

No stage: it needs no run. The log is streamed; targets and matches alone take
memory.

Formal guarantee:
  None. Pairs, counts and which topics have a match are functions of the queries
  without noise: where the log is private, so is all that comes out, the counts
  on the screen too. The file of pairs holds texts, and only its owner may read
  it; the screen shows no text.
"""

import collections
import dataclasses
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from synthq_jax import artifacts
from synthq_jax.data import files, query_pairs, shipped
from synthq_jax.leakage import near_duplicates
from synthq_jax.report import tables
from synthq_jax.retrieval import text_encoders

__all__ = ["DETECTORS", "Target", "count", "detector", "find", "run", "targets"]

_Text = near_duplicates.Text

_KINDS: dict[str, Callable[..., near_duplicates.Detector]] = {
  "exact": near_duplicates.Exact,
  "token_set": near_duplicates.TokenSet,
  "containment": near_duplicates.Containment,
  "trigrams": near_duplicates.Trigrams,
}
DETECTORS = (*_KINDS, "embedding")
"""The names that `--detector` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A text that queries are compared with.

  Attributes:
    text: its id and what it says.
    topic: the topic or query it belongs to; several texts may.
    collection: the test set, or "" where the file names none.
  """

  text: near_duplicates.Text
  topic: str
  collection: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counts:
  """What one detector found in one collection."""

  detector: str
  collection: str
  pairs: int
  queries: int
  topics: int
  of: int


def targets(path: str | os.PathLike) -> list[Target]:
  """Reads what queries are compared with: topics of TREC, or queries.

  Args:
    path: JSONL with "topic", "title" and "description", both of which are
      compared; or a log as `query_pairs.query_log` reads it.

  Returns:
    The texts.

  Raises:
    ValueError: if the file is missing, empty or malformed.
  """
  lines = files.json_lines(path) if ".jsonl" in os.fspath(path) else ()
  if any("topic" in line for _, line in itertools.islice(lines, 1)):
    return [
      Target(
        text=_Text(id=f"{topic.number} {field}", text=getattr(topic, field)),
        topic=topic.number,
        collection=topic.collection,
      )
      for topic in query_pairs.topics(path)
      for field in ("title", "description")
    ]
  found = [
    Target(text=_Text(id=name, text=text), topic=name, collection="")
    for name, text in query_pairs.query_log(path)
  ]
  if not found:
    raise ValueError(f"{path}: expected a target, got an empty file; add some")
  return found


def detector(
  name: str,
  *,
  threshold: float | None = None,
  checkpoint: str | os.PathLike | None = None,
  vocabulary: str | os.PathLike | None = None,
  bert: str | os.PathLike | None = None,
) -> near_duplicates.Detector:
  """Makes a detector of the name and threshold that the user gave.

  Args:
    name: one of `DETECTORS`.
    threshold: None for its own.
    checkpoint: of the encoder of "embedding"; None for the shipped one.
    vocabulary: that belongs to the checkpoint.
    bert: instead, a folder as `text_encoders.Bert` reads it.

  Returns:
    The detector.

  Raises:
    ValueError: if they do not go together.
  """
  if name not in DETECTORS:
    raise ValueError(
      f"expected a detector of {', '.join(DETECTORS)}, got --detector={name};"
      " choose one"
    )
  given = {} if threshold is None else {"threshold": threshold}
  if name == "exact" and given == {"threshold": 1.0}:
    given = {}
  if name == "exact" and given:
    raise ValueError(
      f"--detector=exact takes no threshold, got --threshold={threshold}"
    )
  if name != "embedding" and (checkpoint or vocabulary or bert):
    raise ValueError(
      "--checkpoint, --vocabulary and --bert go with --detector=embedding, got"
      f" {name}"
    )
  if name == "embedding":
    encode = _encoder(checkpoint, vocabulary, bert)
    return near_duplicates.Embedding(encode=encode, **given)
  return _KINDS[name](**given)


def _encoder(checkpoint, vocabulary, bert):
  """Loads what the user names, or else the shipped encoder."""
  if (checkpoint is None) != (vocabulary is None):
    raise ValueError(
      "expected --checkpoint and --vocabulary together, got one: the words of"
      " a checkpoint are numbered by its own vocabulary"
    )
  if bert and checkpoint:
    raise ValueError("expected --bert or --checkpoint, got both: leave one out")
  if bert:
    return text_encoders.load(text_encoders.Bert(folder=bert)).encode
  own = text_encoders.OwnEncoder(
    checkpoint=checkpoint or shipped.DIRECTORY,
    vocabulary=vocabulary or shipped.VOCABULARY,
    length=64,
  )
  return text_encoders.load(own).encode


def run(
  queries: str | os.PathLike,
  compared: str | os.PathLike,
  output: str | os.PathLike,
  detectors: Sequence[near_duplicates.Detector],
  *,
  progress: bool = True,
) -> str:
  """Writes the near-duplicates that each detector finds, and counts them.

  Args:
    queries: the log, see `query_pairs.query_log`; read once for each detector.
    compared: the targets, see `targets`.
    output: the JSONL file of pairs, readable by its owner alone.
    detectors: what finds them.
    progress: whether bars are shown.

  Returns:
    A table, time and memory; no text.

  Raises:
    ValueError: if a file is missing or malformed.
  """
  known = targets(compared)
  found, times = [], []
  with artifacts.replacing(output, mode=0o600) as stream:
    for each in detectors:
      start = time.monotonic()
      log = (_Text(id=i, text=t) for i, t in query_pairs.query_log(queries))
      pairs = _written(find(log, known, each, progress=progress), stream)
      found += count(pairs, known, each.name)
      times.append((each.name, time.monotonic() - start))
  return _table(found, times, output)


def find(
  log: Iterable[near_duplicates.Text],
  known: Sequence[Target],
  each: near_duplicates.Detector,
  *,
  progress: bool = False,
) -> Iterator[tuple[Target, near_duplicates.Match]]:
  """Finds near-duplicates, whose ids of targets need not be different.

  Args:
    log: the queries, read once.
    known: the targets.
    each: the detector.
    progress: whether a bar is shown.

  Yields:
    Matches, each with its target.
  """
  numbered = [
    _Text(id=str(place), text=target.text.text)
    for place, target in enumerate(known)
  ]
  for match in near_duplicates.find(log, numbered, each, progress=progress):
    target = known[int(match.target_id)]
    yield target, dataclasses.replace(match, target_id=target.text.id)


def _written(pairs: Iterable, stream) -> Iterator:
  for target, match in pairs:
    line = dataclasses.asdict(match)
    if target.collection:
      line["collection"] = target.collection
    stream.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
    yield target, match


def count(
  pairs: Iterable[tuple[Target, near_duplicates.Match]],
  known: Sequence[Target],
  name: str,
) -> list[_Counts]:
  """Counts matches by collection.

  A query that matches both title and description of a topic is one pair.

  Args:
    pairs: matches with their targets.
    known: all targets.
    name: the detector's.

  Returns:
    One row per collection, in the order of the targets.
  """
  seen = collections.defaultdict(set)
  for target, match in pairs:
    seen[target.collection].add((match.query_id, target.topic))
  topics = collections.defaultdict(set)
  for target in known:
    topics[target.collection].add(target.topic)
  return [
    _Counts(
      detector=name,
      collection=collection,
      pairs=len(seen[collection]),
      queries=len({query for query, _ in seen[collection]}),
      topics=len({topic for _, topic in seen[collection]}),
      of=len(every),
    )
    for collection, every in topics.items()
  ]


def _table(found: Sequence[_Counts], times, output) -> str:
  """Says what was found, and what it took."""
  table = tables.of(
    found,
    {
      "Detector": lambda each: each.detector,
      "Collection": lambda each: each.collection or "-",
      "Pairs": lambda each: f"{each.pairs:,}",
      "Queries": lambda each: f"{each.queries:,}",
      "Topics": lambda each: f"{each.topics:,}",
      "Of": lambda each: f"{each.of:,}",
    },
    left=("Detector", "Collection"),
  )
  took = ", ".join(
    f"{name} {tables.duration(seconds)}" for name, seconds in times
  )
  return (
    "PRIVATE if the log is: counts and pairs come from single queries\n\n"
    f"{table.text()}\n\n"
    f"Time: {took}; peak memory {_peak_mib():,} MiB\n"
    f"Pairs with their texts, readable by you alone: {output}"
  )


def _peak_mib() -> int:
  """The largest resident size of this process so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak // (1 << 20 if sys.platform == "darwin" else 1 << 10)
