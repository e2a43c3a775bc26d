"""Releases scores on private test queries with noise, so that they may be shared.

One Gaussian mechanism releases the mean of every row that may be shared by every
measure. Differences from BM25 are taken from what was released.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from synthq_jax.privacy import accounting, rounding, terms
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import measures
from synthq_jax.runtime import (
  config_types,
  noisy_results,
  noisy_sums,
  results,
  runner,
  stage,
)
from synthq_jax.runtime import rows as rows_lib

__all__ = ["STAGE", "Config", "Inputs", "run"]

_MARGIN = 1.0005  # of a closed form beside what the accountant finds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is released, and for which promise; every value is public."""

  enabled: bool = False
  """Whether the stage runs."""
  required: bool = True
  """Whether scores that the noise would hide stop the run; if not, nothing is
  released then, and a line says why."""
  epsilon: float = 0.5
  """Of all scores together, beside what the systems themselves cost."""
  delta: float | None = None
  """Of the promise; None: 1 / (2n), n the larger number of train queries, or
  users, and of those that are scored: as small as that of the trainings."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Whose scores are released."""

  prepared: results.PreparedData
  evaluations: Sequence[results.Evaluation]
  """Of rows that may be shared, on the test split."""
  systems: tuple[str, ...]
  """The releases behind these rows, as their ledgers name them."""


def plan_rows(plan: rows_lib.Plan) -> dict[str, None]:
  """Plans one release, where it is wanted; few queries may leave it out."""
  return {"": None} if plan.config.release_scores.enabled else {}


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs] | None:
  """Returns the release of all rows that may be shared."""
  config = run.config.release_scores
  scored = {
    target: made
    for target, made in run.get_results("evaluate").items()
    if target.test_set == "test" and _may_be_shared(run, made.value)
  }
  if not scored:
    run.say("[release_scores] no row may be shared: left out")
    return None
  number = run.prepared.num_queries[run.prepared.test_split]
  size = len(scored) * len(config.measures)
  refused = _refusal(config, number, size, run.prepared)
  if refused and not config.required:
    run.say(f"[release_scores] left out: {refused}")
    return None
  return stage.Job(
    depends=(
      config,
      *run.data,
      {str(target): made.digest for target, made in scored.items()},
    ),
    settings=config,
    inputs=Inputs(
      prepared=run.prepared,
      evaluations=[made.value for made in scored.values()],
      systems=results.releases_behind(
        run.systems[row].value
        for _, row in scored
        if row in run.systems  # BM25 is not
      ),
    ),
  )


def _may_be_shared(run: runner.Run, scored: results.Evaluation) -> bool:
  """Says whether a row's system has a claim, and lies where it may be shared."""
  finite = scored.epsilon is None or math.isfinite(scored.epsilon)
  system = run.systems.get(scored.row)  # None: BM25
  hidden = system and results.is_private_path(system.value.directory)
  return finite and not hidden


def check(run: runner.Run) -> None:
  """Refuses what could not be released, before anything is trained.

  Raises:
    ValueError: if a measure is not computed or has no range, delta is too large,
      or there are too few test queries even for one row.
  """
  config = run.config.release_scores
  if not config.enabled:
    return
  config_types.some_of(config, "measures", run.config.evaluate.measures)
  if odd := [name for name in config.measures if not measures.is_share(name)]:
    raise ValueError(
      "release_scores.Config.measures must lie in [0, 1] for every query, got"
      f" {', '.join(odd)}: leave them out"
    )
  split, size = run.prepared.test_split, len(config.measures)
  number = run.prepared.num_queries[split]
  if config.delta is not None:
    units = run.prepared.units(split)
    accounting.check_delta(config.delta, noisy_sums.full_batch(units))
  if config.required:
    _check_noise(config, number, size, run.prepared)


def run(task: stage.Task[Config, Inputs]) -> results.ReleasedScores:
  """Draws the noise, and says what it leaves open.

  Formal guarantee:
    Unit: one test query, or all test queries of one user, at most K, which move
    the sum by K times as much. Relation: ADD_OR_REMOVE_ONE, where n, the number
    of test queries, is a public constant as that of train queries is. The
    released numbers are a function of one Gaussian mechanism with the sum that
    `noisy_sums.centred_sum` bounds, and satisfy the statement of the result, which the
    ledger holds before noise is drawn. What the systems cost comes on top:
    `joint.claim` of both. The noise comes from the secret and from numbers that
    are drawn for this release and these values alone; a sum is rounded to a
    thousandth of the noise, so that its low bits tell nothing. Everything else
    (differences, intervals) is post-processing.

  Args:
    task: with the working directory's secret.

  Returns:
    The scores with their intervals and their promise; they may be shared.

  Raises:
    ValueError: if the noise would hide the scores.
  """
  config, space = task.settings, task.space
  prepared, evaluations = task.inputs.prepared, task.inputs.evaluations
  table = np.concatenate(
    [_values(space.root, one, config.measures) for one in evaluations],
    axis=1,
  )  # [query, row x measure]
  number, size = table.shape
  _check_noise(config, number, size, prepared)
  promise = noisy_sums.make_claim(
    config, prepared, prepared.test_split, terms.SCORES,
    size=size, space=space,
  )  # fmt: skip
  statement, noisy = noisy_sums.draw(
    task, promise, noisy_sums.centred_sum(table)
  )
  std = promise.noise_std
  means = (noisy_sums.MIDDLE + noisy / number).reshape(len(evaluations), -1)
  folder = task.folder(private=False)
  return results.ReleasedScores(
    directory=space.relative(folder),
    statement=statement,
    num_queries=number,
    confidence=config.confidence,
    noise=std / number,
    rows=_rows(
      config,
      evaluations,
      means,
      noise=std / number,
      number=number,
      most=prepared.queries_per_user or 1,
    ),
    systems=task.inputs.systems,
  )


def _check_noise(
  config: Config, num_queries: int, size: int, prepared: results.PreparedData
) -> None:
  """Refuses more noise than scores can stand."""
  if refused := _refusal(config, num_queries, size, prepared):
    raise ValueError(f"release_scores: {refused}")


def _refusal(
  config: Config, num_queries: int, size: int, prepared: results.PreparedData
) -> str:
  """Says what is wrong with more noise than scores can stand, and what would do."""
  import dp_accounting

  quantile = noisy_results.quantile(config.confidence)
  users = prepared.num_users.get(prepared.test_split, num_queries)
  most = prepared.queries_per_user or 1

  def width(number: int) -> float:
    units = math.ceil(users / num_queries * number)
    delta = config.delta or noisy_sums.get_smallest_delta(prepared, units)
    if number > num_queries:  # a given one may be too large for so many
      delta = min(delta, 1 / (2 * units))
    # In closed form: the accountant takes seconds for each.
    noise = _MARGIN * dp_accounting.get_sigma_gaussian(config.epsilon, delta)
    return (
      quantile * noise * most * math.sqrt(size) * noisy_sums.MIDDLE / number
    )

  found = width(num_queries)
  if found <= config.widest:
    return ""
  enough = noisy_sums.find_enough(
    lambda n: width(n) / config.widest, num_queries
  )
  return (
    f"expected noise of at most {config.widest:g} on a mean, got"
    f" {found:.2g}: {size} scores of {num_queries:,} test queries at epsilon"
    f" {rounding.epsilon(config.epsilon)}, where {enough:,} queries would do; join splits"
    " (TEST_SPLIT='dev+test'), leave rows or measures out, raise epsilon, or set"
    " release_scores.Config.enabled=False"
  )


def _values(
  root, one: results.Evaluation, measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
  """Reads the values of a row."""
  read = json.loads((root / one.directory / "per_query.json").read_text())
  table = [[v for _, v in sorted(read[m].items())] for m in measures]
  return np.array(table, float).T


def _rows(
  config: Config,
  evaluations: Sequence[results.Evaluation],
  means: Float[np.ndarray, "row measure"],
  **known: Any,
) -> tuple[results.ReleasedRow, ...]:
  """Returns the rows with their intervals; reads nothing private."""
  known["confidence"] = config.confidence
  scored = [one.row for one in evaluations]
  base: Mapping[str, float] = {}
  if rows_lib.BM25 in scored:
    found = means[scored.index(rows_lib.BM25)]
    base = dict(zip(config.measures, found.tolist(), strict=True))
  rows = []
  for one, values in zip(evaluations, means.tolist(), strict=True):
    own = dict(zip(config.measures, values, strict=True))
    over = {} if one.row == rows_lib.BM25 else base
    rows.append(
      results.ReleasedRow(
        row=one.row,
        label=one.label,
        epsilon=_epsilon(one.statement),
        means={m: noisy_results.mean(v, **known) for m, v in own.items()},
        over_bm25={
          m: noisy_results.difference(own[m], v, **known)
          for m, v in over.items()
        },
      )
    )
  return tuple(rows)


def _epsilon(claim: statement_lib.PrivacyStatement | None) -> float | None:
  """Returns what the system of a row cost; None: no private query."""
  return None if claim is None or claim.is_public else claim.epsilon


def _screen(made: Sequence[results.ReleasedScores]) -> str:
  return "".join(
    f"{one.name}: {measure} {mean.here:.3f}\n"
    for scores in made
    for one in scores.rows
    for measure, mean in one.means.items()
  )


STAGE = stage.Stage(
  name="release_scores",
  result=results.ReleasedScores,
  config=Config,
  check=check,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("evaluate",),
  needs_secret=True,
  screen=_screen,
)
