"""How often each detector of near-duplicates is right, on labelled pairs.

The labels are those of Fröbe et al., SPIRE 2022: queries of MS MARCO and ORCAS
whose cosine with a variant of a TREC topic is at least .90, and whether people
took query and topic for near-duplicates.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from synthq_jax import artifacts, intervals
from synthq_jax.data import query_pairs, shipped
from synthq_jax.leakage import calibration, near_duplicates, words
from synthq_jax.pipeline import config_types, fingerprints
from synthq_jax.report import blocks, plots, tables
from synthq_jax.retrieval import text_encoders
from synthq_jax.studies import frame

__all__ = [
  "DETECTORS",
  "SIDES",
  "Candidates",
  "STUDY",
  "Config",
  "Detector",
  "Labelled",
  "Point",
  "Relations",
  "Study",
  "agreement",
  "candidates",
  "confusion",
  "point",
]

SIDES = ("variant", "title")
"""Texts of a topic that queries are compared with."""

DETECTORS = {
  "exact": near_duplicates.Exact(),
  "token set": near_duplicates.TokenSet(),
  "token set without function words": near_duplicates.TokenSet(
    ignored=near_duplicates.FUNCTION_WORDS
  ),
  "containment": near_duplicates.Containment(),
  "trigrams": near_duplicates.Trigrams(),
}
"""All but the embedding, which needs an encoder."""

_COSINE = "cosine of the paper"
_EMBEDDING = "embedding"
_POINTS = 60  # of a curve
_WORDS = frame.words("detectors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """The whole study."""

  folder: str
  """With spire22_annotations.jsonl and spire22_agreement.jsonl."""
  encoder: bool = True
  """Whether the package's encoder is a detector, too."""
  precision: float = 0.9
  """What a threshold is wanted for."""
  draws: int = 500
  """Draws of topics, and splits of them into halves."""

  def __post_init__(self):
    config_types.within(self, "(0, 1]", "precision")
    config_types.at_least(self, 1, "draws")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """The pairs that score at least a threshold."""

  threshold: float
  found: int
  right: int
  """Near-duplicates among those found."""
  precision: intervals.Interval
  """Interval by drawing topics."""
  recall: intervals.Interval
  """Interval by drawing topics."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
  """One detector on one side of the topics."""

  name: str
  side: str
  """One of `SIDES`."""
  average_precision: intervals.Interval
  """The middle 95% of draws of topics."""
  curve: tuple[tuple[float, ...], ...]
  """Threshold, precision and recall, thinned out."""
  default: Point | None
  """At the detector's own threshold, where that is meant for these texts."""
  wanted: Point | None
  """At the lowest threshold with the wanted precision, where there is one."""
  kept_apart: intervals.Interval | None
  """Precision where the threshold was chosen on other topics."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relations:
  """What the rule on words says against what people said."""

  counts: tuple[tuple[int, ...], ...]
  """By `words.RELATIONS`; rows are people's."""
  accuracy: intervals.Interval
  """Share of pairs on the diagonal, Wilson's interval."""
  commonest: float
  """Accuracy of always saying the commonest relation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
  """Labelled pairs of one test set, as table 2 of the paper counts them."""

  collection: str
  leaks: int
  """Queries beside a topic that people took for near-duplicates."""
  leak_topics: int
  """Topics of these."""
  others: int
  """Queries beside a topic that they are not about."""
  other_topics: int
  """Topics of these; a topic may have both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  num_pairs: int
  num_positive: int
  num_topics: int
  precision: float
  draws: int
  detectors: tuple[Detector, ...]
  lowest_cosine: float
  """With the wanted precision."""
  rounded_cosine: float | None
  """The lowest of three decimals."""
  cosines: tuple[Point, ...]
  kappa: dict[str, tuple[float, ...]]
  """Way of comparing labels -> kappa, pairs agreed on, pairs."""
  relations: dict[str, Relations]
  """By side."""
  candidates: tuple[Candidates, ...]
  """By test set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
  """Labelled pairs as columns.

  Attributes:
    pairs: one per query.
    labels: whether query and topic are near-duplicates.
    topics: groups of pairs that depend on each other.
    cosines: of query and variant, as the authors computed them.
  """

  pairs: Sequence[query_pairs.LabelledPair]
  labels: np.ndarray
  topics: list[str]
  cosines: np.ndarray

  @classmethod
  def read(cls, folder: pathlib.Path) -> "Labelled":
    """Reads the pairs; positive is whatever is not "Different Topic"."""
    pairs = query_pairs.labelled_pairs(folder / "spire22_annotations.jsonl")
    return cls(
      pairs=pairs,
      labels=np.array([not pair.different_topic for pair in pairs]),
      topics=[pair.topic for pair in pairs],
      cosines=np.array([pair.cosine for pair in pairs]),
    )

  def by_topic(self) -> tuple[int, np.ndarray]:
    """Returns the number of topics, and the topic of each pair."""
    names, of_pair = np.unique(self.topics, return_inverse=True)
    return len(names), of_pair


def point(threshold: float, scores: np.ndarray, labelled: Labelled) -> Point:
  """Counts the pairs that score at least a threshold.

  Args:
    threshold: of the scores.
    scores: of each pair.
    labelled: the pairs.
  """
  found = scores >= threshold
  right = found & labelled.labels
  precision, recall = (
    calibration.grouped_interval(right, total, labelled.topics)
    for total in (found, labelled.labels)
  )
  return Point(
    threshold=float(threshold),
    found=int(found.sum()),
    right=int(right.sum()),
    precision=precision,
    recall=recall,
  )


def _lowest(
  scores: np.ndarray, labels: np.ndarray, precision: float
) -> float | None:
  """Returns the lowest threshold with a precision, or None."""
  try:
    return calibration.threshold(scores, labels, precision=precision)
  except ValueError:
    return None


def _average_precision(
  scores: np.ndarray, labelled: Labelled, draws: int
) -> intervals.Interval:
  rng, (number, of_pair) = np.random.default_rng(0), labelled.by_topic()
  rows = [np.flatnonzero(of_pair == topic) for topic in range(number)]
  drawn = [
    np.concatenate([rows[topic] for topic in draw])
    for draw in rng.integers(number, size=(draws, number))
  ]
  low, high = np.quantile(
    [
      calibration.average_precision(scores[at], labelled.labels[at])
      for at in drawn
    ],
    [0.025, 0.975],
  )
  mean = calibration.average_precision(scores, labelled.labels)
  return intervals.Interval(mean=mean, low=float(low), high=float(high))


def _kept_apart(
  scores: np.ndarray, labelled: Labelled, config: Config
) -> intervals.Interval | None:
  """Chooses the threshold on half of the topics, measures on the others.

  Returns:
    The precision; None where no half has a threshold that finds a pair.
  """
  rng, (number, of_pair) = np.random.default_rng(0), labelled.by_topic()
  reached = []
  for _ in range(config.draws):
    known = rng.permutation(number)[of_pair] % 2 == 0
    lowest = _lowest(scores[known], labelled.labels[known], config.precision)
    found = ~known & (scores >= (np.inf if lowest is None else lowest))
    if found.any():
      reached.append(labelled.labels[found].mean())
  if not reached:
    return None
  low, high = np.quantile(reached, [0.025, 0.975])
  return intervals.Interval(
    mean=float(np.mean(reached)), low=float(low), high=float(high)
  )


def _measured(
  config: Config, labelled: Labelled, name: str, side: str
) -> Detector:
  """Measures one detector on one side of the topics."""
  default = None
  if name == _COSINE:
    scores = labelled.cosines
  else:
    own = near_duplicates.Embedding
    detector = DETECTORS.get(name) or own(encode=text_encoders.load().encode)
    scores = detector.scores(
      [pair.query for pair in labelled.pairs],
      [getattr(pair, side) for pair in labelled.pairs],
    )
    if name != _EMBEDDING:
      default = point(detector.threshold, scores, labelled)
  curve = calibration.curve(scores, labelled.labels)
  columns = zip(curve.thresholds, curve.precision, curve.recall, strict=True)
  step = -(-len(curve.thresholds) // _POINTS)
  lowest = _lowest(scores, labelled.labels, config.precision)
  has_lowest = lowest is not None
  return Detector(
    name=name,
    side=side,
    average_precision=_average_precision(scores, labelled, config.draws),
    curve=tuple(tuple(map(float, row)) for row in columns)[::step],
    default=default,
    wanted=point(lowest, scores, labelled) if has_lowest else None,
    kept_apart=_kept_apart(scores, labelled, config) if has_lowest else None,
  )


def agreement(folder: pathlib.Path) -> dict[str, tuple[float, ...]]:
  """Returns kappa of both annotators, several labels of a pair in six ways.

  Args:
    folder: with spire22_agreement.jsonl.

  Returns:
    Kappa, pairs agreed on, and pairs.
  """
  found = query_pairs.agreement(folder / "spire22_agreement.jsonl")
  people = sorted(next(iter(found.values())))
  both = [[said[person] for said in found.values()] for person in people]
  ways = {
    "different topic or not": lambda said: bool(said["other"]),
    "relation to the title": lambda said: said["title"],
    "relation to the variant": lambda said: said["variant"],
    "title, or different topic": lambda said: said["other"] or said["title"],
    "variant, or different topic": (
      lambda said: said["other"] or said["variant"]
    ),
    "all labels together": lambda said: tuple(said.values()),
  }
  table = {}
  for name, way in ways.items():
    first, second = ([way(said) for said in side] for side in both)
    agreed = sum(a == b for a, b in zip(first, second, strict=True))
    kappa = calibration.cohens_kappa(first, second)
    table[name] = (float(kappa), float(agreed), float(len(first)))
  return table


def confusion(labelled: Labelled, side: str) -> Relations:
  """Counts what the rule says against what people said of the same texts.

  Args:
    labelled: the pairs.
    side: one of `SIDES`.
  """
  counts: collections.Counter = collections.Counter()
  for pair in labelled.pairs:
    told = getattr(pair, f"{side}_relations")
    if pair.different_topic:
      told = ("different topic",)
    if told:
      said = words.relation(pair.query, getattr(pair, side))
      counts[told[0], said] += 1
  kinds = words.RELATIONS
  table = tuple(tuple(counts[one, other] for other in kinds) for one in kinds)
  right = sum(table[i][i] for i in range(len(kinds)))
  total = sum(counts.values())
  return Relations(
    counts=table,
    accuracy=intervals.wilson(right, total),
    commonest=max(map(sum, table)) / total,
  )


def candidates(labelled: Labelled) -> tuple[Candidates, ...]:
  """Counts the pairs of each test set, in the order in which they come."""
  names = dict.fromkeys(x for pair in labelled.pairs for x in pair.collections)
  counts = []
  for name in names:
    sides: tuple[list[str], list[str]] = [], []
    for pair in labelled.pairs:
      if name in pair.collections:
        sides[pair.different_topic].append(pair.topic)
    leaks, others = sides
    counts.append(
      Candidates(
        collection=name,
        leaks=len(leaks),
        leak_topics=len(set(leaks)),
        others=len(others),
        other_topics=len(set(others)),
      )
    )
  return tuple(counts)


def _names(config: Config) -> Iterator[tuple[str, str]]:
  yield _COSINE, "variant"
  for name in (*DETECTORS, *([_EMBEDDING] if config.encoder else ())):
    for side in SIDES:
      yield name, side


def _jobs(task: frame.Task, labelled: Labelled) -> list[frame.Job]:
  """Lists every detector on every side of the topics."""
  config, folder = task.config, pathlib.Path(task.config.folder)
  listed = []
  for name, side in _names(config):
    digest = artifacts.fingerprint(
      "detectors 2",
      fingerprints.of_file(folder / "spire22_annotations.jsonl"),
      _fingerprint(name),
      (name, side, config.precision, config.draws),
      fingerprints.versions(),
    )
    listed.append(
      frame.Job(
        directory=task.root / "detectors" / f"{name.replace(' ', '_')}_{side}",
        kind=Detector,
        digest=digest,
        make=lambda name=name, side=side: _measured(
          config, labelled, name, side
        ),
      )
    )
  return listed


def _fingerprint(name: str) -> str:
  """Returns what a detector's scores depend on beside the pairs."""
  if name == _EMBEDDING:
    return fingerprints.of_checkpoint(shipped.DIRECTORY)
  return repr(DETECTORS.get(name))


def _result(
  task: frame.Task, labelled: Labelled, found: Sequence[Detector]
) -> Study:
  cosines, labels = labelled.cosines, labelled.labels
  wanted = task.config.precision
  rounded = np.arange(900, 1000) / 1000
  reached = np.array([labels[cosines >= at].mean() for at in rounded])
  return Study(
    num_pairs=len(labelled.pairs),
    num_positive=int(labels.sum()),
    num_topics=len(set(labelled.topics)),
    precision=wanted,
    draws=task.config.draws,
    detectors=tuple(found),
    lowest_cosine=float(
      calibration.threshold(cosines, labels, precision=wanted)
    ),
    rounded_cosine=next((float(x) for x in rounded[reached >= wanted]), None),
    cosines=tuple(
      point(at, cosines, labelled)
      for at in (0.90, 0.91, 0.92, 0.926, 0.93, 0.94, 0.95)
    ),
    kappa=agreement(pathlib.Path(task.config.folder)),
    relations={side: confusion(labelled, side) for side in SIDES},
    candidates=candidates(labelled),
  )


def _rounded(cosine: float | None) -> str:
  if cosine is None:
    return ", and none with three decimals has it"
  return f", or {cosine:.3f} of those with three decimals"


def _curves(study: Study) -> blocks.Figure:
  panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for one in study.detectors:
    _, precision, recall = (
      list(column) for column in zip(*one.curve, strict=True)
    )
    panel = panels.setdefault(f"query beside {one.side}", {})
    panel[one.name] = recall, precision
  return blocks.Figure(
    svg=plots.together(
      panels, label="precision", across="recall", level=study.precision
    ),
    caption="Precision against recall of each detector",
    file="study.svg",
  )


def _relations(study: Study) -> list[blocks.Block]:
  shown: list[blocks.Block] = []
  for side, one in study.relations.items():
    rows = zip(words.RELATIONS, one.counts, strict=True)
    header = ("People, rule", *words.RELATIONS)
    shown += [
      blocks.Heading(text=f"Query beside {side}"),
      _WORDS("relations", one=one),
      blocks.Table(
        header=header,
        rows=tuple((name, *map(str, counts)) for name, counts in rows),
        numeric=header[1:],
      ),
    ]
  return shown


def _page(study: Study) -> blocks.Page:
  counts = {
    "At": lambda at: f"{at.threshold:.3f}",
    "Found": lambda at: str(at.found),
    "Precision": lambda at: f"{at.precision:.3f}",
    "Recall": lambda at: f"{at.recall:.3f}",
  }
  points = [
    (one, at)
    for one in study.detectors
    for at in (one.default, one.wanted)
    if at
  ]
  detectors = {
    "Detector": lambda row: row[0].name,
    "With": lambda row: row[0].side,
    "Threshold": lambda row: "own" if row[1] is row[0].default else "lowest",
    **{
      title: lambda row, cell=cell: cell(row[1])
      for title, cell in counts.items()
    },
    "AP": lambda row: f"{row[0].average_precision:.3f}",
    "Kept apart": lambda row: (
      tables.interval(row[0].kept_apart) if row[1] is row[0].wanted else "-"
    ),
  }
  kappa = {
    "Labels": lambda row: row[0],
    "Kappa": lambda row: f"{row[1][0]:.3f}",
    "Agreed": lambda row: f"{row[1][1]:.0f}",
    "Pairs": lambda row: f"{row[1][2]:.0f}",
  }
  left = ("Detector", "With", "Threshold")
  counted = {
    "Test set": lambda one: one.collection,
    "Near-duplicates": lambda one: str(one.leaks),
    "Their topics": lambda one: str(one.leak_topics),
    "Different topic": lambda one: str(one.others),
    "Topics of those": lambda one: str(one.other_topics),
  }
  return blocks.Page(
    title="Detectors of near-duplicates",
    introduction=(
      _WORDS("setting", study=study, all=study.num_positive / study.num_pairs),
    ),
    parts=(
      frame.part(
        "Candidates by test set",
        _WORDS("candidates"),
        tables.of(study.candidates, counted),
      ),
      frame.part(
        "Detectors",
        _WORDS("detectors", study=study),
        tables.of(points, detectors, left=left),
        _curves(study),
      ),
      frame.part(
        "The paper's cosine",
        _WORDS("cosine", study=study, rounded=_rounded(study.rounded_cosine)),
        tables.of(study.cosines, counts, left=()),
      ),
      frame.part(
        "Annotators", _WORDS("kappa"), tables.of(study.kappa.items(), kappa)
      ),
      frame.part("Relations", *_relations(study)),
    ),
  )


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: Labelled.read(pathlib.Path(task.config.folder)),
  jobs=_jobs,
  result=_result,
  page=_page,
  num_shown=5,
)
