"""Chooses how much a reranker weighs beside the first stage, for every source.

Formal guarantee:
  Post-processing, as in `fuse`: synthetic queries choose whose documents were
  held out of its training, a task then holds them, the public documents and what
  was trained on queries of the same generator, and opens no file under `private/`
  unless these lie there. The row `original` has no guarantee.
"""

import dataclasses

from synthq_jax import artifacts
from synthq_jax.pipeline import config_types, results, system_results
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import fusion
from synthq_jax.stages import _held_out, _reranking, _search, stage
from synthq_jax.training import distributed

__all__ = ["STAGE", "Config", "run"]

_FIRST = ("bm25", "fused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is put into a new order, and how."""

  first_stage: str = "bm25"
  """"bm25", or "fused" with the retriever of the same pairs."""
  depth: int = 100
  """The first documents of each query that are scored again."""
  weight: float | None = None
  """The reranker's share beside the score of the first stage, in [0, 1]; 1: the
  first stage gives the documents alone. None: chosen as `fuse.Config` says."""
  batch_size: int = artifacts.speed_only(256)
  """Queries encoded at once, where the first stage is fused."""

  def __post_init__(self):
    config_types.one_of(self, "first_stage", _FIRST)
    config_types.at_least(self, 1, "depth", "batch_size")
    config_types.within(self, "[0, 1]", "weight")


def jobs(run):
  """Yields a weight for every reranker, where reranked rows are wanted."""
  config = run.config
  for name, (reranker, trained) in run.rows("train_reranker").items():
    if not config.rows.reranked:
      break
    first, digest = None, "bm25"
    if config.rerank.first_stage == "fused":
      first, digest = run.rows("fuse")[name]
    queries = _held_out.source(run, name)
    real = name.startswith("original")
    vectors = run.rows("encode_documents").get(name)
    yield stage.Job(
      name=name,
      depends=(
        config.rerank,
        config.fuse,
        *run.t5_data,
        trained,
        digest,
        queries.digest if queries else "none",
      ),
      settings=config.rerank,
      inputs={
        "documents": run.prepared if real else run.documents,
        "reranker": reranker,
        "settings": run.seeded(config.train_reranker, name),
        "fusion": first,
        "retriever": run.retrievers[name].value if first else None,
        "vectors": vectors.value if first else None,
        "synthetic": queries.value if queries else None,
        "chooser": config.fuse,
      },
    )


def run(task: stage.Task) -> system_results.Reranking | None:
  """Reranks for the queries that choose, and tries the weights.

  Args:
    task: its inputs are "documents", the public collection, or for `original`
      the prepared data; "t5", the folder of the public checkpoint that the
      "reranker" started from, and the "settings" of its training; "synthetic",
      all that one generator wrote, or None; "chooser", a `fuse.Config`; and
      where the first stage is fused, its "fusion", "retriever" and "vectors".

  Returns:
    The weight; None in processes other than 0.
  """
  config, folders = task.settings, task.folders
  reranker, chooser = task.inputs["reranker"], task.inputs["chooser"]
  directory = task.folder(private=results.is_private_path(reranker.directory))
  judged, words = _held_out.read(task, chooser, config.weight)
  candidates = judged and _candidates(task, judged, directory)
  if not distributed.is_main():
    return None
  runs = judged and (candidates, _scores(task, candidates, judged))
  first = task.inputs["fusion"]
  return system_results.Reranking(
    directory=folders.relative(directory),
    name=f"{system_results.Reranking.SYSTEM}_{task.name}",
    reranker=reranker,
    first_stage=first.name if first else system_results.LEXICAL,
    statement=statement_lib.inherit(
      reranker.statement,
      f"The weight beside the first stage was chosen on: {words}.",
    ),
    depth=config.depth,
    chosen_on=words,
    **_held_out.chosen(
      config.weight,
      judged,
      runs,
      chooser,
      method=fusion.Convex(),
      depth=config.depth,
    ),
  )


def _scores(task, candidates, judged):
  """Returns the candidates in the order of the reranker."""
  return _reranking.score(
    task.folders,
    task.inputs["reranker"],
    candidates,
    judged,
    documents=task.inputs["documents"],
    encoder=task.inputs["t5"],
    settings=task.inputs["settings"],
    depth=task.settings.depth,
  )


def _candidates(task, judged, directory):
  """Returns what the first stage finds for the queries that choose."""
  depth, first = task.settings.depth, task.inputs["fusion"]
  dense = first and _search.dense(
    task,
    task.inputs["retriever"],
    judged,
    directory,
    task.inputs["vectors"],
    depth,
  )
  if not distributed.is_main():
    return None
  lexical = _search.lexical(judged, depth)
  if first is None:
    return lexical
  return fusion.fuse(
    first.method, lexical, dense, weight=first.weight, depth=depth
  )


STAGE = stage.of(
  __name__,
  needs=("train_reranker", "fuse"),
  reads=("t5",),
  together=True,
)
