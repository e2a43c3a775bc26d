"""Plans the rows and the private trainings of a run from its settings alone."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from synthq_jax import stages
from synthq_jax.runtime import (
  private_training,
  results,
  runner,
  stage,
  system_results,
)
from synthq_jax.stages import direct_dp, learn_adapter

__all__ = ["IF_ALLOWED", "Outlook", "Training", "rows", "trainings"]

IF_ALLOWED = ("release_scores",)
"""Stages that are left out where the data has too few queries for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One private training of a plan; None is known once the data is read."""

  stage: str
  """That makes it."""
  place: str
  """Folder of the result, e.g. "finetune_dp/eps8"."""
  row: str
  """Of the table, e.g. "synthetic_eps8"."""
  epsilon: float
  """Target of this training alone."""
  delta: float | None
  """Target; None: 1 / (2n), n the queries, or users where these are
  protected."""
  num_records: int | None
  """The private records that are drawn: queries, or users."""
  num_users: int | None = None
  """Users who asked, where these are protected: n of `delta`."""
  batch_size: int | None
  """Expected records of a batch; None: all of them."""
  max_batch_size: int | None
  """Most records of a batch."""
  steps: int
  """Optimizer steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
  """The plan of a run, and the part of it that is finished."""

  there: Sequence[tuple[str, Mapping[str, bool] | None]]
  """Each stage with its rows and whether they are finished; None: a stage
  before it is not (`runner.Run.survey`)."""
  rows: Mapping[str, tuple[str, ...]]
  """Each stage with the rows that it makes; "" is its only result."""
  trainings: tuple[Training, ...]
  """The private trainings, with those that are finished."""


def rows(
  config: Any,
  wanted: Sequence[str],
  *,
  test_sets: Sequence[str] = (),
) -> dict[str, tuple[str, ...]]:
  """Plans which stages make which rows.

  Args:
    config: a `plan.RunConfig`.
    wanted: stages, with all that they need.
    test_sets: names of the further test sets.

  Returns:
    The names of the rows by stage; a stage without rows does nothing.
  """
  chosen, direct = config.rows, direct_dp.rows(config)
  generators = [stage.row_name(epsilon) for epsilon in chosen.synthetic]
  written = [*(["public_only"] if chosen.public_only else []), *generators]
  adapted = _adapters(config, wanted)
  hidden = {**_retrievers(config, wanted, generators), **adapted}
  systems = dict(hidden)
  if "fuse" in wanted and chosen.fused:
    systems |= {
      f"{system_results.Fusion.SYSTEM}_{k}": hidden[k] for k in hidden
    }
  ranked = []
  if "learn_to_rank" in wanted and not runner.is_for_audit(wanted):
    ranked = _ranked(config, hidden)
  for name in ranked:
    row = f"{system_results.Ranking.SYSTEM}_{name}"
    systems[row] = hidden[name] or chosen.is_compared(row)
  scored = {**({"bm25": False} if chosen.bm25 else {}), **systems}
  only = ("",)
  planned: dict[str, Sequence[str]] = {
    "prepare_data": only,
    "prepare_test_set": test_sets,
    "finetune_dp": generators,
    "generate": written,
    "static_encoder": only if config.static_encoder.dim else (),
    "filter_queries": written if config.filter_queries.is_wanted else (),
    "query_leakage": only if written and config.query_leakage.enabled else (),
    "train_retriever": [k for k in hidden if k not in {**direct, **adapted}],
    "direct_dp": [k for k in hidden if k in direct],
    "encode_documents": [k for k in hidden if k not in adapted],
    "learn_adapter": [*adapted],
    "fuse": [*hidden] if chosen.fused else (),
    "learn_to_rank": ranked,
    "evaluate": [
      f"{called}/{name}"
      for called in (*results.OWN_TEST_SETS, *test_sets)
      for name, is_hidden in scored.items()
      if called != "public" or not is_hidden
    ],
    "audit": generators if config.canaries.number else (),
    "compare_queries": only,
    "release_scores": only if config.release_scores.enabled else (),
    "report": only,
  }
  return {name: tuple(planned[name]) for name in wanted}


def _retrievers(
  config: Any, wanted: Sequence[str], generators: Sequence[str]
) -> dict[str, bool]:
  """Returns the rows of retrievers, and whether they lie under `private/`."""
  chosen, is_audit = config.rows, runner.is_for_audit(wanted)
  hidden = {}
  if "train_retriever" in wanted:
    if chosen.untrained:
      hidden["untrained"] = False
    if chosen.public_only and not is_audit:
      hidden["public_only"] = False
    for name in generators:
      row = f"synthetic_{name}"
      hidden[row] = name == "inf" or chosen.is_compared(row)
    if chosen.original and not is_audit:
      hidden["original"] = True
  if "direct_dp" in wanted and not is_audit:
    hidden |= {row: chosen.is_compared(row) for row in direct_dp.rows(config)}
  return hidden


def _adapters(config: Any, wanted: Sequence[str]) -> dict[str, bool]:
  """Returns the rows of adapters, and whether they lie under `private/`."""
  if "learn_adapter" not in wanted or runner.is_for_audit(wanted):
    return {}
  rows = {}
  for epsilon in config.rows.adapted:
    name = learn_adapter.row_name(epsilon)
    rows[name] = math.isinf(epsilon) or config.rows.is_compared(name)
  return rows


def _ranked(config: Any, retrievers: Mapping[str, bool]) -> list[str]:
  """Returns the retrievers that get learned weights.

  No claim covers a query and the text of a query alone.
  """
  other_unit = {
    row
    for row, (method, _) in direct_dp.rows(config).items()
    if method.unit == "query"
  }
  return [
    name
    for name in retrievers
    if config.rows.is_ranked(name) and name not in other_unit
  ]


def trainings(
  config: Any,
  planned: Mapping[str, Sequence[str]],
  prepared: results.PreparedData | None = None,
) -> tuple[Training, ...]:
  """Plans the trainings with noise.

  Args:
    config: a `plan.RunConfig`.
    planned: of `rows`.
    prepared: the data; None: it is not read yet.

  Raises:
    ValueError: if a training would be refused, such as one whose batch is larger
      than the data.
  """
  chosen, found = config.rows, []

  def add(
    stage_name: str,
    name: str,
    row: str,
    own: Any,
    epsilon: float,
    **options: Any,
  ) -> None:
    if name in planned.get(stage_name, ()) and math.isfinite(epsilon):
      folder = stages.get(stage_name).folder or stage_name
      named = {"stage": stage_name, "place": f"{folder}/{name}", "row": row}
      known = {**named, "epsilon": epsilon, "steps": own.steps}
      found.append(_training(known, own, epsilon, prepared, **options))

  for epsilon in chosen.synthetic:
    name = stage.row_name(epsilon)
    add(
      "finetune_dp",
      name,
      f"synthetic_{name}",
      config.finetune_dp,
      epsilon,
      noise_bands=config.finetune_dp.noise_bands,
      draws_users=bool(prepared and prepared.queries_per_user),
      is_counted=not config.canaries.number,
    )
  for row, (method, epsilon) in direct_dp.rows(config).items():
    is_fixed = method.unit == "query"
    add("direct_dp", row, row, method, epsilon, fixed_order=is_fixed)
  for name in planned.get("learn_to_rank", ()):
    # Beside a retriever without privacy weights are learned without noise.
    if name not in ("original", "synthetic_inf"):
      own, row = config.learn_to_rank, f"{system_results.Ranking.SYSTEM}_{name}"
      add("learn_to_rank", name, row, own, own.epsilon)
  for epsilon in chosen.adapted:
    row = learn_adapter.row_name(epsilon)
    add("learn_adapter", row, row, config.learn_adapter, epsilon)
  return tuple(found)


def _training(
  known: Mapping[str, Any],
  config: Any,
  epsilon: float,
  prepared: results.PreparedData | None,
  *,
  draws_users: bool = False,
  is_counted: bool = True,
  **options: Any,
) -> Training:
  """Plans one training; without the data, or with canaries, n stays open.

  Raises:
    ValueError: if the data is known and the training would be refused.
  """
  if prepared is None or not is_counted:
    return Training(
      delta=config.delta,
      num_records=None,
      batch_size=config.batch_size or None,
      max_batch_size=None,
      **known,
    )
  config.check(
    prepared,
    noise_bands=options.get("noise_bands", 1),
    draws_users=draws_users,
  )
  config = private_training.filled(config, prepared, draws_users=draws_users)
  users = prepared.num_users.get("train")
  number = users if draws_users else prepared.num_queries["train"]
  assert number is not None  # who draws users knows how many there are
  settings = private_training.Settings(
    config=config,
    epsilon=epsilon,
    mechanism="",
    num_users=None if draws_users else users,
    **options,
  )
  sampler = private_training.sampler(
    settings, number, prepared.queries_per_user
  )
  return Training(
    delta=config.delta or 1 / (2 * prepared.units("train")),
    num_records=number,
    num_users=users,
    batch_size=config.batch_size,
    max_batch_size=sampler.max_batch_size,
    **known,
  )
