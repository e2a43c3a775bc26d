"""The stages of a run: one module each, which assigns `STAGE`."""

import importlib
import types
from collections.abc import Iterable

from synthq_jax.runtime import stage

__all__ = ["SUMMARIES", "get", "with_needs"]

SUMMARIES = types.MappingProxyType(
  {
    "prepare_data": (
      "turns raw data into documents (public), queries (private), splits and arrays"
    ),
    "prepare_test_set": (
      "prepares further test sets, such as BEIR's: public collections with queries"
    ),
    "finetune_dp": (
      "fine-tunes a public T5 with DP to write a query for a document"
    ),
    "generate": (
      "writes synthetic queries for documents of the whole public collection"
    ),
    "static_encoder": (
      "makes static vectors, from which retrievers start in a T5's place"
    ),
    "filter_queries": (
      "drops synthetic queries that teach a retriever little, if filters are set"
    ),
    "query_leakage": "looks for private queries among the synthetic ones",
    "train_retriever": (
      "trains a dual encoder on pairs, real or synthetic, without noise"
    ),
    "direct_dp": "trains a dual encoder on the real pairs with DP directly",
    "encode_documents": (
      "encodes the collection with every retriever, once for all that search it"
    ),
    "learn_map": (
      "learns a map of a public encoder's query vectors from pairs, without noise"
    ),
    "learn_adapter": (
      "learns with DP a linear map of a public encoder's vectors: an adapter"
    ),
    "fuse": "chooses how much a retriever weighs beside BM25",
    "learn_to_rank": (
      "learns with DP how BM25's scores, the length and a retriever's score weigh"
    ),
    "evaluate": "scores a system, or BM25, on a set of test queries",
    "audit": "asks a fine-tuned generator for the secrets of its canaries",
    "compare_queries": (
      "compares rows with each other, and synthetic with real queries"
    ),
    "release_scores": (
      "releases scores on private test queries with noise, so that they may be shared"
    ),
    "report": (
      "draws the shareable pages, the private one, and the table on the screen"
    ),
  }
)
"""Summary of each stage, in the order in which they run."""


def get(name: str) -> stage.Stage:
  """Imports a stage.

  Args:
    name: one of `SUMMARIES`.
  """
  return importlib.import_module(f"{__name__}.{name}").STAGE


def with_needs(names: Iterable[str]) -> tuple[str, ...]:
  """Returns stages with all stages that they need, in the order in which they
  run.

  Args:
    names: names of the stages.

  Raises:
    ValueError: if there is no such stage.
  """
  selected: set[str] = set()
  unknown = set(names) - set(SUMMARIES)
  if unknown:
    raise ValueError(
      f"expected stages of {', '.join(SUMMARIES)}, got {sorted(unknown)}"
    )

  def add(name: str) -> None:
    selected.add(name)
    for required in get(name).needs:
      add(required)

  for name in names:
    add(name)
  return tuple(name for name in SUMMARIES if name in selected)
