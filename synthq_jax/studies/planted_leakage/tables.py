"""Computes the study's tables: means with tests, and memorisation."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.leakage import splits, study
from synthq_jax.retrieval import measures, significance, trec
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data as data_lib
from synthq_jax.studies.planted_leakage import training

__all__ = [
  "BASELINE",
  "Cell",
  "MeasureTable",
  "MemoryTable",
  "Study",
  "make_result",
]

BASELINE = "BM25"
"""Name of the row of the candidates in their own order."""

_NONE, *_LEAKING = splits.NAMES
_RANDOM_ORDERS = 50

Trainings = Sequence[training.Training]
Key = tuple[str, str, int]
"""Reranker, kind of leakage and size; size 0 is chosen on the other folds."""
Values = dict[Key, dict[str, float]]
"""Values by key: test query -> value, averaged over seeds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """A mean over test queries and repetitions, with its comparison."""

  model: str
  """Name of the reranker."""
  leakage: str
  """Kind of training set, one of `splits.NAMES`."""
  mean: float
  """Mean over test queries."""
  comparison: significance.Comparison | None
  """Comparison with the same reranker without leakage; None without leakage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureTable:
  """One measure of all rerankers."""

  measure: str
  """Name of the measure."""
  size: int
  """Instances of the training sets; 0 for sizes chosen on the other folds."""
  baseline: float
  """Value of BM25."""
  chance: float
  """Value of the candidates in random order."""
  cells: tuple[Cell, ...]
  """Cells by reranker and kind of leakage; their tests are one family."""
  sizes: dict[str, list[int]]
  """"RERANKER, KIND" -> chosen sizes, by seed and fold."""

  def ranks(self, model: str) -> bool:
    """Checks that a reranker ranks better than chance without leakage.

    A reranker whose value is nearer to the random order than to BM25 has learned
    nothing about queries: its gain from leakage is memorisation alone.
    """
    means = {c.model: c.mean for c in self.cells if c.leakage == _NONE}
    distance = abs(means[model] - self.baseline)
    is_better = (means[model] > self.baseline) == (self.baseline > self.chance)
    return is_better or distance < abs(means[model] - self.chance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
  """Ranks and scores of the documents leaked to one reranker, at one size."""

  model: str
  """Name of the reranker."""
  leakage: str
  """Near or test leakage."""
  size: int
  """Instances of the training set."""
  rank_without: float
  """Mean rank of leaked relevant documents after training without leakage."""
  rank_with: float
  """Mean rank of the same documents after training with leakage."""
  score_without: float
  """Mean score of these documents after training without leakage."""
  score_with: float
  """Mean score of these documents after training with leakage."""
  rank: significance.Comparison
  """Comparison of ranks with and without leakage."""
  offset: significance.Comparison
  """Comparison of offsets with and without leakage. An offset is the rank of the
  leaked non-relevant document minus the rank of the relevant one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The result of the study."""

  facts: data_lib.Facts
  """Counts of the data."""
  folds: int
  """Number of folds for the choice of sizes."""
  alpha: float
  """Level of the tests."""
  depth: int
  """Number of candidates of a query."""
  notes: tuple[str, ...]
  """Descriptions of the rerankers, a sentence for each."""
  measures: tuple[MeasureTable, ...]
  """Tables of chosen sizes, then of each size."""
  memory: tuple[MemoryTable, ...]
  """Tables by reranker, kind and size. Tests of ranks are one family, tests of
  offsets another."""
  trainings: tuple[training.Training, ...]
  """All trainings."""


def make_result(
  task: frame.Task, data: data_lib.Data, trainings: Trainings
) -> Study:
  """Computes the result of the study from all trainings."""
  config = task.config
  return Study(
    facts=data.facts,
    folds=config.folds,
    alpha=config.alpha,
    depth=config.depth,
    notes=tuple(map(training.describe, config.models)),
    measures=_make_measure_tables(config, data, trainings),
    memory=_make_memory_tables(task, data),
    trainings=tuple(trainings),
  )


def _make_measure_tables(
  config: Any, data: data_lib.Data, trainings: Trainings
) -> tuple[MeasureTable, ...]:
  """Returns a table of each measure with chosen sizes, then tables of each size."""
  if config.leaked_only:
    data, trainings = _select_leaking(data, trainings)
  baseline = _evaluate(config, data, data.candidates)
  chance = _compute_chance(config, data)
  folds = study.make_folds(list(data.queries), config.folds, seed=config.seed)
  chosen, fixed = [], []
  for name in config.measures:
    values, sizes = _get_chosen(name, folds, trainings)
    levels = (baseline[name], chance[name])
    chosen += _make_tables(config, name, levels, values, sizes)
    fixed += _make_tables(config, name, levels, _get_fixed(name, trainings), {})
  return (*chosen, *fixed)


def _select_leaking(
  data: data_lib.Data, trainings: Trainings
) -> tuple[data_lib.Data, Trainings]:
  """Selects the scores of test queries with a near-duplicate."""

  def select(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in values.items() if name in data.leaking}

  scored = {
    name: select(getattr(data, name))
    for name in ("queries", "qrels", "candidates")
  }
  return dataclasses.replace(data, **scored), [
    dataclasses.replace(
      each, measures={name: select(x) for name, x in each.measures.items()}
    )
    for each in trainings
  ]


def _evaluate(
  config: Any, data: data_lib.Data, run: trec.Run
) -> dict[str, float]:
  return measures.evaluate(
    data.qrels, run, config.measures, drop_identical=False
  ).mean


def _compute_chance(config: Any, data: data_lib.Data) -> dict[str, float]:
  """Returns the mean measures of candidates over random orders."""
  rng = np.random.default_rng([config.seed, 2])
  levels = [
    _evaluate(
      config,
      data,
      {
        query: dict(zip(scores, rng.permutation(len(scores)), strict=True))
        for query, scores in data.candidates.items()
      },
    )
    for _ in range(_RANDOM_ORDERS)
  ]
  return study.average(levels)


def _get_fixed(name: str, trainings: Trainings) -> Values:
  """Returns the values of a measure for each size."""
  groups: dict[Key, list[dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.size)
    groups.setdefault(key, []).append(each.measures[name])
  return {key: study.average(group) for key, group in groups.items()}


def _get_chosen(
  name: str, folds: Sequence[Sequence[str]], trainings: Trainings
) -> tuple[Values, dict[str, list[int]]]:
  """Chooses sizes for each seed; returns the values under them, and the sizes."""
  of_size: dict[Key, dict[int, dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.seed)
    of_size.setdefault(key, {})[each.size] = each.measures[name]
  seeds: dict[Key, list[dict[str, float]]] = {}
  sizes: dict[str, list[int]] = {}
  for (model, leakage, _), grid in of_size.items():
    choice = study.choose_sizes(
      grid, folds, fewer_is_better=name in study.FEWER_IS_BETTER
    )
    seeds.setdefault((model, leakage, 0), []).append(choice.per_query)
    sizes.setdefault(f"{model}, {leakage}", []).extend(choice.sizes)
  return {key: study.average(v) for key, v in seeds.items()}, sizes


def _make_tables(
  config: Any,
  name: str,
  levels: tuple[float, float],
  values: Values,
  sizes: dict[str, list[int]],
) -> list[MeasureTable]:
  """Makes a table for each size; the tests of all tables are one family."""
  leaking = [key for key in values if key[1] != _NONE]
  compared = significance.compare(
    {
      _make_label(key): (values[key], values[key[0], _NONE, key[2]])
      for key in leaking
    },
    alpha=config.alpha,
    seed=config.seed,
  )
  comparison = dict(zip(leaking, compared, strict=True))
  return [
    MeasureTable(
      measure=name,
      size=size,
      baseline=levels[0],
      chance=levels[1],
      cells=tuple(
        Cell(
          model=key[0],
          leakage=key[1],
          mean=statistics.fmean(values[key].values()),
          comparison=comparison.get(key),
        )
        for key in values
        if key[2] == size
      ),
      sizes=sizes,
    )
    for size in sorted({key[2] for key in values})
  ]


def _make_label(key: Key) -> str:
  model, leakage, size = key
  return f"{model}, {leakage}" + (f", {size:,} instances" if size else "")


def _make_memory_tables(
  task: frame.Task, data: data_lib.Data
) -> tuple[MemoryTable, ...]:
  """Makes the tables of ranks and scores of leaked documents."""
  config = task.config
  memories: dict[Key, list[list[study.Memory]]] = {
    (model.name, kind, size): [
      [
        _measure_memory(
          task, data, (model.name, kind, size), trained_with, seed
        )
        for seed in range(model.seeds)
      ]
      for trained_with in (_NONE, kind)
    ]
    for model, kind, size in itertools.product(
      config.models, _LEAKING, config.sizes
    )
  }
  ranks, offsets = (
    significance.compare(
      {
        _make_label(key): tuple(
          study.average(getattr(repetition, field) for repetition in side)
          for side in (leaking, without)
        )
        for key, (without, leaking) in memories.items()
      },
      alpha=config.alpha,
      seed=config.seed,
    )
    for field in ("ranks", "offsets")
  )
  rows = zip(memories.items(), ranks, offsets, strict=True)
  return tuple(
    MemoryTable(
      model=model,
      leakage=leakage,
      size=size,
      rank_without=_compute_mean(without, "ranks"),
      rank_with=_compute_mean(leaking, "ranks"),
      score_without=_compute_mean(without, "scores"),
      score_with=_compute_mean(leaking, "scores"),
      rank=rank,
      offset=offset,
    )
    for ((model, leakage, size), (without, leaking)), rank, offset in rows
  )


def _measure_memory(
  task: frame.Task,
  data: data_lib.Data,
  key: Key,
  trained_with: str,
  seed: int,
) -> study.Memory:
  """Looks up the documents leaked by kind `key[1]` in a run of `trained_with`."""
  model, leakage, size = key
  folder = training.get_folder(task.root, model, trained_with, size, seed)
  return study.measure_memory(
    trec.read_run(folder / training.RUN),
    data.candidates,
    [
      (each.target, each.relevant_id, each.non_relevant_id)
      for each in data.leaked[leakage][seed]
    ],
  )


def _compute_mean(side: Sequence[study.Memory], field: str) -> float:
  """Returns the mean over repetitions of the mean over test queries."""
  each = [getattr(repetition, field).values() for repetition in side]
  return statistics.fmean(map(statistics.fmean, each))
