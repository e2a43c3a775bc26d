"""Trains a dual encoder on pairs, real or synthetic, without noise.

Every row uses the same recipe: a shared encoder with mean pooling (a T5's, or
static vectors), cosine over a temperature and in-batch softmax; only the pairs
differ. Training on the real pairs with DP is `direct_dp`.
"""

import dataclasses

import jax

from synthq_jax import field_kinds
from synthq_jax.models import encoders
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  model_files,
  private_training,
  results,
  rows,
  runner,
  stage,
  training_pairs,
)
from synthq_jax.training import loop, pairs
from synthq_jax.training import mesh as mesh_lib

__all__ = ["STAGE", "Config", "Inputs", "check_batch", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(pairs.Recipe):
  """The recipe shared by all rows that train without noise."""

  microbatch_size: int | None = field_kinds.speed_only(None)
  """Texts encoded at a time, so that large batches fit into memory, at the cost
  of one more forward pass; divides `batch_size`. None: all."""
  mesh: mesh_lib.Shape = field_kinds.speed_only(make=mesh_lib.Shape)
  """Division of the work among all devices of all processes."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "temperature", "learning_rate")
    config_types.at_least(self, 1, "batch_size", "steps", "microbatch_size")
    size = self.microbatch_size or 1
    if self.batch_size % size:
      raise ValueError(
        "train_retriever.Config.microbatch_size must divide"
        f" batch_size={self.batch_size}, got {size}"
      )
    config_types.at_least(self, 0, "warmup_steps", "seed")
    if self.steps <= self.warmup_steps:
      raise ValueError(
        "train_retriever.Config.steps must be more than warmup_steps="
        f"{self.warmup_steps}, got {self.steps}: set more RETRIEVER_STEPS or a"
        " shorter warm-up"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Data and start of a retriever's training."""

  documents: results.PublicDocuments | results.PreparedData
  """The public collection; for the real queries alone the private data."""
  encoder: encoder_start.EncoderStart
  synthetic: results.SyntheticQueries | None = None
  """Queries to train on; None: the real ones."""
  held_out: float = 0.0  # share of documents whose queries are left out


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the training of one retriever."""
  if row == rows.UNTRAINED:
    return stage.Job(
      row=row,
      depends=run.encoder_data,
      inputs=Inputs(documents=run.documents, encoder=run.encoder),
    )
  settings, held_out = run.config.train_retriever, run.plan.left_out(row)
  synthetic = None if row == rows.ORIGINAL else run.queries[row]
  source = synthetic.digest if synthetic else "original"
  return stage.Job(
    row=row,
    depends=(settings, held_out, *run.encoder_data, source),
    settings=settings,
    inputs=Inputs(
      documents=run.documents if synthetic else run.prepared,
      encoder=run.encoder,
      synthetic=synthetic.value if synthetic else None,
      held_out=held_out,
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses another vocabulary, and a batch larger than the data can be."""
  run.check_encoder()
  prepared, number = run.prepared, run.config.generate.num_documents
  is_cut = prepared.num_passages > prepared.num_documents  # more are written
  check_batch(
    run.plan,
    prepared.num_queries["train"],
    None if is_cut else number or prepared.num_asked or prepared.num_documents,
  )


def check_batch(
  plan: rows.Plan, queries: int | None, documents: int | None
) -> None:
  """Refuses a batch larger than the data can be.

  Args:
    plan: the rows of the run, with its settings.
    queries: number of train queries, or more; None: unknown.
    documents: number of documents that queries are written for, or more; None:
      unknown.
  """
  config, most = plan.config, {}
  if rows.ORIGINAL in plan.trained and queries is not None:
    most["real queries"] = round((1 - plan.left_out(rows.ORIGINAL)) * queries)
  if set(plan.written) & set(plan.trained) and documents is not None:
    each = config.generate.queries_per_document
    most["synthetic queries"] = documents * each
  for name, number in most.items():
    if config.train_retriever.batch_size > number:
      raise ValueError(
        f"train_retriever.Config.batch_size must be at most {number:,}, as there"
        f" are no more {name}, got {config.train_retriever.batch_size:,}: set a"
        " smaller RETRIEVER_BATCH_SIZE"
      )


def run(task: stage.Task[Config | None, Inputs]) -> results.Checkpoint:
  """Trains on synthetic queries, or on the real ones without privacy.

  Formal guarantee:
    Post-processing: a task with synthetic queries holds the public documents
    and these queries, no PreparedData.

  Args:
    task: task; one without settings trains nothing.

  Returns:
    The encoder; under `private/` if the queries are.
  """
  config, space = task.settings, task.folders
  documents = task.inputs.documents
  encoder = task.inputs.encoder
  params, model_config = encoder.load_public(documents)
  params = encoders.of(model_config).select(params)
  if config is None:
    return model_files.save_checkpoint(
      task,
      task.folder(private=False),
      params,
      model_config,
      save=encoder.save,
      kind="retriever",
      statement=documents.statement(),
      steps=0,
      batch_size=0,
      num_parameters=0,
      metrics="",
    )
  synthetic = task.inputs.synthetic
  directory = task.folder(private=training_pairs.are_private(synthetic))
  records = training_pairs.read(
    space, documents, synthetic, task.inputs.held_out, encoder.tokens()
  )
  metrics_path = directory / f"metrics_{task.digest}.jsonl"
  params = pairs.train(
    config,
    params,
    model_config,
    records,
    loop.Files(
      directory=private_training.state_directory(
        space, task.result_path, task.digest
      ),
      metrics_path=metrics_path,
      description=f"train_retriever {task.get_row()}",
    ),
    mesh=mesh_lib.of_all(config.mesh),
    microbatch_size=config.microbatch_size,
  )
  return model_files.save_checkpoint(
    task,
    directory,
    params,
    model_config,
    save=encoder.save,
    kind="retriever",
    statement=training_pairs.inherit(
      synthetic,
      real="Trained on the private queries without privacy.",
      synthetic="A retriever was trained on the synthetic queries: post-processing.",
    ),
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
  )


STAGE = stage.Stage(
  name="train_retriever",
  result=results.Checkpoint,
  config=Config,
  check=check,
  plan=lambda plan: {str(row): row for row in plan.trained},
  job=make_job,
  run=run,
  needs=("filter_queries", "static_encoder"),
  starts_from="encoder",
  together=True,
)
