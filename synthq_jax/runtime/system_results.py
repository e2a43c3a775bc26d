"""Defines the results of fusion, learning to rank, adapters and encoding.

A system uses one retriever, and has the statement of its row. A joint system
combines the results of BM25 and of its retriever.
"""

import abc
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping

from synthq_jax.retrieval import fusion, ranking, trec
from synthq_jax.runtime import results, rows
from synthq_jax.storage import artifacts

__all__ = [
  "Adapter",
  "Fusion",
  "JointSystem",
  "Ranking",
  "System",
  "Vectors",
  "find_retriever",
  "read_fingerprint",
  "stands_on",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors(results.RowResult):
  """Document vectors of one retriever, with its row and claim."""

  vectors: str
  """Folder that `retrieval.vector_files` opens."""
  num_bytes: int
  """Size of the vectors, in bytes."""
  retriever: str
  """Fingerprint of the retriever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(results.Checkpoint):
  """A retriever that applies a linear map to the query vectors of another one.

  Documents keep the vectors of `base`.
  """

  FILE = "map.npy"
  """File in the directory: float32 [dim, dim]; a query vector becomes `vector @
  map`."""

  base: results.Checkpoint
  """Retriever whose query vectors are mapped."""
  base_fingerprint: str
  """Fingerprint of `base`."""

  @property
  def document_encoder(self) -> results.Checkpoint:
    """The retriever whose document vectors this one searches: `base`."""
    return self.base

  def find_base(self, root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of `base` in a working directory.

    Raises:
      ValueError: if the folder holds another training of it.
    """
    folder = root / self.base.directory
    if artifacts.read_fingerprint(folder) != self.base_fingerprint:
      raise ValueError(
        f"{root / self.directory}: expected the encoder that its map was learned"
        f" for in {folder}, got another: run `synthq run` again, which makes the map"
        " anew"
      )
    return folder


MakeCandidates = Callable[
  [trec.Run, trec.Run], Mapping[str, ranking.Candidates]
]
"""(results of BM25, results of a retriever) -> candidates of each query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointSystem(results.RowResult, abc.ABC):
  """A system that combines the results of BM25 and of one retriever."""

  depth: int
  """Documents of BM25 and of the retriever, each, that are combined."""
  retriever_fingerprint: str = ""
  """Fingerprint of the retriever; empty: a version wrote this that kept none."""

  @property
  def retriever(self) -> rows.Row:
    """The row of the retriever."""
    return self.row.retriever

  @abc.abstractmethod
  def combine(
    self,
    lexical: trec.Run,
    dense: trec.Run,
    make_candidates: MakeCandidates,
    depth: int,
  ) -> trec.Run:
    """Returns the best documents of each query.

    Args:
      lexical: results of BM25.
      dense: results of the retriever.
      make_candidates: computes the features of both runs' documents; called if
        the system needs features.
      depth: largest number of documents of a query.
    """

  @abc.abstractmethod
  def describe(self) -> str:
    """Describes the weights, in a few words for the report's label."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion(JointSystem):
  """Fusion of BM25 and one retriever, and the choice of its weight.

  Private if the retriever is, or the queries that chose the weight are. The
  claim is the retriever's: a weight that public queries chose is
  post-processing.
  """

  depth: int = 100
  """Documents of each run that are fused; their scores set the scale."""
  weight: float
  """Fusion weight of the retriever, in [0, 1]."""
  chosen_on: str
  """Description of the queries that chose the weight."""
  num_queries: int
  """Queries that chose the weight; 0: it was set."""
  scores: tuple[tuple[float, float], ...]
  """Weights that were tried, each with its nDCG@10 on these queries."""

  def combine(self, lexical, dense, make_candidates, depth) -> trec.Run:
    """Fuses the first `self.depth` documents of both."""
    del make_candidates
    runs = (trec.first(run, self.depth) for run in (lexical, dense))
    return fusion.fuse(*runs, weight=self.weight, depth=depth)

  def describe(self) -> str:
    """Describes the weight."""
    return f"{self.weight:.0%} beside BM25"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking(JointSystem):
  """Learned weights of BM25's scores and a retriever's, from private
  queries."""

  features: tuple[str, ...]
  """Names of the weighted features: `retrieval.ranking.FEATURES`."""
  weights: tuple[float, ...]
  """Weight of each feature."""
  num_queries: int
  """Private queries that the weights were learned on."""
  kind: str = "weights"

  def combine(self, lexical, dense, make_candidates, depth) -> trec.Run:
    """Ranks the first `self.depth` documents of both by their features."""
    runs = (trec.first(run, self.depth) for run in (lexical, dense))
    return ranking.rank(make_candidates(*runs), self.weights, depth)

  def describe(self) -> str:
    """Describes who chose the weights, and whether with privacy."""
    with_dp = " with DP" if math.isfinite(self.statement.epsilon) else ""
    return f"weights by real queries{with_dp}"


def stands_on(
  system: JointSystem, retriever: results.Checkpoint, root: pathlib.Path
) -> bool:
  """Checks whether a system was made with a retriever as it is now.

  A public retriever that is trained anew keeps its empty ledger, and one of
  synthetic queries that of its generator: only the fingerprint tells them apart.

  Args:
    system: the system.
    retriever: the record of the retriever.
    root: the working directory.
  """
  trained = artifacts.read_fingerprint(root / retriever.directory)
  is_same_release = set(retriever.statement.ledger) <= set(
    system.statement.ledger
  )
  return is_same_release and system.retriever_fingerprint in ("", trained)


def find_retriever(root: pathlib.Path, row: rows.Row) -> pathlib.Path | None:
  """Returns the folder of a finished retriever; None: there is none.

  Args:
    root: the working directory.
    row: the row of the retriever.

  Raises:
    ValueError: if settings that were changed in between left two of this row.
  """
  finished = [
    folder
    for part in (root, root / results.PRIVATE)
    for stage in ("train_retriever", "learn_adapter")
    if artifacts.read_fingerprint(folder := part / stage / str(row)) is not None
  ]
  if len(finished) > 1:
    raise ValueError(
      f"{finished[0]} and {finished[1]}: expected one retriever of the row {row}, got"
      " two, of different settings: delete the one that you do not want"
    )
  return finished[0] if finished else None


def read_fingerprint(root: pathlib.Path, retriever: results.Checkpoint) -> str:
  """Returns the fingerprint of a finished retriever.

  Args:
    root: the working directory.
    retriever: the record of the retriever.
  """
  fingerprint = artifacts.read_fingerprint(root / retriever.directory)
  assert fingerprint is not None  # its record was just read
  return fingerprint


System = results.Checkpoint | JointSystem
