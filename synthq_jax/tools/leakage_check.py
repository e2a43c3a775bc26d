"""Test queries that stand in a training log: `synthq leakage check`.

No stage: it needs no run. The log is streamed; test queries and matches alone
take memory.

Formal guarantee:
  None. Pairs, counts, which queries leak and the exit code are functions of the
  queries without noise: where the log is private, so is all that comes out. All
  files may be read by their owner alone; the screen shows no text.
"""

import array
import collections
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synthq_jax import checks
from synthq_jax.data import query_pairs, sources
from synthq_jax.leakage import calibration, near_duplicates
from synthq_jax.report import blocks, page, tables
from synthq_jax.retrieval import text_encoders
from synthq_jax.storage import artifacts
from synthq_jax.tools import leakage_targets
from synthq_jax.training import progress as progress_lib

__all__ = [
  "CALIBRATED",
  "DETECTORS",
  "Check",
  "Count",
  "Request",
  "calibrated",
  "count",
  "detector",
  "run",
]

_Text = near_duplicates.Text

CALIBRATED = {
  "exact": 1.0,
  "token_set": 0.714,
  "containment": 0.843,
  "trigrams": 0.477,
  "embedding": 0.749,
}
"""The least similarity of a leak, by detector: the lowest with precision .9 on the
827 labelled pairs of SPIRE 2022, of a query and a variant of a topic. Those pairs
were chosen by a cosine: among all pairs of a log, fewer are right."""

DETECTORS = tuple(CALIBRATED)
"""The names that `--detector` takes."""

_KINDS: dict[str, Callable[..., near_duplicates.Detector]] = {
  "exact": lambda threshold: near_duplicates.Exact(),
  "token_set": lambda threshold: near_duplicates.TokenSet(
    threshold=threshold, ignored=near_duplicates.FUNCTION_WORDS
  ),
  "containment": lambda threshold: near_duplicates.Containment(
    threshold=threshold
  ),
  "trigrams": lambda threshold: near_duplicates.Trigrams(threshold=threshold),
}
_SHOWN = 200  # pairs on the page
_PAIRS, _CLEAN, _PAGE = "pairs.jsonl", "clean_ids.txt", "report.html"
_RESULT = "check.json"
_MARK = ".leakage_check"  # these files are a check's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A query log, test queries, and the settings of their comparison.

  Attributes:
    train: the log, streamed: a source such as "beir:DIR" or "ir_datasets:ID", or
      a file as `query_pairs.query_log` reads it.
    test: the test queries: the same, or a file of TREC's topics.
    train_split: of a source, whose judged queries; None: all queries.
    test_split: the same of the test queries.
    variants: a file as `query_pairs.variants` reads it, of test queries by id.
    known: a file as `query_pairs.verified` reads it: pairs of a test query and a
      query of the log, by their ids, that people took for near-duplicates. They
      leak, whatever the detectors say.
    output: the folder of what is written.
    fail_above: how many leaked queries of the log are too many; None: never.
    processes: that look at the log side by side; None: as many as there are
      cores, and one where an encoder works.
  """

  train: str
  test: str
  output: str
  train_split: str | None = None
  test_split: str | None = None
  variants: str | None = None
  known: str | None = None
  fail_above: int | None = None
  processes: int | None = None

  def __post_init__(self):
    """Checks the numbers."""
    if self.fail_above is not None:
      checks.at_least(0, fail_above=self.fail_above)
    if self.processes is not None:
      checks.at_least(1, processes=self.processes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
  """Matches of one detector in one collection; a query and a topic are a pair."""

  detector: str
  threshold: float
  collection: str
  pairs: int
  queries: int
  topics: int
  of: int
  """All topics of the collection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """Contents of check.json: counts, and no text.

  Attributes:
    num_queries: different queries of the log, an id with a text each.
    num_leaked: different queries that a detector matched.
    counts: by detector and collection.
    fail_above: as it was asked for.
    is_passed: whether no more leaked than that.
    seconds: of wall time.
  """

  train: str
  test: str
  num_queries: int
  num_leaked: int
  counts: tuple[Count, ...]
  fail_above: int | None
  is_passed: bool
  seconds: float


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
    threshold: None for that of `CALIBRATED`.
    checkpoint: of the encoder of "embedding"; None for the shipped one.
    vocabulary: that belongs to the checkpoint.
    bert: instead, a folder as `text_encoders.FolderEncoder` reads it.

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
  if name == "exact" and threshold not in (None, 1.0):
    raise ValueError(
      f"--detector=exact takes no threshold, got --threshold={threshold}"
    )
  if name != "embedding" and (checkpoint or vocabulary or bert):
    raise ValueError(
      "--checkpoint, --vocabulary and --bert go with --detector=embedding, got"
      f" {name}"
    )
  threshold = CALIBRATED[name] if threshold is None else threshold
  if name == "embedding":
    encode = _encoder(checkpoint, vocabulary, bert)
    return near_duplicates.Embedding(encode=encode, threshold=threshold)
  return _KINDS[name](threshold)


def _encoder(checkpoint, vocabulary, bert):
  """Loads what the user names, or else the shipped encoder."""
  if (checkpoint is None) != (vocabulary is None):
    raise ValueError(
      "expected --checkpoint and --vocabulary together, got one: the words of"
      " a checkpoint are numbered by its own vocabulary"
    )
  if bert and checkpoint:
    raise ValueError("expected --bert or --checkpoint, got both: leave one out")
  named = text_encoders.given(bert, checkpoint, vocabulary)
  return text_encoders.load(named).encode


def calibrated(
  one: near_duplicates.Detector, labels: str, *, precision: float
) -> near_duplicates.Detector:
  """Gives a detector the lowest threshold with a precision on labelled pairs.

  Compared are a query and what somebody asked who had read the topic. `Exact`
  stays as it is.

  Args:
    one: the detector.
    labels: a file as `query_pairs.labelled_pairs` reads it.
    precision: the wanted one, in (0, 1].

  Raises:
    ValueError: if no threshold reaches it, or the file is malformed.
  """
  if isinstance(one, near_duplicates.Exact):
    return one
  pairs = query_pairs.labelled_pairs(labels)
  if not pairs:
    raise ValueError(f"{labels}: expected labelled pairs, got none")
  queries = [pair.query for pair in pairs]
  scores = one.scores(queries, [pair.variant for pair in pairs])
  right = np.array([not pair.different_topic for pair in pairs])
  try:
    least = -1.0 if isinstance(one, near_duplicates.Embedding) else 0.0
    found = calibration.threshold(
      scores, right, precision=precision, above=least
    )
    return dataclasses.replace(one, threshold=found)
  except ValueError as error:
    raise ValueError(
      f"{labels}: calibrating {one.name} at precision {precision}: {error}"
    ) from error


def run(
  request: Request,
  detectors: Sequence[near_duplicates.Detector],
  *,
  progress: bool = True,
) -> tuple[Check, str]:
  """Compares a log with test queries and writes what leaks.

  The folder gets check.json (counts), report.html (counts and some pairs),
  pairs.jsonl (all pairs with their texts) and clean_ids.txt: the ids of the
  log's queries that no detector matched, nor `known` lists, one a line. Files of
  an earlier check are replaced, and nobody else's.

  Args:
    request: what is compared.
    detectors: what finds near-duplicates; the log is read once for all.
    progress: whether a bar is shown.

  Returns:
    The result, and a table with time and memory; no text.

  Raises:
    ValueError: if a file is missing or malformed, or the folder holds files of
      these names that no check wrote.
  """
  start = time.monotonic()
  written = _written(request)
  known = leakage_targets.read(
    request.test, split=request.test_split, variants=request.variants
  )
  listed = (
    leakage_targets.listed(request.known, known) if request.known else None
  )
  log = iter(leakage_targets.queries(request.train, request.train_split))
  first = list(itertools.islice(log, 1))  # its file is there, and read so far
  if not first:
    raise ValueError(
      f"{request.train}: expected queries in the log, got none; check its export"
    )
  folder = pathlib.Path(request.output)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / _MARK).touch(mode=0o600)
  for path in written:  # nothing of an earlier check stays that looks finished
    path.unlink(missing_ok=True)
  with (
    artifacts.replacing(folder / _PAIRS, mode=0o600) as pairs,
    artifacts.replacing(folder / _CLEAN, mode=0o600) as clean,
    tempfile.TemporaryFile(dir=folder) as spool,
  ):
    found = _Found(known, detectors, listed, pairs, spool)
    for texts, matches in near_duplicates.search(
      (_Text(id=name, text=text) for name, text in itertools.chain(first, log)),
      _numbered(known),
      detectors,
      processes=_processes(request, detectors),
      progress=progress,
    ):
      found.add(texts, matches)
    found.finish(clean)
    unmet = found.unmet()
    if listed and unmet == len(listed.places):
      raise ValueError(
        f"{request.known}: expected pairs with queries of the log, got {unmet} ids"
        " that it has not; check that the second ids are those of --train"
      )
  too_many = request.fail_above is not None and (
    len(found.leaked) > request.fail_above
  )
  check = Check(
    train=_title(request.train),
    test=_title(request.test),
    num_queries=found.num_queries,
    num_leaked=len(found.leaked),
    counts=tuple(found.counts()),
    fail_above=request.fail_above,
    is_passed=not too_many,
    seconds=time.monotonic() - start,
  )
  shown = page.html(_page(check, found.shown))
  text = json.dumps(artifacts.to_json(check), indent=1)
  for name, content in ((_PAGE, shown), (_RESULT, f"{text}\n")):
    with artifacts.replacing(folder / name, mode=0o600) as stream:
      stream.write(content.encode())
  note = f"note: {unmet} ids of --known are not in the log\n" if unmet else ""
  return check, note + _screen(check, folder)


def _processes(request: Request, detectors: Sequence[Any]) -> int:
  if any(isinstance(one, near_duplicates.Embedding) for one in detectors):
    return 1
  if request.processes is not None:
    return request.processes
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _written(request: Request) -> list[pathlib.Path]:
  """Returns the files to write; refuses those that are read, or not a check's.

  A file of its own says that the others are a check's, also after a kill.
  """
  folder = pathlib.Path(request.output)
  written = [folder / name for name in (_RESULT, _PAGE, _PAIRS, _CLEAN)]
  read = (request.train, request.test, request.variants, request.known)
  for given in filter(None, read):
    place = pathlib.Path(str(given).rpartition(":")[2])
    if place.resolve() in [path.resolve() for path in written]:
      raise ValueError(
        f"{request.output}: expected a folder whose files are not read, got"
        f" {place} among them: give --output another"
      )
  for path in written:
    if path.exists() and not (folder / _MARK).exists():
      raise ValueError(
        f"{path}: expected a folder without such a file, got one that no check"
        " wrote: give --output another"
      )
  return written


def _title(place: str) -> str:
  if leakage_targets.is_source(place):
    return sources.open(place).title
  return pathlib.Path(place).name


def _numbered(
  known: Sequence[leakage_targets.Target],
) -> list[near_duplicates.Text]:
  """Returns the texts with ids that are different."""
  return [
    _Text(id=str(place), text=target.text.text)
    for place, target in enumerate(known)
  ]


class _Found:
  """Matches so far; pairs go to their file at once, ids to a spool.

  A query is an id with a text: users and sessions ask several. Clean ids are
  written at the end: a later text of an id may match. What is kept of ids, and of
  queries, until then are hashes of 8 bytes, which tell those that stand again; that
  two of ten million have the same has a chance of 3e-6.
  """

  def __init__(self, known, detectors, listed, pairs, spool):
    self._known, self._listed = known, listed
    self._detectors = [*detectors, *([listed] if listed else [])]
    self._pairs, self._spool = pairs, spool
    self._ids, self._queries = array.array("q"), array.array("q")
    self._seen = {
      one.name: collections.defaultdict(set) for one in self._detectors
    }
    self.leaked: set[tuple[str, str]] = set()
    self.shown: list[tuple[leakage_targets.Target, near_duplicates.Match]] = []
    self.num_queries = 0

  def add(self, texts, matches) -> None:
    """Takes the matches of a chunk of queries."""
    if self._listed:
      matches = [*matches, *self._listed.matches(texts, self._known)]
    for match in matches:
      target = self._known[int(match.target_id)]
      query = match.query_id, match.query
      self.leaked.add(query)
      seen = self._seen[match.detector][target.collection]
      seen.add((query, target.topic))
      line = dataclasses.asdict(match) | {"target_id": target.text.id}
      if target.collection:
        line["collection"] = target.collection
      text = json.dumps(line, ensure_ascii=False)
      self._pairs.write(f"{text}\n".encode())
      if len(self.shown) < _SHOWN:
        self.shown.append((target, match))
    ids = dict.fromkeys(text.id for text in texts)
    self._ids.extend(map(hash, ids))
    self._queries.extend(hash((text.id, text.text)) for text in texts)
    self._spool.write("".join(f"{name}\n" for name in ids).encode())

  def finish(self, clean) -> None:
    """Counts queries, and writes each clean id once, in their order."""
    self.num_queries = len(self._queries) - len(_repeated(self._queries))
    again, written = {*_repeated(self._ids).tolist()}, set()
    leaked = {name for name, _ in self.leaked}
    self._spool.seek(0)
    for line in self._spool:
      name = line.decode().removesuffix("\n")
      if name in leaked or name in written:
        continue
      if hash(name) in again:
        written.add(name)
      clean.write(line)

  def unmet(self) -> int:
    """Counts listed queries that the log lacks."""
    listed = [*map(hash, self._listed.places)] if self._listed else []
    return int(np.sum(~np.isin(listed, np.array(self._ids, np.int64))))

  def counts(self) -> Iterator[Count]:
    """Yields a row for each detector and collection."""
    for one in self._detectors:
      yield from count(self._seen[one.name], self._known, one)


def _repeated(hashes: array.array) -> np.ndarray:
  """Returns each hash as often as it stands again."""
  ordered = np.sort(np.array(hashes, np.int64))
  return ordered[1:][ordered[1:] == ordered[:-1]]


def count(
  seen: dict[str, set[tuple[Any, str]]],
  known: Sequence[leakage_targets.Target],
  one: near_duplicates.Detector,
) -> list[Count]:
  """Counts matches by collection.

  A query that matches both title and description of a topic is one pair.

  Args:
    seen: collection -> query and topic of each match.
    known: all targets.
    one: the detector.

  Returns:
    One row per collection, in the order of the targets.
  """
  topics = collections.defaultdict(set)
  for target in known:
    topics[target.collection].add(target.topic)
  return [
    Count(
      detector=one.name,
      threshold=one.threshold,
      collection=collection,
      pairs=len(found := seen.get(collection, set())),
      queries=len({query for query, _ in found}),
      topics=len({topic for _, topic in found}),
      of=len(every),
    )
    for collection, every in topics.items()
  ]


def _counts(check: Check) -> blocks.Table:
  return tables.of(
    check.counts,
    {
      "Detector": lambda each: each.detector,
      "From": lambda each: f"{each.threshold:.3g}",
      "Collection": lambda each: each.collection or "-",
      "Pairs": lambda each: f"{each.pairs:,}",
      "Queries": lambda each: f"{each.queries:,}",
      "Topics": lambda each: f"{each.topics:,}",
      "Of": lambda each: f"{each.of:,}",
    },
    left=("Detector", "Collection"),
  )


def _outcome(check: Check) -> str:
  said = (
    f"{check.num_leaked:,} of {check.num_queries:,} queries of the log"
    f" ({check.train}) are near-duplicates of a test query ({check.test})"
  )
  if check.fail_above is None:
    return said
  bar = f"{check.fail_above:,} are allowed"
  return f"{said}; {bar}: {'passed' if check.is_passed else 'FAILED'}"


def _precision(check: Check) -> str:
  """Writes the measured precision of matches."""
  usual = {name.replace("_", " "): value for name, value in CALIBRATED.items()}
  for one in check.counts:
    if one.threshold != usual.get(one.detector, one.threshold):
      return ""
  return (
    "The thresholds are right in 9 of 10 labelled pairs that were chosen for being"
    " similar; among all pairs of a log, fewer are. "
  )


def _page(
  check: Check, shown: Sequence[tuple[leakage_targets.Target, Any]]
) -> blocks.Page:
  columns = {
    "Query": lambda row: row[1].query,
    "Test text": lambda row: row[1].target,
    "Test id": lambda row: row[0].text.id,
    "Detector": lambda row: row[1].detector,
    "Score": lambda row: f"{row[1].score:.2f}",
    "Relation, by a rule on words": lambda row: row[1].relation,
  }
  left = [name for name in columns if name != "Score"]
  pairs = [tables.of(shown, columns, left=left)] if shown else []
  return blocks.Page(
    title="Test queries in a training log",
    banner="PRIVATE if the log is: counts and pairs come from single queries",
    introduction=(blocks.Paragraph(text=f"{_outcome(check)}."),),
    parts=(
      blocks.Part(title="What each detector found", blocks=(_counts(check),)),
      blocks.Part(
        title="Pairs",
        blocks=(
          blocks.Paragraph(
            text=f"The first {len(shown)}; all of them are in {_PAIRS}, and the"
            f" ids of the queries without a match in {_CLEAN}."
          ),
          *pairs,
        ),
      ),
      blocks.Part(
        title="What this does not say",
        blocks=(
          blocks.Paragraph(
            text=f"A match is a candidate. {_precision(check)}Synonyms and"
            " paraphrases without common words are not found without an encoder."
          ),
        ),
      ),
    ),
  )


def _screen(check: Check, folder: pathlib.Path) -> str:
  """Summarizes matches, time and memory."""
  return (
    "PRIVATE if the log is: counts and pairs come from single queries\n\n"
    f"{_counts(check).text()}\n\n"
    f"{_outcome(check)}\n"
    f"Time: {tables.duration(check.seconds)}; peak memory of a process"
    f" {max(progress_lib.peak_bytes()) >> 20:,} MiB\n"
    f"Readable by you alone: {folder}/{_PAGE}, {_RESULT}, {_PAIRS} (with texts),"
    f" {_CLEAN}"
  )
