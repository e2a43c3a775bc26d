"""Runs stages: each result is made once, and skipped from then on.

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

import numpy as np

import synthq_jax
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.data import shipped
from synthq_jax.privacy import ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  encoder_start,
  fingerprints,
  model_files,
  prepared_files,
  results,
  rows,
  system_results,
  workspace,
)
from synthq_jax.runtime import stage as stage_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import distributed
from synthq_jax.training import progress as progress_lib

__all__ = ["Run"]

_FORMAT = 7
"""Version of the stages' files. A raise makes every result anew, private trainings
among them, with other noise: each is one more release. Results that only lack a new
field are refused by `artifacts.load` instead, which costs no release."""

_TEXTS_PER_CANARY = 2


class Run:
  """One run: its stages, its finished results, and the inputs of its next
  jobs."""

  def __init__(
    self,
    plan: rows.Plan,
    space: workspace.Workspace,
    stages: Sequence[stage_lib.Stage],
    *,
    say: Callable[[str], None] = print,
  ):
    """Creates a run without any result.

    Args:
      plan: the settings, and the rows that follow from them.
      space: the working directory.
      stages: the stages to run, in their order.
      say: prints a line.
    """
    self.plan = plan
    self.config = plan.config
    self.stages = tuple(stages)
    self.made: dict[str, dict[Any, stage_lib.Made]] = {}
    self.folders = workspace.Folders(space.root)
    self.say = say
    self._space = space
    self._of_checkpoint = functools.cache(fingerprints.of_checkpoint)

  # Inputs of jobs.

  def get_results(self, name: str) -> Mapping[Any, stage_lib.Made]:
    """Returns the results of a stage by row; empty if it did not run."""
    return self.made.get(name, {})

  @property
  def generators(self) -> Mapping[rows.Row, stage_lib.Made[results.Checkpoint]]:
    """The fine-tuned generators."""
    return self.get_results("finetune_dp")

  @property
  def queries(
    self,
  ) -> Mapping[rows.Row, stage_lib.Made[results.SyntheticQueries]]:
    """The synthetic queries that filters kept."""
    return {
      **self.get_results("generate"),
      **self.get_results("filter_queries"),
    }

  @property
  def retrievers(self) -> Mapping[rows.Row, stage_lib.Made[results.Checkpoint]]:
    """Every dense retriever."""
    names = ("train_retriever", "direct_dp", "learn_map", "learn_adapter")
    return _merge(map(self.get_results, names))

  def get_vectors(
    self, row: rows.Row
  ) -> stage_lib.Made[system_results.Vectors]:
    """Returns the document vectors of a retriever; an adapter has its
    base's."""
    encoder = self.retrievers[row].value.document_encoder
    return self.get_results("encode_documents")[encoder.row]

  @property
  def systems(self) -> Mapping[rows.Row, stage_lib.Made]:
    """Every system that can be scored, except BM25."""
    systems = ("fuse", "learn_to_rank")
    return _merge([self.retrievers, *map(self.get_results, systems)])

  @property
  def prepared(self) -> results.PreparedData:
    """The prepared data."""
    return self.made["prepare_data"][None].value

  @property
  def documents(self) -> results.PublicDocuments:
    """The public part of the data."""
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
    """Start of retrievers: an encoder, the generators' T5, or static
    vectors."""
    named = self.config.encoder
    if self.get_results("static_encoder"):
      folder = self._space.public("static_encoder")
    else:
      folder = shipped.checkpoint(named.folder) if named.folder else self.start
    return dataclasses.replace(named, folder=os.fspath(folder))

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
    """The fingerprint of the prepared data; "" before they exist."""
    prepared = self.get_results("prepare_data").get(None)
    return prepared.digest if prepared else ""

  @property
  def encoder_data(self) -> tuple[str, ...]:
    """The fingerprints of the data and of `encoder`; static vectors read no
    T5."""
    encoder = self.encoder
    encoder_digest = self._of_checkpoint(pathlib.Path(encoder.folder))
    if self.get_results("static_encoder"):
      return (*self.data_alone, encoder_digest)
    if not self.config.encoder.folder:
      return self.data
    if not encoder.has_tokenizer:
      return (*self.data, encoder_digest)
    tokenization = dataclasses.replace(encoder, folder="")
    return (*self.data, encoder_digest, artifacts.fingerprint(tokenization))

  @property
  def t5_data(self) -> tuple[str, ...]:
    """The fingerprints of the data, of `start` and of another `t5`."""
    if self.t5 == self.start:
      return self.data
    return (*self.data, self._of_checkpoint(self.t5))

  @property
  def secret_digest(self) -> list[int]:
    """Seed that represents the secret in the fingerprint of the data."""
    return self._space.seed("digest")

  def private_data(
    self, row: rows.Row, data: tuple[str, ...] | None = None
  ) -> tuple[str, ...]:
    """Returns the fingerprints that a training on private queries depends on.

    The training's own settings are not among them.

    Args:
      row: the row of the training; it also decides whether the result may be
        shared.
      data: the fingerprints of the data and of the starting checkpoint; None:
        `data`.
    """
    data = self.data if data is None else data
    marks = ("compared",) if self.plan.is_compared(row) else ()
    return (fingerprints.versions(), *data, *marks)

  @functools.cached_property
  def canaries(self) -> tuple[canaries_lib.Canary, ...]:
    """The canaries of a run, inserted and held out; empty if none are set.

    The secret of the working directory draws texts, secrets and coins. No private
    query is read.
    """
    settings, space, prepared = self.config.canaries, self._space, self.prepared
    if not settings.number:
      return ()
    cells = len(settings.kinds) * len(settings.repetitions)
    rng = np.random.default_rng(space.seed("canary texts"))
    num_texts = _TEXTS_PER_CANARY * cells * settings.number
    chosen = set(rng.permutation(prepared.num_documents)[:num_texts].tolist())
    # Lines are read one by one: the collection may not fit into memory.
    with open(
      prepared_files.corpus(space, prepared), encoding="utf-8"
    ) as stream:
      lines = [line for i, line in enumerate(stream) if i in chosen]
    texts = [prepared_files.parse_document_text(line) for line in lines]
    return canaries_lib.make(
      [text for text in texts if text.split()],
      prepared_files.vocabulary(space, prepared),
      number=settings.number,
      kinds=settings.kinds,
      repetitions=settings.repetitions,
      digits=settings.digits,
      seed=space.seed("canaries"),
    )

  def check_vocabulary(self, checkpoint: pathlib.Path) -> None:
    """Refuses a checkpoint that was trained with another vocabulary."""
    model_files.check_vocabulary(checkpoint, self._space, self.prepared)

  def check_encoder(self) -> None:
    """Refuses retrievers that start from a T5 with another vocabulary."""
    if self.config.encoder.folder and not self.encoder.has_tokenizer:
      self.check_vocabulary(pathlib.Path(self.encoder.folder))

  # Making of results.

  def execute(self, on_accepted: Callable[[], None]) -> None:
    """Makes the results of all stages.

    Args:
      on_accepted: called once the working directory is known to hold no results
        of other data, before anything is written to it.

    Raises:
      ValueError: if a setting or the data cannot be used.
    """
    main_only = [stage.name for stage in self.stages if not stage.together]
    if distributed.count() > 1 and main_only:
      self.say(
        f"process 0 alone makes, while the others wait: {', '.join(main_only)}."
        " If waiting machines cost money, run these stages on one of them:"
        " `synthq STAGE` continues from the finished results"
      )
    for position, stage in enumerate(self.stages):
      finished = self.made[stage.name] = {}
      for name, target in stage.plan(self.plan).items():
        job = stage.job(self, target)
        if job is None:
          continue
        if not position:
          self._accept(stage, name, job)
          on_accepted()
        finished[target] = self.make(stage, name, job)
      if distributed.is_main():
        stage.finish(self)
      if not position:
        for other in self.stages:
          other.check(self)

  def survey(self) -> Iterator[tuple[str, dict[str, bool] | None]]:
    """Yields each stage with its rows, and whether their results exist.

    No result is made. The rows of stages that follow a missing result are
    unknown: None.
    """
    is_known = True
    for stage in self.stages:
      self.made[stage.name], is_finished = {}, {}
      for name, target in stage.plan(self.plan).items() if is_known else ():
        if (job := stage.job(self, target)) is None:
          continue
        result_path = _get_result_path(stage, name)
        digest = _compute_digest(result_path, job)
        is_finished[name] = self._is_there(result_path, digest)
        if is_finished[name]:
          value = self._load(result_path, stage.result, digest)
          self.made[stage.name][target] = _make_result(value, digest)
      yield stage.name, is_finished if is_known else None
      is_known = is_known and all(is_finished.values())

  def _accept(
    self, stage: stage_lib.Stage, name: str, job: stage_lib.Job
  ) -> None:
    """Refuses to overwrite the results of other data."""
    result_path = _get_result_path(stage, name)
    digest = _compute_digest(result_path, job)
    if distributed.is_main() and not self._is_there(result_path, digest):
      prepared_files.refuse_other_data(self._space, job.settings.source)

  def make(
    self, stage: stage_lib.Stage, name: str, job: stage_lib.Job
  ) -> stage_lib.Made:
    """Makes a result, or loads it if it is finished.

    Args:
      stage: the stage.
      name: folder of the result below the stage's; empty: the stage's own.
      job: the work.

    Returns:
      The result as it is on disk, in every process.

    Raises:
      ValueError: if the processes would make different results.
    """
    result_path = _get_result_path(stage, name)
    digest = _compute_digest(result_path, job)
    distributed.check_same(
      f"settings, data and versions for {result_path}",
      digest,
      "give all processes the same command, packages and --workdir",
    )
    if distributed.decided(
      result_path, lambda: self._is_there(result_path, digest)
    ):
      value = self._load(result_path, stage.result, digest)
      if distributed.is_main():
        self._check(result_path, digest, value)
        # A kill may have come between the result and its tidying.
        stage_lib.tidy(self._folders(result_path), digest)
      self.say(f"[{result_path}] finished earlier, skipped")
      return _make_result(value, digest)
    if distributed.is_main():
      self._remove_report()
      for folder in self._folders(result_path):
        for name in (artifacts.RESULT_NAME, artifacts.FILES_NAME):
          artifacts.remove(folder / name)
    self.say(f"[{result_path}] running")
    start = time.monotonic()
    task = stage_lib.Task(
      result_path=result_path,
      row=job.row,
      digest=digest,
      data=self._data,
      settings=job.settings,
      inputs=job.inputs,
      is_private=job.row is not None and self.plan.is_compared(job.row),
      folders=self._space if stage.needs_secret else self.folders,
    )
    if stage.together or distributed.is_main():
      context = contextlib.nullcontext if stage.together else distributed.alone
      with context():
        stage.make(task, saves=distributed.is_main())
    distributed.barrier(result_path)
    seconds = time.monotonic() - start
    self.say(f"[{result_path}] done in {progress_lib.format_duration(seconds)}")
    # The value on disk: a later run, which loads it, gets the same one.
    return _make_result(self._load(result_path, stage.result, digest), digest)

  def _remove_report(self) -> None:
    """Removes the pages of earlier results, before a result is made.

    A run that is interrupted would leave a page whose joint claim and scores are
    those of the results before. The report of any settings is written again
    without a release.
    """
    folders = [each for each in self._folders("report") if each.exists()]
    for folder in folders:
      artifacts.remove(folder)
    if folders:
      self.say(
        "[report] of earlier results removed; `synthq run` writes it anew"
      )

  def _folders(self, result_path: str) -> tuple[pathlib.Path, pathlib.Path]:
    return self._space.public(result_path), self._space.private(result_path)

  def _is_there(self, result_path: str, digest: str) -> bool:
    digests = map(artifacts.read_fingerprint, self._folders(result_path))
    return digest in digests

  def _check(self, result_path: str, digest: str, value: Any) -> None:
    """Refuses damaged files, and a training that is missing in the ledger."""
    for folder in self._folders(result_path):
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
    identifiers = {
      entry.identifier for statement in started for entry in statement.ledger
    }
    for entry in claim.ledger:
      if entry.identifier not in identifiers:
        raise ValueError(
          f"{path}: expected the training {entry.identifier}, whose result is in"
          f" {result_path}, got none: restore the ledger from a copy"
        )

  def _load(self, result_path: str, kind: type, digest: str) -> Any:
    for folder in self._folders(result_path):
      if artifacts.read_fingerprint(folder) == digest:
        return artifacts.load(folder, kind)
    if distributed.is_main():
      raise RuntimeError(
        f"{result_path} did not save its result: report this bug"
      )
    raise ValueError(
      f"{self._space.root / result_path}: expected the result that process 0 has"
      " saved, got none: give all processes one --workdir on a file system that"
      " they share"
    )


def _merge(groups: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
  return {key: value for group in groups for key, value in group.items()}


def _make_result(value: Any, digest: str) -> stage_lib.Made:
  return stage_lib.Made(value, fingerprints.of_result(digest, value))


def _get_result_path(stage: stage_lib.Stage, name: str = "") -> str:
  return "/".join(filter(None, (stage.folder or stage.name, name)))


def _compute_digest(result_path: str, job: stage_lib.Job) -> str:
  version = synthq_jax.__version__
  return artifacts.fingerprint(_FORMAT, version, result_path, *job.depends)
