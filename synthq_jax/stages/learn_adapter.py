"""Learns with DP a linear map of a public encoder's vectors: an adapter.

The encoder stays as it is. Each private query is compared with its documents, the
nearest others and a pool of public documents. The map moves queries alone, so that
documents keep their vectors. It starts as the map that queries of the public T5
taught, if the run has one (`learn_map`), else as the identity.

Formal guarantee:
  That of `private_training.train`, for the map. Unit: one train query with its
  judgements, or the queries of one user, at most K. Relation: add or remove
  one. Each query's gradient is clipped. Assumed: its candidates and vectors are
  a function of that query, of public documents, of the public encoder and of the
  public map alone, to the last bit; the pool is drawn by public randomness.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from synthq_jax import optim, typing
from synthq_jax.models import vector_map
from synthq_jax.retrieval import index
from synthq_jax.runtime import (
  config_types,
  private_training,
  rows,
  runner,
  stage,
  system_results,
)
from synthq_jax.stages import _ranking, _search
from synthq_jax.storage import array_files
from synthq_jax.training import dp_step

__all__ = ["STAGE", "Config", "Inputs", "PooledGrad", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_ranking.Config):
  """Settings of learning the map; every value is public."""

  OPTIMIZERS = dp_step.OPTIMIZERS  # the map's parameters start at 0
  clip_norm: float = 0.5
  steps: int = 48
  optimizer: str = "dp_dual_averaging"
  """One of `OPTIMIZERS`; "dp_dual_averaging" denoises the map, whose noise has a
  known scale."""
  learning_rate: float = 16.0
  microbatch_size: int | None = 512
  candidates: int = 32
  """Documents that a query is compared with, its own among them."""
  most_relevant: int = 4
  """Maximum relevant documents of a query that count."""
  pool: int = 512
  """Public documents, drawn anew for each step, that all queries are compared
  with; 0: none."""
  temperature: float = 0.05
  """Divisor of the cosines."""
  seed: int = 0
  """Seed of the pool; public."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "temperature")
    config_types.at_least(self, 1, "most_relevant")
    config_types.at_least(self, 0, "pool", "seed")
    _ranking.check_candidates(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(_ranking.Inputs):
  """Data that the map is learned on."""

  epsilon: float  # the map's own; inf: without noise
  start: system_results.Adapter | None = None
  """Public map of the same encoder that training starts from; None: the
  identity."""


def plan_training(plan: rows.Plan, row: rows.Row) -> private_training.Planned:
  """Plans the training of one adapter."""
  assert row.epsilon is not None
  return private_training.Planned(
    config=plan.config.learn_adapter, epsilon=row.epsilon
  )


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the training of one adapter."""
  config, planned = run.config, plan_training(run.plan, row)
  settings = planned.get_settings(run.prepared)
  base = config.rows.adapter_base
  retriever, vectors = run.retrievers[base], run.get_vectors(base)
  start = run.get_results("learn_map").get(rows.PUBLIC_ONLY)
  return stage.Job(
    row=row,
    depends=(
      settings,
      planned.epsilon,
      config.evaluate.drop_identical,
      *run.private_data(row, run.encoder_data),
      vectors.digest,
      *([start.digest] if start else []),
    ),
    settings=settings,
    inputs=Inputs(
      prepared=run.prepared,
      retriever=retriever.value,
      vectors=vectors.value,
      drop_identical=config.evaluate.drop_identical,
      epsilon=planned.epsilon,
      start=start.value if start else None,
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses settings that the accountant would refuse later."""
  if run.plan.adapters:
    run.config.learn_adapter.check(run.prepared)


def run(task: stage.Task[Config, Inputs]) -> system_results.Adapter:
  """Learns a map of queries.

  Args:
    task: with the working directory's secret.

  Returns:
    The adapter; under `private/` if its epsilon is inf, or it is only compared.
  """
  task_inputs = task.inputs
  params, fields = _learn(task)
  directory = task.folder(private=math.isinf(task_inputs.epsilon))
  matrix, start = vector_map.get_matrix(params), task_inputs.start
  if start is not None:
    folder = task.folders.root / start.directory
    matrix = array_files.read(folder / start.FILE) @ matrix
  array_files.save(directory / system_results.Adapter.FILE, matrix)
  return system_results.Adapter(
    directory=task.folders.relative(directory),
    row=task.get_row(),
    kind="retriever",
    base=task_inputs.retriever,
    base_fingerprint=task_inputs.vectors.retriever,
    **fields,
  )


@dataclasses.dataclass(frozen=True)
class PooledGrad:
  """A clipped gradient whose batch has a pool that all its queries share.

  Formal guarantee: that of `optim.clipped_grad` for queries. The loss of a
  query reads its own fields, the pool and public vectors alone. The pool is
  public: `Training.extra_fn` draws it without looking at the records.

  Attributes:
    vectors: vectors of all documents, public.
    config: settings of the stage.
  """

  vectors: Any
  config: Config
  is_per_example = True

  def __call__(
    self, params: typing.Params, batch: typing.Batch, **options: Any
  ) -> tuple[typing.Params, Any]:
    """Returns the sum of clipped gradients, as `optim.ClippedGrad` does."""
    fields = dict(batch)
    return self._of(fields.pop("pool", None))(params, fields, **options)

  @property
  def l2_clip_norm(self) -> float:
    """L2 clip norm of a query's gradient."""
    return self.config.clip_norm

  def sensitivity(self, relation: Any) -> float:
    """Returns the distance by which one query moves the sum."""
    return self._of(None).sensitivity(relation)

  def loss_fn(self, params: typing.Params, batch: typing.Batch) -> jax.Array:
    """Returns the losses with a pool of the first documents."""
    size = min(self.config.pool, len(self.vectors))
    pool = np.arange(size, dtype=np.int32) if size else None
    return self._of(pool).loss_fn(params, batch)

  def _of(self, pool: Any) -> optim.ClippedGrad:
    config = self.config
    return optim.clipped_grad(
      functools.partial(
        vector_map.get_losses,
        vectors=self.vectors,
        pool=pool,
        temperature=config.temperature,
      ),
      l2_clip_norm=config.clip_norm,
      microbatch_size=config.microbatch_size,
    )


def _learn(task: stage.Task[Config, Inputs]) -> tuple[Any, dict[str, Any]]:
  """Trains the map; returns it, and fields of the result."""
  config, task_inputs = task.settings, task.inputs
  judged = _ranking.read_train(
    task.folders,
    task_inputs.prepared,
    drop_identical=task_inputs.drop_identical,
  )
  folder = task.folders.root / task_inputs.vectors.vectors
  vectors = _search.open_vectors(judged, folder)
  built = index.exact(vectors)
  size = min(config.pool, len(vectors))

  def draw(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([config.seed, 8, step])
    pool = generator.choice(len(vectors), size, replace=False)
    return {"pool": np.sort(pool).astype(np.int32)}

  def make(rows: np.ndarray) -> dict[str, np.ndarray]:
    chosen = _ranking.select(judged, rows)
    query_vectors = _ranking.encode_queries(
      task.folders,
      task_inputs.start or task_inputs.retriever,
      chosen,
      config.encode_batch_size,
    )
    query_vectors = _search.zero_broken(query_vectors)
    return _ranking.make_map_records(
      chosen,
      query_vectors,
      built,
      candidates=config.candidates,
      most_relevant=config.most_relevant,
    )

  return private_training.train(
    task,
    _ranking.make_settings(
      config,
      task_inputs.prepared,
      epsilon=task_inputs.epsilon,
      mechanism="adapter",
    ),
    dp_step.Training(
      grad_fn=functools.partial(PooledGrad, config=config),
      public=vectors,
      params=vector_map.init(vectors.shape[1]),
      records=dp_step.Drawn(len(judged.qrels), make),
      extra_fn=draw if size else None,
    ),
  )


STAGE = stage.Stage(
  name="learn_adapter",
  result=system_results.Adapter,
  config=Config,
  check=check,
  plan=lambda plan: {str(row): row for row in plan.adapters},
  job=make_job,
  training=plan_training,
  run=run,
  needs=("encode_documents", "learn_map"),
  needs_secret=True,
)
