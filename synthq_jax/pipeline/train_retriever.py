"""Trains a dual encoder on pairs: real ones, synthetic ones, or with DP.

Every row that trains without noise uses the same recipe, a shared T5 encoder
with mean pooling, cosine over a temperature and in-batch softmax; only the
pairs differ. `run_direct` is the papers' naive private baseline: the gradient
of the whole batch is clipped, so the noise does not shrink with the batch.
"""

import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import artifacts, optim
from synthq_jax.losses import contrastive
from synthq_jax.models import dual_encoder, t5_checkpoints
from synthq_jax.pipeline import (
  config_types,
  inputs,
  private_training,
  results,
  workspace,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.training import dp_step, loop, pairs

__all__ = ["Config", "DirectConfig", "run", "run_direct"]

_MECHANISM = (
  "the contrastive gradient of a whole Poisson sample of (query, document)"
  " pairs, clipped as one, with Gaussian noise"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The recipe shared by all rows that train without noise."""

  steps: int = 300
  """Optimizer steps."""
  batch_size: int = 128
  """Pairs of a batch, each the negative of the others."""
  learning_rate: float = 1e-3
  """Peak of Adam's; warm-up, then linear decay."""
  warmup_steps: int = 30
  """Linear warm-up."""
  temperature: float = 0.05
  """Divides the cosines."""
  seed: int = 0
  """Order of the pairs."""
  settings: loop.Settings = dataclasses.field(
    default_factory=loop.Settings, metadata={"speed_only": True}
  )
  """Saving and reporting."""

  def __post_init__(self):
    config_types.positive(self, "temperature", "learning_rate")
    config_types.at_least(self, 1, "batch_size", "steps")
    config_types.at_least(self, 0, "warmup_steps", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectConfig:
  """The papers' naive private training; every value is public."""

  delta: float | None = None
  """Target; None: 1 / (2n)."""
  clip_norm: float = 0.1
  """L2 clip norm of the whole batch's gradient."""
  batch_size: int = 32
  """Expected records of a Poisson batch."""
  steps: int = 100
  """Optimizer steps."""
  optimizer: str = "dp_adafactor"
  """"dp_adam" or "dp_adafactor"."""
  learning_rate: float = 1e-3
  """Peak; warm-up over a tenth of the steps, then linear decay."""
  temperature: float = 0.05
  """Divides the cosines."""
  settings: loop.Settings = dataclasses.field(
    default_factory=loop.Settings, metadata={"speed_only": True}
  )
  """Saving and reporting."""

  def __post_init__(self):
    config_types.positive(
      self, "temperature", "learning_rate", "clip_norm", "delta"
    )
    config_types.at_least(self, 1, "batch_size", "steps")
    if self.optimizer not in dp_step.OPTIMIZERS:
      raise ValueError(
        "train_retriever.DirectConfig.optimizer must be one of"
        f" {', '.join(dp_step.OPTIMIZERS)}, got optimizer={self.optimizer!r}"
      )


def run(
  config: Config,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  synthetic: results.SyntheticQueries | None,
  name: str,
) -> results.Checkpoint:
  """Trains on synthetic queries, or on the real ones without privacy.

  Args:
    config: the recipe.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: documents and private train queries.
    start_from: a public checkpoint.
    synthetic: the queries to train on; None: the real ones.
    name: the row of the table.

  Returns:
    The encoder; under `private/` if the queries are.
  """
  start = time.monotonic()
  stage = f"train_retriever/{name}"
  private = synthetic is None or inputs.is_private(synthetic.directory)
  directory = (space.private if private else space.public)(stage)
  records = _records(space, prepared, synthetic)
  params, model_config = inputs.load_public(start_from, prepared)
  metrics_path = directory / f"metrics_{digest}.jsonl"
  params = pairs.train(
    config,
    dual_encoder.encoder_params(params),
    model_config,
    records,
    directory=private_training.state_directory(space, stage, digest),
    metrics_path=metrics_path,
    description=f"train_retriever {name}",
  )
  t5_checkpoints.save(directory, params, model_config)
  result = results.Checkpoint(
    directory=space.relative(directory),
    kind="retriever",
    name=name,
    statement=_inherited(synthetic),
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
    seconds=time.monotonic() - start,
  )
  artifacts.save(directory, result, digest)
  private_training.remove_state(space, stage, digest)
  return result


def run_direct(
  config: DirectConfig,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  epsilon: float,
  name: str,
) -> results.Checkpoint:
  """Trains on the real queries with the whole batch's gradient clipped.

  Formal guarantee:
    Unit: one query with its document; neighbours: add or remove one. The
    clipped gradient of a Poisson sample moves by at most 2C, whatever the
    loss; noise is scaled to that, and the divisor is the public constant 1.

  Args:
    config: delta, optimizer, length of training.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: documents and private train queries.
    start_from: a public checkpoint.
    epsilon: the target, finite.
    name: the row of the table.

  Returns:
    The encoder with its own statement.
  """
  start = time.monotonic()
  stage = f"train_retriever/{name}"
  params, model_config = inputs.load_public(start_from, prepared)
  metrics_path = space.private(stage, f"metrics_{digest}.jsonl")
  grad_fn = optim.batch_clipped_grad(
    functools.partial(
      _masked_loss, model_config=model_config, temperature=config.temperature
    ),
    l2_clip_norm=config.clip_norm,
  )
  params, statement = private_training.train(
    private_training.Settings(
      epsilon=epsilon,
      delta=config.delta,
      batch_size=config.batch_size,
      multiple_of=8,
      steps=config.steps,
      optimizer=config.optimizer,
      learning_rate=config.learning_rate,
      mechanism=_MECHANISM,
      denominator=1.0,
    ),
    space,
    stage,
    digest,
    grad_fn=grad_fn,
    params=dual_encoder.encoder_params(params),
    records=_records(space, prepared, None),
    prepared=prepared,
    metrics_path=metrics_path,
    loop_settings=config.settings,
  )
  directory = space.public(stage)
  t5_checkpoints.save(directory, params, model_config)
  result = results.Checkpoint(
    directory=space.relative(directory),
    kind="retriever",
    name=name,
    statement=statement,
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
    seconds=time.monotonic() - start,
  )
  artifacts.save(directory, result, digest)
  private_training.remove_state(space, stage, digest)
  return result


def _records(space, prepared, synthetic) -> dict[str, np.ndarray]:
  """Returns tokens of queries and their documents, and the documents' rows."""
  if synthetic is not None:
    return inputs.pairs(space, prepared, synthetic)
  path = space.root / prepared.private_directory / "train.npz"
  return inputs.with_documents(
    space, prepared, inputs.arrays(space, prepared, path)
  )


def _inherited(synthetic: results.SyntheticQueries | None):
  if synthetic is None:
    return statement_lib.non_private(
      "Trained on the private queries without privacy."
    )
  return statement_lib.inherit(
    synthetic.statement,
    "A retriever was trained on the synthetic queries: post-processing.",
  )


def _masked_loss(params, batch, is_real, *, model_config, temperature):
  """Returns the mean loss over the real pairs; padding is no negative."""
  encode = functools.partial(dual_encoder.encode, params, model_config)
  similarity = encode(batch["queries"]) @ encode(batch["documents"]).T
  losses = contrastive.softmax(
    similarity,
    temperature=temperature,
    is_padding_example=~is_real,
    is_padding_document=~is_real,
  )
  # The realised count is part of the clipped gradient, which is bounded.
  return jnp.sum(losses * is_real) / jnp.maximum(jnp.sum(is_real), 1)
