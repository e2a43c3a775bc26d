"""The whole pipeline: which stages make which rows, in which order.

Stages know nothing of each other; here each gets the results it reads. A stage
whose fingerprint (its settings and the fingerprints of what it reads) equals
that of the result on disk is skipped.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from synthq_jax import artifacts
from synthq_jax.data import shipped
from synthq_jax.pipeline import evaluate as evaluate_lib
from synthq_jax.pipeline import finetune_dp as finetune_dp_lib
from synthq_jax.pipeline import generate as generate_lib
from synthq_jax.pipeline import inputs, results, workspace
from synthq_jax.pipeline import prepare_data as prepare_data_lib
from synthq_jax.pipeline import report as report_lib
from synthq_jax.pipeline import train_retriever as train_retriever_lib

__all__ = ["STAGES", "Rows", "RunConfig", "run"]

STAGES = (
    "prepare_data",
    "finetune_dp",
    "generate",
    "train_retriever",
    "evaluate",
    "report",
)

_FORMAT = 1  # raise when a stage's files change, so that old ones are remade
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """The rows of the table."""

  bm25: bool = True
  """BM25, which trains on nothing."""
  public_only: bool = True
  """Synthetic queries of the public checkpoint, before any private step."""
  original: bool = True
  """The real queries, without privacy."""
  synthetic: tuple[float, ...] = (8.0,)
  """Synthetic queries of generators fine-tuned at these epsilons."""
  direct_dp: tuple[float, ...] = (8.0,)
  """The real queries with DP directly, at these epsilons."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that `synthq run` does."""

  prepare_data: prepare_data_lib.Config = prepare_data_lib.Config()
  """Data, vocabulary, splits."""
  finetune_dp: finetune_dp_lib.Config = finetune_dp_lib.Config()
  """The generator's private fine-tuning; its epsilon is taken from the rows."""
  generate: generate_lib.Config = generate_lib.Config()
  """Sampling of queries."""
  train_retriever: train_retriever_lib.Config = train_retriever_lib.Config()
  """The retriever's recipe."""
  direct_dp: train_retriever_lib.DirectConfig = train_retriever_lib.DirectConfig()
  """The retriever trained with DP; its epsilon is taken from the rows."""
  evaluate: evaluate_lib.Config = evaluate_lib.Config()
  """Measures."""
  report: report_lib.Config = report_lib.Config()
  """The pages."""
  rows: Rows = Rows()
  """What the table compares."""
  secret_seed: int | None = None
  """Fixes batches and noise, for demonstrations on public data only; None
  draws a secret that stays in the working directory's private folder."""


class _Runner:
  """Makes results, or finds them finished."""

  def __init__(self, space: workspace.Workspace, say: Callable[[str], None]):
    self._space = space
    self._say = say
    self.made: list[str] = []

  def __call__(
      self,
      name: str,
      kind: type[_Result],
      parts: Sequence[Any],
      make: Callable[[str], _Result],
  ) -> tuple[_Result, str]:
    """Returns a result and its fingerprint."""
    digest = artifacts.fingerprint(_FORMAT, name, *parts)
    for place in (self._space.public(name), self._space.private(name)):
      if artifacts.read_fingerprint(place) == digest:
        self._say(f"[{name}] finished earlier, skipped")
        return artifacts.load(place, kind), digest
    for place in (self._space.public(name), self._space.private(name)):
      (place / artifacts.RESULT_NAME).unlink(missing_ok=True)
    self._say(f"[{name}] running")
    self.made.append(name)
    return make(digest), digest


def run(
    config: RunConfig,
    workdir: str | os.PathLike,
    *,
    stages: Sequence[str] | None = None,
    progress: bool = True,
) -> results.Report | None:
  """Runs the pipeline, or its first stages.

  Args:
    config: all settings.
    workdir: the working directory; finished results in it are used.
    stages: what is wanted, of `STAGES`; what it needs is run too. None: all.
    progress: whether bars are shown.

  Returns:
    The report, or None where it was not wanted.

  Raises:
    ValueError: if a setting or the data cannot be used.
  """
  unknown = set(stages or ()) - set(STAGES)
  if unknown:
    raise ValueError(f"expected stages of {STAGES}, got {sorted(unknown)}")
  last = max((STAGES.index(s) for s in stages), default=0) if stages else len(STAGES) - 1  # fmt: skip
  config = _with_progress(config, progress)
  space = workspace.Workspace(workdir, config.secret_seed)
  runner = _Runner(space, lambda text: print(text, flush=True))
  return _Pipeline(config, space, runner, last, progress).run()


class _Pipeline:
  """One run: the stages in order, each with what it reads."""

  def __init__(self, config, space, runner, last: int, progress: bool):
    self._config = config
    self._space = space
    self._runner = runner
    self._last = last
    self._progress = progress

  def run(self) -> results.Report | None:
    """Runs every stage up to the last that is wanted."""
    config, runner = self._config, self._runner
    prepared, data = runner(
        "prepare_data",
        results.PreparedData,
        (config.prepare_data, config.secret_seed, _shipped_digest()),
        lambda digest: prepare_data_lib.run(
            config.prepare_data, self._space, digest
        ),
    )
    self._prepared, self._data = prepared, (data, prepared.digest)
    generators = self._generators() if self._wants("finetune_dp") else {}
    queries = self._queries(generators) if self._wants("generate") else {}
    retrievers = self._retrievers(queries) if self._wants("train_retriever") else {}  # fmt: skip
    scores = self._evaluations(retrievers) if self._wants("evaluate") else {}
    if not self._wants("report"):
      return None
    made, _ = runner(
        "report",
        results.Report,
        (config.report, *(digest for *_, digest in _all(generators, queries, retrievers, scores))),  # fmt: skip
        lambda digest: self._report(digest, generators, queries, retrievers, scores),  # fmt: skip
    )
    return made

  def _wants(self, stage: str) -> bool:
    return STAGES.index(stage) <= self._last

  def _generators(self):
    made = {}
    for epsilon in self._config.rows.synthetic:
      settings = dataclasses.replace(self._config.finetune_dp, epsilon=epsilon)
      name = _name(epsilon)
      made[name] = self._runner(
          f"finetune_dp/{name}",
          results.Checkpoint,
          (settings, *self._data, _digest_of(settings.checkpoint)),
          lambda digest, settings=settings, name=name: finetune_dp_lib.run(
              settings, self._space, digest, prepared=self._prepared, name=name
          ),
      )
    return made

  def _queries(self, generators):
    wanted = dict(generators)
    if self._config.rows.public_only:
      wanted = {"public_only": (None, _shipped_digest()), **wanted}
    return {
        name: self._runner(
            f"generate/{name}",
            results.SyntheticQueries,
            (self._config.generate, *self._data, source),
            lambda digest, name=name, generator=generator: generate_lib.run(
                self._config.generate,
                self._space,
                digest,
                prepared=self._prepared,
                generator=generator,
                name=name,
                progress=self._progress,
            ),
        )
        for name, (generator, source) in wanted.items()
    }

  def _retrievers(self, queries):
    config, made = self._config, {}
    sources = {
        "public_only" if name == "public_only" else f"synthetic_{name}": value
        for name, value in queries.items()
    }
    if config.rows.original:
      sources["original"] = (None, "original")
    for name, (synthetic, source) in sources.items():
      made[name] = self._runner(
          f"train_retriever/{name}",
          results.Checkpoint,
          (config.train_retriever, *self._data, source,
           _digest_of(config.train_retriever.checkpoint)),
          lambda digest, name=name, synthetic=synthetic: train_retriever_lib.run(
              config.train_retriever, self._space, digest,
              prepared=self._prepared, synthetic=synthetic, name=name,
          ),
      )  # fmt: skip
    for epsilon in config.rows.direct_dp:
      settings = dataclasses.replace(config.direct_dp, epsilon=epsilon)
      name = f"direct_dp_{_name(epsilon)}"
      made[name] = self._runner(
          f"train_retriever/{name}",
          results.Checkpoint,
          (settings, *self._data, _digest_of(settings.checkpoint)),
          lambda digest, name=name, s=settings: train_retriever_lib.run_direct(
              s, self._space, digest, prepared=self._prepared, name=name
          ),
      )
    return made

  def _evaluations(self, retrievers):
    wanted = dict(retrievers)
    if self._config.rows.bm25:
      wanted = {"bm25": (None, "bm25"), **wanted}
    made = {}
    for test_set in evaluate_lib.TEST_SETS:
      for name, (retriever, source) in wanted.items():
        hidden = retriever and inputs.is_private(retriever.directory)
        if test_set == "public" and hidden:
          continue  # its scores could not be shared anyway
        key = f"evaluate/{test_set}/{name}"
        made[key] = self._runner(
            key,
            results.Evaluation,
            (self._config.evaluate, *self._data, source),
            lambda digest, n=name, r=retriever, t=test_set: evaluate_lib.run(
                self._config.evaluate, self._space, digest,
                prepared=self._prepared, retriever=r, name=n,
                label=_label(n, r), test_set=t,
            ),
        )  # fmt: skip
    return made

  def _report(self, digest, generators, queries, retrievers, scores):
    return report_lib.run(
        self._config.report,
        self._space,
        digest,
        prepared=self._prepared,
        evaluations=[value for value, _ in scores.values()],
        synthetic=[value for value, _ in queries.values()],
        checkpoints=[v for v, _ in (*generators.values(), *retrievers.values())],
    )


def _all(*groups):
  return [pair for group in groups for pair in group.values()]


def _name(epsilon: float) -> str:
  return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


def _label(name: str, retriever: results.Checkpoint | None) -> str:
  """Says in words what a row was trained on."""
  if retriever is None:
    return "BM25"
  if name == "public_only":
    return "public only (no private data)"
  if name == "original":
    return "original queries, no privacy"
  if name.startswith("synthetic"):
    return "DP-synthetic queries"
  return "original queries, DP directly"


def _digest_of(checkpoint: str) -> str:
  """Fingerprints the public checkpoint that a stage starts from."""
  import hashlib

  path = pathlib.Path(checkpoint or shipped.DIRECTORY) / "params.safetensors"
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _shipped_digest() -> str:
  return _digest_of("")


def _with_progress(config: RunConfig, progress: bool) -> RunConfig:
  """Hands the choice of progress bars to every loop."""

  def quiet(stage):
    settings = dataclasses.replace(stage.settings, progress=progress)
    return dataclasses.replace(stage, settings=settings)

  return dataclasses.replace(
      config,
      finetune_dp=quiet(config.finetune_dp),
      train_retriever=quiet(config.train_retriever),
      direct_dp=quiet(config.direct_dp),
  )
