"""Puts the study's numbers together: means, their tests, what is remembered."""

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

__all__ = ["BASELINE", "Cell", "MeasureTable", "MemoryTable", "Study", "result"]

BASELINE = "BM25"
"""The row of the candidates in their own order."""

_NONE, *_LEAKING = splits.NAMES
_RANDOM_ORDERS = 50

Trainings = Sequence[training.Training]
Key = tuple[str, str, int]
"""Reranker, kind of leakage and size; 0: chosen on the other folds."""
Values = dict[Key, dict[str, float]]
"""By key, test query -> value, seeds averaged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """A mean over test queries, the repetitions averaged, and its comparison."""

  model: str
  """Whose."""
  leakage: str
  """One of `splits.NAMES`."""
  mean: float
  """Over test queries."""
  comparison: significance.Comparison | None
  """With the same reranker without leakage; None where this is it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureTable:
  """One measure of all rerankers."""

  measure: str
  """Its name."""
  size: int
  """Of the training sets; 0: chosen on the other folds."""
  baseline: float
  """BM25's."""
  chance: float
  """Of the candidates in random order."""
  cells: tuple[Cell, ...]
  """By reranker and kind of leakage; their tests are one family."""
  sizes: dict[str, list[int]]
  """"RERANKER, KIND" -> sizes that were chosen, by fold and seed."""

  def ranks(self, model: str) -> bool:
    """Returns whether a reranker ranks before anything leaks.

    One that stands nearer to the random order than to BM25 has learned nothing
    of queries: what it gains from leakage is memory alone.
    """
    of = {c.model: c.mean for c in self.cells if c.leakage == _NONE}
    distance = abs(of[model] - self.baseline)
    is_better = (of[model] > self.baseline) == (self.baseline > self.chance)
    return is_better or distance < abs(of[model] - self.chance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
  """What one reranker does to the documents leaked to it, at one size."""

  model: str
  """Whose."""
  leakage: str
  """Near or test leakage."""
  size: int
  """Of the training set."""
  rank_without: float
  """Mean rank of leaked relevant documents without leakage."""
  rank_with: float
  """The same with it."""
  score_without: float
  """Their mean score without leakage."""
  score_with: float
  """The same with it."""
  rank: significance.Comparison
  """Ranks with leakage against those without."""
  offset: significance.Comparison
  """Offsets with leakage against those without: the rank of the leaked
  non-relevant document minus that of the relevant one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  facts: data_lib.Facts
  """Of the data."""
  sizes: tuple[int, ...]
  """Of training sets."""
  folds: int
  """Of the grid search."""
  alpha: float
  """Level of the tests."""
  depth: int
  """Candidates of a query."""
  notes: tuple[str, ...]
  """What a reader must know of the rerankers, one sentence each."""
  measures: tuple[MeasureTable, ...]
  """With chosen sizes first, then each size."""
  memory: tuple[MemoryTable, ...]
  """By reranker, kind and size; ranks are one family of tests, offsets
  another."""
  trainings: tuple[training.Training, ...]
  """All of them."""
  seconds: float
  """Of all trainings and rerankings, whenever they ran."""


def result(
  task: frame.Task, data: data_lib.Data, trainings: Trainings
) -> Study:
  """Puts the trainings together."""
  config = task.config
  return Study(
    facts=data.facts,
    sizes=config.sizes,
    folds=config.folds,
    alpha=config.alpha,
    depth=config.depth,
    notes=tuple(map(training.note, config.models)),
    measures=_measure_tables(config, data, trainings),
    memory=_memory_tables(task, data),
    trainings=tuple(trainings),
    seconds=sum(e.train_seconds + e.rerank_seconds for e in trainings),
  )


def _measure_tables(
  config: Any, data: data_lib.Data, trainings: Trainings
) -> tuple[MeasureTable, ...]:
  """Returns a table of each measure with chosen sizes, then those of each size."""
  if config.leaked_only:
    data, trainings = _of_leaking(data, trainings)
  baseline = _evaluated(config, data, data.candidates)
  chance = _chance(config, data)
  folds = study.make_folds(list(data.queries), config.folds, seed=config.seed)
  chosen, fixed = [], []
  for name in config.measures:
    values, sizes = _chosen(name, folds, trainings)
    levels = (baseline[name], chance[name])
    chosen += _tables(config, name, levels, values, sizes)
    fixed += _tables(config, name, levels, _fixed(name, trainings), {})
  return (*chosen, *fixed)


def _of_leaking(
  data: data_lib.Data, trainings: Trainings
) -> tuple[data_lib.Data, Trainings]:
  """Keeps the scores of test queries with a near-duplicate."""

  def kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in values.items() if name in data.leaking}

  scored = {
    name: kept(getattr(data, name))
    for name in ("queries", "qrels", "candidates")
  }
  return dataclasses.replace(data, **scored), [
    dataclasses.replace(
      each, measures={name: kept(x) for name, x in each.measures.items()}
    )
    for each in trainings
  ]


def _evaluated(
  config: Any, data: data_lib.Data, run: trec.Run
) -> dict[str, float]:
  return measures.evaluate(
    data.qrels, run, config.measures, drop_identical=False
  ).mean


def _chance(config: Any, data: data_lib.Data) -> dict[str, float]:
  """Returns the measures of candidates in random order, many times over."""
  rng = np.random.default_rng([config.seed, 2])
  found = [
    _evaluated(
      config,
      data,
      {
        query: dict(zip(scores, rng.permutation(len(scores)), strict=True))
        for query, scores in data.candidates.items()
      },
    )
    for _ in range(_RANDOM_ORDERS)
  ]
  return study.average(found)


def _fixed(name: str, trainings: Trainings) -> Values:
  """Returns the values of each size."""
  groups: dict[Key, list[dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.size)
    groups.setdefault(key, []).append(each.measures[name])
  return {key: study.average(group) for key, group in groups.items()}


def _chosen(
  name: str, folds: Sequence[Sequence[str]], trainings: Trainings
) -> tuple[Values, dict[str, list[int]]]:
  """Returns values under sizes that were chosen, seed by seed, and the sizes."""
  of_size: dict[Key, dict[int, dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.seed)
    of_size.setdefault(key, {})[each.size] = each.measures[name]
  seeds: dict[Key, list[dict[str, float]]] = {}
  sizes: dict[str, list[int]] = {}
  for (model, leakage, _), grid in of_size.items():
    found = study.choose_sizes(
      grid, folds, fewer_is_better=name in study.FEWER_IS_BETTER
    )
    seeds.setdefault((model, leakage, 0), []).append(found.per_query)
    sizes.setdefault(f"{model}, {leakage}", []).extend(found.sizes)
  return {key: study.average(v) for key, v in seeds.items()}, sizes


def _tables(
  config: Any,
  name: str,
  levels: tuple[float, float],
  values: Values,
  sizes: dict[str, list[int]],
) -> list[MeasureTable]:
  """Returns a table for each size; their tests are one family."""
  leaking = [key for key in values if key[1] != _NONE]
  compared = significance.compare(
    {
      _label(key): (values[key], values[key[0], _NONE, key[2]])
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


def _label(key: Key) -> str:
  model, leakage, size = key
  return f"{model}, {leakage}" + (f", {size:,} instances" if size else "")


def _memory_tables(
  task: frame.Task, data: data_lib.Data
) -> tuple[MemoryTable, ...]:
  """Returns what each reranker does to the documents that were leaked to it."""
  config = task.config
  memories: dict[Key, list[list[study.Memory]]] = {
    (model.name, kind, size): [
      [
        _memory(task, data, (model.name, kind, size), trained_with, seed)
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
        _label(key): tuple(
          study.average(getattr(one, what) for one in side)
          for side in (leaking, without)
        )
        for key, (without, leaking) in memories.items()
      },
      alpha=config.alpha,
      seed=config.seed,
    )
    for what in ("ranks", "offsets")
  )
  rows = zip(memories.items(), ranks, offsets, strict=True)
  return tuple(
    MemoryTable(
      model=model,
      leakage=leakage,
      size=size,
      rank_without=_mean_of(without, "ranks"),
      rank_with=_mean_of(leaking, "ranks"),
      score_without=_mean_of(without, "scores"),
      score_with=_mean_of(leaking, "scores"),
      rank=rank,
      offset=offset,
    )
    for ((model, leakage, size), (without, leaking)), rank, offset in rows
  )


def _memory(
  task: frame.Task,
  data: data_lib.Data,
  key: Key,
  trained_with: str,
  seed: int,
) -> study.Memory:
  """Looks up what kind `key[1]` leaks in a run of `trained_with`."""
  model, leakage, size = key
  place = training.folder(task.root, model, trained_with, size, seed)
  return study.measure_memory(
    trec.read_run(place / training.RUN),
    data.candidates,
    [
      (each.target, each.relevant_id, each.non_relevant_id)
      for each in data.leaked[leakage][seed]
    ],
  )


def _mean_of(side: Sequence[study.Memory], what: str) -> float:
  """Returns the mean over repetitions of the mean over test queries."""
  each = [getattr(one, what).values() for one in side]
  return statistics.fmean(map(statistics.fmean, each))
