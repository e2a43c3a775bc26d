"""Prepares further test sets, such as BEIR's: public collections with queries.

Every retriever of the run is scored on them as it is: no stage trains or
chooses on them.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

from synthq_jax.data import beir, beir_sets, collection, files, sources
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.retrieval import tables
from synthq_jax.runtime import (
  config_types,
  fingerprints,
  prepared_files,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.storage import array_files

__all__ = ["STAGE", "Inputs", "TestSet", "check_named", "expand", "run"]

_FOLDERS = ("beir", "msmarco", "hf")
_BY_NAME = ("tfds", "seqio", "ir_datasets")
_KINDS = (*_FOLDERS, *_BY_NAME)
_SETTING = "RunConfig.test_sets"
_FOLDER_SPLITS = {"validation": "dev"}
"""Names of TFDS splits -> names in a BEIR folder."""
_IR_SPLIT = re.compile(r"\.(train|dev|test|v[0-9])$")
"""The end of an id of ir_datasets that is no part of a BEIR set's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestSet:
  """A public collection with judged queries, not read yet."""

  __test__ = False  # for pytest

  name: str
  """Name in tables and files; parts of a group of BEIR's are GROUP.PART."""
  source: sources.Source
  """Source of the set."""
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
  """Lists the test sets that a setting names.

  The name of a set is that of its folder; a part of a group of BEIR's has the
  group before it: cqadupstack/android is cqadupstack.android. A folder without
  a corpus stands for all sets below it. By convention a set called msmarco is
  scored on dev, the others on test. Results with the query's own id are dropped
  for the sets of BEIR that hold their queries, and for sets that BEIR doesn't
  know.

  Args:
    texts: sources in the form of `SOURCE`, e.g. "beir:DIR".

  Returns:
    The sets.

  Raises:
    ValueError: if a folder has no set, or two sets have one name.
  """
  test_sets = []
  for text in texts:
    test_sets += _name_sets(sources.open(text, _SETTING, kinds=_KINDS))
  titles = [*beir_sets.GROUPS, tables.AVERAGE]
  names = [test_set.name for test_set in test_sets]
  twice = [name for name in names if [*titles, *names].count(name) > 1]
  if twice:
    raise ValueError(
      f"RunConfig.test_sets must have different names, got {twice[0]!r} twice:"
      " rename a folder"
    )
  return tuple(test_sets)


def list_names(texts: Sequence[str]) -> list[str]:
  """Lists the names of a setting's sets; a URL, which is not opened, names its
  set."""
  remote = [text for text in texts if sources.is_remote(text)]
  here = [text for text in texts if text not in remote]
  return [*(test_set.name for test_set in expand(here)), *remote]


def refuse_private(test_sets: Sequence[TestSet], source: str) -> None:
  """Refuses a run's private log as a test set, whose queries would be public.

  Args:
    test_sets: sets that the setting names, or that lie below a folder that it
      names.
    source: source of the run, as `prepare_data.Config.source`.

  Raises:
    ValueError: if a set is at the log's path, or has the same files.
  """
  private = sources.open(source, "prepare_data.Config.source")
  kinds = _FOLDERS if private.kind in _FOLDERS else (private.kind,)
  alike = [each for each in test_sets if each.source.kind in kinds]
  private = _without_corpus(private)
  private_path = os.path.realpath(private.location)
  is_there = os.path.exists(private_path) or private.kind == "seqio"
  digest = private.digest() if alike and is_there else None
  for test_set in alike:
    other = _without_corpus(test_set.source)
    if os.path.realpath(other.location) == private_path or (
      digest is not None and other.digest() == digest
    ):
      raise _make_error(test_set.name)


def _without_corpus(source: sources.Source) -> sources.Source:
  """Returns a task of queries without the task of its documents."""
  if source.kind != "seqio":
    return source
  return dataclasses.replace(source, location=source.location.partition("@")[0])


def _get_location(text: str) -> str:
  """Returns a source's URL; `hf:` reads folders of `beir:`, too."""
  return text.partition(":")[2].rstrip("/")


def _make_error(name: str) -> ValueError:
  return ValueError(
    f"{_SETTING} must not hold the private log, got {name}, which is SOURCE or has"
    " its files: its queries and all rows' scores on them would lie in the open;"
    " leave it out (of a folder of sets: name the others), or say"
    " public_data=True if its queries are public"
  )


def check_named(texts: Sequence[str], private: str | None = None) -> None:
  """Refuses sets whose files are missing, or that are the private log.

  Nothing is downloaded; of sets under a URL, one with the log's URL is refused.

  Args:
    texts: sources, see `expand`.
    private: the run's source, if its queries are private.

  Raises:
    ValueError: as `expand` and `refuse_private` do, or as reading the set
      would.
  """
  here = []
  for text in texts:
    if sources.is_remote(text):
      sources.check(text, _SETTING, kinds=_KINDS)
      if private and _get_location(text) == _get_location(private):
        raise _make_error(text)
    else:
      here.append(text)
  test_sets = expand(here)
  for test_set in test_sets:
    sources.check(
      f"{test_set.source.kind}:{test_set.source.location}", _SETTING
    )
  if private and not sources.is_remote(private):
    refuse_private(test_sets, private)


def _name_sets(source: sources.Source) -> list[TestSet]:
  """Lists one set, or all sets below a folder."""
  if source.kind in _BY_NAME:
    name = source.location.partition("@")[0]
    if source.kind == "seqio":  # a task, or the folder of its cache
      name = pathlib.Path(name).name
    return [_make_test_set(name.replace("/", "."), source)]
  root = pathlib.Path(source.location)
  if not root.is_dir():
    raise ValueError(
      f"RunConfig.test_sets: expected a folder, got none: {root}"
    )
  if source.kind != "beir" or _has_corpus(os.listdir(root)):
    return [_make_test_set(_get_name(root), source)]
  below = sorted(
    pathlib.Path(folder)
    for folder, _, names in os.walk(root, followlinks=True)
    if _has_corpus(names)
  )
  if not below:
    raise ValueError(
      f"RunConfig.test_sets: expected corpus.jsonl in {root} or in folders"
      " below it, got none: check the path"
    )
  return [
    _make_test_set(
      _get_name(path), dataclasses.replace(source, location=str(path))
    )
    for path in below
  ]


def _has_corpus(names: Sequence[str]) -> bool:
  return not {*files.variants("corpus.jsonl")}.isdisjoint(names)


def _get_name(path: pathlib.Path) -> str:
  """Returns the name of a set: its folder's, after its group's."""
  *_, parent, name = ("", *path.absolute().parts)
  return f"{parent}.{name}" if parent in beir_sets.GROUPS else name


def _make_test_set(name: str, source: sources.Source) -> TestSet:
  """Applies BEIR's conventions; its folders have - where TFDS has _."""
  key = name.replace("-", "_").removeprefix("beir_" * (source.kind == "seqio"))
  has_one_split = source.kind == "ir_datasets"  # its ids name set and split
  if has_one_split and key.startswith("beir."):
    key = _IR_SPLIT.sub("", key.removeprefix("beir."))
  beir_set = {
    each.task.removeprefix("beir_")
    if source.kind == "seqio"
    else each.name: each
    for each in beir_sets.SETS
  }.get(key)
  split = beir_set.scored if beir_set and not has_one_split else "test"
  return TestSet(
    name=name,
    source=source,
    split=_FOLDER_SPLITS.get(split, split),
    drop_identical=beir_set.holds_queries if beir_set else True,
  )


def _answers_itself(judged: collection.Qrels) -> bool:
  """Checks whether a document with its query's id is relevant: ids then tell
  nothing."""
  return any(grades.get(query, 0) > 0 for query, grades in judged.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """The run's documents, whose vocabulary and lengths are used."""

  documents: results.PublicDocuments  # the run's own


def make_job(
  run: runner.Run, test_set: TestSet | None
) -> stage.Job[Inputs] | None:
  """Returns the preparation of one set; it receives no private data.

  Args:
    run: the run so far.
    test_set: the set; None: it lies under a URL that is not opened.
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
  """Tokenizes a set like the run's own data.

  Formal guarantee:
    A function of the set, of the run's vocabulary and of settings: the task
    holds neither PreparedData nor the secret of the working directory.

  Returns:
    The folder of the set and its counts; none of it is private.

  Raises:
    ValueError: if the set cannot be read or has no judged query in its split.
  """
  test_set, documents = task.settings, task.inputs.documents
  data = test_set.source.read()
  try:
    every = data.judgements(test_set.split)
  except ValueError as error:
    reason = str(error).partition(";")[0]
    raise ValueError(
      f"{test_set.source.location}: {reason}, on which {test_set.name} is scored: add"
      " its judgements, or leave the set out of TEST_SETS"
    ) from error
  judged = {
    query: grades
    for query, grades in every.items()
    if any(grade > 0 for grade in grades.values())
  }
  if not judged:
    raise ValueError(
      f"{test_set.source.location}: expected judged queries in split"
      f" {test_set.split!r}, got none with a grade above 0"
    )
  folder = workspace.make_empty(task.folders.public(task.result_path))
  vocabulary = prepared_files.vocabulary(task.folders, documents)
  written = prepared_files.write_documents(
    data.documents,
    folder,
    vocabulary,
    length=documents.read_length,
    stride=documents.passage_stride,
  )
  queries = tuple(
    dataclasses.replace(query, client="")  # users do not matter here
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
  plan=lambda plan: {**plan.test_sets},
  job=make_job,
  run=run,
  needs=("prepare_data",),
)
