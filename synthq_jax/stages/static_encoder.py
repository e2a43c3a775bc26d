"""Makes static vectors, from which retrievers start instead of a T5.

Each token of the vocabulary gets a random direction, whose length grows with
the token's rarity in the public documents. Then spans of documents learn to
find the rest of their passage. The result is a retriever that has seen no
query; `train_retriever` continues from its vectors.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float, Int

from synthq_jax.data import passages as passages_lib
from synthq_jax.leakage.rerankers import terms
from synthq_jax.models import static_vectors
from synthq_jax.runtime import (
  config_types,
  model_files,
  prepared_files,
  private_training,
  results,
  rows,
  runner,
  stage,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import loop, pairs

__all__ = ["STAGE", "Config", "Inputs", "draw_spans", "run"]

_SHORTEST, _LONGEST = 4, 10  # tokens of a span
_LEAST = 0.1  # weight of a token, those of rare ones being up to ln(documents)
_MOST = 200_000  # pairs in memory; longer trainings read them again
_STAYING_SHARE = 0.1  # share of spans that stay in their document as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(pairs.Recipe):
  """Settings of static vectors and their training."""

  dim: int = 0
  """Dimension of a vector; 0: retrievers start from the T5's encoder."""
  steps: int = 450
  """Optimizer steps on spans of documents; 0: none."""
  batch_size: int = 256
  learning_rate: float = 3e-3
  """Learning rate; it is large, since random vectors have far to go."""
  seed: int = 0
  """Seed of directions, spans and batches."""

  def __post_init__(self):
    super().__post_init__()
    config_types.at_least(self, 0, "dim", "seed", "steps", "warmup_steps")
    config_types.at_least(self, 1, "batch_size")
    config_types.positive(self, "learning_rate", "temperature")
    if 0 < self.steps <= self.warmup_steps:
      raise ValueError(
        "static_encoder.Config.steps must be 0, or more than warmup_steps="
        f"{self.warmup_steps}, got {self.steps}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Documents that vectors are made of."""

  documents: results.PublicDocuments


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns the making of the encoder."""
  config = run.config.static_encoder
  return stage.Job(
    row=rows.UNTRAINED,
    depends=(config, *run.data_alone),
    settings=config,
    inputs=Inputs(documents=run.documents),
  )


def run(task: stage.Task[Config, Inputs]) -> results.Checkpoint:
  """Draws the vectors, and trains them on the documents.

  Formal guarantee: reads the public documents and their vocabulary alone.

  Returns:
    A public encoder.
  """
  config, folders = task.settings, task.folders
  documents = task.inputs.documents
  weights = _weights(
    terms.inverse_document_frequencies(
      prepared_files.vocabulary(folders, documents),
      prepared_files.document_texts(prepared_files.corpus(folders, documents)),
    ),
    documents.num_documents,
  )
  shape = static_vectors.StaticConfig(
    vocab_size=len(weights),
    emb_dim=config.dim,
    token_ids=documents.token_ids,
  )
  params = static_vectors.init(jax.random.key(config.seed), shape, weights)
  directory = task.folder(private=False)
  metrics_path = directory / f"metrics_{task.digest}.jsonl"
  if config.steps:
    params = _train(task, params, shape, metrics_path)
  content = (folders.root / documents.vocabulary).read_bytes()
  artifacts.write_atomically(directory / model_files.VOCABULARY_NAME, content)
  return model_files.save_checkpoint(
    task,
    directory,
    params,
    shape,
    kind="retriever",
    statement=documents.statement(),
    steps=config.steps,
    batch_size=config.batch_size if config.steps else 0,
    num_parameters=len(weights) * config.dim if config.steps else 0,
    metrics=folders.relative(metrics_path) if config.steps else "",
  )


def _train(task: stage.Task[Config, Inputs], params, shape, metrics_path):
  """Trains the vectors on spans of the documents."""
  config, folders = task.settings, task.folders
  records = draw_spans(
    prepared_files.document_tokens(folders, task.inputs.documents),
    min(config.steps * config.batch_size, _MOST),
    config.seed,
  )
  if len(records["rows"]) < config.batch_size:
    raise ValueError(
      "static_encoder.Config.steps needs documents of"
      f" {2 * _SHORTEST} tokens or more, got {len(records['rows'])} spans for"
      f" batches of {config.batch_size}: set it to 0"
    )
  state = private_training.state_directory(
    folders, task.result_path, task.digest
  )
  files = loop.Files(
    directory=state, metrics_path=metrics_path, description=task.result_path
  )
  return pairs.train(config, params, shape, records, files)


def _weights(
  idf: Float[np.ndarray, " vocab"], num_documents: int
) -> Float[np.ndarray, " vocab"]:
  """Returns the initial lengths of the tokens' vectors.

  No length is 0: a text of such tokens alone would have no direction, and a
  gradient of a million. A token that no document holds gets the least length,
  since it could only turn a query away.
  """
  is_held = idf < np.log(num_documents + 1) - 0.1  # else ln((N + 1) / 1)
  return np.where(is_held, np.maximum(idf, _LEAST), _LEAST)


def draw_spans(
  collection: passages_lib.Passages, number: int, seed: int
) -> dict[str, Int[np.ndarray, "pair ..."]]:
  """Draws spans of passages, each with the passage that it was taken out of.

  In one of ten pairs the span stays in its passage as well, so that equal words
  still count. This is the inverse cloze task (Lee et al. 2019,
  arXiv:1906.00300, section 3.2), with spans instead of the paper's sentences.

  Args:
    collection: the documents.
    number: number of pairs.
    seed: seed of the draws.

  Returns:
    "queries" [pair, 10], "documents" [pair, length], with padding in place of
    the span, and "rows" [pair], positions of documents. There are fewer pairs
    if passages are shorter than two short spans.
  """
  generator = np.random.default_rng([seed, 9])
  drawn = generator.integers(len(collection.owners), size=number)
  documents = np.array(collection.tokens[drawn], np.int32)
  sizes = np.count_nonzero(documents, axis=1) - 1  # without EOS
  enough = sizes >= 2 * _SHORTEST
  drawn, documents, sizes = drawn[enough], documents[enough], sizes[enough]
  sizes = sizes[:, None]
  lengths = generator.integers(_SHORTEST, np.minimum(_LONGEST, sizes // 2) + 1)
  starts = generator.integers(0, sizes - lengths + 1)
  places = np.arange(_LONGEST)
  picked = np.take_along_axis(
    documents, np.minimum(starts + places, documents.shape[1] - 1), axis=1
  )
  columns = np.arange(documents.shape[1])
  inside = (columns >= starts) & (columns < starts + lengths)
  stays = generator.random((len(drawn), 1)) < _STAYING_SHARE
  return {
    "queries": np.where(places < lengths, picked, 0),
    "documents": np.where(inside & ~stays, 0, documents),
    "rows": collection.owners[drawn].astype(np.int32),
  }


STAGE = stage.Stage(
  name="static_encoder",
  result=results.Checkpoint,
  config=Config,
  plan=lambda plan: {"": None} if plan.config.static_encoder.dim else {},
  job=make_job,
  run=run,
  needs=("prepare_data",),
)
