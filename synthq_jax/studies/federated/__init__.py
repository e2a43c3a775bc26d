"""Answer-sentence retrieval over clients that may not share texts.

The rows of a thesis' main table (PDD-AS2 on Fed-NewsQA) on any collection whose
passages fall to clients: BM25, federated training with negatives at random and
of BM25, each client alone, federated training with static hard negatives, query
encoders of clients' own, the same with negatives of other clients, and all data
in one place: as many epochs, as many updates, and with query encoders of
clients' own. There is no privacy in these rows beyond what federated training
itself keeps apart.
"""

import dataclasses

from synthq_jax.federated import personalisation
from synthq_jax.federated import training as training_lib
from synthq_jax.runtime import config_types
from synthq_jax.studies import frame
from synthq_jax.studies.federated import data as data_lib
from synthq_jax.studies.federated import methods as methods_lib
from synthq_jax.studies.federated import page

__all__ = ["STUDY", "Config", "Personal", "Recipe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(training_lib.Recipe):
  """How towers are trained, whoever has the data."""

  warmup_rounds: int = 1
  """Rounds with BM25's negatives before static hard ones."""
  rounds: int = 3
  """Rounds after those. Every method gets the sum of both."""
  top: int = 100
  """The best sentences of the current encoders, from which static hard
  negatives are drawn."""
  weight_decay: float | None = None
  """Of AdamW; None: Adam."""

  def __post_init__(self):
    config_types.at_least(self, 0, "warmup_rounds", "rounds")
    config_types.at_least(self, 1, "epochs", "batch_size", "num_negatives")
    config_types.positive(self, "learning_rate", "temperature")
    if self.top < self.num_negatives:
      raise ValueError(
        "federated.Recipe: expected top of at least num_negatives, got"
        f" top={self.top} and num_negatives={self.num_negatives}"
      )
    if not self.warmup_rounds + self.rounds:
      raise ValueError(
        "federated.Recipe: expected rounds, got warmup_rounds=0 and rounds=0"
      )

  def history(self, kind: str, warmup: str | None = None) -> tuple[str, ...]:
    """Returns the negatives of all rounds.

    >>> Recipe(warmup_rounds=1, rounds=2).history("static", "bm25")
    ('bm25', 'static', 'static')
    """
    first = kind if warmup is None else warmup
    return (first,) * self.warmup_rounds + (kind,) * self.rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personal:
  """How clients train query towers of their own."""

  rounds: int = 2
  """In each of which negatives are exchanged, where they are."""
  settings: personalisation.Settings = dataclasses.field(
    default_factory=personalisation.Settings
  )
  """Of a client in a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config, config_types.Encoder):
  """The whole study."""

  source: str = "environment_docs"
  """Of passages and questions: a source of runs."""
  partition: str = "client"
  """Who holds a passage: the "client" that the source names, the "genre" of its
  URL (NewsQA), or a random one: "dirichlet", by how questions begin, or
  "iid"."""
  sentences_of: str | None = None
  """Where documents are sentences: the key of their line that names the
  passage. None: documents are passages, and are split."""
  urls: tuple[str, ...] = ()
  """Files of URLs, for "genre"."""
  num_clients: int = 10
  """Of "dirichlet" and "iid"."""
  alpha: float = 0.3
  """Of "dirichlet": small ones make clients more different."""
  partition_seed: int = 0
  """Of random partitions, and of which train questions are kept."""
  test_split: str = "test"
  """Whose questions are scored."""
  max_train_questions: int | None = None
  """Of a client; None: all."""
  min_test_questions: int = 5
  """Clients with fewer are left out; 2 or more, for a variance."""
  max_clients: int | None = None
  """So many clients with the most `test_split` questions are kept, of the genres
  only those with a name; None: all."""
  max_sentences: int | None = None
  """Of a passage; None: all."""
  query_length: int = 32
  """Tokens of a question."""
  sentence_length: int = 128
  """Tokens of a sentence."""
  query_pooling: str = "mean"
  """How a question's vector is taken: "mean" or "first" token (of a BERT
  [CLS])."""
  sentence_pooling: str = "mean"
  """The same of a sentence."""
  methods: tuple[str, ...] = methods_lib.METHODS
  """Rows of the main table."""
  seeds: int = 3
  """Repetitions of the main table."""
  recipe: Recipe = dataclasses.field(default_factory=Recipe)
  """Of all trainings."""
  rates: tuple[float, ...] = ()
  """Learning rates of which each trained row takes the one with the best MRR@10
  of dev questions, after the round that was best there; (): the recipe's, and
  the last round. Query encoders of clients' own go on from such towers, at a
  rate of their own."""
  dev_split: str = "dev"
  """Whose questions choose, with `rates`, and stop the trainings of clients'
  own query towers, with `personal.settings.patience`; not the scored ones."""
  central_learning_rate: float | None = None
  """Of "Central", which takes many steps where federated training averages
  few, and is a bound only where its own is tuned; None: the recipe's. With
  `rates` it is one of them."""
  personal: Personal = dataclasses.field(default_factory=Personal)
  """Of clients' own query towers."""
  exchange_top: int = 10
  """Of Fed-Negative: sentences of all partners together for a question."""
  methods_tried: tuple[str, ...] = (methods_lib.BASE,)
  """Rows of the main table that are trained with other settings, too, with the
  first seed alone."""
  negatives_tried: tuple[int, ...] = ()
  """Numbers of negatives of these."""
  tops_tried: tuple[int, ...] = ()
  """Values of `recipe.top`, the same way."""
  rates_tried: tuple[float, ...] = ()
  """Values of `recipe.learning_rate`, the same way."""
  shares_tried: tuple[float, ...] = ()
  """Shares of every client's train questions, the same way."""

  def __post_init__(self):
    super().__post_init__()
    config_types.one_of(self, "partition", data_lib.PARTITIONS)
    config_types.some_of(self, "methods", methods_lib.METHODS)
    config_types.some_of(self, "methods_tried", methods_lib.METHODS)
    config_types.positive(self, "alpha", "central_learning_rate")
    config_types.at_least(
      self, 1, "seeds", "exchange_top", "query_length",
      "sentence_length", "max_train_questions",
    )  # fmt: skip
    config_types.at_least(
      self, 2, "num_clients", "min_test_questions", "max_clients"
    )
    if (self.partition == "genre") != bool(self.urls):
      raise ValueError(
        "federated.Config.urls must be given with partition='genre', and only"
        f" then, got partition={self.partition!r} and urls={self.urls}"
      )
    choosing = {"dev_split": self.dev_split} if self.is_chosen else {}
    for name, split in {"test_split": self.test_split, **choosing}.items():
      if split == data_lib.TRAIN:
        raise ValueError(
          f"federated.Config.{name} must be another split than {split}, whose"
          " questions are trained on"
        )
    if self.is_chosen and self.dev_split == self.test_split:
      raise ValueError(
        "federated.Config.dev_split must be another split than test_split with"
        " rates or patience, or the scored questions choose; got"
        f" {self.dev_split!r} for both"
      )
    if not all(rate > 0 for rate in self.rates):
      raise ValueError(
        f"federated.Config.rates must be above 0, got {self.rates}"
      )
    if not all(0 < share <= 1 for share in self.shares_tried):
      raise ValueError(
        f"federated.Config.shares_tried must be in (0, 1], got"
        f" {self.shares_tried}"
      )

  @property
  def is_chosen(self) -> bool:
    """Whether dev questions choose a rate, a round or an epoch."""
    return bool(self.rates) or self.personal.settings.patience is not None


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: data_lib.build(task.config),
  jobs=methods_lib.jobs,
  result=lambda task, data, outcomes: methods_lib.Study(
    facts=data.facts,
    notes=page.notes(task.config),
    outcomes=tuple(outcomes),
    seconds=sum(one.seconds for one in outcomes),
  ),
  page=page.page,
  num_shown=6,
  digests=lambda data: (data.digest,),
)
