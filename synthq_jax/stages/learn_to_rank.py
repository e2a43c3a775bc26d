"""Learns with DP the weights of BM25's scores, the length and a retriever's
score.

A sum of ten scores (`retrieval.ranking`) ranks the results of BM25 and of a
retriever. The private queries teach its weights, for each retriever its own.
Public queries could not: they copy their documents' words, and their weights
rank below BM25. Ten numbers are so few that a small epsilon is enough. A
retriever that was trained on the real queries without privacy has seen the
answers. Its weights are learned, without noise, on queries that were left out
of its training.

Formal guarantee:
  That of `private_training.train`. Unit: one train query with its judgements,
  or the queries of one user, at most K. Relation: add or remove one. Each
  query's gradient is clipped. Assumed: its features are a function of that
  query, of public documents and of the retriever alone, to the last bit. The
  row joins this claim and its retriever's. If the retriever has none, the row
  has none.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import optim, typing
from synthq_jax.losses import listwise
from synthq_jax.privacy import joint
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import ranking
from synthq_jax.runtime import (
  config_types,
  private_training,
  results,
  rows,
  runner,
  stage,
  system_results,
)
from synthq_jax.stages import _ranking, _search
from synthq_jax.training import dp_step

__all__ = ["STAGE", "Config", "Inputs", "loss_fn", "run"]

_NOTE = (
  "The weights of BM25's scores and of the retriever's were learned on the private"
  " queries {}."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_ranking.Config):
  """Settings of learning the weights; every value is public."""

  epsilon: float = 0.5
  """Epsilon of the weights, besides the epsilon of the row's retriever."""
  clip_norm: float = 0.5
  steps: int = 60
  learning_rate: float = 0.5
  microbatch_size: int | None = 4096
  held_out: float = 0.1
  """Share of the documents, in (0, 1), whose real queries teach the weights of
  the retriever that is trained on real queries without privacy. That retriever
  does not train on them."""
  start: float = 8.0
  """Initial weight of BM25; the others start at 0."""
  depth: int = 100
  """Documents that BM25 and the retriever each find for a query."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "epsilon", "start")
    config_types.within(self, "(0, 1)", "held_out")
    config_types.at_least(self, 1, "depth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(_ranking.Inputs):
  """Data that weights are learned on."""

  left_out: float
  """Share of documents whose queries did not train the retriever, and alone
  teach the weights; 0: all queries do."""


def plan_training(
  plan: rows.Plan, row: rows.Row
) -> private_training.Planned | None:
  """Plans the learning of weights, with noise if the retriever is private."""
  if row.is_without_privacy:
    return None
  config = plan.config.learn_to_rank
  return private_training.Planned(config=config, epsilon=config.epsilon)


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the learning of the weights of one retriever."""
  config = run.config
  settings = private_training.fill_batch_size(
    config.learn_to_rank, run.prepared
  )
  retriever = run.retrievers[row.retriever]
  vectors = run.get_vectors(row.retriever)
  left_out = run.plan.left_out(row)
  return stage.Job(
    row=row,
    depends=(
      settings,
      config.evaluate.drop_identical,
      *run.private_data(row),
      left_out,
      retriever.digest,
      vectors.digest,
    ),
    settings=settings,
    inputs=Inputs(
      prepared=run.prepared,
      retriever=retriever.value,
      vectors=vectors.value,
      left_out=left_out,
      drop_identical=config.evaluate.drop_identical,
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses settings that the accountant would refuse later."""
  for row in run.plan.retrievers:
    is_ranked = row.of_system(rows.RANKED) in run.plan.ranked
    if rows.begins_with(row, run.config.rows.ltr) and not is_ranked:
      run.say(
        f"[learn_to_rank/{row}] its claim is about another unit: left out"
      )
  if run.plan.ranked:
    run.config.learn_to_rank.check(run.prepared)


def run(task: stage.Task[Config, Inputs]) -> system_results.Ranking:
  """Learns the weights of one retriever.

  Args:
    task: with the working directory's secret.

  Returns:
    The weights; under `private/` if the retriever is, or the row is only
    compared.
  """
  config, retriever = task.settings, task.inputs.retriever
  has_claim = math.isfinite(retriever.statement.epsilon)
  judged = _ranking.read_train(
    task.folders,
    task.inputs.prepared,
    drop_identical=task.inputs.drop_identical,
    held_out=task.inputs.left_out,
    reads_held_out=True,
  )
  number = len(judged.qrels)
  weights, claim = ranking.start(config.start), retriever.statement
  if number:  # there may be no left-out query
    weights, learned = _learn(task, judged, has_claim)
    if has_claim:
      claim = joint.claim([claim, learned])
      assert claim is not None  # of one unit
  private = results.is_private_path(retriever.directory)
  note = _NOTE.format("with DP" if has_claim else "without noise")
  return system_results.Ranking(
    directory=task.folders.relative(task.folder(private=private)),
    row=task.get_row(),
    statement=statement_lib.inherit(claim, note),
    retriever_fingerprint=system_results.read_fingerprint(
      task.folders.root, retriever
    ),
    features=ranking.FEATURES,
    weights=tuple(np.asarray(weights).astype(float).tolist()),
    depth=config.depth,
    num_queries=number,
  )


def _learn(
  task: stage.Task[Config, Inputs], judged: _search.Judged, has_claim: bool
) -> tuple[np.ndarray, statement_lib.PrivacyStatement]:
  """Returns the learned weights, and their statement."""
  config, number = task.settings, len(judged.qrels)
  if task.inputs.left_out:
    size = min(config.batch_size, number)
    config = dataclasses.replace(config, batch_size=size)
    task = dataclasses.replace(task, settings=config)

  make = functools.partial(_ranking.make_records, task, judged, config.depth)
  clipped = optim.clipped_grad(
    loss_fn,
    l2_clip_norm=config.clip_norm,
    microbatch_size=config.microbatch_size,
  )
  trained, fields = private_training.train(
    task,
    _ranking.make_settings(
      config,
      task.inputs.prepared,
      epsilon=config.epsilon if has_claim else math.inf,
      mechanism="ranking",
    ),
    dp_step.Training(
      grad_fn=clipped,
      params={"weights": jnp.asarray(ranking.start(config.start))},
      records=dp_step.Drawn(number, make),
    ),
  )
  return trained["weights"], fields["statement"]


def loss_fn(params: typing.Params, batch: typing.Batch) -> jax.Array:
  """Returns each query's cross-entropy over its candidates, [batch].

  Args:
    params: "weights", [feature].
    batch: "values" [batch, candidate, feature], and "relevant" and "candidate",
      bool [batch, candidate].
  """
  scores = jnp.einsum("qcf,f->qc", batch["values"], params["weights"])
  return listwise.cross_entropy(scores, batch["relevant"], batch["candidate"])


STAGE = stage.Stage(
  name="learn_to_rank",
  result=system_results.Ranking,
  config=Config,
  check=check,
  plan=lambda plan: {str(row.retriever): row for row in plan.ranked},
  job=make_job,
  training=plan_training,
  run=run,
  needs=("learn_map", "learn_adapter"),
  needs_secret=True,
)
