"""Which retriever is scored on which test set, and the sets that it takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from synthq_jax.pipeline import (
  _fingerprints,
  results,
  runner,
  workspace,
)
from synthq_jax.pipeline import evaluate as evaluate_lib
from synthq_jax.pipeline import prepare_test_set as prepare_test_set_lib
from synthq_jax.training import distributed

__all__ = ["evaluations", "test_sets"]

Made = dict[str, tuple[Any, str]]
"""Results with their fingerprints, by name."""


def test_sets(
  make: runner.Runner,
  space: workspace.Workspace,
  prepared: results.PreparedData,
  wanted: Sequence[prepare_test_set_lib.TestSet],
) -> Made:
  """Prepares the further test sets; the stage gets nothing that is private.

  Args:
    make: makes results, or finds them finished.
    space: the working directory.
    prepared: the run's own data, whose vocabulary and lengths are used.
    wanted: the sets.

  Returns:
    The sets, by name.
  """
  folders = workspace.Folders(space.root)
  documents = results.public_documents(prepared)
  how = (
    _fingerprints.of_file(folders.root / documents.vocabulary),
    documents.extra_ids,
    documents.document_length,
    documents.query_length,
  )
  return {
    one.name: make(
      f"prepare_test_set/{one.name}",
      results.TestSet,
      (one.name, one.split, one.drop_identical, one.source.digest(), *how),
      lambda digest, one=one: prepare_test_set_lib.run(
        one, folders, digest, documents=documents
      ),
    )
    for one in wanted
  }


def evaluations(
  config: Any,
  make: runner.Runner,
  space: workspace.Workspace,
  *,
  prepared: results.PreparedData,
  data: Sequence[str],
  further: Mapping[str, tuple[results.TestSet, str]],
  retrievers: Mapping[str, tuple[results.Checkpoint, str]],
  progress: bool,
) -> Made:
  """Scores every row on every test set.

  Retrievers trained without privacy are not scored on the public pseudo-queries,
  which nobody asked; on further sets they are, in the private folder.

  Args:
    config: the `plan.RunConfig`.
    make: makes results, or finds them finished.
    space: the working directory.
    prepared: the run's own data.
    data: the fingerprints of that data.
    further: public sets, with their fingerprints.
    retrievers: with their fingerprints.
    progress: whether bars are shown.

  Returns:
    The evaluations.
  """
  wanted: dict[str, tuple[Any, str]] = dict(retrievers)
  if config.rows.bm25:
    wanted = {"bm25": (None, "bm25"), **wanted}
  if not prepared.num_public_test and distributed.is_main():
    print("[evaluate/public] no document gives a pseudo-query: left out")
  sets: dict[str, tuple[Any, tuple[str, ...]]] = {
    name: (name, tuple(data)) for name in results.OWN_TEST_SETS
  }
  sets |= {name: (one, (digest,)) for name, (one, digest) in further.items()}
  made = {}
  for called, (test_set, of_set) in sets.items():
    for name, (retriever, source) in wanted.items():
      hidden = retriever and results.is_private_path(retriever.directory)
      if called == "public" and (hidden or not prepared.num_public_test):
        continue  # its scores could not be shared, or there is no such set
      key = f"evaluate/{called}/{name}"
      made[key] = make.together(
        key,
        results.Evaluation,
        (config.evaluate, *of_set, source),
        lambda digest, n=name, r=retriever, t=test_set: evaluate_lib.run(
          config.evaluate,
          space,
          digest,
          prepared=prepared,
          retriever=r,
          name=n,
          label=_label(n, r),
          test_set=t,
          progress=progress,
        ),
      )
  return made


def _label(name: str, retriever: results.Checkpoint | None) -> str:
  """Says in words what a row was trained on."""
  if retriever is None:
    return "nothing"
  if name == "untrained":
    return "nothing, the public encoder"
  if name.startswith("public_only"):
    return "queries written before any private step"
  if name.startswith("original"):
    return "real queries, no privacy"
  if name.startswith("synthetic"):
    return "synthetic queries"
  return "real queries, DP directly"
