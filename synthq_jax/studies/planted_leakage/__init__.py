"""Planted leakage: what rerankers gain from test queries they were trained on.

Rerankers are trained on sets that give a known number of test queries away, as
they are or as near-duplicates, and on sets that do not (`leakage.splits`). All
rerank BM25's best documents of the same test queries. Fröbe et al. do so with
MS MARCO and ORCAS for Robust04 and Common Core; here it is any collection.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`.
"""

import dataclasses

from synthq_jax.leakage import near_duplicates
from synthq_jax.leakage.rerankers import building
from synthq_jax.runtime import config_types
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data, page, tables, training

__all__ = ["STUDY", "Config", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(building.Settings):
  """One reranker and how it is trained."""

  name: str = ""
  """In tables, and a folder; "": the kind."""
  seeds: int = 1
  """Repetitions, each with training sets and a start of its own."""
  checkpoint: str | None = None
  """monoBERT: folder of a Hugging Face BERT; None: a new, small one on the
  package's vocabulary. The others: folder of the T5 that monoT5 starts from,
  and whose vectors of pieces they start from; None: the package's."""
  vocabulary: str | None = None
  """SentencePiece model of the T5; None: the package's. A BERT brings its own."""

  def __post_init__(self):
    config_types.one_of(self, "kind", building.KINDS)
    config_types.at_least(self, 1, "seeds", "query_length", "document_length")
    if not self.name:
      object.__setattr__(self, "name", self.kind)
    config_types.named_as_folder(self)
    needs_both = self.kind != building.BERT and self.checkpoint is not None
    if needs_both != (self.vocabulary is not None):
      raise ValueError(
        "planted_leakage.Model.vocabulary must be given with the checkpoint of"
        f" a T5, and only then, got kind={self.kind!r},"
        f" checkpoint={self.checkpoint!r} and vocabulary={self.vocabulary!r}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """The whole study."""

  models: tuple[Model, ...]
  """The rerankers."""
  source: str = "environment_docs"
  """Of documents, test queries and judgements: any of `data.sources`, such as
  "beir:DIR" or "ir_datasets:trec-robust04"."""
  train_source: str | None = None
  """Of the queries and documents trained on; None: `source`."""
  more_queries: str | None = None
  """A second source of queries about the documents of `train_source`, whose ids
  differ from those there; half of the filler is of each. None: one source."""
  train_split: str = "train"
  """Whose queries are trained on."""
  test_split: str = "test"
  """Whose queries are leaked and scored; several are joined by "+"."""
  num_test_queries: int | None = 50
  """Test queries drawn; None: all that can be used."""
  sizes: tuple[int, ...] = (2000, 4000, 8000)
  """Instances of training sets, as the paper counts them: a query with one
  document, so that two come from each query that is drawn."""
  num_leaked: int = 400
  """Leaked instances of those with leakage, whatever their size."""
  near: str = "siblings"
  """Where near-duplicates come from: one of `data.NEAR`."""
  verified: str | None = None
  """Of near="verified": a file of pairs that people took for near-duplicates, as
  `query_pairs.verified` reads it."""
  variants: str | None = None
  """More texts of test queries, by their id, that near="train_source" compares
  queries with; a file as `query_pairs.variants` reads it."""
  negatives: str = "bm25"
  """Documents of leaked instances that are not relevant: BM25's best that nobody
  judged relevant, or those that were "judged" not relevant, where there are
  some."""
  leaked_only: bool = False
  """Whether only test queries with a near-duplicate are scored, as in the paper's
  figure 2. All are leaked either way, and no training is repeated."""
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

  def __post_init__(self):
    config_types.at_least(self, 1, "num_leaked", "depth")
    config_types.at_least(self, 2, "num_test_queries", "folds")
    config_types.one_of(self, "near", data.NEAR)
    config_types.one_of(self, "negatives", data.NEGATIVES)
    config_types.within(
      self, "(0, 1]", "near_threshold", "filler_threshold", "filler_containment"
    )
    if self.filler_threshold > self.near_threshold:
      raise ValueError(
        "planted_leakage.Config.filler_threshold must be at most near_threshold,"
        f" got {self.filler_threshold} and {self.near_threshold}: filler would"
        " hold near-duplicates"
      )
    config_types.within(self, "(0, 1)", "alpha")
    if (self.near in data.ELSEWHERE) != (self.train_source is not None):
      raise ValueError(
        f"planted_leakage.Config.near must be one of {data.ELSEWHERE} where"
        f" there is a train_source, and only there, got near={self.near!r} and"
        f" train_source={self.train_source!r}"
      )
    if self.more_queries is not None and self.train_source is None:
      raise ValueError(
        "planted_leakage.Config.more_queries must go with a train_source, got"
        f" {self.more_queries!r} alone"
      )
    for name, near in (("verified", "verified"), ("variants", "train_source")):
      if getattr(self, name) is not None and self.near != near:
        raise ValueError(
          f"planted_leakage.Config.{name} goes with near={near!r} alone, got"
          f" near={self.near!r}"
        )
    if self.near == "verified" and self.verified is None:
      raise ValueError(
        "planted_leakage.Config.verified must be a file of pairs with"
        " near='verified', got none"
      )
    if any(number % 2 for number in (*self.sizes, self.num_leaked)):
      raise ValueError(
        "planted_leakage.Config.sizes and num_leaked must be even, two instances"
        f" for each query, got sizes={self.sizes} and"
        f" num_leaked={self.num_leaked}"
      )
    if not self.sizes or min(self.sizes) < self.num_leaked:
      raise ValueError(
        "planted_leakage.Config.sizes must be at least num_leaked, got"
        f" sizes={self.sizes} and num_leaked={self.num_leaked}"
      )
    if not self.models:
      raise ValueError("planted_leakage.Config.models must be some, got none")
    config_types.different_names(self, "models")

  def words(self, threshold: float) -> near_duplicates.TokenSet:
    """Returns the detector of near-duplicates at a threshold."""
    return near_duplicates.TokenSet(
      threshold=threshold, ignored=near_duplicates.FUNCTION_WORDS
    )


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: data.build(task.config),
  jobs=training.jobs,
  result=tables.result,
  page=page.page,
  num_shown=7,
  digests=lambda data: (data.digest,),
)
