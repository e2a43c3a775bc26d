"""Searches the collection of a run with BM25 or with a retriever.

Formal guarantee: none of its own; results reveal the queries and the retriever
as the run's statements say.
"""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from synthq_jax.data import files, passages
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import (
  encode,
  index,
  ranking,
  trec,
  vector_files,
)
from synthq_jax.runtime import (
  encoder_start,
  prepared_files,
  results,
  stage,
  system_results,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.training import distributed
from synthq_jax.training import progress as progress_lib

__all__ = [
  "SHARED",
  "Judged",
  "encode_with",
  "get_document_tokens",
  "get_query_tokens",
  "make_candidates",
  "open_vectors",
  "read_judged",
  "search_dense",
  "search_lexical",
  "search_nearest",
  "zero_broken",
]

SHARED = "documents"
"""Folder of a test set's document vectors while its systems are scored."""
_BLOCK = 8192
"""Rows between two saves of vectors, and rows that one process takes at a
time."""


class Judged(NamedTuple):
  """Judged queries and the collection that they search."""

  split: str  # of the judgements
  qrels: dict[str, dict[str, int]]
  queries: list[str]  # texts, in the order of qrels
  query_tokens: np.ndarray  # [query, length]
  passages: passages.Passages
  corpus: pathlib.Path  # texts of the documents, in that order
  drop_identical: bool = False
  """Whether a query's own document, by its id, is no result: its score must not
  set the scale of the others when runs are fused. A document judged relevant
  stays."""

  def without_own(self, run: trec.Run, depth: int) -> trec.Run:
    """Removes queries' own documents, if these are dropped, and cuts to
    `depth`."""
    if not self.drop_identical:
      return run
    return trec.without_own(run, depth, self.qrels)


def read_judged(
  folders: workspace.Folders,
  stored: Any,
  folder: pathlib.Path,
  split: str,
  queries: pathlib.Path,
) -> Judged:
  """Reads judged queries of a folder and the collection that they search."""
  arrays = prepared_files.read_judged_queries(folders, stored, queries)
  judged = prepared_files.read_qrels(folder, split)
  names = arrays["ids"].tolist()
  return Judged(
    split=split,
    qrels={query: judged[query] for query in names},
    queries=queries_lib.texts(folder, names),
    query_tokens=arrays["tokens"],
    passages=prepared_files.document_tokens(folders, stored),
    corpus=prepared_files.corpus(folders, stored),
  )


def search_lexical(judged: Judged, depth: int) -> trec.Run:
  """Searches whole documents with BM25, not cut at the encoder's length."""
  ids = judged.passages.ids
  built = queries_lib.index_of(ids, judged.corpus)
  run = built.search_run(
    list(judged.qrels), judged.queries, depth + judged.drop_identical
  )
  return judged.without_own(run, depth)


def make_candidates(
  judged: Judged, lexical_run: trec.Run, dense_run: trec.Run
) -> dict[str, ranking.Candidates]:
  """Returns the candidates to rank: the results of BM25 and of a retriever."""
  features = _features(judged.corpus, files.state(judged.corpus))
  runs = (
    [run.get(query, {}) for query in judged.qrels]
    for run in (lexical_run, dense_run)
  )
  rows = features.of(judged.queries, *runs)
  return dict(zip(judged.qrels, rows, strict=True))


@functools.lru_cache(maxsize=1)  # consecutive rows share a collection
def _features(corpus: pathlib.Path, _: tuple[int, int]) -> ranking.Features:
  """Indexes a collection; the second argument is the state of its file."""
  with open(corpus, encoding="utf-8") as stream:
    ids = [json.loads(line)["_id"] for line in stream]
  return ranking.Features.build(ids, prepared_files.document_texts(corpus))


def link_earlier(folder: pathlib.Path, rows: int) -> None:
  """Links the newest vectors beside a folder into it, where it has none."""
  others = {*folder.parent.glob(f"{folder.name.partition('_')[0]}_*")}
  earlier = sorted((x.stat().st_mtime_ns, x) for x in others - {folder})
  if earlier and distributed.is_main():
    vector_files.link_blocks(earlier[-1][1], folder, rows, block_rows=_BLOCK)
  distributed.barrier(f"link {folder.name}")


def encode_with(
  task: stage.Task[Any, Any],
  retriever: results.Checkpoint,
  texts: Mapping[str, tuple[passages.Tokens, pathlib.Path]],
) -> None:
  """Encodes tokens into folders with a retriever; waits for all processes.

  Each process encodes its share, and resumes after a kill.

  Args:
    task: task of the stage.
    retriever: the encoder.
    texts: tokens and folder of the texts, by their role.
  """
  shard, num_shards = distributed.index(), distributed.count()
  for role, (tokens, folder) in texts.items():
    params, shape = encoder_start.load(task.folders, retriever, role)
    own = vector_files.rows_of_shard(
      len(tokens), block_rows=_BLOCK, shard=shard, num_shards=num_shards
    )
    with progress_lib.bar(f"{task.result_path}: {role}", own) as bar:
      encode.to_files(
        params,
        shape,
        tokens,
        folder,
        shard=shard,
        num_shards=num_shards,
        block_rows=_BLOCK,
        batch_size=task.settings.batch_size,
        devices=distributed.own_devices(),
        progress=bar.update,
      )
  distributed.barrier(task.result_path)


def get_query_tokens(
  folders: workspace.Folders, retriever: results.Checkpoint, judged: Judged
) -> np.ndarray:
  """Returns the tokens of the queries as a retriever reads them."""
  tokens = encoder_start.tokens_of(folders, retriever)
  return encoder_start.query_tokens(tokens, judged.queries, judged.query_tokens)


def get_document_tokens(
  folders: workspace.Folders, retriever: results.Checkpoint, judged: Judged
) -> passages.Tokens:
  """Returns the tokens of the passages as a retriever reads them."""
  tokens = encoder_start.tokens_of(folders, retriever)
  return encoder_start.replace_tokens(
    judged.passages, judged.corpus, tokens
  ).tokens


def search_dense(
  task: stage.Task[Any, Any],
  retriever: results.Checkpoint,
  judged: Judged,
  directory: pathlib.Path,
  documents: system_results.Vectors | None,
  depth: int,
) -> trec.Run | None:
  """Encodes queries and finds their nearest documents by exact inner product.

  Documents without vectors of their own are encoded into a folder of their set,
  where the next system of the same encoder, such as an adapter, finds them. It
  lies under `private/`, since no statement stands beside them.

  Args:
    task: task of the stage.
    retriever: the encoder.
    judged: the queries and documents.
    directory: the result's folder.
    documents: vectors of the documents; None: they are encoded, too.
    depth: number of results for each query.
  """
  queries = directory / f"parts_{task.digest}" / "queries"
  own = task.folders.private(task.result_path).parent / SHARED
  texts: dict[str, tuple[passages.Tokens, pathlib.Path]] = {
    sentence_folders.QUERY: (
      get_query_tokens(task.folders, retriever, judged),
      queries,
    )
  }
  if documents is None:
    texts[sentence_folders.DOCUMENT] = (
      get_document_tokens(task.folders, retriever, judged),
      own,
    )
    if distributed.is_main():  # of a set that had more documents
      total = len(judged.passages.owners)
      vector_files.shorten(own, total, block_rows=_BLOCK)
  else:
    own = task.folders.root / documents.vectors
  encode_with(task, retriever, texts)
  if not distributed.is_main():
    return None
  total = len(judged.queries)
  query_vectors = np.asarray(vector_files.open_vectors(queries, total))
  return search_nearest(judged, own, query_vectors, depth)


def zero_broken(query_vectors: Float[np.ndarray, "query dim"]) -> np.ndarray:
  """Replaces a query vector that is not finite by 0.

  Formal guarantee: the result of a query depends on its own vector alone. An
  error would reveal one private query through the results of all others.
  """
  finite = np.isfinite(query_vectors).all(axis=1, keepdims=True)
  return np.where(finite, query_vectors, np.zeros_like(query_vectors))


def open_vectors(
  judged: Judged, documents: pathlib.Path
) -> Float[np.ndarray, "passage dim"]:
  """Opens the vectors of all passages, which `encode_with` wrote."""
  total = len(judged.passages.owners)
  return np.asarray(vector_files.open_vectors(documents, total))


def search_nearest(
  judged: Judged, documents: pathlib.Path, query_vectors: np.ndarray, depth: int
) -> trec.Run:
  """Returns the documents nearest to each query, by exact inner product.

  A query whose vector is not finite is searched with the zero vector.
  """
  best = index.search_documents(
    index.exact(open_vectors(judged, documents)),
    zero_broken(query_vectors),
    judged.passages.owners,
    depth + judged.drop_identical,
  )
  ids = [str(i) for i in judged.passages.ids]
  run = trec.to_run(list(judged.qrels), ids, *best)
  return judged.without_own(run, depth)
