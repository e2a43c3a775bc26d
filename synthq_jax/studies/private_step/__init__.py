"""Audits the private step itself: what canaries find of what it claims.

`audit.mechanism` trains the smallest model there is on canaries with gradients
far above the clip norm, by this library's own clipping, noise, sampling and
accounting. The study repeats that for several claims, numbers of canaries and
samplers: a bound above the claim, at 95% confidence, in more than 5% of seeds
is a mistake in the code; how far the bounds lie below says what a quiet audit
of that size means.

Formal guarantee: none is claimed and no data is read; that of
`audit.mechanism.audit` holds for each seed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from synthq_jax import artifacts
from synthq_jax.audit import mechanism
from synthq_jax.pipeline import config_types, fingerprints
from synthq_jax.privacy import rounding, sampling
from synthq_jax.report import blocks, tables
from synthq_jax.stages import stage
from synthq_jax.studies import frame

__all__ = ["SAMPLERS", "STUDY", "Config", "Row", "Study"]

SAMPLERS = ("one sum", "poisson")
"""One noisy sum of all records, or an epoch of Poisson batches."""

_EPOCH = 50  # steps of an epoch
_WORDS = frame.words("private_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """The whole study."""

  epsilons: tuple[float, ...] = (1.0, 4.0, 8.0)
  """Claims that are audited."""
  delta: float = 1e-5
  """Of each claim."""
  num_canaries: tuple[int, ...] = (100, 400, 1600)
  """All records of a training are canaries."""
  samplers: tuple[str, ...] = SAMPLERS
  """Some of `SAMPLERS`."""
  seeds: int = 10
  """Audits of each claim, size and sampler."""
  public_data: bool = True
  """No data is read, so results may be shared."""

  def __post_init__(self):
    config_types.positive(self, "delta")
    config_types.some_of(self, "samplers", SAMPLERS)
    config_types.at_least(self, 1, "seeds")
    if min(self.num_canaries, default=0) < 2 * _EPOCH:
      raise ValueError(
        f"private_step.Config.num_canaries must be at least {2 * _EPOCH} each,"
        f" got {self.num_canaries}: smaller batches of an epoch are empty"
      )


@dataclasses.dataclass(frozen=True)
class _Case:
  """One claim, number of canaries and sampler."""

  sampler: str
  epsilon: float
  num_canaries: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(_Case):
  """All seeds of one case."""

  bounds: tuple[float, ...]
  """Lower bounds on epsilon, by seed."""
  estimates: tuple[float, ...]
  """No bounds: epsilon of the Gaussian mechanism with the audit's AUROC."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  delta: float
  rows: tuple[Row, ...]


def _row(config: Config, case: _Case) -> Row:
  steps, number = 1, case.num_canaries
  sampler: sampling.Sampler = sampling.FixedOrder(
    num_examples=number, batch_size=number
  )
  if case.sampler == "poisson":
    steps = _EPOCH
    sampler = sampling.Poisson.with_margin(
      num_examples=number, expected_batch_size=number // _EPOCH
    )
  claimed = mechanism.Mechanism(
    epsilon=case.epsilon, delta=config.delta, sampler=sampler, steps=steps
  )
  bounds = [
    mechanism.audit(claimed, num_canaries=number, seed=seed).bounds
    for seed in range(config.seeds)
  ]
  return Row(
    **dataclasses.asdict(case),
    bounds=tuple(one.epsilon_one_run_fdp for one in bounds),
    estimates=tuple(one.epsilon_gdp_estimate for one in bounds),
  )


def _jobs(task: frame.Task, code: str) -> list[frame.Job]:
  """Lists the audits; what they audit is the code, so other code is anew."""
  config: Config = task.config
  cases = itertools.product(
    config.samplers, config.epsilons, config.num_canaries
  )
  return [
    frame.Job(
      directory=task.root
      / "audits"
      / f"{case.sampler}_{stage.row_name(case.epsilon)}_{case.num_canaries}",
      kind=Row,
      digest=artifacts.fingerprint(
        "private_step",
        code,
        (*dataclasses.astuple(case), config.delta, config.seeds),
      ),
      make=functools.partial(_row, config, case),
    )
    for case in itertools.starmap(_Case, cases)
  ]


def _result(task: frame.Task, code: str, rows: Sequence[Row]) -> Study:
  del code
  return Study(delta=task.config.delta, rows=tuple(rows))


def _page(study: Study) -> blocks.Page:
  columns = {
    "Training": lambda row: row.sampler,
    "Claimed epsilon": lambda row: rounding.epsilon(row.epsilon),
    "Canaries": lambda row: f"{row.num_canaries:,}",
    "Median bound": lambda row: f"{np.median(row.bounds):.2f}",
    "Largest bound": lambda row: f"{max(row.bounds):.2f}",
    "Above the claim": lambda row: (
      f"{sum(x > row.epsilon for x in row.bounds)} of {len(row.bounds)}"
    ),
    "Median estimate": lambda row: f"{np.median(row.estimates):.2f}",
  }
  return blocks.Page(
    title="The private step, audited",
    introduction=(_WORDS("setting", delta=study.delta),),
    parts=(frame.part("Bounds", tables.of(study.rows, columns)),),
  )


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: fingerprints.program({}, None),
  jobs=_jobs,
  result=_result,
  page=_page,
  num_shown=1,
)
