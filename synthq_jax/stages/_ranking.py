"""Reads what is learned to be ranked: candidates of queries, and their vectors.

Formal guarantee: none of its own. What is returned of a query depends on that query,
on the documents and on the retriever alone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from synthq_jax import artifacts
from synthq_jax.data import passages as passages_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import (
  config_types,
  inputs,
  private_training,
  results,
)
from synthq_jax.privacy import terms
from synthq_jax.retrieval import encode, ranking
from synthq_jax.stages import _search, stage

__all__ = [
  "Config",
  "Found",
  "drawing",
  "of_train",
  "padded",
  "settings",
  "vectors_at",
  "vectors_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(private_training.Config):
  """What every training that ranks candidates is set by; every value is public."""

  batch_size: int = 0
  share: float = artifacts.later(1.0)
  """Share of the documents whose queries teach, in (0, 1]. Few queries are enough:
  each is searched for in the whole collection, by BM25 and by the retriever."""
  encode_batch_size: int = artifacts.speed_only(256)
  """Queries encoded at once."""

  def __post_init__(self):
    super().__post_init__()
    config_types.within(self, "(0, 1]", "share")
    config_types.at_least(self, 1, "encode_batch_size")


def settings(
  config: Config,
  prepared: results.PreparedData,
  *,
  epsilon: float,
  mechanism: str,
) -> private_training.Settings:
  """Returns what is promised to queries, or users, whose candidates are ranked.

  Args:
    config: of the stage.
    prepared: says whether users are protected, and how many there are.
    epsilon: the target; inf trains without noise and claims nothing.
    mechanism: what is clipped and noised, in words.
  """
  has_claim = math.isfinite(epsilon)
  return private_training.Settings(
    config=config,
    epsilon=epsilon,
    mechanism=mechanism,
    num_users=prepared.num_users.get("train") if has_claim else None,
    base=terms.RANKED if config.share == 1 else terms.RANKED_SHARE,
    of_users=terms.DRAWN_JUDGED,
  )


class Found(NamedTuple):
  """Judged queries, and what BM25 and a retriever find for them."""

  judged: _search.Judged
  queries: Float[np.ndarray, "query dim"]
  """By the retriever."""
  candidates: Mapping[str, ranking.Candidates]


def of_train(task: Any, depth: int, *, share: float = 1.0) -> Found:
  """Returns train queries with their candidates.

  Args:
    task: its inputs are "prepared", "retriever", "vectors" and "drop_identical".
    depth: documents that BM25 and the retriever find, each.
    share: of the documents whose queries are read, `inputs.held_out`; 1: all.
  """
  space, size = task.folders, task.settings.encode_batch_size
  prepared, retriever = task.inputs["prepared"], task.inputs["retriever"]
  folder = space.root / prepared.private_directory
  path = folder / "train.npz"
  judged = _search.asked(space, prepared, folder, "train", path)
  if share < 1:
    documents = inputs.arrays(space, prepared, path)["documents"]
    is_read = inputs.held_out(prepared.num_documents, share)
    judged = _chosen(judged, np.flatnonzero(is_read[documents]))
  judged = judged._replace(drop_identical=task.inputs["drop_identical"])
  asked = vectors_of(task, retriever, judged.query_tokens, size)
  documents = space.root / task.inputs["vectors"].vectors
  candidates = _search.candidates(
    judged,
    _search.lexical(judged, depth),
    _search.nearest(judged, documents, asked, depth),
  )
  return Found(judged, asked, candidates)


def _chosen(judged: _search.Judged, places: np.ndarray) -> _search.Judged:
  """Returns some of the queries."""
  names = list(judged.qrels)
  return judged._replace(
    qrels={names[place]: judged.qrels[names[place]] for place in places},
    queries=[judged.queries[place] for place in places],
    query_tokens=judged.query_tokens[places],
  )


def drawing(task: stage.Task, number: int) -> stage.Task:
  """Returns the task with settings for the queries that were read, or all.

  Delta stays that of all of them.

  Args:
    task: its input "prepared" says how many queries and users there are; public.
    number: of the queries that were read.

  Raises:
    ValueError: if there are none.
  """
  config, prepared = task.settings, task.inputs["prepared"]
  if not number:
    name = config_types.label(type(config))
    raise ValueError(
      f"{name}.share: expected a share of the documents with a train query, got"
      f" none of {config.share:g}: take a larger one"
    )
  if config.share == 1 and number >= config.batch_size:
    return task
  units = prepared.num_users.get("train", prepared.num_queries["train"])
  size = min(config.batch_size, number)
  delta = config.delta or 1 / (2 * units)
  config = dataclasses.replace(config, batch_size=size, delta=delta)
  return dataclasses.replace(task, settings=config)


def vectors_of(
  task: Any, retriever: results.Checkpoint, tokens: Any, size: int
) -> Float[np.ndarray, "text dim"]:
  """Encodes texts with a retriever, so many at once."""
  params, shape = t5_checkpoints.load(task.folders.root / retriever.directory)
  return encode.encode(params, shape, tokens, batch_size=size)


def vectors_at(
  task: Any,
  retriever: results.Checkpoint,
  passages: passages_lib.Passages,
  candidates: Sequence[ranking.Candidates],
  size: int,
) -> Float[np.ndarray, "passage dim"]:
  """Encodes the passages of the candidates; the vectors of all others are 0."""
  places = np.unique(np.concatenate([one.places for one in candidates]))
  wanted = np.flatnonzero(np.isin(passages.owners, places))
  encoded = vectors_of(task, retriever, passages.tokens[wanted], size)
  shape = (len(passages.owners), encoded.shape[1])
  vectors = np.zeros(shape, np.float32)  # memory that is not written takes none
  vectors[wanted] = encoded
  return vectors


def padded(found: Found, depth: int) -> dict[str, np.ndarray]:
  """Returns "values", "relevant" and "candidate" of each query, as records.

  Args:
    found: the queries.
    depth: documents of each system: a record has room for twice as many.
  """
  size = (len(found.judged.qrels), 2 * depth)
  records = {
    "values": np.zeros((*size, len(ranking.FEATURES)), np.float32),
    "relevant": np.zeros(size, bool),
    "candidate": np.zeros(size, bool),
  }
  for row, (query, (ids, _, values)) in enumerate(found.candidates.items()):
    judged = found.judged.qrels[query]
    records["values"][row, : len(ids)] = values
    records["candidate"][row, : len(ids)] = True
    records["relevant"][row, : len(ids)] = [judged.get(x, 0) > 0 for x in ids]
  return records
