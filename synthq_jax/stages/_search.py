"""Searches the collection of a run with BM25 or with a retriever.

Formal guarantee: none of its own; a run says of queries and retriever what
these give away.
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
  best_passages,
  encode,
  index,
  ranking,
  trec,
  vector_files,
)
from synthq_jax.runtime import (
  encoder_start,
  inputs,
  results,
  stage,
  system_results,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.training import distributed
from synthq_jax.training import progress as progress_lib

__all__ = [
  "Judged",
  "read_judged",
  "make_candidates",
  "open_vectors",
  "search_dense",
  "document_tokens",
  "encode_rows",
  "encode_with",
  "search_lexical",
  "search_nearest",
  "query_tokens",
  "zero_broken",
]

_BLOCK = 8192
"""Rows between two saves of vectors, and what one process takes at a time."""


class Judged(NamedTuple):
  """Judged queries and the collection they are asked of."""

  split: str  # whose judgements
  qrels: dict[str, dict[str, int]]
  queries: list[str]  # texts, in the order of qrels
  query_tokens: np.ndarray  # [query, length]
  passages: passages.Passages
  corpus: pathlib.Path  # texts of the documents, in that order
  drop_identical: bool = False
  """Whether a query's own document, by its id, is no result: it may not weigh
  on the scale of the others when runs are fused. One judged relevant is kept."""

  def without_own(self, run: trec.Run, depth: int) -> trec.Run:
    """Returns a run that was searched to one more than `depth` as it counts."""
    if not self.drop_identical:
      return run
    return trec.without_own(run, depth, self.qrels)


def read_judged(
  folders: workspace.Folders,
  made: Any,
  folder: pathlib.Path,
  split: str,
  queries: pathlib.Path,
) -> Judged:
  """Reads judged queries of a folder and the collection they are asked of."""
  arrays = inputs.judged_queries(folders, made, queries)
  judged = inputs.qrels(folder, split)
  names = arrays["ids"].tolist()
  return Judged(
    split=split,
    qrels={query: judged[query] for query in names},
    queries=queries_lib.texts(folder, names),
    query_tokens=arrays["tokens"],
    passages=inputs.document_tokens(folders, made),
    corpus=inputs.corpus(folders, made),
  )


def search_lexical(judged: Judged, depth: int) -> trec.Run:
  """Runs BM25 over whole documents, not cut at the encoder's length."""
  ids = judged.passages.ids
  built = queries_lib.index_of(ids, judged.corpus)
  run = built.search_run(
    list(judged.qrels), judged.queries, depth + judged.drop_identical
  )
  return judged.without_own(run, depth)


def make_candidates(
  judged: Judged, found: trec.Run, dense: trec.Run
) -> dict[str, ranking.Candidates]:
  """Returns what is learned to be ranked: what BM25 found, and a retriever."""
  features = _features(judged.corpus, files.state(judged.corpus))
  runs = (
    [run.get(query, {}) for query in judged.qrels] for run in (found, dense)
  )
  made = features.of(judged.queries, *runs)
  return dict(zip(judged.qrels, made, strict=True))


@functools.lru_cache(maxsize=1)  # rows of one collection follow each other
def _features(corpus: pathlib.Path, _: tuple[int, int]) -> ranking.Features:
  """Indexes a collection; what else tells one of that name from another."""
  with open(corpus, encoding="utf-8") as stream:
    ids = [json.loads(line)["_id"] for line in stream]
  return ranking.Features.build(ids, inputs.document_texts(corpus))


def encode_rows(
  params: Any,
  model_config: Any,
  tokens: passages.Tokens,
  folder: pathlib.Path,
  *,
  title: str,
  batch_size: int,
  progress: bool,
) -> None:
  """Encodes texts into files, this process its share; goes on where it was."""
  shard, num_shards = distributed.index(), distributed.count()
  own = vector_files.rows_of_shard(
    len(tokens), block_rows=_BLOCK, shard=shard, num_shards=num_shards
  )
  with progress_lib.bar(title, own, progress) as bar:
    encode.to_files(
      params,
      model_config,
      tokens,
      folder,
      shard=shard,
      num_shards=num_shards,
      block_rows=_BLOCK,
      batch_size=batch_size,
      devices=distributed.own_devices(),
      progress=bar.update,
    )


def encode_with(
  task: stage.Task[Any, Any],
  retriever: results.Checkpoint,
  wanted: Mapping[str, tuple[passages.Tokens, pathlib.Path]],
) -> None:
  """Encodes tokens into folders with a retriever; waits for all processes.

  Args:
    task: of the stage.
    retriever: what encodes.
    wanted: by the role of the texts: their tokens, and the folder.
  """
  for role, (tokens, folder) in wanted.items():
    params, shape = encoder_start.load(task.folders, retriever, role)
    encode_rows(
      params,
      shape,
      tokens,
      folder,
      title=f"{task.place}: {role}",
      batch_size=task.settings.batch_size,
      progress=task.progress,
    )
  distributed.barrier(task.place)


def query_tokens(
  folders: workspace.Folders, retriever: results.Checkpoint, judged: Judged
) -> np.ndarray:
  """Returns the tokens of the queries as a retriever reads them."""
  tokens = encoder_start.tokens_of(folders, retriever)
  return encoder_start.query_tokens(tokens, judged.queries, judged.query_tokens)


def document_tokens(
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
  """Searches vectors with faiss' exact inner product."""
  state = directory / f"parts_{task.digest}"
  queries, own = state / "queries", state / "documents"
  wanted: dict[str, tuple[passages.Tokens, pathlib.Path]] = {
    sentence_folders.QUERY: (
      query_tokens(task.folders, retriever, judged),
      queries,
    )
  }
  if documents is None:
    wanted[sentence_folders.DOCUMENT] = (
      document_tokens(task.folders, retriever, judged),
      own,
    )
  else:
    own = task.folders.root / documents.vectors
  encode_with(task, retriever, wanted)
  if not distributed.is_main():
    return None
  total = len(judged.queries)
  asked = np.asarray(vector_files.open_vectors(queries, total))
  return search_nearest(judged, own, asked, depth)


def zero_broken(asked: Float[np.ndarray, "query dim"]) -> np.ndarray:
  """Puts 0 in place of a query's vector that is not finite.

  Formal guarantee: what becomes of a query depends on its own vector alone. An
  error would tell of one private query by the results of all others.
  """
  finite = np.isfinite(asked).all(axis=1, keepdims=True)
  return np.where(finite, asked, np.zeros_like(asked))


def open_vectors(
  judged: Judged, documents: pathlib.Path
) -> Float[np.ndarray, "passage dim"]:
  """Returns the vectors of all passages, which `encode_rows` wrote."""
  total = len(judged.passages.owners)
  return np.asarray(vector_files.open_vectors(documents, total))


def search_nearest(
  judged: Judged, documents: pathlib.Path, asked: np.ndarray, depth: int
) -> trec.Run:
  """Returns the documents nearest to each query, by exact inner product.

  A query whose vector is not finite is searched for as `zero_broken` has it.
  """
  found = best_passages.documents(
    index.exact(open_vectors(judged, documents)),
    zero_broken(asked),
    judged.passages.owners,
    depth + judged.drop_identical,
  )
  ids = [str(i) for i in judged.passages.ids]
  run = trec.to_run(list(judged.qrels), ids, *found)
  return judged.without_own(run, depth)
