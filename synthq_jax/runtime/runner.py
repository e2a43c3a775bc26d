"""Runs stages: each result is made once, and found finished from then on.

A result whose fingerprint (its settings and the fingerprints of what it reads)
equals that of the one on disk is skipped. With several processes process 0
decides, and works alone while the others wait, or all of them work together.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import synthq_jax
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.data import shipped
from synthq_jax.privacy import ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  encoder_start,
  fingerprints,
  inputs,
  planted,
  results,
  rows,
  stage,
  system_results,
  workspace,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import distributed
from synthq_jax.training import progress as progress_lib

__all__ = ["Run"]

_FORMAT = 8  # raise when a stage's files change, so that old ones are remade


class Run:
  """One run: what is wanted, what is made so far, and what comes next of it."""

  def __init__(
    self,
    plan: rows.Plan,
    space: workspace.Workspace,
    stages: Sequence[stage.Stage],
    *,
    say: Callable[[str], None] = print,
    progress: bool = True,
  ):
    """Starts with nothing made.

    Args:
      plan: the settings, and the rows that follow from them.
      space: the working directory.
      stages: what is wanted, in the order in which they run.
      say: prints a line.
      progress: whether bars are shown.
    """
    self.plan = plan
    self.config = plan.config
    self.stages = tuple(stages)
    self.made: dict[str, dict[Any, stage.Made]] = {}
    self.folders = workspace.Folders(space.root)
    self.say = say
    self._space = space
    self._progress = progress
    self._of_checkpoint = functools.cache(fingerprints.of_checkpoint)

  # What jobs read.

  def get_results(self, name: str) -> Mapping[Any, stage.Made]:
    """Returns the results of a stage by row; none where it did not run."""
    return self.made.get(name, {})

  @property
  def generators(self) -> Mapping[rows.Row, stage.Made[results.Checkpoint]]:
    """The fine-tuned generators."""
    return self.get_results("finetune_dp")

  @property
  def queries(self) -> Mapping[rows.Row, stage.Made[results.SyntheticQueries]]:
    """The synthetic queries that filters kept."""
    return {
      **self.get_results("generate"),
      **self.get_results("filter_queries"),
    }

  @property
  def retrievers(self) -> Mapping[rows.Row, stage.Made[results.Checkpoint]]:
    """Every dense retriever."""
    names = ("train_retriever", "direct_dp", "learn_adapter")
    return _merge(map(self.get_results, names))

  def get_vectors(self, row: rows.Row) -> stage.Made[system_results.Vectors]:
    """Returns the document vectors of a retriever; an adapter has its base's."""
    made = self.retrievers[row].value
    base = made.base.row if isinstance(made, system_results.Adapter) else row
    return self.get_results("encode_documents")[base]

  @property
  def systems(self) -> Mapping[rows.Row, stage.Made]:
    """Everything that can be scored, but for BM25."""
    systems = ("fuse", "learn_to_rank")
    return _merge([self.retrievers, *map(self.get_results, systems)])

  @property
  def prepared(self) -> results.PreparedData:
    """The data."""
    return self.made["prepare_data"][None].value

  @property
  def documents(self) -> results.PublicDocuments:
    """What is public of the data."""
    return results.public_documents(self.prepared)

  @property
  def start(self) -> pathlib.Path:
    """The public checkpoint that generators start from."""
    return shipped.checkpoint(self.config.checkpoint)

  @property
  def t5(self) -> pathlib.Path:
    """The public T5 whose vectors MAUVE compares."""
    encoder = self.encoder
    is_t5 = self.config.encoder.folder and not encoder.has_tokenizer
    return pathlib.Path(encoder.folder) if is_t5 else self.start

  @property
  def encoder(self) -> encoder_start.EncoderStart:
    """Where retrievers start: an encoder, the generators' T5, or static vectors."""
    named = self.config.encoder
    if self.get_results("static_encoder"):
      place = self._space.public("static_encoder")
    else:
      place = shipped.checkpoint(named.folder) if named.folder else self.start
    return dataclasses.replace(named, folder=os.fspath(place))

  @property
  def data(self) -> tuple[str, ...]:
    """The fingerprints of the data and of `start`."""
    return (*self.data_alone, self._of_checkpoint(self.start))

  @property
  def data_alone(self) -> tuple[str, ...]:
    """The fingerprints of the data."""
    return (self._data, self.prepared.digest)

  @property
  def _data(self) -> str:
    """The fingerprint of the prepared data; "" before they are there."""
    made = self.get_results("prepare_data").get(None)
    return made.digest if made else ""

  @property
  def encoder_data(self) -> tuple[str, ...]:
    """The fingerprints of the data and of `encoder`; static vectors read no T5."""
    encoder = self.encoder
    made = self._of_checkpoint(pathlib.Path(encoder.folder))
    if self.get_results("static_encoder"):
      return (*self.data_alone, made)
    if not self.config.encoder.folder:
      return self.data
    if not encoder.has_tokenizer:
      return (*self.data, made)
    reads = dataclasses.replace(encoder, folder="")
    return (*self.data, made, artifacts.fingerprint(reads))

  @property
  def t5_data(self) -> tuple[str, ...]:
    """The fingerprints of the data, of `start` and of another `t5`."""
    if self.t5 == self.start:
      return self.data
    return (*self.data, self._of_checkpoint(self.t5))

  @property
  def secret_digest(self) -> list[int]:
    """What stands for the secret in the fingerprint of the data."""
    return self._space.seed("digest")

  def private_data(
    self, row: rows.Row, data: tuple[str, ...] | None = None
  ) -> tuple[str, ...]:
    """Returns what a training on private queries depends on, but for its own.

    Args:
      row: what it is made for; whether it may be shared counts, too.
      data: the fingerprints of the data and of what it starts from; None: `data`.
    """
    data = self.data if data is None else data
    place = ("compared",) if self.plan.is_compared(row) else ()
    return (fingerprints.versions(), *data, *place)

  @functools.cached_property
  def canaries(self) -> tuple[canaries_lib.Canary, ...]:
    """The canaries that generators are trained with; none where none are wanted."""
    return planted.make(self.config.canaries, self._space, self.prepared)

  def check_vocabulary(self, checkpoint: pathlib.Path) -> None:
    """Refuses a checkpoint that was trained with another vocabulary."""
    inputs.check_vocabulary(checkpoint, self._space, self.prepared)

  # What makes results.

  def execute(self, on_accepted: Callable[[], None]) -> None:
    """Makes all that is wanted.

    Args:
      on_accepted: called once the working directory is known to hold no results
        of other data, before anything is written to it.

    Raises:
      ValueError: if a setting or the data cannot be used.
    """
    alone = [one.name for one in self.stages if not one.together]
    if distributed.count() > 1 and alone:
      self.say(
        f"process 0 makes alone, while the others wait: {', '.join(alone)}."
        " Where waiting machines cost money, make these on one of them:"
        " `synthq STAGE` goes on with what is there"
      )
    for position, one in enumerate(self.stages):
      made = self.made[one.name] = {}
      for name, target in one.plan(self.plan).items():
        job = one.job(self, target)
        if job is None:
          continue
        if not position:
          self._accept(one, name, job)
          on_accepted()
        made[target] = self.make(one, name, job)
      if not position:
        for other in self.stages:
          other.check(self)
    self._say_others()

  def _say_others(self) -> None:
    """Names finished results that these settings do not ask for."""
    if "report" not in self.plan.wanted:
      return
    known = {_place(one) for one in self.stages}
    made = {
      _place(one, name)
      for one in self.stages
      for name, target in one.plan(self.plan).items()
      if target in self.get_results(one.name)
    }
    others = set()
    for path in self.folders.root.rglob(artifacts.RESULT_NAME):
      place = path.parent.relative_to(self.folders.root).as_posix()
      place = place.removeprefix(f"{results.PRIVATE}/")
      if place not in made and place.partition("/")[0] in known:
        others.add(place)
    if others:
      self.say(
        f"of other settings, left as they are: {', '.join(sorted(others))};"
        " delete what is not wanted: what may be shared of it counts as released"
      )

  def survey(self) -> Iterator[tuple[str, dict[str, bool] | None]]:
    """Yields each wanted stage with its rows, and whether they are there.

    Nothing is made. The rows of what follows a result that is not there are not
    known: None.
    """
    is_known = True
    for one in self.stages:
      self.made[one.name], is_finished = {}, {}
      for name, target in one.plan(self.plan).items() if is_known else ():
        if (job := one.job(self, target)) is None:
          continue
        place = _place(one, name)
        digest = _digest(place, job)
        is_finished[name] = self._is_there(place, digest)
        if is_finished[name]:
          value = self._load(place, one.result, digest)
          self.made[one.name][target] = _made(value, digest)
      yield one.name, is_finished if is_known else None
      is_known = is_known and all(is_finished.values())

  def _accept(self, one: stage.Stage, name: str, job: stage.Job) -> None:
    """Refuses to write over the results of other data."""
    place = _place(one, name)
    digest = _digest(place, job)
    if distributed.is_main() and not self._is_there(place, digest):
      inputs.refuse_other_data(self._space, job.settings.source)

  def make(self, one: stage.Stage, name: str, job: stage.Job) -> stage.Made:
    """Makes a result, or finds it finished.

    Args:
      one: the stage.
      name: the result's folder below the stage's; empty: the stage's own.
      job: the work.

    Returns:
      The result as it is on disk, in every process.

    Raises:
      ValueError: if the processes would make different results.
    """
    place = _place(one, name)
    digest = _digest(place, job)
    distributed.check_same(
      f"settings, data and versions for {place}",
      digest,
      "give all processes the same command, packages and --workdir",
    )
    if distributed.decided(place, lambda: self._is_there(place, digest)):
      value = self._load(place, one.result, digest)
      if distributed.is_main():
        self._check(place, digest, value)
        stage.tidy(self._folders(place), digest)  # of a kill after the result
      self.say(f"[{place}] finished earlier, skipped")
      return _made(value, digest)
    if distributed.is_main():
      for folder in self._folders(place):
        for name in (artifacts.RESULT_NAME, artifacts.FILES_NAME):
          artifacts.remove(folder / name)
    self.say(f"[{place}] running")
    start = time.monotonic()
    task = stage.Task(
      place=place,
      row=job.row,
      digest=digest,
      data=self._data,
      settings=job.settings,
      inputs=job.inputs,
      is_private=job.is_private,
      folders=self._space if one.needs_secret else self.folders,
      progress=self._progress,
    )
    if one.together or distributed.is_main():
      alone = contextlib.nullcontext if one.together else distributed.alone
      with alone():
        one.make(task, saves=distributed.is_main())
    distributed.barrier(place)
    seconds = time.monotonic() - start
    self.say(f"[{place}] done in {progress_lib.format_duration(seconds)}")
    # As it is on disk: a later run, which finds it there, gets the same value.
    return _made(self._load(place, one.result, digest), digest)

  def _folders(self, place: str) -> tuple[pathlib.Path, pathlib.Path]:
    return self._space.public(place), self._space.private(place)

  def _is_there(self, place: str, digest: str) -> bool:
    found = map(artifacts.read_fingerprint, self._folders(place))
    return digest in found

  def _check(self, place: str, digest: str, value: Any) -> None:
    """Refuses damaged files, and a training that the ledger has lost."""
    for folder in self._folders(place):
      if artifacts.read_fingerprint(folder) == digest:
        artifacts.check(folder)
    claim = getattr(value, "statement", None)
    if (
      not isinstance(claim, statement_lib.PrivacyStatement) or not claim.ledger
    ):
      return
    path = self._space.private(ledger.NAME)
    started = ledger.read(path).values() if ledger.begun(path) else ()
    ledger.mend(path)
    known = {entry.identifier for one in started for entry in one.ledger}
    for entry in claim.ledger:
      if entry.identifier not in known:
        raise ValueError(
          f"{path}: expected the training {entry.identifier}, whose result is in"
          f" {place}, got none: restore the ledger from a copy"
        )

  def _load(self, place: str, kind: type, digest: str) -> Any:
    for folder in self._folders(place):
      if artifacts.read_fingerprint(folder) == digest:
        return artifacts.load(folder, kind)
    if distributed.is_main():
      raise RuntimeError(f"{place} did not save its result: report this bug")
    raise ValueError(
      f"{self._space.root / place}: expected the result that process 0 has"
      " saved, got none: give all processes one --workdir on a file system that"
      " they share"
    )


def _merge(groups: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
  return {key: value for group in groups for key, value in group.items()}


def _made(value: Any, digest: str) -> stage.Made:
  return stage.Made(value, fingerprints.of_result(digest, value))


def _place(one: stage.Stage, name: str = "") -> str:
  return "/".join(filter(None, (one.folder or one.name, name)))


def _digest(place: str, job: stage.Job) -> str:
  version = synthq_jax.__version__
  return artifacts.fingerprint(_FORMAT, version, place, *job.depends)
