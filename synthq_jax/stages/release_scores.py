"""Releases scores on private test queries with noise, so that they may be shared.

One Gaussian mechanism releases the mean of every row that may be shared, for
every measure. Differences from BM25 are computed from the released means.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from synthq_jax.privacy import (
  accounting,
  gaussian,
  ledger,
  rounding,
  sampling,
  terms,
)
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import measures
from synthq_jax.runtime import (
  config_types,
  noisy_results,
  private_training,
  results,
  runner,
  stage,
)
from synthq_jax.runtime import release as release_lib
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = [
  "STAGE",
  "Config",
  "Inputs",
  "compute_centred_sum",
  "draw",
  "get_smallest_delta",
  "make_claim",
  "run",
]

_MIDDLE = 0.5
"""Middle of the range [0, 1] of values."""
_MARGIN = 1.0005  # of a closed form over the accountant's value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the release and of its claim; every value is public."""

  enabled: bool = False
  """Whether the stage runs."""
  required: bool = True
  """Whether scores that the noise would hide stop the run. If not, nothing is
  released then, and a line says why."""
  epsilon: float = 0.5
  """Epsilon of all scores together, besides the epsilon of the systems
  themselves."""
  delta: float | None = None
  """Delta of the claim; None: 1 / (2n), n the larger of the number of train
  queries, or users, and the number of those that are scored. So it is at most
  that of the trainings."""
  measures: tuple[str, ...] = ("nDCG@10",)
  """Measures of `evaluate.Config.measures` with values in [0, 1]; noise grows
  as the square root of their number times that of the rows."""
  confidence: float = 0.95
  """Confidence of each interval by itself."""
  widest: float = 0.05
  """Maximum that noise may add to a mean, with this confidence; with more noise
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
  """Evaluations whose scores are released."""

  prepared: results.PreparedData
  evaluations: Sequence[results.Evaluation]
  """Evaluations of rows that may be shared, on the test split."""
  systems: tuple[str, ...]
  """Identifiers in the ledger of the releases behind these rows."""


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs] | None:
  """Returns the release of all rows that may be shared."""
  config = run.config.release_scores
  scored = {
    target: result
    for target, result in run.get_results("evaluate").items()
    if target.test_set == "test" and _may_be_shared(run, result.value)
  }
  if not scored:
    run.say("[release_scores] no row may be shared: left out")
    return None
  number = run.prepared.num_queries[run.prepared.test_split]
  size = len(scored) * len(config.measures)
  refused = _describe_refusal(config, number, size, run.prepared)
  if refused and not config.required:
    run.say(f"[release_scores] left out: {refused}")
    return None
  return stage.Job(
    depends=(
      config,
      *run.data,
      {str(target): result.digest for target, result in scored.items()},
    ),
    settings=config,
    inputs=Inputs(
      prepared=run.prepared,
      evaluations=[result.value for result in scored.values()],
      systems=results.list_releases(
        run.systems[row].value
        for _, row in scored
        if row in run.systems  # BM25 is not
      ),
    ),
  )


def _may_be_shared(run: runner.Run, scored: results.Evaluation) -> bool:
  """Checks whether a row's system has a claim, and lies outside `private/`."""
  finite = scored.epsilon is None or math.isfinite(scored.epsilon)
  system = run.systems.get(scored.row)  # None: BM25
  hidden = system and results.is_private_path(system.value.directory)
  return finite and not hidden


def check(run: runner.Run) -> None:
  """Refuses scores that could not be released, before any training.

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
    accounting.check_delta(config.delta, _full_batch(units))
  if config.required:
    _check_noise(config, number, size, run.prepared)


def run(task: stage.Task[Config, Inputs]) -> results.ReleasedScores:
  """Draws the noise, and computes the intervals that it leaves.

  Formal guarantee:
    Unit: one test query, or all test queries of one user, at most K, which move
    the sum by K times as much. Relation: ADD_OR_REMOVE_ONE, where n, the number
    of test queries, is a public constant as that of train queries is. The
    released numbers are a function of one Gaussian mechanism with the sum that
    `compute_centred_sum` bounds. They satisfy the statement of the result,
    which the ledger holds before noise is drawn. The claims of the systems come
    on top: `joint.claim` of both. The noise comes from the secret and from
    numbers that are drawn for this release and these values alone. A sum is
    rounded to a thousandth of the noise, so that its low bits reveal nothing.
    Everything else (differences, intervals) is post-processing.

  Args:
    task: task with the working directory's secret.

  Returns:
    The scores with their intervals and their statement; they may be shared.

  Raises:
    ValueError: if the noise would hide the scores.
  """
  config, space = task.settings, task.space
  prepared, evaluations = task.inputs.prepared, task.inputs.evaluations
  table = np.concatenate(
    [
      _read_values(space.root, evaluation, config.measures)
      for evaluation in evaluations
    ],
    axis=1,
  )  # [query, row x measure]
  number, size = table.shape
  _check_noise(config, number, size, prepared)
  promise = make_claim(
    config, prepared, size=size, secret_is_fixed=space.is_fixed
  )
  statement, noisy = draw(task, promise, compute_centred_sum(table))
  std = promise.noise_std
  means = (_MIDDLE + noisy / number).reshape(len(evaluations), -1)
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
  """Refuses noise that would hide the scores."""
  if refused := _describe_refusal(config, num_queries, size, prepared):
    raise ValueError(f"release_scores: {refused}")


def _describe_refusal(
  config: Config, num_queries: int, size: int, prepared: results.PreparedData
) -> str:
  """Returns the reason to refuse the noise, and what to change; empty: none."""
  import dp_accounting

  users = prepared.num_users.get(prepared.test_split, num_queries)
  delta = config.delta or get_smallest_delta(prepared, users)
  # In closed form: the accountant takes seconds.
  noise = _MARGIN * dp_accounting.get_sigma_gaussian(config.epsilon, delta)
  sensitivity = (prepared.queries_per_user or 1) * math.sqrt(size) * _MIDDLE
  quantile = noisy_results.compute_quantile(config.confidence)
  width = quantile * noise * sensitivity / num_queries
  if width <= config.widest:
    return ""
  return (
    f"expected noise of at most {config.widest:g} on a mean, got {width:.2g}:"
    f" {size} scores of {num_queries:,} test queries at epsilon"
    f" {rounding.epsilon(config.epsilon)} are too few queries; join splits"
    " (TEST_SPLIT='dev+test'), leave rows or measures out, raise epsilon, or set"
    " release_scores.Config.enabled=False"
  )


def _read_values(
  root, evaluation: results.Evaluation, measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
  """Reads the values of a row."""
  per_query = json.loads(
    (root / evaluation.directory / "per_query.json").read_text()
  )
  table = [[v for _, v in sorted(per_query[m].items())] for m in measures]
  return np.array(table, float).T


def _rows(
  config: Config,
  evaluations: Sequence[results.Evaluation],
  means: Float[np.ndarray, "row measure"],
  **options: Any,
) -> tuple[results.ReleasedRow, ...]:
  """Returns the rows with their intervals; reads nothing private."""
  options["confidence"] = config.confidence
  scored = [evaluation.row for evaluation in evaluations]
  base: Mapping[str, float] = {}
  if rows_lib.BM25 in scored:
    bm25_means = means[scored.index(rows_lib.BM25)]
    base = dict(zip(config.measures, bm25_means.tolist(), strict=True))
  rows = []
  for evaluation, values in zip(evaluations, means.tolist(), strict=True):
    own = dict(zip(config.measures, values, strict=True))
    over = {} if evaluation.row == rows_lib.BM25 else base
    rows.append(
      results.ReleasedRow(
        row=evaluation.row,
        label=evaluation.label,
        epsilon=_epsilon(evaluation.statement),
        means={m: noisy_results.mean(v, **options) for m, v in own.items()},
        over_bm25={
          m: noisy_results.difference(own[m], v, **options)
          for m, v in over.items()
        },
      )
    )
  return tuple(rows)


def _epsilon(claim: statement_lib.PrivacyStatement | None) -> float | None:
  """Returns the epsilon of a row's system; None: no private query."""
  return None if claim is None or claim.is_public else claim.epsilon


def _screen(releases: Sequence[results.ReleasedScores]) -> str:
  return "".join(
    f"{row.name}: {measure} {mean.here:.3f}\n"
    for scores in releases
    for row in scores.rows
    for measure, mean in row.means.items()
  )


def compute_centred_sum(
  table: Float[np.ndarray, "query score"],
) -> Float[np.ndarray, " score"]:
  """Sums the scores of all queries, each less a half.

  Formal guarantee:
    One query more or less moves the sum by at most sqrt(scores) / 2 in L2, and
    some values attain this bound: a query's row lies in a cube of side 1 around
    0. Without the half the bound would be sqrt(scores), since a sum of plain
    scores also tells the number of queries.

  >>> compute_centred_sum(np.array([[1.0, 0.5], [0.75, 0.0]]))
  array([ 0.75, -0.5 ])

  Args:
    table: values in [0, 1]. Others are clipped to this range and nan becomes 0:
      an error about one query's value would reveal it without noise.
  """
  return (np.nan_to_num(table).clip(0, 1) - _MIDDLE).sum(axis=0)


def _full_batch(units: int) -> sampling.Poisson:
  """Returns a sampler that draws every unit, with room for two more.

  Args:
    units: number of queries or users, which is public.
  """
  return sampling.Poisson(
    num_examples=units, expected_batch_size=units, max_batch_size=units + 2
  )


def make_claim(
  config: Any,
  prepared: results.PreparedData,
  *,
  size: int,
  secret_is_fixed: bool = False,
) -> claim_lib.Claim:
  """Returns the claim of one noisy sum over the test queries.

  Args:
    config: settings with `epsilon` and `delta`; delta None: `get_smallest_delta`.
    prepared: the data, with its numbers of queries and users.
    size: number of entries of the released sum.
    secret_is_fixed: whether settings fix the secret of the working directory.

  Raises:
    ValueError: if there is no test query.
  """
  units = prepared.units(prepared.test_split)
  most = prepared.queries_per_user or 1
  return claim_lib.calibrated(
    epsilon=config.epsilon,
    delta=config.delta or get_smallest_delta(prepared, units),
    sampler=_full_batch(units),
    steps=1,
    l2_clip_norm=most * math.sqrt(size) * _MIDDLE,
    words=terms.SCORES.but(
      unit=prepared.unit,
      assumptions=(
        *(() if prepared.division else ("split",)),
        *(("summed",) if prepared.queries_per_user else ()),
      ),
      not_protected=prepared.not_protected,
      secret_is_fixed=secret_is_fixed,
    ),
    part=prepared.part(prepared.test_split),
  )


def get_smallest_delta(prepared: results.PreparedData, units: int) -> float:
  """Returns the delta of a release: at most that of a training.

  Args:
    prepared: the data, with its numbers of train queries and users.
    units: number of units in the released sum.
  """
  trained = (prepared.num_users or prepared.num_queries)["train"]
  return 1 / (2 * max(units, trained))


def draw(
  task: stage.Task,
  promise: claim_lib.Claim,
  total: Float[np.ndarray, " number"],
) -> tuple[statement_lib.PrivacyStatement, Float[np.ndarray, " number"]]:
  """Enters a claim into the ledger, then draws the noise and adds it.

  Formal guarantee:
    The noise has the scale of the claim. It comes from the secret and from
    numbers that are drawn for this release and these values alone
    (`release.start`). It is drawn only after the ledger holds the claim.
    Assumed: one unit moves `total` by at most `promise.l2_sensitivity`.

  Args:
    task: task with the working directory's secret.
    promise: the claim, from `make_claim`.
    total: the exact sum.

  Returns:
    The statement, and the sum with noise.
  """
  space = task.space
  directory = private_training.state_directory(
    space, task.result_path, task.digest
  )
  release = release_lib.start(
    space,
    task.result_path,
    task.digest,
    directory=directory,
    # The same noise at two scales would reveal the sum.
    program=artifacts.fingerprint(
      space.seed(f"sum {total.tolist()}"),
      promise.noise_multiplier,
      promise.l2_sensitivity,
    ),
  )
  statement = promise.enter(space.private(ledger.NAME), release.identifier)
  noisy = gaussian.noisy(total, promise.noise_std, release.noise_key)
  return statement, noisy


STAGE = stage.Stage(
  name="release_scores",
  result=results.ReleasedScores,
  config=Config,
  check=check,
  plan=lambda plan: {"": None} if plan.config.release_scores.enabled else {},
  job=make_job,
  run=run,
  needs=("evaluate",),
  needs_secret=True,
  screen=_screen,
)
