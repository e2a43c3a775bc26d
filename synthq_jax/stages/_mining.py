"""Finds hard negatives for the pairs that a retriever is trained on.

Formal guarantee: post-processing where the queries are synthetic: negatives are
a function of these, of public documents and, where the retriever mines for
itself, of what the same queries made of it.
"""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax.data import passages
from synthq_jax.pipeline import inputs
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.retrieval import encode, hard_negatives, trec
from synthq_jax.stages import _search
from synthq_jax.training import distributed

__all__ = [
  "Rows",
  "judged",
  "mined",
  "searched_by",
  "with_negatives",
]


class Rows:
  """Tokens of several documents for each pair, read where they are used."""

  def __init__(self, tokens: Any, at: Int[np.ndarray, "pair hard"]):
    """Keeps where the documents stand."""
    self._tokens, self._at = tokens, at
    self.shape = (*at.shape, tokens.shape[1])

  def __getitem__(self, pairs: np.ndarray) -> np.ndarray:
    """Returns the tokens of some pairs' documents [some, hard, length]."""
    at = self._at[pairs]
    rows = np.asarray(self._tokens[at.reshape(-1)])
    return rows.reshape(*at.shape, rows.shape[-1])


def judged(
  folders: Any, documents: Any, records: dict[str, Any]
) -> _search.Judged:
  """Returns the queries of pairs, named by their numbers, and the collection."""
  vocabulary = inputs.vocabulary(folders, documents)
  texts = [queries_lib.decoded(vocabulary, row) for row in records["queries"]]
  return _search.Judged(
    split="train",
    qrels={str(i): {} for i in range(len(texts))},
    queries=texts,
    query_tokens=records["queries"],
    passages=inputs.document_tokens(folders, documents),
    corpus=inputs.corpus(folders, documents),
  )


def searched_by(
  params: Any,
  model_config: Any,
  queries: _search.Judged,
  depth: int,
  folder: pathlib.Path,
) -> trec.Run:
  """Searches the collection with a retriever that is in training."""
  _search.encode_rows(
    params,
    model_config,
    queries.passages.tokens,
    folder,
    title="mining",
    batch_size=256,
    progress=False,
  )
  distributed.barrier(f"mining {folder.name}")
  asked = encode.encode(
    params,
    model_config,
    queries.query_tokens,
    devices=distributed.own_devices(),
  )
  return _search.nearest(queries, folder, asked, depth)


def mined(
  run: trec.Run,
  collection: passages.Passages,
  records: dict[str, Any],
  *,
  per_query: int,
  skip: int,
  below: float,
  seed: int,
) -> Int[np.ndarray, "pair hard"]:
  """Picks documents that a run ranks high, and that are not the pair's own.

  Where there are none, they are drawn; of a single document it is the own one.
  """
  ids, own = [str(i) for i in collection.ids], records["rows"]
  position = {id_: i for i, id_ in enumerate(ids)}
  qrels = {str(i): {ids[row]: 1} for i, row in enumerate(own.tolist())}
  found = hard_negatives.mine(
    run, qrels, per_query=per_query, skip=skip, below=below
  )
  rng = np.random.default_rng([seed, 7])
  drawn = rng.integers(len(ids), size=(len(qrels), per_query))
  drawn = np.where(drawn == own[:, None], (drawn + 1) % len(ids), drawn)
  for pair, documents in found.items():
    drawn[int(pair), : len(documents)] = [position[one] for one in documents]
  return drawn


def with_negatives(
  records: dict[str, Any],
  collection: passages.Passages,
  negatives: Int[np.ndarray, "pair hard"],
) -> dict[str, Any]:
  """Adds what `training.pairs.loss_fn` reads of hard negatives."""
  hard = negatives.shape[1]
  at = passages.best(
    collection, negatives.reshape(-1), np.repeat(records["queries"], hard, 0)
  )
  return {
    **records,
    "negatives": Rows(collection.tokens, at.reshape(negatives.shape)),
    "negative_rows": negatives.astype(np.int32),
  }
