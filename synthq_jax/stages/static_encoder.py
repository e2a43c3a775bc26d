"""Draws static vectors, from which retrievers start in a T5's place.

Each token of the vocabulary gets a random direction, as long as the token is
rare in the public documents: a retriever that ranks like weighted words before
any training, and that `train_retriever` teaches which words mean the same.
"""

import dataclasses

import jax

from synthq_jax.leakage.rerankers import terms
from synthq_jax.models import static_vectors
from synthq_jax.pipeline import config_types, inputs, results
from synthq_jax.stages import stage

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Whether retrievers are static vectors."""

  dim: int = 0
  """Numbers of a vector; 0: retrievers start from the T5's encoder."""
  seed: int = 0
  """Of the directions."""

  def __post_init__(self):
    config_types.at_least(self, 0, "dim", "seed")


def jobs(run):
  """Yields one encoder where a size is given."""
  config = run.config.static_encoder
  if config.dim:
    yield stage.Job(depends=(config, *run.data), settings=config)


def run(task: stage.Task) -> results.Checkpoint:
  """Draws the vectors.

  Formal guarantee: reads the public documents and their vocabulary alone.

  Args:
    task: its inputs are "documents", the public collection.

  Returns:
    A public encoder.
  """
  config, folders = task.settings, task.folders
  documents = task.inputs["documents"]
  texts = inputs.document_texts(inputs.corpus(folders, documents))
  weights = terms.inverse_document_frequencies(
    inputs.vocabulary(folders, documents), texts
  )
  shape = static_vectors.StaticConfig(
    vocab_size=len(weights), emb_dim=config.dim
  )
  return inputs.save_checkpoint(
    task,
    task.folder(private=False),
    static_vectors.init(jax.random.key(config.seed), shape, weights),
    shape,
    kind="retriever",
    statement=documents.statement(),
    steps=0,
    batch_size=0,
    num_parameters=0,
    metrics="",
  )


STAGE = stage.of(__name__, needs=("pretrain",), reads=("documents",))
