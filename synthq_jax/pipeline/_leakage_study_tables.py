"""The numbers of the study: means over test queries, their tests, memories."""

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.leakage import splits, study
from synthq_jax.pipeline import (
  _leakage_study_data,
  _leakage_study_results,
  _leakage_study_training,
)
from synthq_jax.retrieval import measures, trec

__all__ = ["measure_tables", "memory_tables"]

_NONE, *_LEAKING = splits.NAMES

_RANDOM_ORDERS = 50

Trainings = Sequence[_leakage_study_results.Training]
Values = dict[tuple[str, str, int], dict[str, float]]
"""(model, kind of leakage, size) -> test query -> value, seeds averaged."""


def measure_tables(
  config: Any, data: _leakage_study_data.Data, trainings: Trainings
) -> tuple[_leakage_study_results.MeasureTable, ...]:
  """Returns a table of each measure with chosen sizes, then those of each size.

  Args:
    config: a `leakage_study.Config`.
    data: with the candidates, which are the baseline.
    trainings: all of the study.
  """
  baseline = _evaluated(config, data, data.candidates)
  chance = _chance(config, data)
  folds = study.folds_of(list(data.queries), config.folds, seed=config.seed)
  chosen, fixed = [], []
  for name in config.measures:
    values, sizes = _chosen(name, folds, trainings)
    levels = (baseline[name], chance[name])
    chosen += _tables(config, name, levels, values, sizes)
    fixed += _tables(config, name, levels, _fixed(name, trainings), {})
  return (*chosen, *fixed)


def _evaluated(
  config: Any, data: _leakage_study_data.Data, run: trec.Run
) -> dict[str, float]:
  return measures.evaluate(
    data.qrels, run, config.measures, drop_identical=False
  ).mean


def _chance(config: Any, data: _leakage_study_data.Data) -> dict[str, float]:
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


def _models(trainings: Trainings) -> list[str]:
  return list(dict.fromkeys(each.model for each in trainings))


def _fixed(name: str, trainings: Trainings) -> Values:
  """Returns the values of each size."""
  groups: dict[tuple[str, str, int], list[dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.size)
    groups.setdefault(key, []).append(each.measures[name])
  return {key: study.average(group) for key, group in groups.items()}


def _chosen(
  name: str, folds: Sequence[Sequence[str]], trainings: Trainings
) -> tuple[Values, dict[str, list[int]]]:
  """Returns values under sizes that were chosen, seed by seed, and the sizes."""
  of_size: dict[tuple[str, str, int], dict[int, dict[str, float]]] = {}
  for each in trainings:
    key = (each.model, each.leakage, each.seed)
    of_size.setdefault(key, {})[each.size] = each.measures[name]
  seeds: dict[tuple[str, str, int], list[dict[str, float]]] = {}
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
) -> list[_leakage_study_results.MeasureTable]:
  """Returns a table for each size; their tests are one family."""
  leaking = [key for key in values if key[1] != _NONE]
  compared = study.compare(
    {
      _label(key): (values[key], values[key[0], _NONE, key[2]])
      for key in leaking
    },
    alpha=config.alpha,
    seed=config.seed,
  )
  comparison = dict(zip(leaking, compared, strict=True))
  return [
    _leakage_study_results.MeasureTable(
      measure=name,
      size=size,
      baseline=levels[0],
      chance=levels[1],
      cells=tuple(
        _leakage_study_results.Cell(
          model=key[0],
          leakage=key[1],
          mean=_mean(values[key]),
          comparison=comparison.get(key),
        )
        for key in values
        if key[2] == size
      ),
      sizes=sizes,
    )
    for size in sorted({key[2] for key in values})
  ]


def _label(key: tuple[str, str, int]) -> str:
  model, leakage, size = key
  return f"{model}, {leakage}" + (f", {size:,} instances" if size else "")


def memory_tables(
  config: Any,
  root: pathlib.Path,
  data: _leakage_study_data.Data,
  trainings: Trainings,
) -> tuple[_leakage_study_results.MemoryTable, ...]:
  """Returns what each reranker does to the documents that were leaked to it.

  Leaked documents of another collection than that of the test queries are no
  candidates, and are not looked for.

  Args:
    config: a `leakage_study.Config`.
    root: where the runs lie.
    data: with the leaked instances.
    trainings: all of the study.
  """
  kinds = _LEAKING if config.train_source is None else _LEAKING[1:]
  seeds = {model.name: model.seeds for model in config.models}
  keys = list(itertools.product(_models(trainings), kinds, config.sizes))
  pairs = {
    key: [
      tuple(
        _memory(config, root, data, key, kind, seed) for kind in (key[1], _NONE)
      )
      for seed in range(seeds[key[0]])
    ]
    for key in keys
  }
  ranks, offsets = (
    study.compare(
      {
        _label(key): tuple(
          study.average(getattr(pair[side], what) for pair in found)
          for side in (0, 1)
        )
        for key, found in pairs.items()
      },
      alpha=config.alpha,
      seed=config.seed,
    )
    for what in ("ranks", "offsets")
  )
  return tuple(
    _leakage_study_results.MemoryTable(
      model=model,
      leakage=leakage,
      size=size,
      rank_without=_mean_of(found, 1, "ranks"),
      rank_with=_mean_of(found, 0, "ranks"),
      score_without=_mean_of(found, 1, "scores"),
      score_with=_mean_of(found, 0, "scores"),
      offset_increase=offset.difference,
      rank=rank,
      offset=offset,
    )
    for ((model, leakage, size), found), rank, offset in zip(
      pairs.items(), ranks, offsets, strict=True
    )
  )


def _memory(
  config: Any,
  root: pathlib.Path,
  data: _leakage_study_data.Data,
  key: tuple[str, str, int],
  trained_with: str,
  seed: int,
) -> study.Memory:
  """Looks up what kind `key[1]` leaks in a run of `trained_with`."""
  model, leakage, size = key
  place = _leakage_study_training.folder(root, model, trained_with, size, seed)
  return study.memory(
    trec.read_run(place / _leakage_study_training.RUN),
    [
      (each.target, each.relevant_id, each.non_relevant_id)
      for each in data.leaked[leakage][seed]
    ],
    depth=config.depth,
  )


def _mean_of(
  found: Sequence[tuple[study.Memory, ...]], side: int, what: str
) -> float:
  """Returns the mean over repetitions of the mean over test queries."""
  each = [getattr(pair[side], what) for pair in found]
  means = [_mean(values) for values in each if values]
  return math.fsum(means) / len(means) if means else math.nan


def _mean(values: Mapping[str, float]) -> float:
  return math.fsum(values.values()) / len(values)
