"""Learns a map of a public encoder's query vectors from pairs, without noise.

The counterpart of `learn_adapter` for queries that the map may follow exactly:
synthetic ones, whose claim it inherits, or for comparison real ones without
privacy. The encoder stays as it is, and documents keep their vectors. Each query
is compared with its document, with the documents nearest to it, and with a pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import field_kinds, typing
from synthq_jax.models import vector_map
from synthq_jax.retrieval import index
from synthq_jax.runtime import (
  config_types,
  prepared_files,
  private_training,
  results,
  rows,
  runner,
  stage,
  system_results,
  training_pairs,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.stages import _ranking, _search
from synthq_jax.storage import array_files
from synthq_jax.training import loop, recipe

__all__ = ["STAGE", "Config", "Inputs", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(recipe.Recipe):
  """Settings of learning a map without noise."""

  steps: int = 40
  batch_size: int = 1024
  """Queries of a step; all, where there are fewer."""
  learning_rate: float = 2e-3
  warmup_steps: int = 4
  share: float = 0.5
  """Share of the learned map that is kept, in (0, 1]. Where queries mislead, half
  of a map costs little (WiSE-FT, Wortsman et al. 2022, for weights)."""
  candidates: int = 32
  """Documents that a query is compared with, its own among them."""
  most_relevant: int = 4
  """Maximum relevant documents of a query that count."""
  pool: int = 512
  """Documents, drawn anew for each step, that all queries are compared with; 0:
  none."""
  temperature: float = 0.05
  """Divisor of the scores."""
  encode_batch_size: int = field_kinds.speed_only(256)
  """Queries encoded at once."""

  def __post_init__(self):
    config_types.positive(self, "temperature", "learning_rate", "share")
    config_types.at_least(self, 1, "batch_size", "steps", "most_relevant")
    config_types.at_least(self, 1, "encode_batch_size")
    config_types.at_least(self, 0, "pool", "seed", "warmup_steps")
    if self.share > 1:
      raise ValueError(
        f"learn_map.Config.share must be at most 1, got {self.share}"
      )
    _ranking.check_candidates(self)
    if self.steps <= self.warmup_steps:
      raise ValueError(
        "learn_map.Config.steps must be more than warmup_steps="
        f"{self.warmup_steps}, got {self.steps}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Queries that the map is learned on, and its encoder."""

  documents: results.PublicDocuments | results.PreparedData
  """The public collection; for the real queries alone the private data."""
  retriever: results.Checkpoint
  """The public encoder."""
  vectors: system_results.Vectors
  """The encoder's vectors of the documents."""
  synthetic: results.SyntheticQueries | None
  """Queries to learn from; None: the real ones."""
  held_out: float  # share of documents whose queries are left out
  drop_identical: bool  # as `evaluate.Config` has it


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the learning of one map."""
  settings, held_out = run.config.learn_map, run.plan.left_out(row)
  synthetic = None if row == rows.ORIGINAL else run.queries[row]
  vectors = run.get_vectors(rows.UNTRAINED)
  source = synthetic.digest if synthetic else "original"
  return stage.Job(
    row=row,
    depends=(
      settings,
      held_out,
      run.config.evaluate.drop_identical,
      *run.encoder_data,
      vectors.digest,
      source,
    ),
    settings=settings,
    inputs=Inputs(
      documents=run.documents if synthetic else run.prepared,
      retriever=run.retrievers[rows.UNTRAINED].value,
      vectors=vectors.value,
      synthetic=synthetic.value if synthetic else None,
      held_out=held_out,
      drop_identical=run.config.evaluate.drop_identical,
    ),
  )


def run(task: stage.Task[Config, Inputs]) -> system_results.Adapter:
  """Learns a map of queries.

  Formal guarantee:
    Post-processing: a task with synthetic queries holds the public documents,
    the public encoder and these queries, no PreparedData.

  Returns:
    The map as an adapter; under `private/` if its queries are.
  """
  config, space, task_inputs = task.settings, task.folders, task.inputs
  synthetic = task_inputs.synthetic
  directory = task.folder(private=training_pairs.are_private(synthetic))
  metrics_path = directory / f"metrics_{task.digest}.jsonl"
  records, vectors = _read_records(task)
  params = _learn(
    config,
    records,
    vectors,
    loop.Files(
      directory=private_training.state_directory(
        space, task.result_path, task.digest
      ),
      metrics_path=metrics_path,
      description=f"learn_map {task.get_row()}",
    ),
  )
  scaled = jax.tree.map(lambda leaf: config.share * leaf, params)
  array_files.save(
    directory / system_results.Adapter.FILE, vector_map.get_matrix(scaled)
  )
  return system_results.Adapter(
    directory=space.relative(directory),
    row=task.get_row(),
    kind="retriever",
    base=task_inputs.retriever,
    base_fingerprint=task_inputs.vectors.retriever,
    statement=training_pairs.inherit(
      synthetic,
      real="A map was learned on the private queries without privacy.",
      synthetic="A map was learned on the synthetic queries: post-processing.",
    ),
    steps=config.steps,
    batch_size=min(config.batch_size, len(records["queries"])),
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
  )


def _read_records(
  task: stage.Task[Config, Inputs],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Reads the fields of queries that the loss reads, and all document vectors."""
  config, folders, task_inputs = task.settings, task.folders, task.inputs
  judged = _read_judged(task)
  vectors = _search.open_vectors(
    judged, folders.root / task_inputs.vectors.vectors
  )
  query_vectors = _ranking.encode_queries(
    folders, task_inputs.retriever, judged, config.encode_batch_size
  )
  records = _ranking.make_map_records(
    judged,
    _search.zero_broken(query_vectors),
    index.exact(vectors),
    candidates=config.candidates,
    most_relevant=config.most_relevant,
  )
  return records, vectors


def _read_judged(task: stage.Task[Config, Inputs]) -> _search.Judged:
  """Reads the queries, each with all documents that are relevant to it.

  The T5 writes some texts for several documents: all of these are relevant.
  """
  folders, task_inputs = task.folders, task.inputs
  documents, synthetic = task_inputs.documents, task_inputs.synthetic
  if synthetic is None:
    assert isinstance(documents, results.PreparedData)
    return _ranking.read_train(
      folders,
      documents,
      drop_identical=task_inputs.drop_identical,
      held_out=task_inputs.held_out,
    )
  folder = folders.root / synthetic.directory
  arrays = prepared_files.arrays(folders, synthetic, folder / "tokens.npz")
  texts = queries_lib.texts(folder)
  passages = prepared_files.document_tokens(folders, documents)
  names = [str(passages.ids[row]) for row in arrays["documents"]]
  relevant: dict[str, dict[str, int]] = {}
  for text, name in zip(texts, names, strict=True):
    relevant.setdefault(text, {})[name] = 1
  return _search.Judged(
    split="synthetic",
    qrels={f"s{row}": relevant[text] for row, text in enumerate(texts)},
    queries=texts,
    query_tokens=arrays["tokens"],
    passages=passages,
    corpus=prepared_files.corpus(folders, documents),
  )


def _learn(
  config: Config,
  records: dict[str, np.ndarray],
  vectors: np.ndarray,
  files: loop.Files,
) -> typing.Params:
  """Learns the whole map with Adam; resumes from the newest saved state."""
  number = len(records["queries"])
  config = dataclasses.replace(
    config, batch_size=min(config.batch_size, number)
  )
  tx = config.optimizer()
  pool_size = min(config.pool, len(vectors))
  key = jax.random.key(config.seed)

  def mean_loss(params, batch, vectors, step):
    pool = None
    if pool_size:
      pool = jax.random.choice(
        jax.random.fold_in(key, step),
        len(vectors),
        (pool_size,),
        replace=False,
      )
    return jnp.mean(
      vector_map.get_losses(
        params,
        batch,
        vectors=vectors,
        pool=pool,
        temperature=config.temperature,
      )
    )

  @jax.jit
  def step_fn(state, batch, vectors, step):
    params, opt_state = state
    loss, grads = jax.value_and_grad(mean_loss)(params, batch, vectors, step)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

  params = vector_map.init(vectors.shape[1])
  public = jnp.asarray(vectors)
  params, _ = config.train(
    lambda state, batch, step: step_fn(state, batch, public, step),
    (params, tx.init(params)),
    lambda rows: {name: values[rows] for name, values in records.items()},
    number,
    files,
  )
  return params


STAGE = stage.Stage(
  name="learn_map",
  result=system_results.Adapter,
  config=Config,
  plan=lambda plan: {str(row): row for row in plan.mapped},
  job=make_job,
  run=run,
  needs=("filter_queries", "encode_documents"),
  folder="learn_adapter",
)
