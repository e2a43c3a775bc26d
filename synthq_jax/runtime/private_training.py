"""Runs the steps that every private training of the pipeline shares.

The noise is calibrated before step 0. The randomness of this training is drawn,
and the release is entered into the ledger of the working directory. Then the
model is trained, and its statement is written.
"""

import dataclasses
import math
import pathlib
from typing import Any, ClassVar, TypeVar

import dp_accounting
import jax

from synthq_jax import checks, field_kinds
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import ledger, sampling, terms
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import config_types, fingerprints, results, workspace
from synthq_jax.runtime import release as release_lib
from synthq_jax.runtime import stage as stage_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import distributed, dp_step, loop

__all__ = [
  "Config",
  "Inputs",
  "Planned",
  "Settings",
  "fill_batch_size",
  "make_claim",
  "sampler",
  "state_directory",
  "train",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings that every stage with a private training shares; all are
  public."""

  OPTIMIZERS: ClassVar[tuple[str, ...]] = ("dp_adam", "dp_adafactor")
  """Optimizers that keep the initial parameters; "dp_dual_averaging" discards them."""

  delta: float | None = None
  """Target delta; None: 1 / (2n), n the number of train queries or users."""
  clip_norm: float = 0.1
  """L2 clip norm of a record's gradient, or of what the method clips
  instead."""
  batch_size: int = 512
  """Expected records of a batch: queries, or users where these are drawn. 0:
  all records of the data; the noise is then least for what a step learns, and a
  step takes longest."""
  steps: int = 100
  """Optimizer steps."""
  optimizer: str = "dp_adam"
  """Optimizer, one of `OPTIMIZERS`."""
  learning_rate: float = 1e-3
  """Peak learning rate; warm-up over a tenth of the steps, then linear
  decay."""
  trained: str = ".*"
  """Regular expression that the whole path of a trained parameter matches, e.g.
  "decoder/.*"; all others keep their public values. The norm of the noise grows
  with the square root of their number, whatever a record can say."""
  microbatch_size: int | None = None
  """Records that a device processes at once, to save memory, whatever the
  number of devices; None: all it has. The padded batch is rounded up to a
  multiple of it, so the accounting depends on it."""
  settings: loop.Settings = field_kinds.speed_only(make=loop.Settings)
  """Settings of saving and reporting."""

  def __post_init__(self):
    """Refuses values out of range."""
    config_types.positive(self, "clip_norm", "learning_rate", "delta")
    if self.delta is not None and self.delta >= 0.5:  # needs no data
      raise ValueError(
        f"{config_types.label(type(self))}.delta must be above 0 and below 1/n"
        f" (n private train queries or users), got {self.delta}: a larger one"
        " allows one of them to be published; leave DELTA out for 1/(2n)"
      )
    config_types.at_least(self, 1, "steps", "microbatch_size")
    config_types.at_least(self, 0, "batch_size")
    config_types.one_of(self, "optimizer", self.OPTIMIZERS)

  def check_batch(self, number: int, units: str) -> None:
    """Refuses a batch of more records than there are.

    Args:
      number: number of records, or more.
      units: what they are, for the message.
    """
    if self.batch_size > number:
      name = config_types.label(type(self))
      size = 1 << max(number // 4, 1).bit_length() - 1
      raise ValueError(
        f"{name}.batch_size must be at most {number:,}, the number of {units}, got"
        f" {self.batch_size}: set a smaller one, such as"
        f" --gin.{name}.batch_size={size}"
      )

  def check(
    self, prepared: results.PreparedData, *, draws_users: bool = False
  ) -> None:
    """Refuses settings that the accountant will refuse, before any training.

    Args:
      prepared: the data, with its numbers of train queries and users.
      draws_users: whether a record is a user.

    Raises:
      ValueError: if the batch is larger than the data, or delta is 1 / n or more.
    """
    filled = fill_batch_size(self, prepared, draws_users=draws_users)
    name = config_types.label(type(self))
    queries = prepared.num_queries["train"]
    users = prepared.num_users.get("train", queries)
    if draws_users:
      filled.check_batch(users, "private train users")
    else:
      filled.check_batch(queries, "private train queries")
    if self.delta is not None and not 0 < self.delta < 1 / users:
      unit = "user" if prepared.num_users else "query"
      units = "users" if prepared.num_users else "queries"
      raise ValueError(
        f"{name}.delta must be above 0 and below 1/n = {1 / users:.3g}"
        f" (n private train {units}), got {self.delta}: a larger one allows a"
        f" {unit} to be published; leave DELTA out for 1/(2n)"
      )


_Config = TypeVar("_Config", bound=Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Data that every private training reads; stages add fields."""

  prepared: results.PreparedData
  """The documents, and the private queries that become records."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The public settings of one private training."""

  config: Config
  """Settings of the stage."""
  epsilon: float
  """Target epsilon; inf trains without noise and claims nothing."""
  mechanism: str
  """Name in sentences.toml of what is clipped and noised."""
  denominator: float | None = None
  """Public divisor of the sum; None: the expected batch size."""
  has_dropout: bool = False
  """Whether the loss takes a key for each record."""
  unit: unit_lib.Unit = unit_lib.QUERY
  """Unit of one record, if the unit is not a user."""
  num_users: int | None = None
  """Number of users, if their queries are drawn one by one."""
  clips_records: bool = True
  """Whether the clipped quantity is each record's own gradient."""
  relation: str = "ADD_OR_REMOVE_ONE"
  """Neighboring relation of the claim."""
  fixed_order: bool = False
  """Whether batches are read in a fixed order instead of drawn."""
  base: terms.Terms = terms.QUERIES
  """Terms of the claim for single queries."""
  not_protected: tuple[str, ...] = ()
  """Names of further facts that the claim does not cover."""

  def __post_init__(self):
    """Refuses a relation that the noise of `dp_step.train` does not cover."""
    if checks.relation(self.relation) == "REPLACE_ONE":
      raise ValueError(
        "expected relation ADD_OR_REMOVE_ONE or REPLACE_SPECIAL, got REPLACE_ONE:"
        " noise is for one record more or less; state that"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
  """A private training that follows from settings, before the data is read."""

  config: Config
  """Settings of the stage."""
  epsilon: float
  """Target epsilon; inf trains without noise."""
  fixed_order: bool = False
  """Whether batches are read in a fixed order instead of drawn."""
  can_draw_users: bool = False
  """Whether a record is a user, if users are the unit of privacy."""
  is_counted: bool = True
  """Whether the data alone gives the number of records; canaries add to it."""

  def draws_users(self, prepared: results.PreparedData) -> bool:
    """Tests whether a record is a user in this data."""
    return self.can_draw_users and prepared.queries_per_user > 0

  def get_settings(self, prepared: results.PreparedData) -> Config:
    """Returns the settings with the batch size as a number."""
    return fill_batch_size(
      self.config, prepared, draws_users=self.draws_users(prepared)
    )


def fill_batch_size(
  config: _Config, prepared: results.PreparedData, *, draws_users: bool = False
) -> _Config:
  """Returns the settings of a training with the batch size filled in.

  Args:
    config: settings of the stage.
    prepared: the data, with its public numbers of train queries and users.
    draws_users: whether a record is a user.
  """
  if config.batch_size:
    return config
  count = prepared.num_users if draws_users else prepared.num_queries
  return dataclasses.replace(config, batch_size=count["train"])


def state_directory(
  space: workspace.Folders, stage: str, digest: str
) -> pathlib.Path:
  """Returns the folder of a stage's unfinished training states."""
  return space.private(stage, f"state_{digest}")


def train(
  task: stage_lib.Task[Any, Inputs],
  settings: Settings,
  training: dp_step.Training,
) -> tuple[Any, dict[str, Any]]:
  """Calibrates the noise, enters the release into the ledger and trains.

  Formal guarantee: that of the statement, for the parameters; and that of
  `release.start` for all trainings of the working directory together. A
  training that is made again is another release, whatever it shares with the
  first one. It has its own batches, its own noise and its own line in the
  ledger.

  Args:
    task: task with the secret; its settings are a `Config`. Settings that
      change only the speed also change the last bits of a gradient.
    settings: target, sampling and optimizer.
    training: gradient, public parameters and records; the gradient reports its
      sensitivity and its `l2_clip_norm`.

  Returns:
    The trained parameters, and fields of `results.Checkpoint`.

  Raises:
    ValueError: if the target cannot be met with these settings.
  """
  space, config, stage = task.space, task.settings, task.result_path
  clipped = training.clipped
  relation = dp_accounting.NeighboringRelation[settings.relation]
  claim = make_claim(
    settings,
    space,
    task.inputs.prepared,
    training.num_records,
    l2_clip_norm=clipped.l2_clip_norm,
    l2_sensitivity=clipped.sensitivity(relation),
    decide=lambda find: distributed.decided(  # processors may differ
      f"{stage} noise multiplier", find
    ),
  )
  state = state_directory(space, stage, task.digest)
  release = release_lib.start(
    space,
    stage,
    task.digest,
    directory=state,
    program=fingerprints.program(config, training.mesh, _read(task)),
    promise=promised(claim),
  )
  mechanism = dp_step.Mechanism(
    sampler=claim.sampler,
    noise_multiplier=claim.constant_noise_multiplier,
    optimizer=dp_step.Optimizer(
      name=config.optimizer,
      learning_rate=config.learning_rate,
      steps=config.steps,
      denominator=settings.denominator,
    ),
    batch_seed=release.batch_seed,
    noise_key=release.noise_key,
    dropout_key=release.dropout_key if settings.has_dropout else None,
  )
  metrics_path = space.private(stage, f"metrics_{task.digest}.jsonl")
  files = loop.Files(
    directory=state,
    metrics_path=metrics_path,
    description=stage.replace("/", " "),
  )
  if distributed.is_main():
    claim.enter(space.private(ledger.NAME), release.identifier)
  distributed.barrier(f"{stage} ledger")  # before any loss is computed
  trained = dp_step.train(training, mechanism, files, config.settings)
  return trained, {
    "statement": claim.statement(release.identifier),
    "steps": config.steps,
    "batch_size": config.batch_size,
    "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(trained)),
    "metrics": space.relative(metrics_path),
  }


def _read(task: stage_lib.Task[Any, Inputs]) -> list[pathlib.Path]:
  """Returns the folders of the results that a training reads."""
  directories = [getattr(x, "directory", x) for x in vars(task.inputs).values()]
  folders = [x for x in directories if isinstance(x, (str, pathlib.Path))]
  return [task.folders.root / folder for folder in folders]


def promised(claim: claim_lib.Claim) -> str:
  """Digests sampling, noise and sensitivity; all steps of one claim share
  it."""
  # (): coefficients of correlated noise, in digests of before.
  return artifacts.fingerprint(claim.statement("any").ledger, ())


def make_claim(
  settings: Settings,
  space: workspace.Workspace,
  prepared: results.PreparedData,
  num_records: int,
  **fields: Any,
) -> claim_lib.Claim:
  """Returns the claim of a training with the least noise that reaches its
  target.

  Args:
    settings: target, sampling and terms.
    space: the working directory; the claim says whether its secret is fixed.
    prepared: the data that the records came from.
    num_records: number of records.
    **fields: fields of `claim.calibrated`: clip norm, sensitivity.
  """
  return claim_lib.calibrated(
    epsilon=settings.epsilon,
    sampler=sampler(settings, num_records, prepared.queries_per_user),
    steps=settings.config.steps,
    delta=settings.config.delta,
    relation=settings.relation,
    part=prepared.part("train"),
    words=_terms(settings, space, prepared),
    **fields,
  )


def sampler(
  settings: Settings, num_examples: int, most_queries: int = 0
) -> sampling.Sampler:
  """Returns the sampler of batches: Poisson, or in a fixed order.

  Args:
    settings: settings of the training.
    num_examples: number of records.
    most_queries: most queries of one user, `PreparedData.queries_per_user`.
  """
  if settings.fixed_order:
    return sampling.FixedOrder(
      num_examples=num_examples, batch_size=settings.config.batch_size
    )
  grouped = {}
  if settings.num_users and most_queries > 1:
    grouped = {"group_size": most_queries, "num_units": settings.num_users}
  poisson = sampling.Poisson.with_margin(
    num_examples=num_examples,
    expected_batch_size=settings.config.batch_size,
    multiple_of=settings.config.microbatch_size or 8,
    **grouped,
  )
  if settings.config.batch_size == num_examples:
    # Every record is drawn: leave room for two more units, as their joint claim asks.
    rows, size = 2 * poisson.group_size, settings.config.microbatch_size or 8
    room = poisson.max_batch_size + size * math.ceil(rows / size)
    poisson = dataclasses.replace(poisson, max_batch_size=room)
  return poisson


def _terms(
  settings: Settings, space: workspace.Workspace, prepared: results.PreparedData
) -> terms.Terms:
  """Returns the terms of the claim for this training and this data."""
  unit, drawn = settings.unit, "split"
  if prepared.queries_per_user:
    unit, drawn = prepared.unit, "drawn_users"
    if settings.num_users:
      drawn = "drawn_queries" if settings.clips_records else "drawn_pairs"
  return settings.base.but(
    unit=unit,
    mechanism=settings.mechanism,
    assumptions=(drawn,),
    not_protected=(*settings.not_protected, *prepared.not_protected),
    secret_is_fixed=space.is_fixed,
    without_noise="no_noise",
  )
