"""Chooses the fusion weight of a retriever with BM25.

All rows share one weight. It is the best one of the untrained encoder for
queries that the public checkpoint wrote before any private step, and that a
filter kept if there is one. Queries of the generator that a retriever learned
from are nearer to it than real ones are, also for documents that it did not
see; they choose far too great a weight. The weights that private queries would
choose, `learn_to_rank` learns.

Formal guarantee:
  A task holds neither PreparedData nor the secret, and opens no file under
  `private/`. The weight is a function of the documents, of the public
  checkpoint and of settings, so that a fused row has its retriever's statement.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from synthq_jax import field_kinds
from synthq_jax.data import files
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import fusion, trec
from synthq_jax.runtime import (
  config_types,
  prepared_files,
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
  """Settings of the fusion and of the choice of its weight."""

  GONE: ClassVar[Mapping[str, Any]] = {
    "method": {"_type": "Convex", "lexical_floor": None, "dense_floor": None}
  }

  weight: float | None = None
  """Fusion weight of the retriever, in [0, 1]; None: public queries choose
  it."""
  num_queries: int = 1000
  """Maximum number of queries that choose the weight."""
  min_queries: int = 100
  """Minimum number of queries that choose; with fewer the weight is
  `default_weight`."""
  standard_errors: float = 0.5
  """Tolerance in standard errors: the weight is the least one whose score is at
  most so far below the best. BM25 gets the benefit where the queries hardly
  distinguish weights; 0: the best."""
  default_weight: float = 0.2
  """Fusion weight of the retriever if nothing can choose, in [0, 1]."""
  depth: int = 100
  """Documents of each run that are fused."""
  seed: int = 0
  """Seed of the choice of queries if there are too many; public."""
  batch_size: int = field_kinds.speed_only(256)
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(
      self, 1, "num_queries", "min_queries", "depth", "batch_size"
    )
    config_types.at_least(self, 0, "seed", "standard_errors")
    config_types.within(self, "[0, 1]", "default_weight", "weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Retriever to fuse, and the queries that choose the weight; None: there is
  none."""

  documents: results.PublicDocuments
  retriever: results.Checkpoint  # the one to fuse
  first: system_results.Fusion | None = None
  """An earlier result of this stage, chosen on the same queries."""
  untrained: results.Checkpoint | None  # the encoder that no query has trained
  vectors: system_results.Vectors | None  # its vectors of the documents
  synthetic: results.SyntheticQueries | None  # queries of the public checkpoint


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the choice of one weight.

  The first result whose retriever may be shared was chosen on public queries,
  as all later ones would be; these copy its weight.
  """
  retriever = run.retrievers[row.retriever]
  untrained = vectors = synthetic = None
  if rows.UNTRAINED in run.retrievers:
    untrained = run.retrievers[rows.UNTRAINED]
    vectors = run.get_vectors(rows.UNTRAINED)
    synthetic = run.queries.get(rows.PUBLIC_ONLY)
  earlier = [result.value for result in run.get_results("fuse").values()]
  public = [x for x in earlier if not results.is_private_path(x.directory)]
  return stage.Job(
    row=row,
    depends=(
      run.config.fuse,
      *run.data,
      retriever.digest,
      *(
        part.digest if part else "none"
        for part in (untrained, vectors, synthetic)
      ),
    ),
    settings=run.config.fuse,
    inputs=Inputs(
      documents=run.documents,
      retriever=retriever.value,
      first=public[0] if public else None,
      untrained=untrained.value if untrained else None,
      vectors=vectors.value if vectors else None,
      synthetic=synthetic.value if synthetic else None,
    ),
  )


def run(task: stage.Task[Config, Inputs]) -> system_results.Fusion | None:
  """Searches with BM25 and with the untrained encoder, and tries the weights.

  Returns:
    The weight; None in processes other than 0.
  """
  config, folders = task.settings, task.folders
  retriever = task.inputs.retriever
  directory = task.folder(private=results.is_private_path(retriever.directory))
  chosen, words = _choose_weight(task, directory)
  if not distributed.is_main():
    return None
  assert chosen is not None  # process 0 has chosen
  return system_results.Fusion(
    directory=folders.relative(directory),
    row=task.get_row(),
    statement=statement_lib.inherit(
      retriever.statement, f"The weight beside BM25 was chosen on: {words}."
    ),
    retriever_fingerprint=system_results.read_fingerprint(
      folders.root, retriever
    ),
    depth=config.depth,
    chosen_on=words,
    **chosen,
  )


def _choose_weight(
  task: stage.Task[Config, Inputs], directory: pathlib.Path
) -> tuple[dict[str, Any] | None, str]:
  """Returns the weight and its scores, None in processes other than 0; and the
  label of the queries that chose."""
  config, first = task.settings, task.inputs.first
  if first:
    names = ("weight", "num_queries", "scores")
    return {name: getattr(first, name) for name in names}, first.chosen_on
  judged, words = _read_queries(task)
  runs = None if judged is None else _search_both(task, judged, directory)
  if not distributed.is_main():
    return None, words
  weight = config.default_weight if config.weight is None else config.weight
  choice = fusion.Choice(weight, ())
  if judged is not None:
    assert runs is not None  # process 0 has searched
    choice = fusion.choose(
      *runs,
      judged.qrels,
      standard_errors=config.standard_errors,
      depth=config.depth,
    )
  return {
    "weight": choice.weight,
    "num_queries": len(judged.qrels) if judged else 0,
    "scores": choice.scores,
  }, words


def _read_queries(
  task: stage.Task[Config, Inputs],
) -> tuple[_search.Judged | None, str]:
  """Reads the public queries that choose, and describes them."""
  config, folders = task.settings, task.folders
  documents, synthetic = task.inputs.documents, task.inputs.synthetic
  if config.weight is not None:
    return None, "nothing, it was set"
  if synthetic is None:
    return None, "nothing, it was set: there are no queries to choose it"
  folder = folders.root / synthetic.directory
  arrays = prepared_files.arrays(folders, synthetic, folder / "tokens.npz")
  rows = np.random.default_rng([config.seed, 6]).permutation(
    len(arrays["documents"])
  )
  rows = np.sort(rows[: config.num_queries])
  if len(rows) < config.min_queries:
    return None, "nothing, it was set for want of queries that could choose it"
  lines = [line for _, line in files.json_lines(folder / "queries.jsonl")]
  chosen = [lines[row] for row in rows]
  passages = prepared_files.document_tokens(folders, documents)
  owners = arrays["documents"][rows]
  judged = _search.Judged(
    split="held out",
    qrels={
      line["_id"]: {str(passages.ids[owner]): 1}
      for line, owner in zip(chosen, owners, strict=True)
    },
    queries=[line["text"] for line in chosen],
    query_tokens=arrays["tokens"][rows],
    passages=passages,
    corpus=prepared_files.corpus(folders, documents),
  )
  whose = f"synthetic queries of {synthetic.name}"
  return judged, f"{whose}, for the untrained encoder; the same in all rows"


def _search_both(
  task: stage.Task[Config, Inputs],
  judged: _search.Judged,
  directory: pathlib.Path,
) -> tuple[trec.Run, trec.Run] | None:
  """Returns the results of BM25 and of the encoder; None in processes other
  than 0."""
  vectors, depth = task.inputs.vectors, task.settings.depth
  encoder = task.inputs.untrained
  assert encoder is not None  # without one there are no queries
  dense = _search.search_dense(task, encoder, judged, directory, vectors, depth)
  return (
    None if dense is None else (_search.search_lexical(judged, depth), dense)
  )


STAGE = stage.Stage(
  name="fuse",
  result=system_results.Fusion,
  config=Config,
  plan=lambda plan: {str(row.retriever): row for row in plan.fused},
  job=make_job,
  run=run,
  needs=("generate", "learn_map", "learn_adapter"),
  together=True,
)
