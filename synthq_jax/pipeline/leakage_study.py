"""Planted leakage: what rerankers gain from test queries they were trained on.

Rerankers are trained on sets that give a known number of test queries away, as
they are or as near-duplicates, and on sets that do not (`leakage.splits`). All
rerank BM25's best documents of the same test queries. Fröbe et al. do so with
MS MARCO and ORCAS for Robust04 and Common Core; here it is any collection.

References:
  Fröbe, Akiki, Potthast and Hagen, "How Train-Test Leakage Affects Zero-shot
  Retrieval", SPIRE 2022, arXiv:2206.14759.
"""

import dataclasses
import os
from collections.abc import Callable

from synthq_jax import artifacts
from synthq_jax.leakage import near_duplicates
from synthq_jax.pipeline import (
  _leakage_study_data,
  _leakage_study_leaks,
  _leakage_study_models,
  _leakage_study_report,
  _leakage_study_results,
  _leakage_study_tables,
  _leakage_study_training,
  config_types,
  workspace,
)

__all__ = ["Config", "Model", "run"]

Model = _leakage_study_models.Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The whole study."""

  models: tuple[Model, ...]
  """The rerankers."""
  source: str = "environment_docs"
  """Of documents, test queries and judgements: a source of runs, or
  "ir_datasets:ID", such as ir_datasets:trec-robust04."""
  train_source: str | None = None
  """Of the queries and documents trained on; None: `source`."""
  train_split: str = "train"
  """Whose queries are trained on."""
  test_split: str = "test"
  """Whose queries are leaked and scored; several are joined by "+"."""
  num_test_queries: int | None = 50
  """Test queries drawn; None: all that can be used."""
  sizes: tuple[int, ...] = (1000, 2000, 4000)
  """Instances of training sets."""
  num_leaked: int = 200
  """Leaked instances of those with leakage, whatever their size."""
  near: str = "siblings"
  """Where near-duplicates come from: see `_leakage_study_leaks.NEAR`."""
  near_threshold: float = 0.6
  """Of near-duplicates: stemmed words in common over all, function words
  aside."""
  filler_threshold: float = 0.5
  """The same, of queries that are never filler."""
  filler_containment: float = 0.8
  """4-grams of characters in common with a leaked query, over those of the
  smaller: no filler has more."""
  depth: int = 100
  """BM25's candidates of a query."""
  measures: tuple[str, ...] = ("nDCG@10", "MFR", "P@1")
  """Of ir-measures, and MFR."""
  folds: int = 5
  """Of the grid search over sizes."""
  alpha: float = 0.05
  """Level of the tests, after Bonferroni's correction."""
  seed: int = 0
  """Of the test queries and the folds; those of trainings count from 0."""
  public_data: bool = False
  """Whether the queries are public. If not, everything lies in private/."""

  def __post_init__(self):
    config_types.at_least(self, 1, "num_leaked", "depth")
    config_types.at_least(self, 2, "num_test_queries", "folds")
    config_types.one_of(self, "near", _leakage_study_leaks.NEAR)
    for name in ("near_threshold", "filler_threshold", "filler_containment"):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(
          f"leakage_study.Config.{name} must be in (0, 1], got"
          f" {getattr(self, name)}"
        )
    if self.filler_threshold > self.near_threshold:
      raise ValueError(
        "leakage_study.Config.filler_threshold must be at most near_threshold,"
        f" got {self.filler_threshold} and {self.near_threshold}: filler would"
        " hold near-duplicates"
      )
    if not 0 < self.alpha < 1:
      raise ValueError(
        f"leakage_study.Config.alpha must be in (0, 1), got {self.alpha}"
      )
    if (self.near == "train_source") != (self.train_source is not None):
      raise ValueError(
        "leakage_study.Config.near must be 'train_source' where there is a"
        f" train_source, and only there, got near={self.near!r} and"
        f" train_source={self.train_source!r}"
      )
    if not self.sizes or min(self.sizes) < self.num_leaked:
      raise ValueError(
        "leakage_study.Config.sizes must be at least num_leaked, got"
        f" sizes={self.sizes} and num_leaked={self.num_leaked}"
      )
    names = [model.name for model in self.models]
    if not names or len(set(names)) < len(names):
      raise ValueError(
        f"leakage_study.Config.models must have different names, got {names}"
      )

  def words(self, threshold: float) -> near_duplicates.TokenSet:
    """Returns the detector of near-duplicates at a threshold."""
    return near_duplicates.TokenSet(
      threshold=threshold, ignored=near_duplicates.FUNCTION_WORDS
    )


def run(
  config: Config,
  workdir: str | os.PathLike,
  *,
  progress: bool = True,
  on_accepted: Callable[[], None] = lambda: None,
) -> str:
  """Trains, reranks and scores what is not finished, then writes the report.

  Args:
    config: the study.
    workdir: gets a folder for each training, study.md, study.svg and
      result.json, below private/ unless the data is public.
    progress: whether bars are shown.
    on_accepted: called once the working directory is ours.

  Returns:
    The tables, and where the report lies.

  Raises:
    ValueError: if another run uses the directory, a source is not there, or the
      training sets cannot be built.
  """
  with workspace.study_root(
    workdir, is_public=config.public_data, on_accepted=on_accepted
  ) as root:
    data = _leakage_study_data.build(config)
    trainings = tuple(
      _leakage_study_training.all_trainings(config, root, data, progress)
    )
    study = _leakage_study_results.Study(
      facts=data.facts,
      sizes=config.sizes,
      folds=config.folds,
      alpha=config.alpha,
      depth=config.depth,
      notes=tuple(map(_leakage_study_models.note, config.models)),
      measures=_leakage_study_tables.measure_tables(config, data, trainings),
      memory=_leakage_study_tables.memory_tables(config, root, data, trainings),
      trainings=trainings,
      seconds=sum(e.train_seconds + e.rerank_seconds for e in trainings),
    )
    artifacts.save(root, study, artifacts.fingerprint(config, data.digest))
    return _leakage_study_report.write(study, root)
