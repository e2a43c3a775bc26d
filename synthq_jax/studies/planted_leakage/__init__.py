"""Planted leakage: measures the gain of rerankers trained on test queries.

Rerankers are trained on sets with a chosen number of leaked instances, from test
queries or their near-duplicates, and on sets without leakage (`leakage.splits`).
All rerank BM25's best documents of the same test queries. Fröbe et al. do so with
MS MARCO and ORCAS for Robust04 and Common Core; here any collection serves.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`.
"""

import dataclasses

from synthq_jax.leakage import rerankers
from synthq_jax.runtime import config_types
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data, page, tables, training

__all__ = ["STUDY", "Config", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """One reranker and its training settings."""

  kind: str
  """One of `training.KINDS`."""
  query_length: int = 24
  """Pieces of a query; longer queries are cut."""
  document_length: int = 128
  """Pieces of a document; longer documents are cut."""
  recipe: rerankers.Recipe = dataclasses.field(default_factory=rerankers.Recipe)
  """Epochs, batches and learning rate."""
  name: str = ""
  """Name in tables and of a folder; "" for the kind."""
  seeds: int = 1
  """Number of repetitions, each with its own training sets and start."""
  checkpoint: str | None = None
  """For monoBERT, folder of a Hugging Face BERT; None for a new, small BERT on the
  package's vocabulary. For the other kinds, folder of a T5; None for the package's
  T5. monoT5 starts from this T5, the others from its vectors of pieces."""
  vocabulary: str | None = None
  """SentencePiece model of the T5; None for the package's. A BERT has its own."""

  def __post_init__(self):
    config_types.one_of(self, "kind", training.KINDS)
    config_types.at_least(self, 1, "seeds", "query_length", "document_length")
    if not self.name:
      object.__setattr__(self, "name", self.kind)
    config_types.named_as_folder(self)
    needs_both = self.kind != training.BERT and self.checkpoint is not None
    if needs_both != (self.vocabulary is not None):
      raise ValueError(
        "planted_leakage.Model.vocabulary must be given with the checkpoint of"
        f" a T5, and only then, got kind={self.kind!r},"
        f" checkpoint={self.checkpoint!r} and vocabulary={self.vocabulary!r}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """Settings of the study."""

  models: tuple[Model, ...]
  """The rerankers."""
  source: str = "environment_docs"
  """Source of documents, test queries and judgements: any of `data.sources`, such
  as "beir:DIR" or "ir_datasets:trec-robust04"."""
  train_source: str | None = None
  """Source of the queries and documents to train on; None for `source`."""
  more_queries: str | None = None
  """A second source of queries about the documents of `train_source`, with other
  query ids. Each source supplies half of the filler. None for one source."""
  train_split: str = "train"
  """Split of the queries to train on."""
  test_split: str = "test"
  """Split of the queries to leak and to score; "+" joins several."""
  num_test_queries: int | None = 50
  """Number of test queries to draw; None for all that can be used."""
  sizes: tuple[int, ...] = (2000, 4000, 8000)
  """Sizes of training sets in the paper's instances. An instance is a query with
  one document, so each drawn query gives two."""
  num_leaked: int = 400
  """Leaked instances of each training set with leakage, whatever its size."""
  near: str = "siblings"
  """Origin of near-duplicates, one of `data.NEAR`."""
  verified: str | None = None
  """For near="verified", a file of pairs that people judged near-duplicates, as
  `query_pairs.verified` reads it."""
  negatives: str = "bm25"
  """Non-relevant documents of leaked instances: "bm25" for BM25's best documents
  that nobody judged relevant, "judged" for documents judged not relevant, if
  there are any."""
  leaked_only: bool = False
  """Whether to score only test queries with a near-duplicate, as in the paper's
  figure 2. All are leaked either way, and no training is repeated."""
  depth: int = 100
  """Number of BM25's candidates of a query."""
  measures: tuple[str, ...] = ("nDCG@10", "MFR", "P@1")
  """Measures of ir-measures, and MFR."""
  folds: int = 5
  """Number of folds for the choice of sizes."""
  alpha: float = 0.05
  """Level of the tests, after Bonferroni's correction."""
  seed: int = 0
  """Seed of the test queries and the folds. Seeds of trainings count from 0."""

  def __post_init__(self):
    config_types.at_least(self, 1, "num_leaked", "depth")
    config_types.at_least(self, 2, "num_test_queries", "folds")
    config_types.one_of(self, "near", data.NEAR)
    config_types.one_of(self, "negatives", data.NEGATIVES)
    config_types.within(self, "(0, 1)", "alpha")
    if (self.near == "verified") != (self.train_source is not None):
      raise ValueError(
        "planted_leakage.Config.near must be 'verified' where there is a"
        f" train_source, and only there, got near={self.near!r} and"
        f" train_source={self.train_source!r}"
      )
    if self.more_queries is not None and self.train_source is None:
      raise ValueError(
        "planted_leakage.Config.more_queries must go with a train_source, got"
        f" {self.more_queries!r} alone"
      )
    if (self.near == "verified") != (self.verified is not None):
      raise ValueError(
        "planted_leakage.Config.verified must be a file of pairs with"
        f" near='verified', and only there, got near={self.near!r} and"
        f" verified={self.verified!r}"
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
      raise ValueError(
        "planted_leakage.Config.models must be some, got none: give at least one"
        " planted_leakage.Model"
      )
    config_types.different_names(self, "models")


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: data.build(task.config),
  jobs=training.list_jobs,
  result=tables.make_result,
  page=page.make_page,
  num_shown=7,
  digests=lambda data: (data.digest,),
)
