"""Reads the records of trainings that rank: candidates of queries, and vectors.

Formal guarantee: none of its own. The record of a query depends on that query,
on the documents and on the retriever alone.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float

from synthq_jax import field_kinds
from synthq_jax.models import vector_map
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.privacy import terms
from synthq_jax.retrieval import encode, index, ranking
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  prepared_files,
  private_training,
  results,
  stage,
  system_results,
  training_pairs,
  workspace,
)
from synthq_jax.stages import _search

__all__ = [
  "Config",
  "Inputs",
  "check_candidates",
  "encode_queries",
  "make_map_records",
  "make_records",
  "make_settings",
  "read_train",
  "select",
]


_SPARE = 64
"""Passages that are searched beyond the candidates, since some are relevant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(private_training.Config):
  """Settings that every training that ranks candidates shares; all are
  public."""

  batch_size: int = 0
  """Expected records of a batch, see `private_training.Config`. Each drawn
  query is searched in the whole collection: for a log of hundreds of thousands,
  draw few."""
  encode_batch_size: int = field_kinds.speed_only(256)
  """Queries encoded at once."""

  def __post_init__(self):
    super().__post_init__()
    config_types.at_least(self, 1, "encode_batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(private_training.Inputs):
  """Data that every training that ranks candidates reads."""

  retriever: results.Checkpoint
  vectors: system_results.Vectors  # the retriever's, of the documents
  drop_identical: bool  # as `evaluate.Config` has it


def make_settings(
  config: Config,
  prepared: results.PreparedData,
  *,
  epsilon: float,
  mechanism: str,
) -> private_training.Settings:
  """Returns the private settings of a training that ranks candidates.

  Args:
    config: settings of the stage.
    prepared: the data, with its number of users if these are the unit.
    epsilon: target epsilon; inf trains without noise and claims nothing.
    mechanism: name of what is clipped and noised.
  """
  has_claim = math.isfinite(epsilon)
  return private_training.Settings(
    config=config,
    epsilon=epsilon,
    mechanism=mechanism,
    num_users=prepared.num_users.get("train") if has_claim else None,
    base=terms.RANKED,
  )


def check_candidates(config: Any) -> None:
  """Refuses a map's settings that leave no room for other documents.

  Args:
    config: the settings, with `candidates` and `most_relevant`.

  Raises:
    ValueError: naming the setting.
  """
  if config.candidates <= config.most_relevant:
    raise ValueError(
      f"{config_types.label(type(config))}.candidates must be above most_relevant="
      f"{config.most_relevant}, got {config.candidates}"
    )


def read_train(
  folders: workspace.Folders,
  prepared: results.PreparedData,
  *,
  drop_identical: bool,
  held_out: float = 0.0,
  reads_held_out: bool = False,
) -> _search.Judged:
  """Reads the private train queries.

  Args:
    folders: the working directory.
    prepared: the data.
    drop_identical: as `evaluate.Config` has it.
    held_out: share of the documents, `training_pairs.draw_held_out`, whose
      queries are held out; 0: none, and all queries are returned.
    reads_held_out: whether the queries that are held out are returned alone; else
      the others are.
  """
  folder = folders.root / prepared.private_directory
  path = folder / "train.npz"
  judged = _search.read_judged(folders, prepared, folder, "train", path)
  if held_out:
    documents = prepared_files.arrays(folders, prepared, path)["documents"]
    is_held_out = training_pairs.draw_held_out(prepared.num_documents, held_out)
    is_read = is_held_out[documents] == reads_held_out
    judged = select(judged, np.flatnonzero(is_read))
  return judged._replace(drop_identical=drop_identical)


def make_records(
  task: stage.Task[Config, Inputs],
  judged: _search.Judged,
  depth: int,
  rows: np.ndarray,
) -> dict[str, np.ndarray]:
  """Makes records of the candidates of some queries.

  Args:
    task: task of the training.
    judged: all queries.
    depth: documents that BM25 and the retriever find, each; a record has room
      for twice as many.
    rows: ascending numbers of the queries.

  Returns:
    "values" [query, candidate, feature], "relevant" and "candidate" [query,
    candidate].
  """
  judged = select(judged, rows)
  vectors = encode_queries(
    task.folders,
    task.inputs.retriever,
    judged,
    task.settings.encode_batch_size,
  )
  vectors = _search.zero_broken(vectors)
  documents = task.folders.root / task.inputs.vectors.vectors
  candidates = _search.make_candidates(
    judged,
    _search.search_lexical(judged, depth),
    _search.search_nearest(judged, documents, vectors, depth),
  )
  size = (len(judged.qrels), 2 * depth)
  arrays = {
    "values": np.zeros((*size, len(ranking.FEATURES)), np.float32),
    "relevant": np.zeros(size, bool),
    "candidate": np.zeros(size, bool),
  }
  for row, (query, (ids, _, values)) in enumerate(candidates.items()):
    grades = judged.qrels[query]
    arrays["values"][row, : len(ids)] = values
    arrays["candidate"][row, : len(ids)] = True
    arrays["relevant"][row, : len(ids)] = [grades.get(x, 0) > 0 for x in ids]
  return arrays


def make_map_records(
  judged: _search.Judged,
  query_vectors: Float[np.ndarray, "query dim"],
  built: index.Index,
  *,
  candidates: int,
  most_relevant: int,
) -> dict[str, np.ndarray]:
  """Makes the records that a map of query vectors learns from.

  Args:
    judged: the queries.
    query_vectors: their vectors.
    built: index of the vectors of all passages.
    candidates: passages that a query is compared with, its relevant ones among
      them.
    most_relevant: largest number of relevant passages of a query.

  Returns:
    "queries", and the fields of `vector_map.Candidates`.
  """
  positions = {
    str(document): i for i, document in enumerate(judged.passages.ids)
  }
  depth = min(candidates + _SPARE, len(judged.passages.owners))
  _, nearest = built.search(query_vectors, depth)
  relevant = []
  for (query, grades), near in zip(judged.qrels.items(), nearest, strict=True):
    relevant_names = [name for name, grade in grades.items() if grade > 0]
    own = [positions[name] for name in relevant_names if name in positions]
    first, stop = judged.passages.of(np.array(own, np.int64))
    relevant.append(
      [row for a, b in zip(first, stop, strict=True) for row in range(a, b)]
    )
    if (
      judged.drop_identical
      and query in positions
      and query not in relevant_names
    ):
      first, stop = judged.passages.of(np.array([positions[query]]))
      near[(near >= first) & (near < stop)] = -1  # as evaluate drops it
  chosen = vector_map.choose_candidates(
    nearest, relevant, size=candidates, most_relevant=most_relevant
  )
  return {"queries": query_vectors, **chosen._asdict()}


def select(judged: _search.Judged, positions: np.ndarray) -> _search.Judged:
  """Returns some of the queries.

  Args:
    judged: all queries.
    positions: numbers of the queries.
  """
  names = list(judged.qrels)
  return judged._replace(
    qrels={
      names[position]: judged.qrels[names[position]] for position in positions
    },
    queries=[judged.queries[position] for position in positions],
    query_tokens=judged.query_tokens[positions],
  )


def encode_queries(
  folders: workspace.Folders,
  retriever: results.Checkpoint,
  judged: _search.Judged,
  size: int,
) -> Float[np.ndarray, "query dim"]:
  """Encodes queries with a retriever, `size` at once."""
  tokens = _search.get_query_tokens(folders, retriever, judged)
  params, shape = encoder_start.load(folders, retriever, sentence_folders.QUERY)
  return encode.encode(params, shape, tokens, batch_size=size)
