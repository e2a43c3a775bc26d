"""Answer-sentence retrieval over clients that may not share texts.

The study trains the rows of a thesis' main table (PDD-AS2 on Fed-NewsQA), on any
collection with clients:

- BM25;
- federated training with random negatives, and with BM25's (each client alone in the
  thesis, section 3.4.4);
- each client alone;
- federated training with static hard negatives;
- clients' own query encoders, without and with other clients' negatives;
- central training with as many epochs, with as many updates, and with clients'
  own query encoders.

These rows have no privacy beyond the separation of texts in federated training.
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
  """Training settings of towers, federated or central."""

  warmup_rounds: int = 1
  """Rounds with BM25's negatives before static hard negatives."""
  rounds: int = 3
  """Rounds after the warmup. Every method trains for the sum of both."""
  top: int = 100
  """Number of best sentences of the current encoders, from which static hard
  negatives are drawn."""
  weight_decay: float | None = None
  """Weight decay of AdamW; None for Adam."""

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
        "federated.Recipe: expected rounds, got warmup_rounds=0 and rounds=0:"
        " set one above 0"
      )

  def history(self, kind: str, warmup: str | None = None) -> tuple[str, ...]:
    """Returns the kind of negatives of each round.

    >>> Recipe(warmup_rounds=1, rounds=2).history("static", "bm25")
    ('bm25', 'static', 'static')
    """
    first = kind if warmup is None else warmup
    return (first,) * self.warmup_rounds + (kind,) * self.rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personal:
  """Training settings of clients' own query towers."""

  rounds: int = 2
  """Number of rounds; with an exchange, each begins with one."""
  settings: personalisation.Settings = dataclasses.field(
    default_factory=personalisation.Settings
  )
  """Settings of a client in a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config, config_types.Encoder):
  """Settings of the study."""

  source: str = "environment_docs"
  """Source of passages and questions, one of `data.sources`."""
  partition: str = "client"
  """Rule that assigns passages to clients: "client", as the source names them;
  "genre", by the genre of the URL (NewsQA); "dirichlet", at random by the
  questions' first words."""
  sentences_of: str | None = None
  """If documents are sentences, the key of their line that names the passage.
  None: documents are passages, which are split."""
  urls: tuple[str, ...] = ()
  """Files of URLs, for "genre"."""
  num_clients: int = 10
  """Number of clients for "dirichlet"."""
  alpha: float = 0.3
  """Concentration of "dirichlet"; small values make clients more different."""
  partition_seed: int = 0
  """Seed of random partitions, and of the draw of `max_train_questions`."""
  test_split: str = "test"
  """Split of the questions to score."""
  max_train_questions: int | None = None
  """Maximum number of train questions of a client; None for all."""
  min_test_questions: int = 5
  """Least number of test questions of a client, at least 2, for a variance.
  Clients with fewer are left out."""
  max_clients: int | None = None
  """Maximum number of clients, those with the most `test_split` questions; with
  "genre", only named genres. None for all clients."""
  max_sentences: int | None = None
  """Maximum number of sentences of a passage; None for all."""
  query_length: int = 32
  """Maximum number of tokens of a question."""
  sentence_length: int = 128
  """Maximum number of tokens of a sentence."""
  query_pooling: str = "mean"
  """Pooling of a question's vector: "mean", or "first" token (a BERT's [CLS])."""
  sentence_pooling: str = "mean"
  """Pooling of a sentence's vector, likewise."""
  methods: tuple[str, ...] = methods_lib.METHODS
  """Rows of the main table."""
  seeds: int = 3
  """Repetitions of the main table."""
  recipe: Recipe = dataclasses.field(default_factory=Recipe)
  """Training settings of all towers."""
  rates: tuple[float, ...] = ()
  """Learning rates to choose from. Each trained row takes the rate and the round
  with the best MRR@10 of dev questions. (): the recipe's rate and the last round.
  Clients' own query encoders start from the chosen towers and choose their own
  rate."""
  dev_split: str = "dev"
  """Split of the questions that choose among `rates` and stop clients' own
  trainings (`personal.settings.patience`); not the scored split."""
  central_learning_rate: float | None = None
  """Learning rate of "Central"; None for the recipe's. Central training takes many
  steps where federated training averages few, so it is a bound only with a tuned
  rate. With `rates`, "Central" takes one of those instead."""
  personal: Personal = dataclasses.field(default_factory=Personal)
  """Training settings of clients' own query towers."""
  exchange_top: int = 10
  """Sentences that Fed-Negative gets from all partners together for a question."""

  def __post_init__(self):
    super().__post_init__()
    config_types.one_of(self, "partition", data_lib.PARTITIONS)
    config_types.some_of(self, "methods", methods_lib.METHODS)
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

  @property
  def is_chosen(self) -> bool:
    """Whether dev questions choose a rate, a round or an epoch."""
    return bool(self.rates) or self.personal.settings.patience is not None


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: data_lib.build(task.config),
  jobs=methods_lib.list_jobs,
  result=lambda task, data, outcomes: methods_lib.Study(
    facts=data.facts,
    notes=page.make_notes(task.config),
    outcomes=tuple(outcomes),
  ),
  page=page.make_page,
  num_shown=6,
  digests=lambda data: (data.digest,),
)
