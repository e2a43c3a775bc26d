"""Trains a dual encoder on pairs, real or synthetic, without noise.

Every row uses the same recipe, a shared T5 encoder with mean pooling, cosine
over a temperature and in-batch softmax; only the pairs differ. Training on the
real pairs with DP is `direct_dp`.
"""

import dataclasses
import pathlib
import time

import jax

from synthq_jax.models import dual_encoder
from synthq_jax.pipeline import (
  _checkpoints,
  config_types,
  inputs,
  private_training,
  results,
  workspace,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.training import loop, pairs
from synthq_jax.training import mesh as mesh_lib

__all__ = ["Config", "run", "run_untrained"]


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
  mesh: mesh_lib.Shape = dataclasses.field(
    default_factory=mesh_lib.Shape, metadata={"speed_only": True}
  )
  """How all devices of all processes share the work."""
  settings: loop.Settings = dataclasses.field(
    default_factory=loop.Settings, metadata={"speed_only": True}
  )
  """Saving and reporting."""

  def __post_init__(self):
    config_types.positive(self, "temperature", "learning_rate")
    config_types.at_least(self, 1, "batch_size", "steps")
    config_types.at_least(self, 0, "warmup_steps", "seed")


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
  private = synthetic is None or results.is_private_path(synthetic.directory)
  directory = (space.private if private else space.public)(stage)
  if synthetic is None:
    records = inputs.real_pairs(space, prepared)
  else:
    records = inputs.pairs(space, prepared, synthetic)
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
    mesh=mesh_lib.of_all(config.mesh),
  )
  return _checkpoints.save(
    space,
    stage,
    digest,
    directory,
    params,
    model_config,
    began=start,
    kind="retriever",
    name=name,
    statement=_inherited(synthetic),
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
  )


def run_untrained(
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  name: str,
) -> results.Checkpoint:
  """Saves the encoder of the public checkpoint as it is.

  Args:
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: whose vocabulary it must have room for.
    start_from: the public checkpoint.
    name: the row of the table.

  Returns:
    The encoder, which has read nothing private.
  """
  start = time.monotonic()
  params, model_config = inputs.load_public(start_from, prepared)
  stage = f"train_retriever/{name}"
  return _checkpoints.save(
    space,
    stage,
    digest,
    space.public(stage),
    dual_encoder.encoder_params(params),
    model_config,
    began=start,
    kind="retriever",
    name=name,
    statement=statement_lib.none(),
    steps=0,
    batch_size=0,
    num_parameters=0,
    metrics="",
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
