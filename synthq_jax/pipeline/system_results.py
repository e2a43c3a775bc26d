"""Defines what the stages of fused, expanded and ranking systems hand on.

A system is made of one row of training pairs, has that row's statement, and a
name that begins with the system's: "fused_synthetic_eps8".
"""

import dataclasses

from synthq_jax.pipeline import results
from synthq_jax.retrieval import fusion

__all__ = [
  "DENSE",
  "LEXICAL",
  "Cost",
  "Costs",
  "Expansion",
  "Fusion",
  "Ranking",
  "Reranker",
  "Reranking",
  "Vectors",
  "Weighed",
  "stands_on",
  "system_of",
]

DENSE, LEXICAL = "dense", "bm25"
"""The systems that a fusion is made of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors(results.Claimed):
  """The collection as one retriever encodes it, whose row and claim it has."""

  vectors: str
  """The folder that `retrieval.vector_files` opens."""
  num_bytes: int
  """Size of the vectors."""
  retriever: str
  """The retriever's fingerprint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighed(results.Claimed):
  """A trained model beside other scores, and how its weight was chosen.

  Private if the model or the queries that chose are. The claim is the model's: a
  weight that synthetic queries chose is post-processing.
  """

  weight: float
  """Share of the model, in [0, 1]."""
  chosen_on: str
  """The queries that chose the weight, in words."""
  num_queries: int
  """How many these are; 0: the weight was set."""
  scores: tuple[tuple[float, float], ...]
  """Each weight that was tried, and its nDCG@10 on these queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion(Weighed):
  """How BM25 and one retriever are fused."""

  SYSTEM = "fused"

  retriever: str
  """The row of the retriever."""
  method: fusion.Convex | fusion.ReciprocalRanks
  """How scores become comparable."""
  depth: int = 100
  """Documents of each run that are fused: scores are scaled by these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion(results.Claimed):
  """Queries that BM25 reads together with their documents; as private as these.

  The claim is that of the queries: post-processing.
  """

  SYSTEM = "expanded"
  FILE = "expansion.jsonl"
  """In the directory: `_id` of a document and its `queries`, in the order of
  the collection; documents without any are left out."""

  queries: str
  """Where the queries came from, in words."""
  queries_per_document: int | None
  """How many a document gets at most; None: all that it has."""
  repeat: int
  """How often each is read."""
  num_documents: int
  """Documents that got one."""
  num_queries: int
  """Queries that were added, repetitions not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reranker(results.Claimed):
  """A trained reranker, of the row of pairs that it was trained on.

  It is as private as the queries, and has their claim: post-processing.
  """

  kind: str
  """One of `rerankers.building.KINDS`."""
  num_pairs: int
  """Pairs that it was trained on, each with a negative."""
  num_parameters: int
  """Trained parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reranking(Weighed):
  """A reranker over the candidates of a first stage."""

  SYSTEM = "reranked"

  reranker: Reranker
  """What gives the new order."""
  first_stage: str
  """The row that gives the candidates."""
  depth: int
  """Candidates of each query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """What a system takes, on this machine."""

  name: str
  """Of the row, with the kind of index where it is not the exact one."""
  index_bytes: int
  """In memory."""
  encode_seconds: float | None
  """To encode the collection; None where nothing is encoded."""
  p50: float
  """Milliseconds in which half of the queries are answered, on one core."""
  p95: float
  """Milliseconds in which 95% of them are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs(results.Saved):
  """What every system takes; private, since some of them are."""

  num_queries: int
  """Synthetic queries that each was asked, one after the other."""
  rows: tuple[Cost, ...]
  """Rerankers are left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking(results.Claimed):
  """How scores of BM25 and of one retriever weigh, learned on private queries."""

  SYSTEM = "ltr"
  FILE = "map.npy"
  """In the directory where there is a map: float32 [dim, dim]."""

  retriever: str
  """The row of the retriever."""
  features: tuple[str, ...]
  """What is weighed: `retrieval.ranking.FEATURES`."""
  weights: tuple[float, ...]
  """One for each."""
  depth: int
  """Documents of BM25 and of the retriever that are ranked, each."""
  num_queries: int
  """Private queries that they were learned on."""
  kind: str = "weights"
  has_map: bool = False
  """Whether query @ map @ document of the retriever's vectors is added."""


def stands_on(made: results.Claimed, part: results.Claimed) -> bool:
  """Says whether a result counts this training of its part, not an earlier one."""
  return set(part.statement.ledger) <= set(made.statement.ledger)


def system_of(
  made: results.Checkpoint | Fusion | Expansion | Ranking | Reranking | None,
) -> str:
  """Names the system that a result is; None is BM25."""
  return LEXICAL if made is None else getattr(made, "SYSTEM", DENSE)
