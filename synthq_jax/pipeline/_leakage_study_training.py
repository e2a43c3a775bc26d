"""One training of the study of planted leakage, and what it ranks."""

import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax
import tqdm

from synthq_jax import artifacts
from synthq_jax.leakage import rerankers, splits
from synthq_jax.pipeline import (
  _fingerprints,
  _leakage_study_data,
  _leakage_study_models,
  _leakage_study_results,
)
from synthq_jax.retrieval import measures, trec

__all__ = ["RUN", "all_trainings", "folder"]

RUN = "run.txt"
"""The candidates in the order of a training."""


def all_trainings(
  config: Any,
  root: pathlib.Path,
  data: _leakage_study_data.Data,
  progress: bool,
) -> Iterator[_leakage_study_results.Training]:
  """Yields every training, done now or before.

  Args:
    config: a `leakage_study.Config`.
    root: where folders of trainings go.
    data: test queries and training sets.
    progress: whether bars are shown.
  """
  total = sum(model.seeds for model in config.models)
  total *= len(config.sizes) * len(splits.NAMES)
  with tqdm.tqdm(total=total, unit=" trainings", disable=not progress) as bar:
    for model in config.models:
      # One object for all trainings of a model: programs are compiled once.
      reranker = _leakage_study_models.build(model, data.documents)
      start = _leakage_study_models.digest(model)
      for seed in range(model.seeds):
        for size in config.sizes:
          for leakage in splits.NAMES:
            job = _Job(
              config,
              model,
              reranker,
              start,
              leakage,
              size,
              seed,
              data,
              root,
              progress,
            )
            yield job.finished()
            bar.update()


def folder(
  root: pathlib.Path, model: str, leakage: str, size: int, seed: int
) -> pathlib.Path:
  """Returns where a training lies."""
  kind = leakage.replace(" ", "_")
  return root / "trainings" / model / f"{kind}_{size}_seed{seed}"


@dataclasses.dataclass(frozen=True)
class _Job:
  """One reranker, kind of leakage, size and seed."""

  config: Any
  model: _leakage_study_models.Model
  reranker: rerankers.Reranker
  start: str  # digest of what the reranker starts from
  leakage: str
  size: int
  seed: int
  data: _leakage_study_data.Data
  root: pathlib.Path
  progress: bool

  @property
  def directory(self) -> pathlib.Path:
    return folder(
      self.root, self.model.name, self.leakage, self.size, self.seed
    )

  @functools.cached_property
  def digest(self) -> str:
    """Of everything the training depends on, and of no other one."""
    return artifacts.fingerprint(
      "leakage_study",
      dataclasses.replace(self.model, seeds=1),
      self.start,
      self.leakage,
      self.size,
      self.seed,
      self.config.num_leaked,
      self.config.depth,
      list(self.config.measures),
      self.data.digest,
      _fingerprints.versions(),
    )

  def finished(self) -> _leakage_study_results.Training:
    """Trains and reranks, or reads what is finished."""
    if artifacts.read_fingerprint(self.directory) == self.digest:
      return artifacts.load(self.directory, _leakage_study_results.Training)
    split = self.data.split(self.leakage, self.size, self.seed)
    state = self.directory / f"state_{self.digest}"
    began = time.monotonic()
    params = rerankers.train(
      self.reranker,
      [self._instance(each) for each in split.instances],
      recipe=self.model.recipe,
      seed=self.seed,
      directory=state,
      progress=self.progress,
    )
    trained = time.monotonic()
    run = rerankers.rerank(
      self.reranker,
      params,
      self.data.candidates,
      self.data.queries,
      self.data.documents,
      depth=self.config.depth,
    )
    trec.write_run(self.directory / RUN, run)
    # What is scored is the file, in which scores fall strictly.
    run = trec.read_run(self.directory / RUN)
    found = measures.evaluate(
      self.data.qrels, run, self.config.measures, drop_identical=False
    )
    result = _leakage_study_results.Training(
      model=self.model.name,
      leakage=self.leakage,
      size=self.size,
      seed=self.seed,
      manifest=splits.manifest(split, self.data.documents),
      measures=found.per_query,
      num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
      steps=self.model.recipe.num_steps(self.size),
      loss=_last_loss(state / "metrics.jsonl"),
      train_seconds=trained - began,
      rerank_seconds=time.monotonic() - trained,
    )
    artifacts.save(self.directory, result, self.digest)
    for left in self.directory.glob("state_*"):
      shutil.rmtree(left, ignore_errors=True)
    return result

  def _instance(self, instance: splits.Instance) -> rerankers.Instance:
    return rerankers.Instance(
      query=instance.query,
      relevant=self.data.documents[instance.relevant_id],
      non_relevant=self.data.documents[instance.non_relevant_id],
    )


def _last_loss(path: pathlib.Path) -> float:
  """Returns the loss of the last line of a log."""
  lines = path.read_text().splitlines()
  return float(json.loads(lines[-1])["loss"]) if lines else float("nan")
