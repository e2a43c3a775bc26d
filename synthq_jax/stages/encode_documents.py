"""Encodes the collection once with each retriever that has its own vectors.

Formal guarantee: post-processing of the retriever, whose statement the vectors
have. The task holds the public documents and the retriever alone.
"""

import dataclasses

from synthq_jax import field_kinds
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  results,
  rows,
  runner,
  stage,
  system_results,
)
from synthq_jax.stages import _search
from synthq_jax.training import distributed

__all__ = ["STAGE", "Config", "Inputs", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of encoding documents."""

  batch_size: int = field_kinds.speed_only(256)
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(self, 1, "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Documents to encode, and the retriever that encodes them."""

  documents: results.PublicDocuments
  retriever: results.Checkpoint


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the encoding of the collection by one retriever."""
  retriever = run.retrievers[row]
  return stage.Job(
    row=row,
    depends=(*run.data, retriever.digest),
    settings=run.config.encode_documents,
    inputs=Inputs(documents=run.documents, retriever=retriever.value),
  )


def run(task: stage.Task[Config, Inputs]) -> system_results.Vectors | None:
  """Encodes every document, each process its share.

  Finished blocks stay: after a kill, a run resumes after the last block. So do
  those of an earlier result, such as one of a shorter log: documents that the
  same encoder reads alike are not encoded again.

  Returns:
    The folder of the vectors; None in processes other than 0.
  """
  folders, retriever = task.folders, task.inputs.retriever
  directory = task.folder(private=results.is_private_path(retriever.directory))
  tokens = encoder_start.tokens_of(folders, retriever)
  passages = encoder_start.open_passages(folders, task.inputs.documents, tokens)
  vectors = directory / f"vectors_{task.digest}"
  _search.link_earlier(vectors, len(passages.tokens))
  texts = {sentence_folders.DOCUMENT: (passages.tokens, vectors)}
  _search.encode_with(task, retriever, texts)
  if not distributed.is_main():
    return None
  return system_results.Vectors(
    directory=folders.relative(directory),
    vectors=folders.relative(vectors),
    row=task.get_row(),
    statement=statement_lib.inherit(
      retriever.statement, "Public documents were encoded: post-processing."
    ),
    num_bytes=sum(path.stat().st_size for path in vectors.glob("*.npy")),
    retriever=system_results.read_fingerprint(folders.root, retriever),
  )


STAGE = stage.Stage(
  name="encode_documents",
  result=system_results.Vectors,
  config=Config,
  plan=lambda plan: {str(row): row for row in plan.encoded},
  job=make_job,
  run=run,
  needs=("train_retriever", "direct_dp"),
  together=True,
)
