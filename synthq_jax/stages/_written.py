"""Reads the queries that a generator wrote, and saves those that filters kept.

Formal guarantee: none of its own; the kept queries are a function of the
queries and of the filter that chose among them.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np

from synthq_jax.data import files
from synthq_jax.retrieval import bm25
from synthq_jax.runtime import inputs, results, workspace
from synthq_jax.runtime import queries as queries_lib

__all__ = ["Written", "read", "save"]


class Written(NamedTuple):
  """Synthetic queries in the order of their documents."""

  names: list[str]
  texts: list[str]
  documents: list[str]  # ids
  tokens: np.ndarray  # [query, length]
  owners: np.ndarray  # [query], positions of the documents, ascending
  passages: np.ndarray  # [query], positions of their passages

  def take(self, indices: np.ndarray) -> "Written":
    """Returns the queries at these positions."""
    return Written(
      names=[self.names[i] for i in indices],
      texts=[self.texts[i] for i in indices],
      documents=[self.documents[i] for i in indices],
      tokens=self.tokens[indices],
      owners=self.owners[indices],
      passages=self.passages[indices],
    )


def read(
  folders: workspace.Folders, ids: Any, synthetic: results.SyntheticQueries
) -> Written:
  """Reads one set of queries; refuses two files of different queries."""
  folder = folders.root / synthetic.directory
  lines = [line for _, line in files.json_lines(folder / "queries.jsonl")]
  stored = inputs.arrays(folders, synthetic, folder / "tokens.npz")
  owners = stored["documents"]
  named = [line["document"] for line in lines]
  if named != [str(i) for i in ids[owners]] or np.any(np.diff(owners) < 0):
    raise ValueError(
      f"{folder}: expected queries.jsonl and tokens.npz of the same queries, in"
      " the order of their documents, got others: delete this folder, and the"
      " queries are written again"
    )
  return Written(
    names=[line["_id"] for line in lines],
    texts=[line["text"] for line in lines],
    documents=named,
    tokens=stored["tokens"],
    owners=owners,
    passages=stored["passages"],
  )


def save(
  folders: workspace.Folders,
  config: queries_lib.Config,
  synthetic: results.SyntheticQueries,
  remaining: Written,
  directory: pathlib.Path,
  *,
  index: bm25.Index,
  corpus: pathlib.Path,
  **changes: Any,
) -> results.SyntheticQueries:
  """Saves and measures the queries that filters kept.

  `changes` are the fields of the result that differ from those of `synthetic`.
  """
  queries_lib.save(
    directory,
    remaining.names,
    remaining.texts,
    remaining.owners,
    index.ids,
    remaining.tokens,
    remaining.passages,
  )
  return dataclasses.replace(
    synthetic,
    directory=folders.relative(directory),
    **changes,
    **queries_lib.measure(
      remaining.texts,
      remaining.owners,
      index=index,
      corpus=corpus,
      config=config,
      num_examples=len(synthetic.examples),
    ),
  )
