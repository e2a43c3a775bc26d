"""Drops synthetic queries that teach a retriever little, if `top_k` is set.

The filter is round-trip consistency: a query is kept if BM25 finds its document
among the first of the whole collection.

Formal guarantee:
  Post-processing. The stage receives synthetic queries, public documents and
  settings. It takes neither PreparedData, nor a retriever, nor the secret of
  the working directory, and opens no file under `private/`, unless the queries
  are there. So the kept queries have the statement of the input queries. A
  retriever that was trained on real queries, or on another release, would break
  this: its choice would tell about them.

References:
  Dai et al. 2022, Promptagator, section 3.2 (round trip).
  Alberti et al. 2019, Synthetic QA Corpora Generation with Roundtrip
  Consistency.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from synthq_jax.data import files
from synthq_jax.generation import filters, text_measures
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  config_types,
  prepared_files,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib

__all__ = ["STAGE", "Config", "Inputs", "run"]

_NOTE = "They were filtered by public rules: post-processing."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(queries_lib.Config):
  """Settings of the filter; without it, the stage is left out."""

  GONE: ClassVar[Mapping[str, Any]] = {
    "ranker": "bm25", "steps": None,
    "copied_share": None, "copied_words": 6, "drop_truncated": False,
  }  # fmt: skip

  top_k: int | None = None
  """Rank within which the own document must be: keep queries whose document
  BM25 ranks among the first this many of the whole collection. None or 0: keep
  all."""

  def __post_init__(self):
    super().__post_init__()
    config_types.at_least(self, 0, "top_k")

  @property
  def is_wanted(self) -> bool:
    """Whether the filter runs."""
    return bool(self.top_k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Queries to filter, and their collection."""

  documents: results.PublicDocuments
  synthetic: results.SyntheticQueries  # all queries of the generator


def plan_rows(plan: rows.Plan) -> dict[str, rows.Row]:
  """Plans the filtering of each set of queries, if the filter is set."""
  written = plan.written if plan.config.filter_queries.is_wanted else ()
  return {row.queries: row for row in written}


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the filtering of one set of queries."""
  settings = run.config.filter_queries
  written = run.get_results("generate")[row]
  # The recipe changes nothing here. Without it, the private trainings behind the
  # filter would have other fingerprints, and be made again.
  recipe = run.config.train_retriever
  return stage.Job(
    row=row,
    depends=(settings, recipe, *run.data, written.digest),
    settings=settings,
    inputs=Inputs(documents=run.documents, synthetic=written.value),
  )


def _read_written(
  folders: workspace.Folders, ids: Any, synthetic: results.SyntheticQueries
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
  """Reads the lines and arrays of queries; refuses those of different queries."""
  folder = folders.root / synthetic.directory
  lines = [line for _, line in files.json_lines(folder / "queries.jsonl")]
  stored = prepared_files.arrays(folders, synthetic, folder / "tokens.npz")
  owners = stored["documents"]
  named = [line["document"] for line in lines]
  if named != [str(i) for i in ids[owners]] or np.any(np.diff(owners) < 0):
    raise ValueError(
      f"{folder}: expected queries.jsonl and tokens.npz of the same queries, in"
      " the order of their documents, got others: delete this folder, and the"
      " queries are written again"
    )
  return lines, stored


def run(task: stage.Task[Config, Inputs]) -> results.SyntheticQueries:
  """Filters the queries of one generator, and measures the rest.

  Returns:
    The kept queries, with all counts; under `private/` if the queries are.

  Raises:
    ValueError: if no query is left, or top_k is at least the size of the
      collection.
  """
  config, folders = task.settings, task.folders
  documents, synthetic = task.inputs.documents, task.inputs.synthetic
  assert config.top_k  # as planned
  if config.top_k >= documents.num_documents:
    raise ValueError(
      f"filter_queries.Config.top_k must be below {documents.num_documents},"
      f" the size of the collection, got {config.top_k}: it would keep all"
    )
  directory = task.folder(private=results.is_private_path(synthetic.directory))
  corpus = prepared_files.corpus(folders, documents)
  ids = prepared_files.document_tokens(folders, documents).ids
  index = queries_lib.index_of(ids, corpus)
  lines, stored = _read_written(folders, ids, synthetic)
  texts, named = ([x[k] for x in lines] for k in ("text", "document"))
  is_found = text_measures.own_document_gauge(
    texts, named, index, k=config.top_k
  )
  passed = filters.keep(texts, named, answerable=is_found)
  if not len(passed.indices):
    raise ValueError(
      f"filter_queries.Config left none of the {len(lines)} queries of"
      f" {synthetic.name}, got {passed.removed}: take a larger top_k (0 keeps all)"
    )
  lines = [lines[i] for i in passed.indices]
  stored = {name: rows[passed.indices] for name, rows in stored.items()}
  texts, owners = [line["text"] for line in lines], stored["documents"]
  queries_lib.save(
    directory,
    [line["_id"] for line in lines],
    texts,
    owners,
    ids,
    stored["tokens"],
    stored["passages"],
  )
  return dataclasses.replace(
    synthetic,
    directory=folders.relative(directory),
    statement=statement_lib.inherit(synthetic.statement, _NOTE),
    removed={
      k: synthetic.removed.get(k, 0) + n for k, n in passed.removed.items()
    },
    filters=(
      "Dropped were queries whose document BM25 does not rank among the first"
      f" {config.top_k} of the collection."
    ),
    **queries_lib.measure(
      texts,
      owners,
      index=index,
      corpus=corpus,
      config=config,
      num_examples=len(synthetic.examples),
    ),
  )


STAGE = stage.Stage(
  name="filter_queries",
  result=results.SyntheticQueries,
  config=Config,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("generate",),
)
