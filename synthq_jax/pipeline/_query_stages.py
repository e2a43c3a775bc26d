"""What is done with written queries: filters, and the check for leaks."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from synthq_jax.pipeline import (
  _query_leakage_results,
  results,
  runner,
  workspace,
)
from synthq_jax.pipeline import filter_queries as filter_queries_lib
from synthq_jax.pipeline import query_leakage as query_leakage_lib

__all__ = ["LEAKAGE_NEEDS", "filtered", "leakage"]

LEAKAGE_NEEDS = frozenset(
  {"prepare_data", "pretrain", "finetune_dp", "generate", "query_leakage"}
)
"""The stages whose results the check for leaks reads, and itself."""

Made = Mapping[str, tuple[Any, str]]
"""Results with their fingerprints, by name."""


def filtered(
  config: Any,
  make: runner.Runner,
  space: workspace.Workspace,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  data: Sequence[str],
  seeded: Callable[[Any, str], Any],
  queries: Made,
) -> Made:
  """Filters the queries; the stage gets nothing that is private.

  Args:
    config: the `plan.RunConfig`.
    make: makes results, or finds them finished.
    space: the working directory.
    prepared: of which the public part is handed on.
    start_from: the public checkpoint of the filter's retriever.
    data: the fingerprints of data and checkpoint.
    seeded: gives settings the seed of the repetition of that name.
    queries: of each generator.

  Returns:
    What stays of them.
  """
  folders = workspace.Folders(space.root)
  documents = results.public_documents(prepared)
  made = {}
  for name, (written, source) in queries.items():
    settings = seeded(config.filter_queries, name)
    recipe = seeded(config.train_retriever, name)
    made[name] = make(
      f"filter_queries/{name}",
      results.SyntheticQueries,
      (settings, recipe, *data, source),
      lambda digest, s=settings, r=recipe, w=written: filter_queries_lib.run(
        s,
        folders,
        digest,
        documents=documents,
        start_from=start_from,
        synthetic=w,
        recipe=r,
      ),
    )
  return made


def leakage(
  config: Any,
  make: runner.Runner,
  space: workspace.Workspace,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  data: Sequence[str],
  written: Made,
  further: Made,
  progress: bool,
) -> Made:
  """Looks for real queries among the written ones.

  Args:
    config: the `plan.RunConfig`.
    make: makes results, or finds them finished.
    space: the working directory.
    prepared: the private queries.
    start_from: the public checkpoint.
    data: the fingerprints of both.
    written: what each generator wrote, before any filter of a stage.
    further: the public test sets.
    progress: whether a bar is shown.

  Returns:
    The result under its name; nothing where nobody wrote, or the stage is
    turned off.
  """
  if not written or not config.query_leakage.enabled:
    return {}
  made = make(
    "query_leakage",
    _query_leakage_results.QueryLeakage,
    (
      config.query_leakage,
      *data,
      {name: digest for name, (_, digest) in written.items()},
      {name: digest for name, (_, digest) in further.items()},
    ),
    lambda digest: query_leakage_lib.run(
      config.query_leakage,
      space,
      digest,
      prepared=prepared,
      encoder=start_from,
      synthetic=[one for one, _ in written.values()],
      test_sets=[one for one, _ in further.values()],
      progress=progress,
    ),
  )
  return {"query_leakage": made}
