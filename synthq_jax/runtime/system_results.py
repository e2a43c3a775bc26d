"""Defines what the stages of fused and ranking systems hand on.

A system is made of one retriever, and has the statement of its row.
"""

import dataclasses
import pathlib

from synthq_jax.retrieval import fusion
from synthq_jax.runtime import results, rows
from synthq_jax.storage import artifacts

__all__ = [
  "Adapter",
  "Fusion",
  "Ranking",
  "System",
  "Vectors",
  "stands_on",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors(results.RowResult):
  """The collection as one retriever encodes it, whose row and claim it has."""

  vectors: str
  """The folder that `retrieval.vector_files` opens."""
  num_bytes: int
  """Size of the vectors."""
  retriever: str
  """The retriever's fingerprint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(results.Checkpoint):
  """A retriever that is another one with a linear map of its vectors.

  Queries are mapped; documents keep the vectors of `base`.
  """

  FILE = "map.npy"
  """In the directory: float32 [dim, dim], by which vectors are multiplied from the
  left."""

  base: results.Checkpoint
  """The retriever whose vectors are mapped."""
  base_fingerprint: str
  """The fingerprint of `base`."""

  def find_base(self, root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of `base` in a working directory.

    Raises:
      ValueError: if another training of it lies there by now.
    """
    folder = root / self.base.directory
    if artifacts.read_fingerprint(folder) != self.base_fingerprint:
      raise ValueError(
        f"{root / self.directory}: expected the encoder that its map was learned"
        f" for in {folder}, got another: run `synthq run` again, which makes the map"
        " anew"
      )
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BesideBm25(results.RowResult):
  @property
  def retriever(self) -> rows.Row:
    """The row of the retriever."""
    return self.row.retriever


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion(_BesideBm25):
  """How BM25 and one retriever are fused, and how the weight was chosen.

  Private if the retriever or the queries that chose are. The claim is the
  retriever's: a weight that public queries chose is post-processing.
  """

  method: fusion.Convex | fusion.ReciprocalRanks
  """How scores become comparable."""
  depth: int = 100
  """Documents of each run that are fused: scores are scaled by these."""
  weight: float
  """Share of the retriever, in [0, 1]."""
  chosen_on: str
  """The queries that chose the weight, in words."""
  num_queries: int
  """How many these are; 0: the weight was set."""
  scores: tuple[tuple[float, float], ...]
  """Each weight that was tried, and its nDCG@10 on these queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking(_BesideBm25):
  """How scores of BM25 and of one retriever weigh, learned on private queries."""

  features: tuple[str, ...]
  """What is weighed: `retrieval.ranking.FEATURES`."""
  weights: tuple[float, ...]
  """One for each."""
  depth: int
  """Documents of BM25 and of the retriever that are ranked, each."""
  num_queries: int
  """Private queries that they were learned on."""
  kind: str = "weights"


def stands_on(made: results.Claimed, part: results.Claimed) -> bool:
  """Says whether a result counts this training of its part, not an earlier one."""
  return set(part.statement.ledger) <= set(made.statement.ledger)


System = results.Checkpoint | Fusion | Ranking
