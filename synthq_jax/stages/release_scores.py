"""Releases scores on private test queries with noise, so that they may be shared.

One Gaussian mechanism releases the mean of every row that may be shared by every
measure. Differences from BM25 are taken from what was released.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats

from synthq_jax import intervals
from synthq_jax.pipeline import (
  config_types,
  noisy_sums,
  results,
  system_results,
)
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import rounding, terms
from synthq_jax.stages import stage

__all__ = ["STAGE", "Config", "centred_sum", "claim", "run"]

_MIDDLE = 0.5
_SUMMED = "The scores of one user's queries are added up."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is released, and for which promise; every value is public."""

  enabled: bool = False
  """Whether the stage runs."""
  epsilon: float = 0.5
  """Of all scores together, beside what the systems themselves cost."""
  delta: float | None = None
  """Of the promise; None: 1 / (2n), n test queries."""
  measures: tuple[str, ...] = ("nDCG@10",)
  """Of `evaluate.Config.measures`, with values in [0, 1]; noise grows as the
  square root of their number times that of the rows."""
  confidence: float = 0.95
  """Of each interval by itself."""
  widest: float = 0.05
  """What noise may add to a mean, at most, with this confidence; with more noise
  nothing is released."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta", "widest")
    config_types.within(self, "(0.5, 1)", "confidence")
    if not self.measures:
      raise ValueError(
        "expected a measure in release_scores.Config.measures, got none"
      )


def jobs(run):
  """Yields one release of all rows that may be shared, where it is wanted."""
  config = run.config.release_scores
  if not config.enabled:
    return
  scored = {
    name: made
    for name, made in run.rows("evaluate").items()
    if made.value.test_set == "test" and _may_be_shared(run, made.value)
  }
  if not scored:
    run.say("[release_scores] no row may be shared: left out")
    return
  yield stage.Job(
    depends=(
      config,
      *run.data,
      {name: made.digest for name, made in scored.items()},
    ),
    settings=config,
    inputs={"evaluations": [made.value for made in scored.values()]},
  )


def _may_be_shared(run, scored: results.Evaluation) -> bool:
  """Says whether a row's system has a claim, and lies where it may be shared."""
  finite = scored.epsilon is None or math.isfinite(scored.epsilon)
  system = run.systems.get(scored.name)  # None: BM25
  hidden = system and results.is_private_path(system.value.directory)
  return finite and not hidden


def check(run) -> None:
  """Refuses what could not be released, before anything is trained.

  Raises:
    ValueError: if a measure is not computed, or there are too few test queries
      even for one row.
  """
  config = run.config.release_scores
  if not config.enabled:
    return
  config_types.some_of(config, "measures", run.config.evaluate.measures)
  split, size = run.prepared.test_split, len(config.measures)
  _check_noise(config, run.prepared.num_queries[split], size, run.prepared)


def run(task: stage.Task) -> results.ReleasedScores:
  """Draws the noise, and says what it leaves open.

  Formal guarantee:
    Unit: one test query, or all test queries of one user, at most K, which move
    the sum by K times as much. Relation: ADD_OR_REMOVE_ONE, where n, the number
    of test queries, is a public constant as that of train queries is. The
    released numbers are a function of one Gaussian mechanism with the sum that
    `centred_sum` bounds, and satisfy the statement of the result, which the
    ledger holds before noise is drawn. What the systems cost comes on top:
    `joint.claim` of both. The noise comes from the secret and from numbers that
    are drawn for this release and these values alone; a sum is rounded to a
    thousandth of the noise, so that its low bits tell nothing. Everything else
    (differences, intervals) is post-processing.

  Args:
    task: with the working directory's secret; its inputs are "prepared", the
      data, and "evaluations" of rows that may be shared, on the test split.

  Returns:
    The scores with their intervals and their promise; they may be shared.

  Raises:
    ValueError: if the noise would hide the scores, or a value is not in [0, 1].
  """
  config, space = task.settings, task.folders
  prepared, evaluations = task.inputs["prepared"], task.inputs["evaluations"]
  rows = collections.defaultdict(list)
  for one in evaluations:
    rows[results.row_of(one.name)].append(one)
  table = np.concatenate(
    [_values(space.root, group, config.measures) for group in rows.values()],
    axis=1,
  )  # [query, row x measure]
  number, size = table.shape
  _check_noise(config, number, size, prepared)
  promise = claim(
    config,
    prepared.num_users.get(prepared.test_split, number),
    size,
    words=noisy_sums.words(terms.SCORES, _SUMMED, space, prepared),
    most=prepared.queries_per_user or 1,
    part=prepared.part(prepared.test_split),
  )
  statement, noisy = noisy_sums.draw(task, promise, centred_sum(table))
  std = promise.noise_multiplier * promise.l2_sensitivity
  means = (_MIDDLE + noisy / number).reshape(len(rows), -1)
  folder = task.folder(private=False)
  return results.ReleasedScores(
    directory=space.relative(folder),
    statement=statement,
    num_queries=number,
    confidence=config.confidence,
    noise=std / number,
    rows=_rows(config, list(rows.values()), means, std / number, number),
  )


def centred_sum(
  table: Float[np.ndarray, "query score"],
) -> Float[np.ndarray, " score"]:
  """Sums the scores of all queries, each less a half.

  Formal guarantee:
    One query more or less moves the sum by at most sqrt(scores) / 2 in L2, and
    there are values that do: a query's row lies in a cube of side 1 around 0.
    Without the half it would be sqrt(scores), since a sum of scores alone also
    tells how many there are.

  >>> centred_sum(np.array([[1.0, 0.5], [0.75, 0.0]]))
  array([ 0.75, -0.5 ])

  Args:
    table: values in [0, 1].

  Raises:
    ValueError: if a value is not; it does not say which.
  """
  if not ((table >= 0) & (table <= 1)).all():  # nan is neither
    raise ValueError(
      "expected scores in [0, 1] for every query and row, got others: leave"
      " such measures out of release_scores.Config.measures, and if all are"
      " shares, run evaluate again"
    )
  return (table - _MIDDLE).sum(axis=0)


def claim(
  config: Config,
  units: int,
  size: int,
  words: terms.Terms = terms.SCORES,
  most: int = 1,
  part: str = "",
) -> claim_lib.Claim:
  """Returns the promise about one release.

  Args:
    config: epsilon and delta.
    units: how many test queries, or users with one, public.
    size: how many means are released.
    words: of the promise.
    most: queries of one unit.
    part: the records that are read.
  """
  return noisy_sums.claim(
    epsilon=config.epsilon,
    delta=config.delta,
    units=units,
    l2_sensitivity=most * math.sqrt(size) * _MIDDLE,
    words=words,
    part=part,
  )


def _check_noise(
  config: Config, num_queries: int, size: int, prepared: results.PreparedData
) -> None:
  """Refuses more noise than scores can stand, and says what would do."""
  quantile = _quantile(config)
  users = prepared.num_users.get(prepared.test_split, num_queries)
  most = prepared.queries_per_user or 1

  def width(number: int) -> float:
    delta = config.delta
    if delta is not None and number > num_queries:
      delta = min(delta, 1 / (2 * number))
    units = math.ceil(users / num_queries * number)
    changed = dataclasses.replace(config, delta=delta)
    made = claim(changed, units, size, most=most)
    return quantile * made.noise_multiplier * made.l2_sensitivity / number

  found = width(num_queries)
  if found <= config.widest:
    return
  enough = noisy_sums.enough(lambda n: width(n) / config.widest, num_queries)
  raise ValueError(
    f"release_scores: expected noise of at most {config.widest:g} on a mean, got"
    f" {found:.2g}: {size} scores of {num_queries:,} test queries at epsilon"
    f" {rounding.epsilon(config.epsilon)}, where {enough:,} queries would do; join splits"
    " (TEST_SPLIT='dev+test'), leave rows or measures out, raise epsilon, or set"
    " release_scores.Config.enabled=False"
  )


def _quantile(config: Config) -> float:
  return float(stats.norm.ppf((1 + config.confidence) / 2))


def _values(
  root, group: Sequence[results.Evaluation], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
  """Reads the values of a row: means over its seeds, which stay in [0, 1]."""
  tables = []
  for one in group:
    read = json.loads((root / one.directory / "per_query.json").read_text())
    tables.append([[v for _, v in sorted(read[m].items())] for m in measures])
  return np.mean(np.array(tables, float), axis=0).T


def _rows(
  config: Config,
  groups: Sequence[Sequence[results.Evaluation]],
  means: Float[np.ndarray, "row measure"],
  noise: float,
  number: int,
) -> tuple[results.ReleasedRow, ...]:
  """Returns the rows with their intervals; reads nothing private."""
  quantile = _quantile(config)
  names = [results.row_of(group[0].name) for group in groups]
  base: Mapping[str, float] = {}
  if system_results.LEXICAL in names:
    found = means[names.index(system_results.LEXICAL)]
    base = dict(zip(config.measures, found.tolist(), strict=True))
  rows = []
  for name, group, values in zip(names, groups, means.tolist(), strict=True):
    own = dict(zip(config.measures, values, strict=True))
    over = {} if name == system_results.LEXICAL else base
    rows.append(
      results.ReleasedRow(
        name=name,
        label=group[0].label,
        epsilon=max((x.epsilon for x in group if x.epsilon), default=None),
        means={m: _mean(v, noise, number, quantile) for m, v in own.items()},
        over_bm25={
          m: _difference(own[m], v, noise, number, quantile)
          for m, v in over.items()
        },
      )
    )
  return tuple(rows)


def _mean(
  value: float, noise: float, number: int, quantile: float
) -> results.ReleasedMean:
  """Returns a mean of values in [0, 1] with both of its intervals.

  The variance of such values is at most m (1 - m), m their mean (Bhatia and
  Davis, 2000): the largest of it over what the noise leaves open is taken.
  """
  here = _around(value, quantile * noise, 0.0)
  middle = min(max(0.5, here.low), here.high)
  spread = middle * (1 - middle)
  half = quantile * math.sqrt(noise**2 + spread / number)
  return results.ReleasedMean(here=here, beyond=_around(value, half, 0.0))


def _difference(
  value: float, other: float, noise: float, number: int, quantile: float
) -> results.ReleasedMean:
  """Returns a mean less another, both noisy, with both intervals.

  With means a and b of values in [0, 1] the mean square of the differences is
  at most min(a + b, 2 - a - b), attained where few queries are good for both;
  how alike two rows are, query by query, is not released.
  """
  error = math.sqrt(2) * noise
  here = _around(value - other, quantile * error, -1.0)
  total = value + other
  half = quantile * error  # of the sum of both means, too
  total = min(max(1.0, total - half), total + half)
  least = min(max(0.0, here.low), here.high)
  spread = max(0.0, min(total, 2 - total) - least**2)
  half = quantile * math.sqrt(error**2 + spread / number)
  return results.ReleasedMean(
    here=here, beyond=_around(value - other, half, -1.0)
  )


def _around(value: float, half: float, lowest: float) -> intervals.Interval:
  """Returns an interval, cut to what such a value can be."""
  value, low, high = (
    min(max(x, lowest), 1.0) for x in (value, value - half, value + half)
  )
  return intervals.Interval(mean=value, low=low, high=high)


def _screen(made: Sequence[results.ReleasedScores]) -> str:
  return "".join(
    f"{one.name}: {measure} {mean.here:.3f}\n"
    for scores in made
    for one in scores.rows
    for measure, mean in one.means.items()
  )


STAGE = stage.of(
  __name__,
  result=results.ReleasedScores,
  needs=("evaluate",),
  reads=("prepared",),
  needs_secret=True,
  screen=_screen,
)
