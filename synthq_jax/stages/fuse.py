"""Chooses how much a retriever weighs beside BM25.

One weight for all rows: the best one of the untrained encoder, for queries that the
public checkpoint wrote before any private step, and that a filter kept where there is
one. Queries of the generator that a retriever learned from are nearer to it than real
ones are, also for documents that it did not see, and choose far too much of it. What
private queries would choose, `learn_to_rank` learns.

Formal guarantee:
  A task holds neither PreparedData nor the secret, and opens no file under
  `private/`. The weight is a function of the documents, of the public checkpoint
  and of settings, so that a fused row has its retriever's statement.
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
  """The retriever's share, in [0, 1]. None: public queries choose."""
  held_out: float = 0.05
  """Share of the documents whose queries choose a reranker's weight, and train
  neither it nor a retriever but direct DP's, in (0, 1)."""
  num_queries: int = 1000
  """Queries that choose, at most."""
  min_queries: int = 100
  """Where there are fewer, the weight is `default_weight`."""
  standard_errors: float = 0.5
  """The weight is the least that is no more than so many standard errors below
  the best one: what the queries hardly tell apart is decided for BM25; 0: the best."""
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
  """Yields the weight beside every retriever, where fused rows are wanted."""
  config = run.config
  chooser = {
    "untrained": run.retrievers.get("untrained"),
    "vectors": run.rows("encode_documents").get("untrained"),
    "synthetic": _held_out.of_public(run),
  }
  if not chooser["untrained"]:
    chooser["synthetic"] = None
  first = None  # that chose on public queries, as all others would
  for name, (retriever, trained) in run.retrievers.items():
    if not config.rows.fused:
      break
    yield stage.Job(
      name=name,
      depends=(
        config.fuse,
        *run.data,
        trained,
        *(one.digest if one else "none" for one in chooser.values()),
      ),
      settings=config.fuse,
      inputs={
        "documents": run.documents,
        "retriever": retriever,
        "first": first,
        **{key: one and one.value for key, one in chooser.items()},
      },
    )
    made = run.rows("fuse").get(name)
    if made and not results.is_private_path(made.value.directory):
      first = first or made.value


def run(task: stage.Task) -> system_results.Fusion | None:
  """Searches with BM25 and with the untrained encoder, and tries the weights.

  Args:
    task: its inputs are "documents", the public collection; the "retriever" that
      is fused; and what chooses, each None where there is none: "first", an
      earlier result of this stage that was chosen on the same queries;
      "untrained", the encoder that no query has trained, its "vectors" of the
      documents, and "synthetic", queries of the public checkpoint.

  Returns:
    The weight; None in processes other than 0.
  """
  config, folders = task.settings, task.folders
  retriever = task.inputs["retriever"]
  directory = task.folder(private=results.is_private_path(retriever.directory))
  chosen, words = _choice(task, directory)
  if not distributed.is_main():
    return None
  return system_results.Fusion(
    directory=folders.relative(directory),
    name=f"{system_results.Fusion.SYSTEM}_{task.name}",
    retriever=task.name,
    statement=statement_lib.inherit(
      retriever.statement, f"The weight beside BM25 was chosen on: {words}."
    ),
    method=config.method,
    depth=config.depth,
    chosen_on=words,
    **chosen,
  )


def _choice(task, directory):
  """Returns the weight and its scores, None in processes other than 0; of whom."""
  config, first = task.settings, task.inputs.get("first")
  if first:
    names = ("weight", "num_queries", "scores")
    return {name: getattr(first, name) for name in names}, first.chosen_on
  judged, words = _held_out.read(task, config, config.weight, everywhere=True)
  runs = judged and _runs(task, judged, directory)
  if not distributed.is_main():
    return None, words
  chosen = _held_out.chosen(
    config.weight,
    judged,
    runs,
    config,
    method=config.method,
    depth=config.depth,
  )
  return chosen, words


def _runs(task, judged, directory):
  """Returns what BM25 and the encoder find; None in processes other than 0."""
  vectors, depth = task.inputs["vectors"], task.settings.depth
  encoder = task.inputs["untrained"]
  dense = _search.dense(task, encoder, judged, directory, vectors, depth)
  return None if dense is None else (_search.lexical(judged, depth), dense)


STAGE = stage.of(
  __name__,
  needs=("generate", "encode_documents"),
  together=True,
)
