"""Searches the synthetic queries for private ones.

Every query that `generate` saved, also those that `filter_queries` drops, is
compared with the private queries that were trained on and with a control group:
private queries of the other splits, which no generator saw. Near-duplicates
that both groups have in common with the written queries are coincidence; the
difference is the effect of being trained on.

A private query is the unit. It counts as reproduced if some written query is a
near-duplicate of it. Only queries count that have no near-duplicate among the
other private ones, whichever group those are in. This rule does not look at
which queries were trained on. Suppose that chance had made the groups and the
generator kept nothing of single queries. Then, given the written queries, every
choice of the trained ones among those that count would be equally likely.
Fisher's test is then exact, whatever the sizes of the groups. Another rule
could remove near-duplicates of train queries from the control group alone. It
would leave rare queries in one group and common ones in the other, and find
leaks where there are none. A rule that removed nothing would count a train
query that came out as a coincidence for its near-duplicate. If queries are
written for the documents of train queries alone
(`prepare_data.Config.written_for`), train queries come out without any memory
of them: shares are shown then, but no difference and no test.

Formal guarantee: none. The numbers of this empirical check are functions of
private queries, without noise: they are private.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from synthq_jax.leakage import near_duplicates, words
from synthq_jax.report import leakage as leakage_report
from synthq_jax.runtime import (
  comparison_results,
  config_types,
  query_comparisons,
  results,
  rows,
  runner,
  stage,
)
from synthq_jax.training import progress

__all__ = ["DETECTORS", "STAGE", "Config", "Inputs", "run"]

DETECTORS = {
  "exact": "the same words in the same order, without case and punctuation",
  "token_set": "at least {:g} of all words of both are in both, stemmed",
  "containment": "at least {:g} of the real query's character 4-grams stand in a"
  " query that has no fewer of them",
}
"""Definition of a near-duplicate for each detector."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the search: detectors, and numbers of queries."""

  enabled: bool = True
  """Whether the stage runs."""
  detectors: tuple[str, ...] = ("exact", "token_set", "containment")
  """Names of `DETECTORS`; each is a test of its own."""
  token_set: float = 0.8
  """Threshold of the detector of that name, in (0, 1]."""
  containment: float = 0.9
  """Threshold of the detector of that name, in (0, 1]."""
  confidence: float = 0.95
  """Confidence of each interval by itself, in (0.5, 1)."""
  max_real: int = 100_000
  """Approximate maximum of private queries that are compared. Of more, whole
  users, documents or single queries are drawn, whether or not generators
  trained on them."""
  max_written: int = 100_000
  """Approximate maximum of queries of each generator that are compared; of
  more, documents are drawn."""
  seed: int = 0
  """Seed of these draws; public."""

  def __post_init__(self):
    config_types.some_of(self, "detectors", tuple(DETECTORS))
    config_types.at_least(self, 2, "max_real")
    config_types.at_least(self, 1, "max_written")
    config_types.at_least(self, 0, "seed")
    config_types.within(self, "(0, 1]", "token_set", "containment")
    config_types.within(self, "(0.5, 1)", "confidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Queries to compare."""

  prepared: results.PreparedData  # the private queries
  synthetic: Sequence[results.SyntheticQueries]  # of each generator


def plan_rows(plan: rows.Plan) -> dict[str, None]:
  """Plans one search, if it is enabled and queries are written."""
  is_wanted = plan.written and plan.config.query_leakage.enabled
  return {"": None} if is_wanted else {}


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns the search of all synthetic queries."""
  config, written = run.config.query_leakage, run.get_results("generate")
  return stage.Job(
    depends=(
      config,
      *run.data,
      {row.queries: result.digest for row, result in written.items()},
    ),
    settings=config,
    inputs=Inputs(
      prepared=run.prepared,
      synthetic=[result.value for result in written.values()],
    ),
  )


def run(task: stage.Task[Config, Inputs]) -> comparison_results.QueryLeakage:
  """Compares each generator's queries with private ones.

  Returns:
    The comparisons, under `private/`.
  """
  config, space = task.settings, task.folders
  prepared, synthetic = task.inputs.prepared, task.inputs.synthetic
  real = query_comparisons.read_real(space, prepared)
  real = real.sample(config.max_real, config.seed)
  written = [
    query_comparisons.read_written(
      space, item, limit=config.max_written, seed=config.seed
    )
    for item in synthetic
  ]
  memberships = []
  total = len(config.detectors)
  with progress.bar(
    "query_leakage", total, task.progress, unit="search"
  ) as bar:
    for name in config.detectors:
      memberships += query_comparisons.compare(
        functools.partial(_index, name, config),
        real,
        written,
        name=name,
        confidence=config.confidence,
        is_fair=not prepared.num_asked,
      )
      bar.update()
  return comparison_results.QueryLeakage(
    directory=space.relative(task.folder(private=True)),
    detectors={
      item: DETECTORS[item].format(getattr(config, item, None))
      for item in config.detectors
    },
    num_train=int(real.trained.sum()),
    num_control=int((~real.trained).sum()),
    num_written={item.name: len(item.texts) for item in written},
    confidence=config.confidence,
    memberships=tuple(memberships),
    only_for_train=bool(prepared.num_asked),
  )


def _index(
  name: str, config: Config, targets: Sequence[str]
) -> near_duplicates.Index:
  """Indexes targets for a detector."""
  if name == "exact":
    return near_duplicates.Exact().index(targets)
  if name == "token_set":
    return near_duplicates.TokenSet(threshold=config.token_set).index(targets)
  contained = near_duplicates.Containment(threshold=config.containment)
  return _HoldingIndex(index=contained.index(targets), sizes=_count(targets))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HoldingIndex:
  """An index whose targets match only queries with at least as many n-grams.

  Without this rule containment takes a written query of two words for a
  near-duplicate of every private query with these words, which reveals nothing.
  Distinct n-grams count: a long query may repeat two words.
  """

  index: near_duplicates.Index
  sizes: np.ndarray

  def match(self, queries: Sequence[str]) -> near_duplicates.Matches:
    rows, targets, scores = self.index.match(queries)
    holds = _count(queries)[rows] >= self.sizes[targets]
    return rows[holds], targets[holds], scores[holds]


def _count(texts: Sequence[str]) -> np.ndarray:
  """Counts the distinct n-grams of each text."""
  bags = words.extract_character_ngrams(texts, n=near_duplicates.Containment.n)
  return np.array([len(each) for each in bags.sets()], np.int64)


def _screen(searches: Sequence[comparison_results.QueryLeakage]) -> str:
  if not searches:
    return (
      "nothing was looked for: no generator wrote queries, or"
      " query_leakage.Config.enabled is False\n"
    )
  text = "\n\n".join(map(leakage_report.text, searches))
  return (
    "\nPRIVATE: computed from real queries. Do not share this table.\n\n"
    f"{text}\n\n"
  )


STAGE = stage.Stage(
  name="query_leakage",
  result=comparison_results.QueryLeakage,
  config=Config,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("generate",),
  screen=_screen,
)
