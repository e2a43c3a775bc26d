"""Trains a dual encoder on pairs, real or synthetic, without noise.

Every row uses the same recipe, a shared encoder with mean pooling (a T5's, or
static vectors), cosine over a temperature and in-batch softmax; only the pairs
differ. Training on the real pairs with DP is `direct_dp`.
"""

import dataclasses

import jax

from synthq_jax import artifacts
from synthq_jax.models import encoders
from synthq_jax.pipeline import config_types, inputs, private_training, results
from synthq_jax.stages import _mining, _search, stage
from synthq_jax.training import loop, pairs
from synthq_jax.training import mesh as mesh_lib

__all__ = ["STAGE", "Config", "run"]

_MINERS = ("bm25", "itself")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(pairs.Recipe):
  """The recipe shared by all rows that train without noise."""

  miners: tuple[str, ...] = ()
  """What finds hard negatives, "bm25" or "itself", the retriever as it is by
  then; the training has a part of equal length for each. Empty: none."""
  hard_negatives: int = 1
  """Documents that are mined for each query."""
  mining_depth: int = 100
  """Documents that a miner looks at for each query."""
  mining_skip: int = 0
  """The best so many are passed over: they may answer the query, too."""
  mining_below: float = 0.95
  """A negative's score is below this share of that of the query's own document,
  in (0, 1]; a query whose own is not found gets negatives at random."""
  microbatch_size: int | None = artifacts.speed_only(None)
  """Texts encoded at a time, so that large batches fit into memory, for one
  forward pass more; divides `batch_size`. None: all."""
  mesh: mesh_lib.Shape = artifacts.speed_only(make=mesh_lib.Shape)
  """How all devices of all processes share the work."""

  def __post_init__(self):
    config_types.positive(self, "temperature", "learning_rate")
    config_types.at_least(
      self, 1, "batch_size", "steps", "hard_negatives", "mining_depth",
      "microbatch_size",
    )  # fmt: skip
    config_types.within(self, "(0, 1]", "mining_below")
    if self.miners:
      config_types.some_of(self, "miners", _MINERS)
    size = self.microbatch_size or 1
    if self.batch_size % size:
      raise ValueError(
        "train_retriever.Config.microbatch_size must divide"
        f" batch_size={self.batch_size}, got {size}"
      )
    config_types.at_least(self, 0, "warmup_steps", "seed", "mining_skip")
    parts = max(1, len(self.miners))
    if self.steps // parts <= self.warmup_steps:
      raise ValueError(
        "train_retriever.Config.steps must be more than warmup_steps="
        f"{self.warmup_steps} in each of {parts} parts, got {self.steps}: set"
        " more RETRIEVER_STEPS or a shorter warm-up"
      )


def jobs(run):
  """Yields a retriever for each set of queries, and the untrained one."""
  config = run.config
  if config.rows.untrained:
    yield stage.Job(
      name="untrained",
      depends=run.encoder_data,
      inputs={"documents": run.documents},
    )
  for name, (synthetic, source) in run.pair_sources.items():
    settings = run.seeded(config.train_retriever, name)
    yield stage.Job(
      name=name,
      depends=(
        settings,
        run.left_out(name),
        *run.encoder_data,
        source,
      ),
      settings=settings,
      inputs={
        "documents": run.documents if synthetic else run.prepared,
        "synthetic": synthetic,
        "held_out": run.left_out(name),
      },
    )


def check(run) -> None:
  """Refuses a batch that is larger than what there can be to train on."""
  config, prepared = run.config, run.prepared
  most = {}
  if config.rows.original and not run.for_audit:
    share = 1 - run.left_out("original")
    most["real queries"] = round(share * prepared.num_queries["train"])
  is_written = config.rows.synthetic or config.rows.public_only
  if (
    is_written and prepared.num_passages <= prepared.num_documents
  ):  # else more
    there = prepared.num_asked or prepared.num_documents
    written = config.generate.num_documents or there
    most["synthetic queries"] = written * config.generate.queries_per_document
  for name, number in most.items():
    if config.train_retriever.batch_size > number:
      raise ValueError(
        f"train_retriever.Config.batch_size must be at most {number:,}, the"
        f" number of {name}, got {config.train_retriever.batch_size:,}: set a"
        " smaller RETRIEVER_BATCH_SIZE"
      )


def run(task: stage.Task) -> results.Checkpoint:
  """Trains on synthetic queries, or on the real ones without privacy.

  Formal guarantee:
    Post-processing, mining included: a task with synthetic
    queries holds the public documents and these queries, no PreparedData.

  Args:
    task: without settings nothing is trained; its inputs are "documents", the
      public collection, or the prepared data with the real queries where
      "synthetic", those to train on, are None; "encoder", the folder of a public
      checkpoint; and "held_out", the share of documents whose queries are left out.

  Returns:
    The encoder; under `private/` if the queries are.
  """
  config, space = task.settings, task.folders
  documents = task.inputs["documents"]
  params, model_config = inputs.load_public(task.inputs["encoder"], documents)
  params = encoders.of(model_config).select(params)
  if config is None:
    return inputs.save_checkpoint(
      task,
      task.folder(private=False),
      params,
      model_config,
      kind="retriever",
      statement=documents.statement(),
      steps=0,
      batch_size=0,
      num_parameters=0,
      metrics="",
    )
  synthetic = task.inputs["synthetic"]
  private = synthetic is None or results.is_private_path(synthetic.directory)
  directory = task.folder(private=private)
  records = inputs.training_pairs(
    space, documents, synthetic, task.inputs["held_out"]
  )
  metrics_path = directory / f"metrics_{task.digest}.jsonl"
  params = _train(task, params, model_config, records, metrics_path)
  return inputs.save_checkpoint(
    task,
    directory,
    params,
    model_config,
    kind="retriever",
    statement=results.inherited(
      synthetic,
      real="Trained on the private queries without privacy.",
      synthetic="A retriever was trained on the synthetic queries: post-processing.",
    ),
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(metrics_path),
  )


def _train(task, params, model_config, records, metrics_path):
  """Trains, in a part for each miner, which starts from the one before."""
  config, folders = task.settings, task.folders
  state = private_training.state_directory(folders, task.place, task.digest)
  collection = inputs.document_tokens(folders, task.inputs["documents"])
  parts = config.miners or ("",)
  for part, miner in enumerate(parts):
    place, pairs_, metrics = state / f"part_{part}", records, metrics_path
    if part < len(parts) - 1:  # the last one's are the result's
      metrics = metrics_path.with_suffix(f".part_{part}.jsonl")
    if miner:
      negatives = _mined(task, params, model_config, records, miner, place)
      pairs_ = _mining.with_negatives(records, collection, negatives)
    first, stop = (config.steps * i // len(parts) for i in (part, part + 1))
    params = pairs.train(
      dataclasses.replace(config, steps=stop - first, miners=()),
      params,
      model_config,
      pairs_,
      loop.Files(
        directory=place / "training" if miner else state,
        metrics_path=metrics,
        description=f"train_retriever {task.name}",
      ),
      mesh=mesh_lib.of_all(config.mesh),
      microbatch_size=config.microbatch_size,
      first=first,
    )
  return params


def _mined(task, params, model_config, records, miner: str, place):
  """Returns the hard negatives of every pair."""
  config, documents = task.settings, task.inputs["documents"]
  judged = _mining.judged(task.folders, documents, records)
  depth = config.mining_depth
  if miner == "bm25":
    run = _search.lexical(judged, depth)
  else:
    run = _mining.searched_by(
      params, model_config, judged, depth, place / "vectors"
    )
  return _mining.mined(
    run,
    judged.passages,
    records,
    per_query=config.hard_negatives,
    skip=config.mining_skip,
    below=config.mining_below,
    seed=config.seed,
  )


STAGE = stage.of(
  __name__,
  needs=("filter_queries", "static_encoder"),
  reads=("encoder",),
  together=True,
)
