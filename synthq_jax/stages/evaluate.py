"""Scores a system, or BM25, on a set of test queries.

"test" is the set of private test queries, whose scores are private. "public" is
a set of sentences taken out of public documents, and further sets are public
collections such as BEIR's. Their scores may be shared for every retriever that
may be.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from synthq_jax import field_kinds
from synthq_jax.data import beir, files, passages
from synthq_jax.retrieval import measures, significance, trec
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
from synthq_jax.storage import array_files, artifacts
from synthq_jax.training import distributed

__all__ = ["STAGE", "Config", "Inputs", "run"]

_WITH_BM25 = (rows.FUSED, rows.RANKED)
_RUN = "run.trec"
_FEW = (
  "Fewer than 50 queries: intervals are too narrow (of reciprocal ranks, half of"
  " them 0, they held 78% of the means of 10 queries and 83% of those of 20)."
)
_TRAPS = (
  "Queries judged without any relevant document are not among them.",
  "BM25 reads whole documents, encoders the first tokens of each; of each passage"
  " where a set is read in passages, as the public one never is.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the evaluation."""

  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Measures known to `retrieval.measures`; its ALL are those of the papers."""
  relevance_level: int = 1
  """The lowest grade that is relevant in measures other than nDCG: 2 for TREC
  Deep Learning."""
  drop_identical: bool = True
  """Whether a result whose id equals the query's is dropped (ArguAna, Quora).
  Use False for MS MARCO's numeric ids, which are equal by chance."""
  depth: int = 100
  """Results of a run for each query; no measure may look at more."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind the 95% intervals."""
  seed: int = 0
  """Seed of the bootstrap."""
  batch_size: int = field_kinds.speed_only(256)
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(self, 1, "relevance_level", "depth")
    config_types.at_least(self, 1, "bootstrap_samples", "batch_size")
    config_types.at_least(self, 0, "seed")
    try:
      measures.check(self.measures, self.relevance_level, self.depth)
    except ValueError as error:
      raise ValueError(f"evaluate.Config.measures: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """System to score, and its test queries."""

  prepared: results.PreparedData  # the documents and the private test queries
  system: system_results.System | None  # None: BM25
  test_set: str | results.TestSet
  """"test" (private), "public", or a further set."""
  parts: Mapping[str, results.Evaluation]
  """Earlier evaluations of the systems that this one combines."""
  retriever: results.Checkpoint | None  # of a dense or a ranking system
  vectors: system_results.Vectors | None
  """Document vectors of the retriever; None for sets that are not the run's
  own."""
  left_out: float  # share of documents whose queries do not train `original`


class Target(NamedTuple):
  """A row on a test set."""

  test_set: str
  row: rows.Row

  def __str__(self) -> str:
    return f"{self.test_set}/{self.row}"


def plan_rows(plan: rows.Plan) -> dict[str, Target]:
  """Plans every row on every test set.

  Private rows are not scored on the public pseudo-queries, which no user asked.
  On further sets they are scored, in the private folder.
  """
  targets = [
    Target(name, row)
    for name in (*rows.OWN_TEST_SETS, *plan.test_sets)
    for row in plan.scored
    if not (name == "public" and plan.is_private(row))
  ]
  return {str(target): target for target in targets}


def make_job(run: runner.Run, target: Target) -> stage.Job[Inputs] | None:
  """Returns the scoring of one row on one test set."""
  name, row = target
  test_set: str | results.TestSet = name
  set_data = run.data
  if name in run.plan.test_sets:
    result = run.get_results("prepare_test_set")[run.plan.test_sets[name]]
    test_set, set_data = result.value, (result.digest,)
  if name == "public" and not run.prepared.num_public_test:
    if row == rows.BM25:
      run.say("[evaluate/public] no document gives a pseudo-query: left out")
    return None
  parts: dict[str, stage.Made[results.Evaluation] | None] = {}
  if row.system in _WITH_BM25:  # a dry run may find their parts unfinished
    for part in (rows.BM25, row.retriever):
      parts[part.system] = run.get_results("evaluate").get(Target(name, part))
  system = retriever = vectors = None
  if row != rows.BM25:
    system, retriever = run.systems[row], run.retrievers[row.retriever].value
    vectors = run.get_vectors(row.retriever).value
  return stage.Job(
    row=row,
    depends=(
      run.config.evaluate,
      *set_data,
      system.digest if system else rows.LEXICAL,
      *(result.digest if result else "none" for result in parts.values()),
    ),
    settings=run.config.evaluate,
    inputs=Inputs(
      prepared=run.prepared,
      system=system.value if system else None,
      test_set=test_set,
      parts={kind: result.value for kind, result in parts.items() if result},
      retriever=retriever,
      vectors=vectors if name == "test" else None,
      left_out=run.plan.left_out(rows.ORIGINAL),
    ),
  )


def _write_label(row: rows.Row, task_inputs: Inputs) -> str:
  """Returns the report label of a row: its training data and its system."""
  system, left_out = task_inputs.system, task_inputs.left_out
  if system is None:
    return "nothing"
  share = f"{1 - left_out:.0%} of the " if left_out else ""
  trained_on = {
    "untrained": "no query",
    "public_only": "queries of the public model",
    "original": f"{share}real queries, no privacy",
    "synthetic": "synthetic queries",
    "adapter": "real queries with DP",
    "direct_dp": "real queries, DP directly",
  }[row.pairs]
  if isinstance(task_inputs.retriever, system_results.Adapter):
    trained_on += ", a linear map of the public encoder"
  if isinstance(system, system_results.JointSystem):
    return f"{trained_on}; {system.describe()}"
  return trained_on


def run(task: stage.Task[Config, Inputs]) -> results.Evaluation | None:
  """Retrieves for every judged query and averages over all of them.

  Each of several processes encodes its share of the collection; process 0 does
  the rest.

  Returns:
    Means with intervals, under `private/` unless queries and system may be
    shared; None in processes other than 0.
  """
  config, space, task_inputs = task.settings, task.folders, task.inputs
  row, system, test_set = (
    task.get_row(),
    task_inputs.system,
    task_inputs.test_set,
  )
  is_further = isinstance(test_set, results.TestSet)
  set_name = test_set.name if is_further else test_set
  private = set_name == "test" or (
    system is not None and results.is_private_path(system.directory)
  )
  directory = task.folder(private=private)
  test = _load(space, task_inputs.prepared, test_set)
  test = test._replace(
    drop_identical=config.drop_identical
    and (not is_further or test_set.drop_identical)
  )
  run_ = _search_with(task, test, directory)
  if run_ is None:
    return None
  trec.write_run(directory / _RUN, run_, tag=str(row))
  scores = measures.evaluate(
    test.qrels,
    run_,
    config.measures,
    drop_identical=test.drop_identical,
    level=config.relevance_level,
    split=test.split,
  )
  artifacts.write_atomically(
    directory / "per_query.json", json.dumps(scores.per_query, sort_keys=True)
  )
  statement = system.statement if system is not None else None
  if statement is not None and statement.is_public:
    statement = None
  owners = prepared_files.read_owners(space, task_inputs.prepared, set_name)
  return results.Evaluation(
    directory=space.relative(directory),
    row=row,
    label=_write_label(row, task_inputs),
    test_set=set_name,
    private=private,
    statement=statement,
    measures={
      measure: significance.bootstrap_interval(
        values, owners, samples=config.bootstrap_samples, seed=config.seed
      )
      for measure, values in scores.per_query.items()
    },
    num_queries=scores.num_queries,
    traps=(*scores.traps, *([_FEW] * (scores.num_queries < 50)), *_TRAPS),
    split=scores.split,
    drop_identical=scores.drop_identical,
    met=scores.met,
  )


def _search_with(
  task: stage.Task[Config, Inputs],
  test: _search.Judged,
  directory: pathlib.Path,
) -> trec.Run | None:
  """Returns the results of a system; None in processes other than 0."""
  config, space, system = task.settings, task.folders, task.inputs.system
  if isinstance(system, results.Checkpoint):
    vectors = task.inputs.vectors
    return _search.search_dense(
      task, system, test, directory, vectors, config.depth
    )
  if not distributed.is_main():
    return None
  if system is None:
    return _search.search_lexical(test, config.depth)
  lexical, dense = (
    _part(space.root / task.inputs.parts[kind].directory / _RUN)
    for kind in (rows.LEXICAL, rows.DENSE)
  )
  make_candidates = functools.partial(_search.make_candidates, test)
  return system.combine(lexical, dense, make_candidates, config.depth)


def _part(path: pathlib.Path) -> trec.Run:
  """Reads an earlier run, whose file does not change."""
  return _read(path, files.state(path))


# BM25's run, which every joint system of a set reads, and that of one retriever.
@functools.lru_cache(maxsize=2)
def _read(path: pathlib.Path, _: tuple[int, int]) -> trec.Run:
  return trec.read_run(path)


def _load(space, prepared, test_set: str | results.TestSet) -> _search.Judged:
  """Reads a test set; texts of documents stay on disk until BM25 reads them."""
  if isinstance(test_set, results.TestSet):
    folder = space.root / test_set.directory
    queries = folder / results.TestSet.QUERIES
    test = _search.read_judged(space, test_set, folder, "test", queries)
    return test._replace(split=test_set.split)
  if test_set == "test":
    folder = space.root / prepared.private_directory
    split = prepared.test_split
    return _search.read_judged(
      space, prepared, folder, split, folder / f"{split}.npz"
    )
  public = space.root / prepared.directory
  data = beir.read_beir(public / "public_test")
  arrays = prepared_files.arrays(space, prepared, public / "public_test.npz")
  texts = data.query_by_id()
  qrels = data.qrels["test"]
  return _search.Judged(
    split=test_set,
    qrels=qrels,
    queries=[texts[query].text for query in qrels],
    query_tokens=arrays["query_tokens"],
    passages=passages.Passages(
      array_files.as_texts([document.id for document in data.documents]),
      arrays["tokens"],
      np.arange(len(data.documents)),
    ),
    corpus=public / "public_test" / "corpus.jsonl",
  )


def _remove_vectors(run: runner.Run) -> None:
  """Removes the document vectors that the systems of a set shared."""
  shared = f"*/{_search.SHARED}"
  for folder in run.folders.private("evaluate").glob(shared):
    artifacts.remove(folder)


STAGE = stage.Stage(
  name="evaluate",
  result=results.Evaluation,
  config=Config,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=(
    "prepare_test_set",
    "encode_documents",
    "fuse",
    "learn_to_rank",
  ),
  together=True,
  finish=_remove_vectors,
)
