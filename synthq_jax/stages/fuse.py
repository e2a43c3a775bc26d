"""Chooses how much each retriever weighs beside BM25.

The weight is the one that finds the documents of queries best which the
retriever was not trained on: those of documents that a public draw keeps out of
training. Direct DP trains on the real queries of all documents, which no draw
keeps out; queries of the public checkpoint choose for it.

Formal guarantee:
  Post-processing. A retriever that was trained on synthetic queries is weighed
  by queries of the same generator; one trained on the private queries with DP,
  and the untrained one, by queries that the public checkpoint wrote before any
  private step. These tasks hold the public documents, the queries and the
  retriever: neither PreparedData nor the secret, and they open no file under
  `private/` unless queries or retriever lie there. Which documents are kept out
  is drawn with a public seed. So the weight has the retriever's statement. The
  weight of `original`, which real queries choose, has no guarantee.
"""

import dataclasses

from synthq_jax import artifacts
from synthq_jax.pipeline import config_types, results, system_results
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import fusion
from synthq_jax.stages import _held_out, _search, stage
from synthq_jax.training import distributed

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How two runs are fused, and what chooses the weight."""

  method: fusion.Convex | fusion.ReciprocalRanks = fusion.Convex()
  """How scores of the two become comparable."""
  weight: float | None = None
  """The retriever's share, in [0, 1]. None: queries that it was not trained on
  choose."""
  held_out: float = 0.05
  """Share of the documents whose queries choose the weight, and train no
  retriever but direct DP's, in (0, 1)."""
  num_queries: int = 1000
  """Queries that choose, at most."""
  min_queries: int = 100
  """Where there are fewer, the weight is `default_weight`."""
  standard_errors: float = 1.0
  """The weight is the least that is no more than so many standard errors below
  the best one; 0: the best."""
  default_weight: float = 0.2
  """The retriever's share where nothing can choose, in [0, 1]."""
  depth: int = 100
  """Documents of each run that are fused."""
  seed: int = 0
  """Which queries choose where there are too many; public."""
  batch_size: int = artifacts.speed_only(256)
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(
      self, 1, "num_queries", "min_queries", "depth", "batch_size"
    )
    config_types.at_least(self, 0, "seed", "standard_errors")
    config_types.within(self, "(0, 1)", "held_out")
    config_types.within(self, "[0, 1]", "default_weight", "weight")


def jobs(run):
  """Yields a weight for every retriever, where fused rows are wanted."""
  config = run.config
  for name, (retriever, trained) in run.retrievers.items():
    if not config.rows.fused:
      break
    real, queries = name.startswith("original"), _held_out.source(run, name)
    vectors = run.rows("encode_documents")[name]
    yield stage.Job(
      name=name,
      depends=(
        config.fuse,
        *run.data,
        trained,
        vectors.digest,
        queries.digest if queries else "none",
      ),
      settings=config.fuse,
      inputs={
        "documents": run.prepared if real else run.documents,
        "retriever": retriever,
        "vectors": vectors.value,
        "synthetic": queries.value if queries else None,
      },
    )


def run(task: stage.Task) -> system_results.Fusion | None:
  """Searches with BM25 and with the retriever, and tries the weights.

  Args:
    task: its inputs are "documents", the public collection, or for `original`
      the prepared data; "retriever"; "vectors" of the documents; and
      "synthetic", all that one generator wrote, filtered or not: None for
      `original`, or where there is none.

  Returns:
    The weight; None in processes other than 0.
  """
  config, folders = task.settings, task.folders
  retriever = task.inputs["retriever"]
  directory = task.folder(private=results.is_private_path(retriever.directory))
  judged, words = _held_out.read(task, config, config.weight)
  runs = judged and _runs(task, judged, directory)
  if not distributed.is_main():
    return None
  return system_results.Fusion(
    directory=folders.relative(directory),
    name=f"{system_results.Fusion.SYSTEM}_{task.name}",
    retriever=task.name,
    statement=_statement(retriever, words),
    method=config.method,
    chosen_on=words,
    **_held_out.chosen(
      config.weight,
      judged,
      runs,
      config,
      method=config.method,
      depth=config.depth,
    ),
  )


def _runs(task, judged, directory):
  """Returns what BM25 and the retriever find; None in processes other than 0."""
  vectors, depth = task.inputs["vectors"], task.settings.depth
  retriever = task.inputs["retriever"]
  dense = _search.dense(task, retriever, judged, directory, vectors, depth)
  return None if dense is None else (_search.lexical(judged, depth), dense)


def _statement(retriever: results.Checkpoint, words: str):
  return statement_lib.inherit(
    retriever.statement, f"The weight beside BM25 was chosen on: {words}."
  )


STAGE = stage.of(
  __name__,
  result=system_results.Fusion,
  needs=("generate", "encode_documents"),
  together=True,
)
