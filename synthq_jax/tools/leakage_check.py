"""Finds test queries in a training log: `synthq leakage check`.

The command is no stage and needs no run. The log is streamed; only test queries
and matches are held in memory.

Formal guarantee:
  None. Pairs, counts, ids of leaked queries and the exit code are functions of the
  queries without noise: if the log is private, so is every output. Only their
  owner may read the files; the screen shows no query text.
"""

import array
import collections
import dataclasses
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synthq_jax import checks
from synthq_jax.data import query_pairs, sources
from synthq_jax.leakage import calibration, near_duplicates
from synthq_jax.models import device_rows
from synthq_jax.report import blocks, page, tables
from synthq_jax.storage import artifacts
from synthq_jax.tools import leakage_targets
from synthq_jax.training import progress as progress_lib

__all__ = [
  "CALIBRATED",
  "DETECTORS",
  "Check",
  "Count",
  "Request",
  "calibrate",
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
}
"""Default threshold of each detector: the least similarity of a leak.

All but "exact" are the lowest with precision .9 on the 827 labelled pairs of SPIRE
2022. Those were selected by cosine: the precision among all pairs of a log is lower.
"""

DETECTORS = tuple(CALIBRATED)
"""Names of detectors that `--detector` takes."""

_MAKERS: dict[str, Callable[..., near_duplicates.Detector]] = {
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
_MARK = ".leakage_check"  # marks a folder whose files a check wrote


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A query log, test queries, and the settings of their comparison.

  Attributes:
    train: location of the log: a source such as "beir:DIR" or "ir_datasets:ID",
      or a file that `query_pairs.query_log` reads.
    test: location of the test queries: the same, or a file of TREC topics.
    train_split: split of a source, whose judged queries are read; None: all.
    test_split: the same for the test queries.
    variants: a file that `query_pairs.variants` reads, by id of a test query.
    known_pairs: a file that `query_pairs.verified` reads: pairs of a test query and a
      query of the log, by id, that people judged to be near-duplicates. Each pair
      is a leak, whatever the detectors find.
    output: the folder of the written files.
    fail_above: the check fails if more queries of the log leak; None: it never
      fails.
    processes: number of processes that search the log; None: one per core.
  """

  train: str
  test: str
  output: str
  train_split: str | None = None
  test_split: str | None = None
  variants: str | None = None
  known_pairs: str | None = None
  fail_above: int | None = None
  processes: int | None = None

  def __post_init__(self):
    """Refuses negative counts and a check without processes."""
    if self.fail_above is not None:
      checks.at_least(0, fail_above=self.fail_above)
    if self.processes is not None:
      checks.at_least(1, processes=self.processes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
  """Counts of one detector's matches in one collection.

  A query of the log and a topic are one pair, however often they match.
  """

  detector: str
  threshold: float
  collection: str
  pairs: int
  queries: int
  topics: int
  of: int
  """Number of all topics in the collection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """Contents of check.json: counts without texts.

  Attributes:
    train: title of the log.
    test: title of the test queries.
    num_queries: distinct queries of the log; a query is an id with a text.
    num_leaked: distinct queries of the log with a match.
    counts: counts by detector and collection.
    fail_above: as in the request.
    is_passed: whether at most `fail_above` queries leak.
    seconds: wall time in seconds.
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
) -> near_duplicates.Detector:
  """Makes a detector of near-duplicates by its name.

  Args:
    name: one of `DETECTORS`.
    threshold: least similarity of a match; None for that of `CALIBRATED`.

  Raises:
    ValueError: if the name is unknown, or an argument does not go with it.
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
  threshold = CALIBRATED[name] if threshold is None else threshold
  return _MAKERS[name](threshold)


def calibrate(
  detector: near_duplicates.Detector, labels: str, *, precision: float
) -> near_duplicates.Detector:
  """Gives a detector the lowest threshold with a precision on labelled pairs.

  The similarity of a pair is that of its query and its topic's variant, a query
  that somebody asked after reading the topic. `Exact` is returned unchanged.

  Args:
    detector: the detector to calibrate.
    labels: a file that `query_pairs.labelled_pairs` reads.
    precision: the precision to reach, in (0, 1].

  Raises:
    ValueError: if no threshold reaches the precision, or the file is malformed.
  """
  if isinstance(detector, near_duplicates.Exact):
    return detector
  pairs = query_pairs.labelled_pairs(labels)
  if not pairs:
    raise ValueError(f"{labels}: expected labelled pairs, got none")
  queries = [pair.query for pair in pairs]
  scores = detector.scores(queries, [pair.variant for pair in pairs])
  is_duplicate = np.array([not pair.different_topic for pair in pairs])
  try:
    threshold = calibration.threshold(scores, is_duplicate, precision=precision)
    return dataclasses.replace(detector, threshold=threshold)
  except ValueError as error:
    raise ValueError(
      f"{labels}: calibrating {detector.name} at precision {precision}: {error}"
    ) from error


def run(
  request: Request,
  detectors: Sequence[near_duplicates.Detector],
) -> tuple[Check, str]:
  """Compares a log with test queries, and writes the leaks to a folder.

  The folder gets check.json (counts), report.html (counts and some pairs),
  pairs.jsonl (all pairs with their texts) and clean_ids.txt. The last lists, one a
  line, the ids of the log without a match and without a known pair. Files of
  an earlier check are replaced; other files of these names are refused.

  Args:
    request: the log, the test queries and the settings.
    detectors: detectors of near-duplicates; the log is read once for all.

  Returns:
    The result, and a summary for the screen without query texts.

  Raises:
    ValueError: if a file is missing or malformed, or the folder holds files of
      these names that no check wrote.
  """
  start = time.monotonic()
  written = _list_outputs(request)
  targets = leakage_targets.read(
    request.test, split=request.test_split, variants=request.variants
  )
  known_pairs = None
  if request.known_pairs:
    known_pairs = leakage_targets.read_known_pairs(request.known_pairs, targets)
  log = iter(leakage_targets.read_queries(request.train, request.train_split))
  # Reading one query finds a missing file before anything is written.
  first = list(itertools.islice(log, 1))
  if not first:
    raise ValueError(
      f"{request.train}: expected queries in the log, got none; check its export"
    )
  processes = request.processes
  if processes is None:
    processes = device_rows.count_cores()
  folder = pathlib.Path(request.output)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / _MARK).touch(mode=0o600)
  # After a kill, an earlier check's files must not look like this one's.
  for path in written:
    path.unlink(missing_ok=True)
  with (
    artifacts.replacing(folder / _PAIRS, mode=0o600) as pairs,
    artifacts.replacing(folder / _CLEAN, mode=0o600) as clean,
    tempfile.TemporaryFile(dir=folder) as spool,
  ):
    collector = _MatchCollector(targets, detectors, known_pairs, pairs, spool)
    for texts, matches in near_duplicates.search(
      (_Text(id=name, text=text) for name, text in itertools.chain(first, log)),
      _number_targets(targets),
      detectors,
      processes=processes,
      progress=True,
    ):
      collector.add(texts, matches)
    collector.finish(clean)
    unmet = collector.count_unmet()
    if known_pairs and unmet == len(known_pairs.target_numbers):
      raise ValueError(
        f"{request.known_pairs}: expected pairs with queries of the log, got {unmet} ids"
        " that the log lacks; check that the second ids are those of --train"
      )
  too_many = request.fail_above is not None and (
    len(collector.leaked) > request.fail_above
  )
  check = Check(
    train=_get_title(request.train),
    test=_get_title(request.test),
    num_queries=collector.num_queries,
    num_leaked=len(collector.leaked),
    counts=tuple(collector.make_counts()),
    fail_above=request.fail_above,
    is_passed=not too_many,
    seconds=time.monotonic() - start,
  )
  shown = page.html(_render_page(check, collector.shown))
  text = json.dumps(artifacts.to_json(check), indent=1)
  for name, content in ((_PAGE, shown), (_RESULT, f"{text}\n")):
    with artifacts.replacing(folder / name, mode=0o600) as stream:
      stream.write(content.encode())
  note = f"note: {unmet} ids of --known are not in the log\n" if unmet else ""
  return check, note + _render_screen(check, folder)


def _list_outputs(request: Request) -> list[pathlib.Path]:
  """Returns the paths of the files to write.

  Raises:
    ValueError: if one of them is an input, or exists in a folder without `_MARK`,
      which is written first.
  """
  folder = pathlib.Path(request.output)
  outputs = [folder / name for name in (_RESULT, _PAGE, _PAIRS, _CLEAN)]
  inputs = (request.train, request.test, request.variants, request.known_pairs)
  names = [str(location) for location in inputs if location]
  names += [name.partition(":")[2] for name in names]  # of "beir:FOLDER"
  read = {pathlib.Path(name).resolve() for name in names}
  if source_files := [path for path in outputs if path.resolve() in read]:
    raise ValueError(
      f"{request.output}: expected a folder whose files are not read, got"
      f" {source_files[0]} among them: give --output another"
    )
  for path in outputs:
    if path.exists() and not (folder / _MARK).exists():
      raise ValueError(
        f"{path}: expected a folder without such a file, got one that no check"
        " wrote: give --output another"
      )
  return outputs


def _get_title(location: str) -> str:
  if leakage_targets.is_source(location):
    return sources.open(location).title
  return pathlib.Path(location).name


def _number_targets(
  targets: Sequence[leakage_targets.Target],
) -> list[near_duplicates.Text]:
  """Returns the targets' texts; the id of each is its position."""
  return [
    _Text(id=str(number), text=target.text.text)
    for number, target in enumerate(targets)
  ]


class _MatchCollector:
  """Collects matches: writes pairs to their file and all ids to a spool.

  A query is an id with a text, as users or sessions ask several. Clean ids are
  written at the end, because a later text of the same id may match. Until then
  memory holds one hash of 8 bytes for each id and for each query, to find
  repetitions. The probability of a collision among ten million is 3e-6.
  """

  def __init__(self, targets, detectors, known_pairs, pairs, spool):
    self._targets, self._known_pairs = targets, known_pairs
    self._detectors = [*detectors, *([known_pairs] if known_pairs else [])]
    self._pairs, self._spool = pairs, spool
    self._ids, self._queries = array.array("q"), array.array("q")
    self._seen = {
      detector.name: collections.defaultdict(set)
      for detector in self._detectors
    }
    self.leaked: set[tuple[str, str]] = set()
    self.shown: list[tuple[leakage_targets.Target, near_duplicates.Match]] = []
    self.num_queries = 0

  def add(self, texts, matches) -> None:
    """Adds a chunk of queries and its matches."""
    if self._known_pairs:
      matches = [*matches, *self._known_pairs.matches(texts, self._targets)]
    for match in matches:
      target = self._targets[int(match.target_id)]
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
    """Counts distinct queries, and writes each clean id once, in the log's order."""
    self.num_queries = len(self._queries) - len(_find_repeated(self._queries))
    repeated, written_ids = {*_find_repeated(self._ids).tolist()}, set()
    leaked = {name for name, _ in self.leaked}
    self._spool.seek(0)
    for line in self._spool:
      name = line.decode().removesuffix("\n")
      if name in leaked or name in written_ids:
        continue
      if hash(name) in repeated:
        written_ids.add(name)
      clean.write(line)

  def count_unmet(self) -> int:
    """Counts the ids of known pairs that the log lacks."""
    ids = self._known_pairs.target_numbers if self._known_pairs else ()
    listed = [*map(hash, ids)]
    return int(np.sum(~np.isin(listed, np.array(self._ids, np.int64))))

  def make_counts(self) -> Iterator[Count]:
    """Yields the counts of each detector in each collection."""
    for detector in self._detectors:
      yield from count(self._seen[detector.name], self._targets, detector)


def _find_repeated(hashes: array.array) -> np.ndarray:
  """Returns each hash once for every repetition."""
  ordered = np.sort(np.array(hashes, np.int64))
  return ordered[1:][ordered[1:] == ordered[:-1]]


def count(
  seen: dict[str, set[tuple[Any, str]]],
  targets: Sequence[leakage_targets.Target],
  detector: near_duplicates.Detector,
) -> list[Count]:
  """Counts a detector's matches in each collection.

  A query that matches both title and description of a topic is one pair.

  Args:
    seen: collection -> set of (query, topic), one for each pair.
    targets: all targets.
    detector: the detector that found the matches.

  Returns:
    One entry per collection, in the order of the targets.
  """
  topics = collections.defaultdict(set)
  for target in targets:
    topics[target.collection].add(target.topic)
  return [
    Count(
      detector=detector.name,
      threshold=detector.threshold,
      collection=collection,
      pairs=len(matches := seen.get(collection, set())),
      queries=len({query for query, _ in matches}),
      topics=len({topic for _, topic in matches}),
      of=len(every),
    )
    for collection, every in topics.items()
  ]


def _render_counts(check: Check) -> blocks.Table:
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


def _write_outcome(check: Check) -> str:
  outcome = (
    f"{check.num_leaked:,} of {check.num_queries:,} queries of the log"
    f" ({check.train}) are near-duplicates of a test query ({check.test})"
  )
  if check.fail_above is None:
    return outcome
  limit = f"{check.fail_above:,} are allowed"
  return f"{outcome}; {limit}: {'passed' if check.is_passed else 'FAILED'}"


def _render_page(
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
    introduction=(blocks.Paragraph(text=f"{_write_outcome(check)}."),),
    parts=(
      blocks.Part(
        title="What each detector found", blocks=(_render_counts(check),)
      ),
      blocks.Part(
        title="Pairs",
        blocks=(
          blocks.Paragraph(
            text=f"These are the first {len(shown)} pairs. {_PAIRS} has all of"
            f" them, {_CLEAN} the ids of queries without a match."
          ),
          *pairs,
        ),
      ),
      blocks.Part(
        title="What this does not say",
        blocks=(
          blocks.Paragraph(
            text="A match is a candidate: people must judge it. Nothing"
            " here finds synonyms, or paraphrases without common words."
          ),
        ),
      ),
    ),
  )


def _render_screen(check: Check, folder: pathlib.Path) -> str:
  """Returns the summary for the screen: counts, time and memory."""
  return (
    "PRIVATE if the log is: counts and pairs come from single queries\n\n"
    f"{_render_counts(check).text()}\n\n"
    f"{_write_outcome(check)}\n"
    f"Time: {tables.duration(check.seconds)}; peak memory of a process"
    f" {max(progress_lib.peak_bytes()) >> 20:,} MiB\n"
    f"Readable by you alone: {folder}/{_PAGE}, {_RESULT}, {_PAIRS} (with texts),"
    f" {_CLEAN}"
  )
