"""Trains a dual encoder on pairs, real or synthetic, without noise.

Every row uses the same recipe, a shared T5 encoder with mean pooling, cosine
over a temperature and in-batch softmax; only the pairs differ. Training on the
real pairs with DP is `direct_dp`.
"""

import dataclasses

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import dual_encoder
from synthq_jax.pipeline import (
  config_types,
  inputs,
  private_training,
  results,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.stages import stage
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import pairs

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(pairs.Recipe):
  """The recipe shared by all rows that train without noise."""

  mesh: mesh_lib.Shape = artifacts.speed_only(make=mesh_lib.Shape)
  """How all devices of all processes share the work."""

  def __post_init__(self):
    config_types.positive(self, "temperature", "learning_rate")
    config_types.at_least(self, 1, "batch_size", "steps")
    config_types.at_least(self, 0, "warmup_steps", "seed")


def jobs(run):
  """Yields a retriever for each set of queries, and the untrained one."""
  config = run.config
  if config.rows.untrained:
    yield stage.Job(name="untrained", depends=run.encoder_data)
  sources = {
    name if name.startswith("public_only") else f"synthetic_{name}": made
    for name, made in run.queries.items()
  }
  if run.for_audit:  # which reads those of private generators alone
    sources = {k: v for k, v in sources.items() if k.startswith("synthetic")}
  elif config.rows.original:
    real = {f"original{seed}": (None, "original") for seed in run.seeds}
    sources |= real
  held_out = config.fuse.held_out if config.rows.fused else 0.0
  for name, (synthetic, source) in sources.items():
    settings = run.seeded(config.train_retriever, name)
    yield stage.Job(
      name=name,
      depends=(settings, held_out, *run.encoder_data, source),
      settings=settings,
      inputs={"synthetic": synthetic, "held_out": held_out},
    )


def run(task: stage.Task) -> results.Checkpoint:
  """Trains on synthetic queries, or on the real ones without privacy.

  Args:
    task: without settings nothing is trained; its inputs are "prepared", the
      documents and private train queries; "encoder", the folder of a public
      checkpoint; "synthetic", the queries to train on, or None for the real
      ones; and "held_out", the share of documents whose queries are left out.

  Returns:
    The encoder; under `private/` if the queries are.
  """
  config, space = task.settings, task.folders
  prepared = task.inputs["prepared"]
  params, model_config = inputs.load_public(task.inputs["encoder"], prepared)
  params = dual_encoder.encoder_params(params)
  if config is None:
    return inputs.save_checkpoint(
      task,
      task.folder(private=False),
      params,
      model_config,
      kind="retriever",
      statement=statement_lib.none(),
      steps=0,
      batch_size=0,
      num_parameters=0,
      metrics="",
    )
  synthetic = task.inputs["synthetic"]
  private = synthetic is None or results.is_private_path(synthetic.directory)
  directory = task.folder(private=private)
  if synthetic is None:
    records = inputs.real_pairs(space, prepared)
  else:
    records = inputs.pairs(space, prepared, synthetic)
  if task.inputs["held_out"]:
    left_out = inputs.held_out(prepared.num_documents, task.inputs["held_out"])
    trained = np.flatnonzero(~left_out[records["rows"]])
    records = {name: values[trained] for name, values in records.items()}
  metrics_path = directory / f"metrics_{task.digest}.jsonl"
  params = pairs.train(
    config,
    params,
    model_config,
    records,
    directory=private_training.state_directory(space, task.place, task.digest),
    metrics_path=metrics_path,
    description=f"train_retriever {task.name}",
    mesh=mesh_lib.of_all(config.mesh),
  )
  return inputs.save_checkpoint(
    task,
    directory,
    params,
    model_config,
    kind="retriever",
    statement=_inherited(synthetic),
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
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


STAGE = stage.of(
  __name__,
  result=results.Checkpoint,
  needs=("filter_queries", "direct_dp"),
  reads=("prepared", "encoder"),
  together=True,
)
