"""What the study of planted leakage finds: frozen, JSON, without texts."""

import dataclasses

from synthq_jax.leakage import splits, study

__all__ = [
  "BASELINE",
  "Cell",
  "Facts",
  "MeasureTable",
  "MemoryTable",
  "Study",
  "Training",
]

BASELINE = "BM25"
"""The row of the candidates in their own order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data, and how near the near-duplicates are."""

  source: str
  """Of test queries and documents."""
  train_source: str
  """Of the other training instances, "" if the same."""
  num_documents: int
  """Of the test collection."""
  num_test_queries: int
  """Scored."""
  num_found: int
  """Test queries of which BM25 finds a relevant document."""
  num_pool: int
  """Judged queries that training instances may be of."""
  num_left_out: int
  """Of these, queries that a detector matched with a test query or one of its
  near-duplicates, or that are test queries: never trained on as filler."""
  near: str
  """Where near-duplicates come from, one of `_leakage_study_leaks.NEAR`."""
  num_near: int
  """Near-duplicates that were leaked."""
  num_near_targets: int
  """Test queries that have one."""
  num_leaked: int
  """Leaked instances of a training set with leakage."""
  relations: dict[str, int]
  """Near-duplicates by their relation to their test query."""
  similarities: dict[str, list[float]]
  """Detector -> smallest, mean and largest score of near-duplicate and test
  query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One reranker, trained once on one set, and what it does to the candidates."""

  model: str
  """Its name in tables."""
  leakage: str
  """One of `splits.NAMES`."""
  size: int
  """Instances."""
  seed: int
  """Of the set and of the training."""
  manifest: splits.Manifest
  """Of the set."""
  measures: dict[str, dict[str, float]]
  """Measure -> test query -> value."""
  num_parameters: int
  """All of them trained."""
  steps: int
  """Optimizer steps."""
  loss: float
  """Mean of the training loss in the last lines of the log."""
  train_seconds: float
  """Compiling included."""
  rerank_seconds: float
  """Compiling included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """A mean over test queries, the repetitions averaged, and its comparison."""

  model: str
  """Whose."""
  leakage: str
  """One of `splits.NAMES`."""
  mean: float
  """Over test queries."""
  comparison: study.Comparison | None
  """With the same reranker without leakage; None where this is it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureTable:
  """One measure of all rerankers."""

  measure: str
  """Its name."""
  size: int
  """Of the training sets; 0: chosen on the other folds."""
  baseline: float
  """BM25's."""
  chance: float
  """Of the candidates in random order."""
  cells: tuple[Cell, ...]
  """By reranker and kind of leakage; their tests are one family."""
  sizes: dict[str, list[int]]
  """"RERANKER, KIND" -> sizes that were chosen, by fold and seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
  """What one reranker does to the documents leaked to it, at one size."""

  model: str
  """Whose."""
  leakage: str
  """Near or test leakage."""
  size: int
  """Of the training set."""
  rank_without: float
  """Mean rank of leaked relevant documents without leakage."""
  rank_with: float
  """The same with it."""
  score_without: float
  """Their mean score without leakage; nan if none was scored."""
  score_with: float
  """The same with it."""
  offset_increase: float
  """Increase of the rank of leaked non-relevant documents minus that of the
  relevant ones."""
  rank: study.Comparison
  """Ranks with leakage against those without."""
  offset: study.Comparison
  """Offsets with leakage against those without."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  facts: Facts
  """Of the data."""
  sizes: tuple[int, ...]
  """Of training sets."""
  folds: int
  """Of the grid search."""
  alpha: float
  """Level of the tests."""
  depth: int
  """Candidates of a query."""
  notes: tuple[str, ...]
  """What a reader must know of the rerankers, one sentence each."""
  measures: tuple[MeasureTable, ...]
  """With chosen sizes first, then each size."""
  memory: tuple[MemoryTable, ...]
  """By reranker, kind and size; ranks are one family of tests, offsets
  another."""
  trainings: tuple[Training, ...]
  """All of them."""
  seconds: float
  """Of all trainings and rerankings, whenever they ran."""
