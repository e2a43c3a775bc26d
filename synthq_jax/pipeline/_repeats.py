"""Rows that were trained with several seeds: means, spread, paired tests."""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

from synthq_jax.pipeline import results
from synthq_jax.retrieval import significance

__all__ = ["Difference", "Row", "differences", "interval", "rows"]

_SEEDS_EXPLAINED = (
  "A row with several seeds is the mean of their retrievers, and its epsilon"
  " that of each of them: all of them together cost more."
)
PerQuery = dict[str, dict[str, float]]
"""Measure -> query id -> value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of a table: one evaluation, or the mean of several seeds'."""

  evaluation: results.Evaluation
  """Measures are means over seeds, intervals are over queries."""
  per_query: PerQuery
  """Means over seeds, for each query."""
  by_seed: dict[str, tuple[float, ...]]
  """Measure -> the mean over queries of each seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """How one row differs from another, query by query."""

  first: str
  """Name of a row."""
  second: str
  """Name of the other."""
  interval: significance.Interval
  """Mean of the first minus mean of the second, with its 95% interval."""
  p_value: float
  """Paired t test, two-sided, times the number of tests (Bonferroni)."""


def rows(
  root: pathlib.Path,
  evaluations: Sequence[results.Evaluation],
  *,
  samples: int,
  seed: int,
) -> list[Row]:
  """Gathers the evaluations of each row of one test set.

  The interval of a mean over seeds is the bootstrap interval of the queries'
  means over seeds: it says how far other queries could move the row, for these
  seeds; `by_seed` says how far other seeds do.

  Returns:
    One for each row, in the order of their first evaluations.
  """
  groups = collections.defaultdict(list)
  for one in evaluations:
    groups[results.row_of(one.name)].append(one)
  return [
    _row(root, name, group, samples, seed) for name, group in groups.items()
  ]


def _row(root, name, group, samples: int, seed: int) -> Row:
  tables = [_per_query(root, one) for one in group]
  merged = {
    measure: {
      query: math.fsum(table[measure][query] for table in tables) / len(tables)
      for query in values
    }
    for measure, values in tables[0].items()
  }
  first = dataclasses.replace(group[0], name=name)
  if len(group) > 1:
    measures = {
      measure: interval(values, samples=samples, seed=seed)
      for measure, values in merged.items()
    }
    first = dataclasses.replace(
      first,
      epsilon=_largest([one.epsilon for one in group]),
      delta=_largest([one.delta for one in group]),
      measures=measures,
      traps=tuple(
        dict.fromkeys(
          trap for one in group for trap in (*one.traps, _SEEDS_EXPLAINED)
        )
      ),
      seconds=math.fsum(one.seconds for one in group),
    )
  by_seed = {
    measure: tuple(one.measures[measure].mean for one in group)
    for measure in merged
  }
  return Row(evaluation=first, per_query=merged, by_seed=by_seed)


def _per_query(root: pathlib.Path, one: results.Evaluation) -> PerQuery:
  return json.loads((root / one.directory / "per_query.json").read_text())


def interval(values, *, samples: int, seed: int) -> results.Measure:
  """Returns the mean over queries with its 95% bootstrap interval."""
  found = significance.bootstrap_interval(values, samples=samples, seed=seed)
  return results.Measure(mean=found.mean, low=found.low, high=found.high)


def _largest(values: Sequence[float | None]) -> float | None:
  return max((value for value in values if value is not None), default=None)


def differences(
  found: Sequence[Row], measure: str, *, samples: int, seed: int
) -> list[Difference]:
  """Tests the pairs of rows that a reader of the table asks about.

  Every row that trained on private queries against the two public ones; in each
  family every epsilon against the next smaller one; synthetic queries against
  every direct DP row at the same epsilon; the real queries against every synthetic row.

  Returns:
    The differences; p values count all of them.
  """
  by_name = {row.evaluation.name: row for row in found}
  pairs = [(a, b) for a, b in _pairs(found) if a in by_name and b in by_name]
  values = {name: row.per_query[measure] for name, row in by_name.items()}
  tests = [significance.paired_t_test(values[a], values[b]) for a, b in pairs]
  corrected = significance.bonferroni([test.p_value for test in tests])
  return [
    Difference(
      first=a,
      second=b,
      interval=significance.paired_bootstrap(
        values[a], values[b], samples=samples, seed=seed
      ),
      p_value=p_value,
    )
    for (a, b), p_value in zip(pairs, corrected, strict=True)
  ]


def _pairs(found: Sequence[Row]) -> list[tuple[str, str]]:
  """Names the pairs, better expected first."""
  families = collections.defaultdict(list)
  for row in found:
    name, epsilon = row.evaluation.name, row.evaluation.epsilon
    if epsilon is not None and "_" in name:
      families[name.rpartition("_")[0]].append((epsilon, name))
  public = ("public_only", "untrained")
  pairs = [("original", name) for name in public]
  for members in families.values():
    members.sort(reverse=True)
    names = [name for _, name in members]
    pairs += zip(names, names[1:], strict=False)
    pairs += [(name, other) for name in names for other in public]
  synthetic = sorted(families["synthetic"], reverse=True)
  pairs += [("original", name) for _, name in synthetic]
  for epsilon, name in synthetic:
    pairs += [
      (name, other)
      for family, members in families.items()
      for value, other in members
      if family.startswith("direct_dp") and value == epsilon
    ]
  return pairs
