"""Plans the private trainings of a run before any of them begins."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import stages
from synthq_jax.runtime import private_training, results
from synthq_jax.runtime import rows as rows_lib

__all__ = ["IF_ALLOWED", "Outlook", "Training", "plan_trainings"]

IF_ALLOWED = ("release_scores",)
"""Stages that are left out if the data has too few queries for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One private training of a plan; a None becomes known once the data is
  read."""

  stage: str
  """Name of the stage."""
  result_path: str
  """Folder of the result, e.g. "finetune_dp/eps8"."""
  row: rows_lib.Row
  """Row of the table."""
  is_released: bool
  """Whether the row counts as released; if not, it is only compared."""
  epsilon: float
  """Target epsilon of this training alone."""
  delta: float | None
  """Target delta; None: 1 / (2n), n the number of queries, or of users if these
  are the unit."""
  num_records: int | None
  """Private records to draw from: queries, or users."""
  num_users: int | None = None
  """Users of the train queries, if these are the unit: n of `delta`."""
  batch_size: int | None
  """Expected records of a batch; None: all records."""
  max_batch_size: int | None
  """Maximum records of a batch."""
  steps: int
  """Optimizer steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
  """The plan of a run, and its finished part."""

  progress: Sequence[tuple[str, Mapping[str, bool] | None]]
  """Stages, each with its rows and whether they are finished; None: an earlier
  stage is not finished (`runner.Run.survey`)."""
  rows: Mapping[str, tuple[str, ...]]
  """Folders of the results of each stage; "" is the folder of a single
  result."""
  trainings: tuple[Training, ...]
  """Private trainings, finished ones included."""


def plan_trainings(
  plan: rows_lib.Plan, prepared: results.PreparedData | None = None
) -> Iterator[Training]:
  """Plans the trainings with noise.

  Args:
    plan: the rows of the run.
    prepared: the data; None: it is not read yet.

  Yields:
    Each training, in the order of the stages.

  Raises:
    ValueError: if a training would be refused, such as one whose batch is larger
      than the data.
  """
  for stage in map(stages.get, plan.stages):
    for name, row in stage.plan(plan).items():
      planned = stage.training(plan, row)
      if planned is None or math.isinf(planned.epsilon):
        continue
      yield Training(
        stage=stage.name,
        result_path=f"{stage.folder or stage.name}/{name}",
        row=row,
        is_released=not plan.is_compared(row),
        epsilon=planned.epsilon,
        steps=planned.config.steps,
        **_sizes(planned, prepared if planned.is_counted else None),
      )


def _sizes(
  planned: private_training.Planned, prepared: results.PreparedData | None
) -> dict[str, Any]:
  """Returns the sizes of a training that follow from the number of records.

  Raises:
    ValueError: if the data is known and the training would be refused.
  """
  config = planned.config
  if prepared is None:
    return {
      "delta": config.delta,
      "num_records": None,
      "batch_size": config.batch_size or None,
      "max_batch_size": None,
    }
  users = prepared.num_users.get("train")
  draws_users = planned.draws_users(prepared)
  config.check(prepared, draws_users=draws_users)
  config = planned.get_settings(prepared)
  number = users if draws_users else prepared.num_queries["train"]
  assert number is not None  # users are drawn only if their number is known
  sampler = private_training.sampler(
    private_training.Settings(
      config=config,
      epsilon=planned.epsilon,
      mechanism="",
      num_users=None if draws_users else users,
      fixed_order=planned.fixed_order,
    ),
    number,
    prepared.queries_per_user,
  )
  return {
    "delta": config.delta or 1 / (2 * prepared.units("train")),
    "num_records": number,
    "num_users": users,
    "batch_size": config.batch_size,
    "max_batch_size": sampler.max_batch_size,
  }
