"""Rerankers of a run: built, saved, loaded, and put over candidates.

Formal guarantee: none of its own; a run says of queries and reranker what these
give away.
"""

import pathlib
from typing import Any

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import building
from synthq_jax.models.checkpoints import tensors
from synthq_jax.pipeline import inputs, results, system_results, workspace
from synthq_jax.retrieval import trec
from synthq_jax.stages import _search

__all__ = ["build", "save", "score"]

_FILE = "reranker.safetensors"


def build(
  config: building.Settings,
  encoder: pathlib.Path,
  documents: results.PublicDocuments,
  vocabulary: Any,
  idf: Any,
) -> rerankers.Reranker:
  """Builds the reranker of a `train_reranker.Config`, not trained yet."""
  params, shape = inputs.load_public(encoder, documents)
  return building.build(
    config,
    vocabulary=vocabulary,
    params=params,
    config=shape,
    idf=idf,
    bert=config.bert,
  )


def save(directory: pathlib.Path, params: Any, idf: Any) -> None:
  """Writes parameters, and the document frequencies that they belong to."""
  tree = {"params": params} | ({} if idf is None else {"idf": idf})
  tensors.write_safetensors(directory / _FILE, tensors.of_tree(tree))


def score(
  folders: workspace.Folders,
  made: system_results.Reranker,
  candidates: trec.Run,
  judged: _search.Judged,
  *,
  documents: results.PublicDocuments,
  encoder: pathlib.Path,
  settings: Any,
  depth: int,
) -> trec.Run:
  """Returns the first candidates of each query with the reranker's scores."""
  stored = tensors.read_safetensors(folders.root / made.directory / _FILE)
  tree = tensors.unflatten({k: v.whole() for k, v in stored.items()})
  reranker = build(
    settings,
    encoder,
    documents,
    inputs.vocabulary(folders, documents),
    tree.get("idf"),
  )
  ids = {
    id_ for run in candidates.values() for id_ in trec.ranking(run)[:depth]
  }
  return rerankers.rerank(
    reranker,
    tree["params"],
    candidates,
    dict(zip(judged.qrels, judged.queries, strict=True)),
    inputs.texts_of(judged.corpus, ids),
    batch_size=256,
    depth=depth,
  )
