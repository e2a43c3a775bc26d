"""Looks for private queries among the synthetic ones.

Every query that `generate` saved, those that `filter_queries` drops too, is held
against the private queries that were trained on and against a control group:
private queries of the other splits, which no generator saw. What both groups
have in common with the written queries is coincidence; the difference is what
being trained on adds.

A private query is the unit. It counts as reproduced if some written query is a
near-duplicate of it, and only queries count that have no near-duplicate among
the other private ones, whichever group those are in. This rule does not look at
who was trained on. So, if chance had made the groups and the generator kept
nothing of single queries, every choice of the trained ones among those that
count would be equally likely given the written queries, and Fisher's test is
exact, whatever the sizes of the groups. Taking out of the control group what is
like a train query, and nothing of the train queries, would leave rare queries in
the one and common ones in the other, and find leaks where there are none;
leaving all of them in would count a train query that came out as a coincidence
for its double. Where queries are written for the documents of train queries alone
(`prepare_data.Config.written_for`), train queries come out without any memory of
them: shares are shown then, but no difference and no test.

Formal guarantee: none. An empirical check whose numbers are functions of
private queries, without noise: they are private.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from synthq_jax.leakage import near_duplicates
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
  " query that is no shorter",
}
"""What each counts as a near-duplicate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is looked for, and among how many queries."""

  enabled: bool = True
  """Whether the stage runs."""
  detectors: tuple[str, ...] = ("exact", "token_set", "containment")
  """Of `DETECTORS`; each is a test of its own."""
  token_set: float = 0.8
  """Threshold of the detector of that name, in (0, 1]."""
  containment: float = 0.9
  """Threshold of the detector of that name, in (0, 1]."""
  confidence: float = 0.95
  """Of each interval by itself, in (0.5, 1)."""
  max_real: int = 100_000
  """Private queries that are compared, about; of more, whole users or documents
  are drawn, of those trained on and of the others at one rate."""
  max_written: int = 100_000
  """Queries of each generator looked at, about; of more, documents are drawn."""
  seed: int = 0
  """Of these draws; public."""

  def __post_init__(self):
    config_types.some_of(self, "detectors", tuple(DETECTORS))
    config_types.at_least(self, 2, "max_real")
    config_types.at_least(self, 1, "max_written")
    config_types.at_least(self, 0, "seed")
    config_types.within(self, "(0, 1]", "token_set", "containment")
    config_types.within(self, "(0.5, 1)", "confidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """What is compared."""

  prepared: results.PreparedData  # the private queries
  synthetic: Sequence[results.SyntheticQueries]  # what each generator wrote


def plan_rows(plan: rows.Plan) -> dict[str, None]:
  """Plans one search, where queries are written and it is wanted."""
  is_wanted = plan.written and plan.config.query_leakage.enabled
  return {"": None} if is_wanted else {}


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns the search of all synthetic queries."""
  config, written = run.config.query_leakage, run.get_results("generate")
  return stage.Job(
    depends=(
      config,
      *run.data,
      {row.queries: made.digest for row, made in written.items()},
    ),
    settings=config,
    inputs=Inputs(
      prepared=run.prepared,
      synthetic=[made.value for made in written.values()],
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
      space, one, limit=config.max_written, seed=config.seed
    )
    for one in synthetic
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
      one: DETECTORS[one].format(getattr(config, one, None))
      for one in config.detectors
    },
    num_train=int(real.trained.sum()),
    num_control=int((~real.trained).sum()),
    num_written={one.name: len(one.texts) for one in written},
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
  return _HoldingIndex(
    index=contained.index(targets), lengths=_lengths(targets)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HoldingIndex:
  """Targets that match queries at least as long as they are.

  Containment takes a written query of two words for a near-duplicate of every
  private query with these words, which gives nothing away.
  """

  index: near_duplicates.Index
  lengths: np.ndarray

  def match(self, queries: Sequence[str]) -> near_duplicates.Matches:
    rows, targets, scores = self.index.match(queries)
    kept = _lengths(queries)[rows] >= self.lengths[targets]
    return rows[kept], targets[kept], scores[kept]


def _lengths(texts: Sequence[str]) -> np.ndarray:
  return np.array([len(" ".join(text.split())) for text in texts], np.int64)


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
