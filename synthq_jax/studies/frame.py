"""Runs a study: reads its data, makes what is not finished, writes one page.

Each result of a study is a job with a fingerprint of its own: what is finished
is read, so that a study that was killed goes on where it stopped, and another
setting makes anew only what depends on it.
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

__all__ = ["Config", "Job", "Study", "Task", "grouped", "part", "run", "words"]

_Item = TypeVar("_Item")
_BANNER = (
  "PRIVATE: computed from data that is not public. Do not share this page."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What every study is set by."""

  public_data: bool = False
  """Whether the data is public. If not, everything lies in private/."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What the functions of a study are given."""

  config: Any
  """The study's own `Config`."""
  folders: workspace.Folders
  """Of the working directory; a `Workspace` for a study with `needs_secret`."""
  root: pathlib.Path
  """Where results go: below private/ unless the data is public."""
  progress: bool
  """Whether bars are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One result of a study."""

  directory: pathlib.Path
  """Of the result; below private/ where the result must not be shared."""
  kind: type
  """Of the result, a frozen dataclass."""
  digest: str
  """Of everything the result depends on, and of no other result."""
  make: Callable[[], Any]
  """Returns the result."""
  state: pathlib.Path | None = None
  """Of an unfinished training; removed when the result is saved."""

  def finished(self) -> Any:
    """Makes and saves the result, or reads what is finished."""
    found = artifacts.find(self.directory, self.kind, self.digest)
    if found is None:
      found = self.make()
      artifacts.save(self.directory, found, self.digest)
    if self.state is not None:
      release_lib.remove(self.state)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A configuration, and what is done with it."""

  config: type
  """Of its settings, a subclass of `Config`."""
  prepare: Callable[[Task], Any]
  """Reads the data, from which the other functions work."""
  jobs: Callable[[Task, Any], Sequence[Job]]
  """Lists the results to be made, in order."""
  result: Callable[[Task, Any, Sequence[Any]], Any]
  """Puts the results of all jobs together: a frozen dataclass."""
  page: Callable[[Any], blocks.Page]
  """Shows the result."""
  num_shown: int
  """Parts of the page, from the first, whose tables the screen shows."""
  digests: Callable[[Any], tuple[str, ...]] = lambda data: ()
  """Of the data, for the fingerprint of the whole result, which may be shared
  where the results may."""
  needs_secret: bool = False
  """Whether it trains with privacy, and so is given the secret."""


def run(
  study: Study,
  config: Any,
  workdir: str | os.PathLike,
  *,
  progress: bool = True,
  on_accepted: Callable[[], None] = lambda: None,
) -> str:
  """Makes what is not finished of a study, then writes its page.

  Args:
    study: what to run.
    config: an instance of its `config`.
    workdir: gets the results of all jobs, study.md, study.svg and result.json,
      below private/ unless the data is public; one run at a time.
    progress: whether bars are shown.
    on_accepted: called once the working directory is ours.

  Returns:
    The tables, and where the page lies.

  Raises:
    ValueError: if another run uses the directory, or the data cannot be read.
  """
  with workspace.locked(workdir):
    folders = workspace.Folders(workdir)
    of_a_run = folders.public("prepare_data"), folders.private("prepare_data")
    if any(place.exists() for place in of_a_run):
      raise ValueError(
        f"{workdir}: expected a working directory of studies, got that of a run:"
        " give another --workdir"
      )
    on_accepted()
    if study.needs_secret:
      folders = workspace.Workspace(workdir, config.secret_seed)
    root = folders.public() if config.public_data else folders.private()
    root.mkdir(parents=True, exist_ok=True)
    if not config.public_data:
      checks.hide(root)
    task = Task(config=config, folders=folders, root=root, progress=progress)
    data = study.prepare(task)
    jobs = study.jobs(task, data)
    made = []
    with progress_lib.bar("", None, progress, unit=" results") as bar:
      for job in jobs:
        made.append(job.finished())
        bar.update()
    result = study.result(task, data, made)
    digest = artifacts.fingerprint(config, *study.digests(data))
    artifacts.save(root, result, digest)
    page = study.page(result)
    if not config.public_data:
      page = dataclasses.replace(page, banner=_BANNER)
    page_lib.write(page, root / "study.md")
  said = [*filter(None, [page.banner]), page_lib.text(page.introduction)]
  for part in page.parts[: study.num_shown]:
    shown = [b for b in part.blocks if not isinstance(b, blocks.Paragraph)]
    if any(isinstance(block, blocks.Table | blocks.Items) for block in shown):
      said.append(page_lib.text([blocks.Heading(text=part.title), *shown]))
  return "\n\n".join([*said, f"report: {root / 'study.md'}"])


def part(title: str, *content: blocks.Block) -> blocks.Part:
  """Returns a part of a page."""
  return blocks.Part(title=title, blocks=content)


def grouped(
  items: Iterable[_Item], key: Callable[[_Item], Any]
) -> dict[Any, list[_Item]]:
  """Returns items by their key, both in the order in which they came.

  >>> grouped(["a1", "b1", "a2"], lambda text: text[0])
  {'a': ['a1', 'a2'], 'b': ['b1']}
  """
  groups: dict[Any, list[_Item]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return groups


def words(study: str) -> words_lib.Words:
  """Returns the sentences of a study's page, from its words.toml."""
  return words_lib.Words(pathlib.Path(__file__).parent / study / "words.toml")
