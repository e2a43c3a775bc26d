"""Scores a retriever, or BM25, on a set of test queries.

"test" are the private test queries, whose scores are private; "public" are
sentences taken out of public documents, and further sets are public collections
such as BEIR's: their scores may be shared for every retriever that may be.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import beir, files
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import (
  _parts,
  _repeats,
  config_types,
  inputs,
  results,
)
from synthq_jax.retrieval import (
  bm25,
  encode,
  index,
  measures,
  trec,
  vector_files,
)
from synthq_jax.stages import stage
from synthq_jax.training import distributed

__all__ = ["STAGE", "Config", "run"]

_BLOCK = 8192
"""Rows between two saves of vectors, and what one process takes at a time."""
_TRAPS = (
  "Queries judged without any relevant document are not among them.",
  "BM25 reads whole documents, the encoders their first tokens.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is measured."""

  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Names that `retrieval.measures` knows; its ALL are those of the papers."""
  relevance_level: int = 1
  """The lowest grade that is relevant in measures other than nDCG: 2 for TREC
  Deep Learning."""
  drop_identical: bool = True
  """Whether a result whose id equals the query's is dropped (ArguAna, Quora);
  False for MS MARCO's numeric ids, where it is chance."""
  depth: int = 100
  """Documents of a run for each query."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind the 95% intervals."""
  seed: int = 0
  """Of the bootstrap."""
  batch_size: int = dataclasses.field(
    default=256, metadata={"speed_only": True}
  )
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(self, 1, "relevance_level", "depth")
    config_types.at_least(self, 1, "bootstrap_samples", "batch_size")
    config_types.at_least(self, 0, "seed")


def jobs(run):
  """Yields every row on every test set.

  Retrievers trained without privacy are not scored on the public pseudo-queries,
  which nobody asked; on further sets they are, in the private folder.
  """
  config, prepared = run.config, run.prepared
  rows = {k: (made.value, made.digest) for k, made in run.retrievers.items()}
  if config.rows.bm25:
    rows = {"bm25": (None, "bm25"), **rows}
  if not prepared.num_public_test:
    run.say("[evaluate/public] no document gives a pseudo-query: left out")
  sets = {name: (name, run.data) for name in results.OWN_TEST_SETS}
  for name, (test_set, digest) in run.rows("prepare_test_set").items():
    sets[name] = (test_set, (digest,))
  for called, (test_set, of_set) in sets.items():
    for name, (retriever, source) in rows.items():
      hidden = retriever and results.is_private_path(retriever.directory)
      if called == "public" and (hidden or not prepared.num_public_test):
        continue  # its scores could not be shared, or there is no such set
      yield stage.Job(
        name=f"{called}/{name}",
        depends=(config.evaluate, *of_set, source),
        settings=config.evaluate,
        inputs={"retriever": retriever, "row": name, "test_set": test_set},
      )


def _label(name: str, retriever: results.Checkpoint | None) -> str:
  """Says in words what a row was trained on."""
  if retriever is None:
    return "nothing"
  words = {
    "untrained": "nothing, the public encoder",
    "public_only": "queries written before any private step",
    "original": "real queries, no privacy",
    "synthetic": "synthetic queries",
  }
  known = (words[start] for start in words if name.startswith(start))
  return next(known, "real queries, DP directly")


def run(task: stage.Task) -> results.Evaluation | None:
  """Retrieves for every judged query and averages over all of them.

  Of several processes each encodes its share of the collection; process 0 does
  the rest.

  Args:
    task: its inputs are "prepared", the documents and the private test queries;
      "retriever", an encoder, or None for BM25; "row", its name; and
      "test_set": "test" (private), "public", or a further set.

  Returns:
    Means with intervals, under `private/` unless queries and retriever are fit
    to be shared; None in processes other than 0.
  """
  config, space = task.settings, task.folders
  name, retriever = task.inputs["row"], task.inputs["retriever"]
  test_set = task.inputs["test_set"]
  called = getattr(test_set, "name", test_set)
  private = called == "test" or (
    retriever is not None and results.is_private_path(retriever.directory)
  )
  directory = task.folder(private=private)
  test = _load(space, task.inputs["prepared"], test_set)
  if retriever is not None:
    state = directory / f"vectors_{task.digest}"
    vectors = _vectors(config, space, retriever, test, state, task.progress)
    distributed.barrier(f"evaluate {called} {name}")
  if not distributed.is_main():
    return None
  run_ = (
    _bm25(test, config.depth)
    if retriever is None
    else _dense(config, test, vectors)
  )
  trec.write_run(directory / "run.trec", run_, tag=name)
  scores = measures.evaluate(
    test.qrels,
    run_,
    config.measures,
    drop_identical=config.drop_identical and test.drop_identical,
    level=config.relevance_level,
    split=test.split,
  )
  artifacts.write_atomically(
    directory / "per_query.json", json.dumps(scores.per_query, sort_keys=True)
  )
  statement = retriever.statement if retriever is not None else None
  if statement is not None and statement.is_public:
    statement = None
  task.when_saved.append(lambda: _remove_vectors(directory))
  return results.Evaluation(
    directory=space.relative(directory),
    name=name,
    label=_label(name, retriever),
    test_set=called,
    private=private,
    epsilon=statement.epsilon if statement else None,
    delta=statement.delta if statement else None,
    measures={
      measure: _repeats.interval(
        values, samples=config.bootstrap_samples, seed=config.seed
      )
      for measure, values in scores.per_query.items()
    },
    num_queries=scores.num_queries,
    traps=(*scores.traps, *_TRAPS),
    split=scores.split,
    drop_identical=scores.drop_identical,
    met=scores.met,
  )


def _remove_vectors(directory: pathlib.Path) -> None:
  """Removes the vectors of this result, and of older settings."""
  for vectors in directory.glob("vectors_*"):
    shutil.rmtree(vectors, ignore_errors=True)


class _TestSet(NamedTuple):
  """Judged queries and the collection they are asked of."""

  split: str  # whose judgements
  qrels: dict[str, dict[str, int]]
  queries: list[str]  # texts, in the order of qrels
  query_tokens: np.ndarray  # [query, length]
  ids: np.ndarray  # [document]
  tokens: np.ndarray  # [document, length]
  corpus: pathlib.Path  # texts of the documents, in that order
  drop_identical: bool = True


def _load(space, prepared, test_set: str | results.TestSet) -> _TestSet:
  """Reads a test set; texts of documents stay on disk until BM25 reads them."""
  if isinstance(test_set, results.TestSet):
    folder = space.root / test_set.directory
    queries = folder / results.TestSet.QUERIES
    test = _asked(space, test_set, folder, "test", queries)
    return test._replace(
      split=test_set.split, drop_identical=test_set.drop_identical
    )
  if test_set == "test":
    folder = space.root / prepared.private_directory
    split = prepared.test_split
    return _asked(space, prepared, folder, split, folder / f"{split}.npz")
  public = space.root / prepared.directory
  data = beir.read_beir(public / "public_test")
  arrays = inputs.arrays(space, prepared, public / "public_test.npz")
  texts = data.query_by_id()
  qrels = data.qrels["test"]
  return _TestSet(
    split=test_set,
    qrels=qrels,
    queries=[texts[query].text for query in qrels],
    query_tokens=arrays["query_tokens"],
    ids=np.array([document.id for document in data.documents]),
    tokens=arrays["tokens"],
    corpus=public / "public_test" / "corpus.jsonl",
  )


def _asked(space, made, folder, split: str, queries: pathlib.Path) -> _TestSet:
  """Reads judged queries of a folder and the collection they are asked of."""
  arrays = inputs.arrays(space, made, queries)
  judged = inputs.qrels(folder, split)
  texts = {
    line["_id"]: line["text"]
    for _, line in files.json_lines(folder / "queries.jsonl")
  }
  names = [str(query) for query in arrays["ids"]]  # with a relevant document
  ids, tokens = inputs.document_tokens(space, made)
  return _TestSet(
    split=split,
    qrels={query: judged[query] for query in names},
    queries=[texts[query] for query in names],
    query_tokens=arrays["tokens"],
    ids=ids,
    tokens=tokens,
    corpus=inputs.corpus(space, made),
  )


def _bm25(test: _TestSet, depth: int) -> trec.Run:
  """Runs BM25 over whole documents, not cut at the encoder's length."""
  built = bm25.BM25().build(
    [str(i) for i in test.ids], inputs.document_texts(test.corpus)
  )
  return built.search_run(list(test.qrels), test.queries, depth)


def _vectors(
  config, space, retriever, test, state, progress
) -> list[pathlib.Path]:
  """Encodes documents and queries into files, this process its share.

  They are kept in `state`, block by block, until the result is saved.
  """
  params, model_config = t5_checkpoints.load(space.root / retriever.directory)
  folders = []
  asked = (("documents", test.tokens), ("queries", test.query_tokens))
  shard, num_shards = distributed.index(), distributed.count()
  for kind, tokens in asked:
    title = f"evaluate {retriever.name}: {kind}"
    own = vector_files.rows_of_shard(
      len(tokens), block_rows=_BLOCK, shard=shard, num_shards=num_shards
    )
    with _parts.bar(title, own, progress) as bar:
      encode.to_files(
        params,
        model_config,
        tokens,
        state / kind,
        shard=shard,
        num_shards=num_shards,
        block_rows=_BLOCK,
        batch_size=config.batch_size,
        devices=distributed.own_devices(),
        progress=bar.update,
      )
    folders.append(state / kind)
  return folders


def _dense(config, test, folders: Sequence[pathlib.Path]) -> trec.Run:
  """Searches the vectors with faiss' exact inner product."""
  vectors = [np.asarray(vector_files.open_vectors(one)) for one in folders]
  depth = min(config.depth, len(test.tokens))
  scores, positions = index.exact(vectors[0]).search(vectors[1], depth)
  return trec.to_run(
    list(test.qrels), [str(i) for i in test.ids], scores, positions
  )


STAGE = stage.Stage(
  name="evaluate",
  result=results.Evaluation,
  needs=("prepare_test_set", "train_retriever"),
  config=Config,
  reads=("prepared",),
  jobs=jobs,
  run=run,
  together=True,
)
