"""Chooses the settings of a generator privately, and pays for it.

Draws a secret number of trials, trains a generator with each at a point of a
public grid, scores it on the private dev queries with noise, and keeps the best
alone. Its working directory, `tuned` below the study's, is one of `synthq run`:
with `winner.gin`, which lies there, the other stages go on from the winner.

Formal guarantee:
  That of the winner's statement, for one train query or one dev query (or user),
  added or removed: `selection.Trials` with one training and one noisy score a
  trial. All points have the noise, batches and steps of one mechanism, so the
  largest divergence of them is that of each. Where a rule that looks at one record
  alone made the splits, dev queries pay for the best of as many scores by a line
  of their own, and train queries nothing for scores. Assumed, beside what a
  generator assumes: neither the number of trials, nor how long they took, nor
  anything of those that lost is seen by anybody. They are removed as they lose.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Sequence

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import (
  config_types,
  fingerprints,
  inputs,
  noisy_sums,
  plan,
  private_training,
  results,
  workspace,
)
from synthq_jax.privacy import (
  accounting,
  gaussian,
  joint,
  ledger,
  rounding,
  sampling,
  selection,
)
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.report import blocks, tables
from synthq_jax.stages import finetune_dp
from synthq_jax.studies import frame

__all__ = ["LAWS", "STUDY", "Config", "Winner", "claims", "noisy_score"]

LAWS = ("logarithmic", "geometric")
"""Of `selection.LAWS`: those that always draw a trial."""

_NO_TIME = 315_532_800  # 1980, the first that all archives can hold
_BATCH = 64  # queries whose losses are computed together
_COPIED = (
  "prepare_data",
  f"{results.PRIVATE}/prepare_data",
  f"{results.PRIVATE}/secret_seed",
)
_BEST = "the best of a secret number of trainings, sums in units of clip norms"
_SCORED = (
  "the best of a secret number of mean scores of dev queries, with noise"
)
_WORDS = frame.words("tuning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """What is chosen from, and at which price; every value is public."""

  run: plan.RunConfig = dataclasses.field(default_factory=plan.RunConfig)
  """Data, start and training; the generator at the first of `plan.Rows.synthetic`
  is chosen, and its epsilon is the winner's, scores included."""
  learning_rates: tuple[float, ...] = (2e-3, 5e-3)
  """Of the points."""
  clip_norms: tuple[float, ...] = (0.05, 0.1)
  """Of the points, each with every rate."""
  trials: float = 4.0
  """How many on average; at least 1."""
  law: str = "logarithmic"
  """Of their number; one of `LAWS`."""
  score_noise: float = 6.0
  """Standard deviation of a score's noise over its sensitivity."""

  def __post_init__(self):
    config_types.one_of(self, "law", LAWS)
    config_types.at_least(self, 1, "trials")
    config_types.positive(self, "score_noise")
    for name in ("learning_rates", "clip_norms"):
      if not getattr(self, name):
        raise ValueError(f"expected a point in tuning.Config.{name}, got none")
    if self.run.canaries.number:
      raise ValueError("expected no canaries among what settings are chosen by")
    if not self.run.rows.synthetic:
      raise ValueError(
        "expected one generator to tune, got"
        f" plan.Rows.synthetic={self.run.rows.synthetic}: give an epsilon"
      )
    if math.isinf(self.run.rows.synthetic[0]):
      raise ValueError(
        "expected a finite epsilon, the winner's, first in plan.Rows.synthetic,"
        f" got {self.run.rows.synthetic}: what has none is chosen without noise"
      )

  @property
  def secret_seed(self) -> int | None:
    """Of the run; None draws one."""
    return self.run.secret_seed

  @property
  def points(self) -> tuple[finetune_dp.Config, ...]:
    """The grid, without the law of the trials."""
    return tuple(
      dataclasses.replace(
        self.run.finetune_dp, learning_rate=rate, clip_norm=norm
      )
      for rate, norm in itertools.product(self.learning_rates, self.clip_norms)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winner:
  """The generator that was kept, and what it costs."""

  directory: str
  """Of the generator, below the study's."""
  learning_rate: float
  clip_norm: float
  num_points: int
  trials: selection.Trials
  statements: tuple[statement_lib.PrivacyStatement, ...]
  """Of the generator, and of the scores where they cost other records."""
  alone: float
  """Epsilon of one such training and score that nothing was chosen by."""
  composed: float
  """Epsilon of `trials.mean` of them by composition, all of them seen."""


def _prepare(task: frame.Task) -> results.PreparedData:
  """Prepares the data of the run, where the winner will lie."""
  root, config = task.folders.public("tuned"), _base(task.config)
  plan.run(config, root, stages=["prepare_data"], progress=task.progress)
  folder = root / results.PRIVATE / "prepare_data"
  prepared = artifacts.load(folder, results.PreparedData)
  if "dev" not in prepared.num_queries:
    raise ValueError(
      "expected a split named dev, whose queries score the trainings, got"
      f" {', '.join(prepared.num_queries)}: set TEST_SPLIT='test' where it"
      " joins dev, or give a SOURCE with judgements of dev queries"
    )
  return prepared


def _base(config: Config) -> plan.RunConfig:
  """Returns the run with the generator that is chosen alone."""
  rows = dataclasses.replace(
    config.run.rows, synthetic=config.run.rows.synthetic[:1], direct_dp=()
  )
  return dataclasses.replace(config.run, rows=rows)


def _jobs(task: frame.Task, prepared: results.PreparedData) -> list[frame.Job]:
  return [
    frame.Job(
      directory=task.root / "winner",
      kind=Winner,
      digest=artifacts.fingerprint(
        "tuning", task.config, prepared.digest, fingerprints.versions()
      ),
      make=lambda: _chosen(task, prepared),
    )
  ]


def _chosen(task: frame.Task, prepared: results.PreparedData) -> Winner:
  """Enters the price, then draws, trains, scores, and keeps the best."""
  config: Config = task.config
  root = task.folders.public("tuned")
  space = workspace.Workspace(root, config.secret_seed)
  drawn = "" if space.is_fixed else secrets.token_hex(16)
  name = f"tuning/{artifacts.fingerprint(space.seed(f'name {drawn}'))}"
  trials = selection.Trials(
    mean=config.trials,
    law=config.law,
    score_noise=None if prepared.division else config.score_noise,
  )
  winner, scores = claims(config, space, prepared, trials)
  statement = winner.enter(space.private(ledger.NAME), name)
  statements = [statement]
  if prepared.division:
    statements.append(
      scores.enter(space.private(ledger.NAME), f"{name}-scores")
    )
  rng = np.random.default_rng(space.seed(f"trials {drawn}"))
  number = int(trials.distribution().rvs(random_state=rng))
  kept, best = space.private("tuning", "best"), None
  for trial in range(number):
    point = config.points[rng.integers(len(config.points))]
    folder = space.private("tuning", "trial")
    run = dataclasses.replace(
      _base(config), finetune_dp=dataclasses.replace(point, trials=trials)
    )
    made = _trained(run, root, folder)
    key = space.key(f"score {trial} {drawn}")
    score = noisy_score(
      _values(point, folder, made, prepared),
      config.score_noise,
      key,
      most=prepared.queries_per_user or 1,
    )
    if best is None or score > best[-1]:
      shutil.rmtree(kept, ignore_errors=True)
      folder.rename(kept)
      best = made, point, score
    else:
      shutil.rmtree(folder)
  made, point, _ = best
  # A dev query pays for the choice, a train query for the trainings.
  both = joint.claim(statements) if prepared.division else statement
  made = dataclasses.replace(made, statement=both, seconds=0.0)
  _install(kept, root, made)
  shutil.rmtree(space.private("tuning"))
  artifacts.write_atomically(root / "winner.gin", _settings(point, trials))
  _without_times(root)
  return Winner(
    directory=f"tuned/{made.directory}",
    learning_rate=point.learning_rate,
    clip_norm=point.clip_norm,
    num_points=len(config.points),
    trials=trials,
    statements=tuple(statements),
    **_other_prices(config, winner, scores, bool(prepared.division)),
  )


def claims(
  config: Config,
  space: workspace.Workspace,
  prepared: results.PreparedData,
  trials: selection.Trials,
) -> tuple[claim_lib.Claim, claim_lib.Claim]:
  """Returns what is promised of the winner, and of the scores by themselves.

  The noise of the trainings is calibrated so that the first, with the price of
  choosing and, where they cost the same records, of scores, reaches its epsilon.

  Args:
    config: of the study.
    space: where the winner will lie.
    prepared: the data.
    trials: the law of their number.
  """
  tuned = dataclasses.replace(config.run.finetune_dp, trials=trials)
  users = prepared.num_users.get("train")
  draws_users = users is not None and tuned.user_sampling == "users"
  settings = finetune_dp.training(
    tuned,
    config.run.rows.synthetic[0],
    draws_users=draws_users,
    num_users=None if draws_users else users,
  )
  settings = dataclasses.replace(
    settings, mechanism=f"{_BEST}: {settings.mechanism}"
  )
  winner = private_training.promise(
    settings,
    space,
    prepared,
    users if draws_users else prepared.num_queries["train"],
    l2_clip_norm=1.0,  # sums in clip norms, of which a trial draws one
  )
  units = prepared.units("dev")
  most = prepared.queries_per_user or 1
  scores = claim_lib.Claim(
    sampler=sampling.Poisson(
      num_examples=units, expected_batch_size=units, max_batch_size=units + 2
    ),
    steps=1,
    noise_multiplier=config.score_noise,
    l2_clip_norm=most / 2,
    delta=min(winner.delta, 1 / (2 * units)),
    part=prepared.part("dev"),
    trials=dataclasses.replace(trials, score_noise=None),
    words=winner.words.but(mechanism=_SCORED),
  )
  return winner, scores


def noisy_score(
  values: np.ndarray, noise: float, key: jax.Array, *, most: int = 1
) -> float:
  """Returns the mean of values in [0, 1] with noise.

  Formal guarantee: a Gaussian mechanism of noise multiplier `noise` for one value
  more or less, or `most` of one user, as `noisy_sums.centred_sum` has it.

  Args:
    values: of the private queries, [query].
    noise: noise multiplier.
    key: of the noise, secret.
    most: values of one unit.
  """
  [total] = noisy_sums.centred_sum(values[:, None])
  [normal] = gaussian.normal_numbers(key, 1)
  return float(0.5 + (total + noise * most / 2 * normal) / len(values))


def _trained(
  run: plan.RunConfig, root: pathlib.Path, folder: pathlib.Path
) -> results.Checkpoint:
  """Trains one generator in a folder of its own; says nothing."""
  shutil.rmtree(folder, ignore_errors=True)
  for place in _COPIED:
    if (root / place).is_dir():
      shutil.copytree(root / place, folder / place)
    elif (root / place).exists():
      shutil.copy2(root / place, folder / place)
  quiet = io.StringIO()  # a line each would tell how many there are
  with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
    plan.run(run, folder, stages=["finetune_dp"], progress=False)
  [made] = folder.glob("finetune_dp/*/" + artifacts.RESULT_NAME)
  return artifacts.load(made.parent, results.Checkpoint)


def _values(
  config: finetune_dp.Config,
  folder: pathlib.Path,
  made: results.Checkpoint,
  prepared: results.PreparedData,
) -> np.ndarray:
  """Returns how well each private dev query is written, in [0, 1].

  One minus its cross-entropy over that of chance, log(vocabulary), at least 0.
  """
  records = finetune_dp.split_records(
    config, workspace.Folders(folder), prepared, "dev"
  )
  params, shape = t5_checkpoints.load(folder / made.directory)
  asked = inputs.with_prompt(
    records["inputs"], made.prompt_tokens, shape.vocab_size
  )
  loss = jax.jit(
    functools.partial(finetune_dp.loss_fn, public={}, model_config=shape)
  )
  params = t5_checkpoints.flatten(params)
  number = len(records["targets"])
  losses = []
  for start in range(0, number, _BATCH):
    rows = np.arange(start, start + _BATCH) % number  # one shape
    batch = {"inputs": asked[rows], "targets": records["targets"][rows]}
    losses.append(np.asarray(loss(params, batch), np.float64))
  found = np.concatenate(losses)[:number]
  found = np.where(np.isfinite(found), found, np.inf)
  return np.clip(1 - found / math.log(shape.vocab_size), 0, 1)


def _install(
  kept: pathlib.Path, root: pathlib.Path, made: results.Checkpoint
) -> None:
  """Puts the winner where `synthq run` finds it, with its claim."""
  held = artifacts.read_json(kept / made.directory / artifacts.RESULT_NAME)
  folders = [
    root / made.directory,
    root / results.PRIVATE / made.directory,
  ]
  for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(kept / folder.relative_to(root), folder)
  artifacts.save(
    root / made.directory,
    made,
    held["fingerprint"],
    folders=folders,
    data=held["data"],
  )


def _without_times(root: pathlib.Path) -> None:
  """Gives all that may be shared one time: differences would tell the number."""
  for path in (root, *root.rglob("*")):
    if results.PRIVATE not in path.relative_to(root).parts:
      os.utime(path, (_NO_TIME, _NO_TIME))


def _settings(point: finetune_dp.Config, trials: selection.Trials) -> str:
  """Writes what `synthq run` has to be told to go on from the winner."""
  fields = dataclasses.asdict(trials)
  return "\n".join(
    [
      "# The settings that were chosen; give this file after the recipe's.",
      "from __gin__ import dynamic_registration",
      "from synthq_jax.privacy import selection",
      "from synthq_jax.stages import finetune_dp",
      "",
      f"finetune_dp.Config.learning_rate = {point.learning_rate!r}",
      f"finetune_dp.Config.clip_norm = {point.clip_norm!r}",
      "finetune_dp.Config.trials = @selection.Trials()",
      *(f"selection.Trials.{name} = {v!r}" for name, v in fields.items()),
      "",
    ]
  )


def _other_prices(
  config: Config,
  winner: claim_lib.Claim,
  scores: claim_lib.Claim,
  is_apart: bool,
) -> dict[str, float]:
  """Returns the epsilon of one trial, and of all by composition."""
  one = [accounting.Run(winner.sampler, winner.noise_multiplier, winner.steps)]
  if not is_apart:
    one.append(accounting.Run(scores.sampler, scores.noise_multiplier, 1))
  epsilon = functools.partial(
    accounting.composed_epsilon, delta=winner.delta, relation=winner.relation
  )
  number = math.ceil(config.trials)
  return {"alone": epsilon(one), "composed": epsilon(one * number)}


def _result(
  task: frame.Task, prepared: results.PreparedData, made: Sequence[Winner]
) -> Winner:
  del task, prepared
  return made[0]


def _page(winner: Winner) -> blocks.Page:
  statement, *scores = winner.statements
  prices = {
    "one trial, nothing chosen": winner.alone,
    f"the best of {winner.trials.mean:g} on average, alone seen": (
      statement.epsilon
    ),
    f"{math.ceil(winner.trials.mean)} trials by composition, all seen": (
      winner.composed
    ),
  }
  columns = {
    "What is paid for": lambda item: item[0],
    "epsilon": lambda item: rounding.up(item[1], places=2),
  }
  settings = {
    "Learning rate": winner.learning_rate,
    "Clip norm": winner.clip_norm,
  }
  return blocks.Page(
    title="Settings that were chosen privately",
    introduction=(
      _WORDS(
        "setting",
        points=winner.num_points,
        mean=f"{winner.trials.mean:g}",
        law=winner.trials.law,
        unit=statement.unit,
        epsilon=rounding.epsilon(statement.epsilon),
        delta=rounding.delta(statement.delta),
        noise=rounding.noise(statement.ledger[0].noise_multiplier, digits=4),
        directory=winner.directory,
      ),
      *(
        _WORDS(
          "apart",
          epsilon=rounding.epsilon(one.epsilon),
          delta=rounding.delta(one.delta),
        )
        for one in scores
      ),
    ),
    parts=(
      frame.part(
        "The winner",
        tables.of(
          settings.items(),
          {"Setting": lambda x: x[0], "Value": lambda x: f"{x[1]:g}"},
        ),
      ),
      frame.part(
        "What it costs", tables.of(prices.items(), columns), _WORDS("prices")
      ),
    ),
  )


STUDY = frame.Study(
  config=Config,
  prepare=_prepare,
  jobs=_jobs,
  result=_result,
  page=_page,
  num_shown=2,
)
