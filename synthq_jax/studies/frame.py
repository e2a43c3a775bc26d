"""Runs a study: reads its data, makes unfinished results, writes one page.

Each result of a study is a job with its own fingerprint. A run reads finished
results, so an interrupted study resumes where it stopped. A changed setting
remakes only the results that depend on it.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from synthq_jax import checks
from synthq_jax.report import blocks
from synthq_jax.report import page as page_lib
from synthq_jax.report import words as words_lib
from synthq_jax.runtime import release as release_lib
from synthq_jax.runtime import workspace
from synthq_jax.storage import artifacts
from synthq_jax.training import progress as progress_lib

__all__ = [
  "Config",
  "Job",
  "Study",
  "Task",
  "group_by",
  "load_words",
  "make_part",
  "run",
]

_Item = TypeVar("_Item")
_BANNER = (
  "PRIVATE: computed from data that is not public. Do not share this page."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of every study."""

  public_data: bool = False
  """Whether the data is public. If not, all results are saved in private/."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Settings and folders that the functions of a study get."""

  config: Any
  """The study's own `Config`."""
  folders: workspace.Folders
  """Folders of the working directory; a `Workspace` if `needs_secret`."""
  root: pathlib.Path
  """Folder of results, below private/ unless the data is public."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One result of a study."""

  directory: pathlib.Path
  """Folder of the result; below private/ if the result must not be shared."""
  kind: type
  """Class of the result, a frozen dataclass."""
  digest: str
  """Fingerprint of everything the result depends on, and of no other result."""
  make: Callable[[], Any]
  """Function that makes the result."""
  state: pathlib.Path | None = None
  """Folder of an unfinished training; removed when the result is saved."""

  def load_or_make(self) -> Any:
    """Loads the finished result, or makes and saves it."""
    result = artifacts.find(self.directory, self.kind, self.digest)
    if result is None:
      result = self.make()
      artifacts.save(self.directory, result, self.digest)
    if self.state is not None:
      release_lib.remove(self.state)
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The configuration class and the functions of a study."""

  config: type
  """Class of its settings, a subclass of `Config`."""
  prepare: Callable[[Task], Any]
  """Reads the data for the other functions."""
  jobs: Callable[[Task, Any], Sequence[Job]]
  """Lists the results to make, in order."""
  result: Callable[[Task, Any, Sequence[Any]], Any]
  """Combines the results of all jobs into a frozen dataclass."""
  page: Callable[[Any], blocks.Page]
  """Makes the page of the combined result."""
  num_shown: int
  """Number of first parts of the page whose tables the screen shows."""
  digests: Callable[[Any], tuple[str, ...]] = lambda data: ()
  """Digests of the data, for the fingerprint of the combined result. The
  fingerprint may be shared if the results may."""
  needs_secret: bool = False
  """Whether the study trains with privacy and so needs the secret."""


def run(
  study: Study,
  config: Any,
  workdir: str | os.PathLike,
  *,
  on_accepted: Callable[[], None] = lambda: None,
) -> str:
  """Makes the unfinished results of a study, then writes its page.

  Args:
    study: study to run.
    config: an instance of `study.config`.
    workdir: folder of the results of all jobs, study.md, study.svg and
      result.json, below private/ unless the data is public. Only one run may use
      it at a time.
    on_accepted: function called once the settings fit the data and the working
      directory, before any result is made.

  Returns:
    The tables, and the path of the page.

  Raises:
    ValueError: if another run uses the directory, or the data cannot be read.
  """
  with workspace.locked(workdir):
    folders = workspace.Folders(workdir)
    of_a_run = folders.public("prepare_data"), folders.private("prepare_data")
    if any(path.exists() for path in of_a_run):
      raise ValueError(
        f"{workdir}: expected a working directory of studies, got that of a run:"
        " give another --workdir"
      )
    if study.needs_secret:
      folders = workspace.Workspace(workdir, config.secret_seed)
    root = folders.public() if config.public_data else folders.private()
    root.mkdir(parents=True, exist_ok=True)
    if not config.public_data:
      checks.hide(root)
    task = Task(config=config, folders=folders, root=root)
    data = study.prepare(task)
    jobs = study.jobs(task, data)
    on_accepted()
    results = []
    with progress_lib.bar("", None, unit=" results") as bar:
      for job in jobs:
        results.append(job.load_or_make())
        bar.update()
    result = study.result(task, data, results)
    digest = artifacts.fingerprint(config, *study.digests(data))
    artifacts.save(root, result, digest)
    page = study.page(result)
    if not config.public_data:
      page = dataclasses.replace(page, banner=_BANNER)
    page_lib.write(page, root / "study.md")
  texts = [*filter(None, [page.banner]), page_lib.text(page.introduction)]
  for part in page.parts[: study.num_shown]:
    shown = [b for b in part.blocks if not isinstance(b, blocks.Paragraph)]
    if any(isinstance(block, blocks.Table | blocks.Items) for block in shown):
      texts.append(page_lib.text([blocks.Heading(text=part.title), *shown]))
  return "\n\n".join([*texts, f"report: {root / 'study.md'}"])


def make_part(title: str, *content: blocks.Block) -> blocks.Part:
  """Makes a part of a page from its blocks."""
  return blocks.Part(title=title, blocks=content)


def group_by(
  items: Iterable[_Item], key: Callable[[_Item], Any]
) -> dict[Any, list[_Item]]:
  """Groups items by key; keys and items keep their order.

  >>> group_by(["a1", "b1", "a2"], lambda text: text[0])
  {'a': ['a1', 'a2'], 'b': ['b1']}
  """
  groups: dict[Any, list[_Item]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return groups


def load_words(study: str) -> words_lib.Words:
  """Loads the sentences of a study's page from its words.toml."""
  return words_lib.Words(pathlib.Path(__file__).parent / study / "words.toml")
