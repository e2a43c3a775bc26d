"""Executes a plan: every stage with what it reads, or finds it finished.

Stages know nothing of each other; here each gets the results it reads, through
a `runner.Runner`, which skips what is finished.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import TypeVar

from synthq_jax.data import shipped
from synthq_jax.pipeline import (
  _auditing,
  _canaries,
  _fingerprints,
  _query_stages,
  _scoring,
  comparison_results,
  inputs,
  private_training,
  results,
)
from synthq_jax.pipeline import compare_queries as compare_queries_lib
from synthq_jax.pipeline import direct_dp as direct_dp_lib
from synthq_jax.pipeline import finetune_dp as finetune_dp_lib
from synthq_jax.pipeline import generate as generate_lib
from synthq_jax.pipeline import prepare_data as prepare_data_lib
from synthq_jax.pipeline import prepare_test_set as prepare_test_set_lib
from synthq_jax.pipeline import pretrain as pretrain_lib
from synthq_jax.pipeline import report as report_lib
from synthq_jax.pipeline import train_retriever as train_retriever_lib

__all__ = ["Pipeline"]

_Settings = TypeVar("_Settings")


class Pipeline:
  """One run: the stages in order, each with what it reads."""

  def __init__(self, config, space, runner, wanted, progress):
    self._config = config
    self._space = space
    self._runner = runner
    self._wanted = wanted
    self._progress = progress
    self.audits: list[results.AuditReport] = []
    self.leakage = None  # of type QueryLeakage, where the stage ran
    self._canaries = functools.cache(self._make_canaries)
    self._start = pathlib.Path(config.checkpoint or shipped.DIRECTORY)

  def run(self, on_accepted: Callable[[], None]) -> results.Report | None:
    """Runs every stage up to the last that is wanted."""
    inputs.check_shape(self._start, self._config.model)
    further = prepare_test_set_lib.expand(self._config.test_sets)
    self._prepare(on_accepted)
    if {"evaluate", "query_leakage"} & {*self._wanted}:  # a bad set ends here
      self._further = _scoring.test_sets(
        self._runner, self._space, self._prepared, further
      )
    self._pretrain()
    generators = self._generators() if self._wants("finetune_dp") else {}
    written = self._queries(generators) if self._wants("generate") else {}
    queries = written
    if self._wants("filter_queries") and self._config.filter_queries.is_wanted:
      queries = self._filtered(queries)
    leakage = self._leakage(written) if self._wants("query_leakage") else {}
    retrievers = (
      self._retrievers(queries) if self._wants("train_retriever") else {}
    )
    scores = self._scores(retrievers) if self._wants("evaluate") else {}
    audits = {}
    if self._wants("audit"):
      audits = self._audits(generators, written, queries, retrievers)
      self.audits = [report for report, _ in audits.values()]
    if not self._wants("compare_queries"):
      return None
    compared = {"compared": self._compared(queries, scores)}
    if not self._wants("report"):
      return None
    groups = (generators, queries, retrievers, compared, audits, leakage)
    digests = [digest for group in groups for _, digest in group.values()]
    values = [[value for value, _ in group.values()] for group in groups]
    made, _ = self._runner(
      "report",
      results.Report,
      (self._config.report, *self._encoder_data, *digests),
      lambda digest: report_lib.run(
        self._config.report,
        self._space,
        digest,
        prepared=self._prepared,
        comparison=values[3][0],
        synthetic=values[1],
        checkpoints=[*values[0], *values[2]],
        audits=values[4],
        leakage=self.leakage,
      ),
    )
    return made

  def _compared(self, queries, scores):
    settings = self._config.compare_queries
    digests = [*queries.values(), *scores.values()]
    return self._runner(
      "compare_queries",
      comparison_results.QueryComparison,
      (settings, *self._encoder_data, *(digest for _, digest in digests)),
      lambda digest: compare_queries_lib.run(
        settings,
        self._space,
        digest,
        prepared=self._prepared,
        evaluations=[value for value, _ in scores.values()],
        synthetic=[value for value, _ in queries.values()],
        encoder=self._encoder,
      ),
    )

  def _wants(self, stage: str) -> bool:
    return stage in self._wanted

  def _prepare(self, on_accepted: Callable[[], None]) -> None:
    settings = self._config.prepare_data
    if not settings.vocabulary:
      beside = inputs.vocabulary_beside(self._start)
      settings = dataclasses.replace(settings, vocabulary=str(beside))
    # Files are known by their content: data that was moved is the same data.
    kind = settings.source.partition(":")[0]
    parts = (
      dataclasses.replace(self._config.prepare_data, source=kind),
      _fingerprints.of_file(settings.vocabulary),
      self._space.seed("digest"),
      prepare_data_lib.source_of(settings).digest(),
    )
    if self._runner.will_make("prepare_data", parts):
      inputs.refuse_other_data(self._space, settings.source)
    on_accepted()
    self._prepared, digest = self._runner(
      "prepare_data",
      results.PreparedData,
      parts,
      lambda digest: prepare_data_lib.run(settings, self._space, digest),
    )
    self._data = (digest, self._prepared.digest)
    self._check_private()
    if self._wants("audit"):
      self._check_canaries()

  def _check_canaries(self) -> None:
    """Refuses canaries that no audit can ask for, before any work."""
    for seed, _ in self._seeds():
      _canaries.check(
        self._config, self._space, self._prepared, self._canaries(seed)
      )

  def _check_private(self) -> None:
    """Refuses private settings that this data rules out, before any work."""
    config, rows = self._config, self._config.rows
    wanted = []
    if rows.synthetic and self._wants("finetune_dp"):
      wanted.append(("finetune_dp.Config", config.finetune_dp))
    if rows.direct_dp and self._wants("train_retriever"):
      wanted += [("direct_dp.Config", one) for one in self._direct().values()]
    for name, settings in wanted:
      private_training.check(
        name,
        batch_size=settings.batch_size,
        delta=settings.delta,
        num_examples=self._prepared.num_queries[prepare_data_lib.TRAIN],
        noise_bands=getattr(settings, "noise_bands", 1),
      )

  def _pretrain(self) -> None:
    """Replaces the public checkpoint where a curriculum is given."""
    config = self._config
    if config.pretrain.phases and self._wants("pretrain"):
      self._runner(
        "pretrain",
        results.Checkpoint,
        (
          config.pretrain,
          *self._data,
          _fingerprints.of_checkpoint(self._start),
        ),
        lambda digest: pretrain_lib.run(
          config.pretrain,
          self._space,
          digest,
          prepared=self._prepared,
          start_from=self._start,
        ),
      )
      self._start = self._space.public("pretrain")
    if self._wants("finetune_dp"):
      inputs.check_vocabulary(self._start, self._space, self._prepared)
      self._data = (*self._data, _fingerprints.of_checkpoint(self._start))
    self._choose_encoder()

  def _choose_encoder(self) -> None:
    """Says what retrievers start from: the generator's checkpoint or another."""
    given = self._config.retriever_checkpoint
    self._encoder, self._encoder_data = self._start, self._data
    if given and self._wants("filter_queries"):
      self._encoder = pathlib.Path(given)
      inputs.check_vocabulary(self._encoder, self._space, self._prepared)
      own = _fingerprints.of_checkpoint(self._encoder)
      self._encoder_data = (*self._data, own)

  def _generators(self):
    config, made = self._config, {}
    for epsilon, (seed, _) in itertools.product(
      config.rows.synthetic, self._seeds()
    ):
      name = _name(epsilon) + seed
      made[name] = self._runner.together(
        f"finetune_dp/{name}",
        results.Checkpoint,
        (
          config.finetune_dp,
          float(epsilon),
          config.canaries,
          _fingerprints.versions(),
          *self._data,
        ),
        lambda digest, epsilon=epsilon, name=name, s=seed: finetune_dp_lib.run(
          config.finetune_dp,
          self._space,
          digest,
          prepared=self._prepared,
          start_from=self._start,
          epsilon=epsilon,
          name=name,
          canaries=self._canaries(s),
        ),
      )
    return made

  def _seeds(self) -> list[tuple[str, dict[str, int]]]:
    """Returns what names and settings of every repetition get."""
    seeds = self._config.seeds
    return [(f"_seed{s}", {"seed": s}) for s in seeds] or [("", {})]

  def _seeded(self, settings: _Settings, name: str) -> _Settings:
    """Returns the settings of a stage for the repetition of that name."""
    chosen = [change for end, change in self._seeds() if name.endswith(end)]
    return dataclasses.replace(settings, **chosen[0])

  def _make_canaries(self, seed: str):
    return _canaries.make(
      self._config.canaries, self._space, self._prepared, seed
    )

  def _queries(self, generators):
    config, wanted = self._config, dict(generators)
    if config.rows.public_only:
      public = {f"public_only{s}": (None, "public") for s, _ in self._seeds()}
      wanted = {**public, **wanted}
    return {
      name: self._runner.together(
        f"generate/{name}",
        results.SyntheticQueries,
        (self._seeded(config.generate, name), *self._data, source),
        lambda digest, name=name, generator=generator: generate_lib.run(
          self._seeded(config.generate, name),
          self._space,
          digest,
          prepared=self._prepared,
          start_from=self._start,
          generator=generator,
          name=name,
          progress=self._progress,
        ),
      )
      for name, (generator, source) in wanted.items()
    }

  def _filtered(self, queries):
    return _query_stages.filtered(
      self._config,
      self._runner,
      self._space,
      prepared=self._prepared,
      start_from=self._encoder,
      data=self._encoder_data,
      seeded=self._seeded,
      queries=queries,
    )

  def _leakage(self, written):
    made = _query_stages.leakage(
      self._config,
      self._runner,
      self._space,
      prepared=self._prepared,
      start_from=self._start,
      data=self._data,
      written=written,
      further=self._further,
      progress=self._progress,
    )
    self.leakage = next((found for found, _ in made.values()), None)
    return made

  def _retrievers(self, queries):
    config, made = self._config, {}
    if config.rows.untrained:
      made["untrained"] = self._untrained()
    sources = {
      name if name.startswith("public_only") else f"synthetic_{name}": value
      for name, value in queries.items()
    }
    is_audit = self._wants("audit") and not self._wants("evaluate")
    if is_audit:  # which reads those of private generators alone
      sources = {k: v for k, v in sources.items() if k.startswith("synthetic")}
    elif config.rows.original:
      for seed, _ in self._seeds():
        sources[f"original{seed}"] = (None, "original")
    for name, (synthetic, source) in sources.items():
      made[name] = self._runner.together(
        f"train_retriever/{name}",
        results.Checkpoint,
        (
          self._seeded(config.train_retriever, name),
          *self._encoder_data,
          source,
        ),
        lambda digest, name=name, queries=synthetic: train_retriever_lib.run(
          self._seeded(config.train_retriever, name),
          self._space,
          digest,
          prepared=self._prepared,
          start_from=self._encoder,
          synthetic=queries,
          name=name,
        ),
      )
    return made if is_audit else {**made, **self._direct_retrievers()}

  def _untrained(self):
    return self._runner(
      "train_retriever/untrained",
      results.Checkpoint,
      self._encoder_data,
      lambda digest: train_retriever_lib.run_untrained(
        self._space,
        digest,
        prepared=self._prepared,
        start_from=self._encoder,
        name="untrained",
      ),
    )

  def _direct(self) -> dict[str, direct_dp_lib.Config]:
    """Returns the methods of direct training, by the name of their rows."""
    methods = self._config.direct_dp_methods or (self._config.direct_dp,)
    return {"_".join(filter(None, ("direct_dp", m.label))): m for m in methods}

  def _direct_retrievers(self):
    made = {}
    for (row, method), epsilon, (seed, _) in itertools.product(
      self._direct().items(),
      filter(math.isfinite, self._config.rows.direct_dp),
      self._seeds(),
    ):
      name = f"{row}_{_name(epsilon)}{seed}"
      settings = self._seeded(method, name)
      made[name] = self._runner(
        f"train_retriever/{name}",
        results.Checkpoint,
        (
          settings,
          float(epsilon),
          _fingerprints.versions(),
          *self._encoder_data,
        ),
        lambda digest, name=name, e=epsilon, s=settings: direct_dp_lib.run(
          s,
          self._space,
          digest,
          prepared=self._prepared,
          start_from=self._encoder,
          epsilon=e,
          name=name,
        ),
      )
    return made

  def _scores(self, retrievers):
    return _scoring.evaluations(
      self._config,
      self._runner,
      self._space,
      prepared=self._prepared,
      data=self._data,
      further=self._further,
      retrievers=retrievers,
      progress=self._progress,
    )

  def _audits(self, generators, written, queries, retrievers):
    return _auditing.audits(
      self._config,
      self._runner,
      self._space,
      prepared=self._prepared,
      start_from=self._start,
      canaries={s: self._canaries(s) for s, _ in self._seeds()},
      generators=generators,
      written=written,
      queries=queries,
      retrievers=retrievers,
      progress=self._progress,
    )


def _name(epsilon: float) -> str:
  return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"
