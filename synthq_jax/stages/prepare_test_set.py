"""Prepares further test sets, such as BEIR's: public collections with queries.

Every retriever of the run is scored on them as it is: nothing is trained or
chosen on them.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from synthq_jax.data import beir, beir_sets, collection, compression, sources
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.retrieval import tables
from synthq_jax.runtime import (
  config_types,
  fingerprints,
  inputs,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.storage import array_files

__all__ = ["STAGE", "Inputs", "TestSet", "check_named", "expand", "run"]

_FOLDERS = ("beir", "msmarco", "hf", "anserini")
_BY_NAME = ("tfds", "seqio", "ir_datasets")
_KINDS = (*_FOLDERS, *_BY_NAME)
_SETTING = "RunConfig.test_sets"
_FOLDER_SPLITS = {"validation": "dev"}
"""What TFDS calls a split, and what it is called in a BEIR folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestSet:
  """A public collection with judged queries, not read yet."""

  __test__ = False  # for pytest

  name: str
  """In tables and file names; parts of a group of BEIR's are GROUP.PART."""
  source: sources.Source
  """Where it is."""
  split: str
  """The split that is scored."""
  drop_identical: bool
  """Whether results with the query's own id are dropped."""

  def __post_init__(self):
    if self.name in rows.OWN_TEST_SETS or not config_types.is_file_name(
      self.name
    ):
      raise ValueError(
        "RunConfig.test_sets must have names of letters, digits, dots, - and _,"
        f" other than {' and '.join(rows.OWN_TEST_SETS)}, got {self.name!r}: rename the"
        " folder"
      )


def expand(texts: Sequence[str]) -> tuple[TestSet, ...]:
  """Finds the sets that a setting names.

  A set is called as its folder, a part of a group of BEIR's with the group
  before it: cqadupstack/android is cqadupstack.android. A folder without a
  corpus stands for all sets below it. By convention a set called msmarco is
  scored on dev, the others on test; results with the query's own id are dropped
  for the sets of BEIR that hold their queries, and for sets that BEIR doesn't
  know.

  Args:
    texts: as `SOURCE`, e.g. "beir:DIR".

  Returns:
    The sets.

  Raises:
    ValueError: if there is none at a place, or two have one name.
  """
  found = []
  for text in texts:
    found += _named(sources.open(text, _SETTING, kinds=_KINDS))
  titles = [*beir_sets.GROUPS, tables.AVERAGE]
  names = [one.name for one in found]
  twice = [name for name in names if [*titles, *names].count(name) > 1]
  if twice:
    raise ValueError(
      f"RunConfig.test_sets must have different names, got {twice[0]!r} twice:"
      " rename a folder"
    )
  return tuple(found)


def names(texts: Sequence[str]) -> list[str]:
  """Names the sets of a setting; one under a URL, which is not opened, by it."""
  remote = [text for text in texts if sources.is_remote(text)]
  here = [text for text in texts if text not in remote]
  return [*(one.name for one in expand(here)), *remote]


def refuse_private(test_sets: Sequence[TestSet], source: str) -> None:
  """Refuses a run's private log as a test set, whose queries lie in the open.

  Args:
    test_sets: that are named beside it, or stand below a folder that is.
    source: of the run, as `prepare_data.Config.source`.

  Raises:
    ValueError: if one is at the log's place, or has the same files.
  """
  private = sources.open(source, "prepare_data.Config.source")
  alike = [one for one in test_sets if one.source.kind == private.kind]
  private = _without_corpus(private)
  place = os.path.realpath(private.place)
  is_there = os.path.exists(place) or private.kind == "seqio"
  digest = private.digest() if alike and is_there else None
  for one in alike:
    other = _without_corpus(one.source)
    if os.path.realpath(other.place) == place or (
      digest is not None and other.digest() == digest
    ):
      raise _is_private(one.name)


def _without_corpus(source: sources.Source) -> sources.Source:
  """Returns a task of queries, whichever task it takes its documents from."""
  if source.kind != "seqio":
    return source
  return dataclasses.replace(source, place=source.place.partition("@")[0])


def _is_private(name: str) -> ValueError:
  return ValueError(
    f"{_SETTING} must not hold the private log, got {name}, which is SOURCE or has"
    " its files: its queries and all rows' scores on them would lie in the open;"
    " leave it out (of a folder of sets: name the others), or say"
    " public_data=True if its queries are public"
  )


def check_named(texts: Sequence[str], private: str | None = None) -> None:
  """Refuses sets whose files are not there, or that are the private log.

  Nothing is downloaded: of sets under a URL, one with the log's URL is refused.

  Args:
    texts: as in `expand`.
    private: the run's source, where its queries are private.

  Raises:
    ValueError: as `expand` and `refuse_private`, or as reading the set would.
  """
  here = []
  for text in texts:
    if sources.is_remote(text):
      sources.check(text, _SETTING, kinds=_KINDS)
      if private and text.rstrip("/") == private.rstrip("/"):
        raise _is_private(text)
    else:
      here.append(text)
  further = expand(here)
  for one in further:
    sources.check(f"{one.source.kind}:{one.source.place}", _SETTING)
  if private and not sources.is_remote(private):
    refuse_private(further, private)


def _named(source: sources.Source) -> list[TestSet]:
  """Names a set, or all sets below a folder."""
  if source.kind in _BY_NAME:
    name = source.place.partition("@")[0]
    if source.kind == "seqio":  # a task, or the folder of its cache
      name = pathlib.Path(name).name
    return [_test_set(name.replace("/", "."), source)]
  root = pathlib.Path(source.place)
  if not root.is_dir():
    raise ValueError(
      f"RunConfig.test_sets: expected a folder, got none: {root}"
    )
  if source.kind != "beir" or _has_corpus(os.listdir(root)):
    return [_test_set(_called(root), source)]
  below = sorted(
    pathlib.Path(place)
    for place, _, names in os.walk(root, followlinks=True)
    if _has_corpus(names)
  )
  if not below:
    raise ValueError(
      f"RunConfig.test_sets: expected corpus.jsonl in {root} or in folders"
      " below it, got none: check the path"
    )
  return [
    _test_set(_called(path), dataclasses.replace(source, place=str(path)))
    for path in below
  ]


def _has_corpus(names: Sequence[str]) -> bool:
  return not {*compression.variants("corpus.jsonl")}.isdisjoint(names)


def _called(path: pathlib.Path) -> str:
  """Returns the name of a set: its folder's, and its group's before it."""
  *_, parent, name = ("", *path.absolute().parts)
  return f"{parent}.{name}" if parent in beir_sets.GROUPS else name


def _test_set(name: str, source: sources.Source) -> TestSet:
  """Applies BEIR's conventions; its folders have - where TFDS has _."""
  key = name.replace("-", "_").removeprefix("beir_" * (source.kind == "seqio"))
  known = {
    one.task.removeprefix("beir_") if source.kind == "seqio" else one.name: one
    for one in beir_sets.SETS
  }.get(key)
  split = known.scored if known else "test"
  return TestSet(
    name=name,
    source=source,
    split=_FOLDER_SPLITS.get(split, split),
    drop_identical=known.holds_queries if known else True,
  )


def _answers_itself(judged: collection.Qrels) -> bool:
  """Whether a document with its query's id is relevant: ids then say nothing."""
  return any(grades.get(query, 0) > 0 for query, grades in judged.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Whose vocabulary and lengths are used."""

  documents: results.PublicDocuments  # the run's own


def plan_rows(plan: rows.Plan) -> dict[str, TestSet | None]:
  """Plans the further test sets."""
  return {**plan.test_sets}


def make_job(
  run: runner.Run, test_set: TestSet | None
) -> stage.Job[Inputs] | None:
  """Returns the preparation of one set, which is given nothing that is private.

  Args:
    run: so far.
    test_set: None: it lies under a URL that is not opened.
  """
  if test_set is None:
    return None
  documents = run.documents
  return stage.Job(
    depends=(
      test_set.name,
      test_set.split,
      test_set.drop_identical,
      test_set.source.digest(),
      fingerprints.of_file(run.folders.root / documents.vocabulary),
      documents.extra_ids,
      documents.read_length,
      documents.passage_stride,
      documents.query_length,
    ),
    settings=test_set,
    inputs=Inputs(documents=documents),
  )


def run(task: stage.Task[TestSet, Inputs]) -> results.TestSet:
  """Tokenizes a set as the run's own data was.

  Formal guarantee:
    A function of the set, of the run's vocabulary and of settings: neither
    PreparedData nor the secret of the working directory is handed in.

  Returns:
    Where everything lies; nothing of it is private.

  Raises:
    ValueError: if the set cannot be read or has no judged query in its split.
  """
  test_set, documents = task.settings, task.inputs.documents
  data = test_set.source.read()
  try:
    every = data.judgements(test_set.split)
  except ValueError as error:
    said = str(error).partition(";")[0]
    raise ValueError(
      f"{test_set.source.place}: {said}, on which {test_set.name} is scored: add"
      " its judgements, or leave the set out of TEST_SETS"
    ) from error
  judged = {
    query: grades
    for query, grades in every.items()
    if any(grade > 0 for grade in grades.values())
  }
  if not judged:
    raise ValueError(
      f"{test_set.source.place}: expected judged queries in split"
      f" {test_set.split!r}, got none with a grade above 0"
    )
  folder = workspace.make_empty(task.folders.public(task.place))
  vocabulary = inputs.vocabulary(task.folders, documents)
  written = inputs.write_documents(
    data.documents,
    folder,
    vocabulary,
    length=documents.read_length,
    stride=documents.passage_stride,
  )
  queries = tuple(
    dataclasses.replace(query, client="")  # nobody here asks who it was
    for query in data.queries
    if query.id in judged
  )
  qrels = {"test": {query.id: judged[query.id] for query in queries}}
  beir.write_judged_queries(
    folder,
    collection.Collection(data.documents, queries, qrels, lacking=data.lacking),
  )
  array_files.save_npz(
    folder / results.TestSet.QUERIES,
    {
      "ids": array_files.as_texts([query.id for query in queries]),
      "tokens": vocabulary_lib.tokenize(
        vocabulary,
        [query.text for query in queries],
        length=documents.query_length,
      ),
    },
  )
  return results.TestSet(
    directory=task.folders.relative(folder),
    name=test_set.name,
    split=test_set.split,
    drop_identical=test_set.drop_identical and not _answers_itself(judged),
    num_documents=len(data.documents),
    num_queries=len(queries),
    cut_documents=written.cut,
  )


STAGE = stage.Stage(
  name="prepare_test_set",
  result=results.TestSet,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("prepare_data",),
)
