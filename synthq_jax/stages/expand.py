"""Gives documents their synthetic queries, for BM25 to read (doc2query).

Formal guarantee:
  Post-processing. A task holds the public documents and one set of queries,
  neither PreparedData nor the secret; how many queries a document gets and how
  often they are read are settings. So an expansion has the statement of its
  queries, and no vectors or weights go with it: whoever can index text can use
  it. The row `original` reads the private queries and has no guarantee.

References:
  Nogueira, Yang, Lin and Cho, "Document Expansion by Query Prediction", 2019.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.pipeline import config_types, inputs, results, system_results
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.stages import stage

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How many queries each document gets."""

  queries_per_document: int | None = None
  """At most; the first that were written. None: all."""
  repeat: int = 1
  """How often BM25 reads each: more is a greater weight beside the document."""
  filtered: bool = True
  """Whether those are left out that filter_queries drops."""

  def __post_init__(self):
    config_types.at_least(self, 1, "queries_per_document", "repeat")


def jobs(run):
  """Yields an expansion for each set of queries, where they are wanted."""
  config = run.config
  if not config.rows.expanded:
    return
  queries = run.queries if config.expand.filtered else run.rows("generate")
  sources: dict[str, tuple[Any, str]] = {
    name if name.startswith("public_only") else f"synthetic_{name}": made
    for name, made in queries.items()
  }
  if config.rows.original:
    sources["original"] = (None, "original")
  for name, (synthetic, source) in sources.items():
    yield stage.Job(
      name=name,
      depends=(config.expand, *run.data, source),
      settings=config.expand,
      inputs={
        "documents": run.documents if synthetic else run.prepared,
        "synthetic": synthetic,
      },
    )


def run(task: stage.Task) -> system_results.Expansion:
  """Writes the queries of each document, in the order of the collection.

  Args:
    task: its inputs are "documents", the public collection, or for `original`
      the prepared data; and "synthetic", the queries, None for the private ones
      of the train split.

  Returns:
    The expansion, under `private/` if the queries are.
  """
  config, folders = task.settings, task.folders
  synthetic = task.inputs["synthetic"]
  private = synthetic is None or results.is_private_path(synthetic.directory)
  directory = task.folder(private=private)
  added = _added(config, folders, task.inputs["documents"], synthetic)
  counts = [0, 0]
  path = directory / system_results.Expansion.FILE
  with artifacts.replacing(path) as stream:
    for line in added:
      counts[0] += 1
      counts[1] += len(line["queries"]) // config.repeat
      stream.write(f"{json.dumps(line)}\n".encode())
  return system_results.Expansion(
    directory=folders.relative(directory),
    name=f"{system_results.Expansion.SYSTEM}_{task.name}",
    statement=results.inherited(
      synthetic,
      real="Documents were expanded by the private queries without privacy.",
      synthetic="Documents were expanded by the synthetic queries: post-processing.",
    ),
    queries=_words(synthetic),
    queries_per_document=config.queries_per_document,
    repeat=config.repeat,
    num_documents=counts[0],
    num_queries=counts[1],
  )


def _added(config, folders, documents, synthetic) -> Iterator[dict[str, Any]]:
  """Yields the lines of the file, in the order of the collection."""
  ids = inputs.document_tokens(folders, documents).ids
  owners, texts = _queries(folders, documents, synthetic)
  order = np.argsort(owners, kind="stable")
  starts = np.flatnonzero(np.diff(owners[order], prepend=-1))
  for rows in np.split(order, starts[1:]):
    kept = rows[: config.queries_per_document]
    if len(kept):
      queries = [texts[row] for row in kept.tolist()]
      yield {
        "_id": str(ids[owners[rows[0]]]),
        "queries": queries * config.repeat,
      }


def _queries(
  folders, documents, synthetic: results.SyntheticQueries | None
) -> tuple[np.ndarray, list[str]]:
  """Reads the position of each query's document, and its text."""
  if synthetic is not None:
    folder = folders.root / synthetic.directory
    owners = inputs.arrays(folders, synthetic, folder / "tokens.npz")
    return owners["documents"], queries_lib.texts(folder)
  folder = folders.root / documents.private_directory
  arrays = inputs.arrays(folders, documents, folder / "train.npz")
  return arrays["documents"], queries_lib.texts(folder, arrays["ids"])


def _words(synthetic: results.SyntheticQueries | None) -> str:
  if synthetic is None:
    return "the real train queries"
  return f"the synthetic queries of {synthetic.name.replace('_', ' ')}"


STAGE = stage.of(
  __name__,
  needs=("filter_queries",),
)
