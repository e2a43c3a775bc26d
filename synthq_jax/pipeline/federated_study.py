"""Answer-sentence retrieval over clients that may not share texts.

The rows of a thesis' main table (PDD-AS2 on Fed-NewsQA) on any collection whose
passages fall to clients: BM25, federated training with negatives at random and
of BM25, each client alone, federated training with static hard negatives, query
encoders of clients' own, the same with negatives of other clients, and all data
in one place. There is no privacy in these rows beyond what federated training
itself keeps apart: `federated.user_privacy`, `federated.silo` and the private
exchanges are for that.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import tqdm

from synthq_jax import artifacts
from synthq_jax.data import shipped
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import exchange
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import (
  _federated_data,
  _federated_exchanges,
  _federated_methods,
  _federated_report,
  _federated_results,
  _federated_training,
  _fingerprints,
  config_types,
  workspace,
)

__all__ = ["Config", "Exchanges", "Personal", "Recipe", "run"]

Recipe = _federated_training.Recipe
Personal = _federated_methods.Personal
Exchanges = _federated_exchanges.Exchanges

_METHODS = tuple(one.name for one in _federated_methods.METHODS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The whole study."""

  source: str = "environment_docs"
  """Of passages and questions: a source of runs, or "newsqa:FILE"."""
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
  max_sentences: int | None = None
  """Of a passage; None: all."""
  query_length: int = 32
  """Tokens of a question."""
  sentence_length: int = 128
  """Tokens of a sentence."""
  checkpoint: str | None = None
  """The public T5 that both towers start from; None: the package's."""
  vocabulary: str | None = None
  """Its SentencePiece model."""
  query_pooling: str = "mean"
  """How a question's vector is taken: "mean" or "first" token."""
  methods: tuple[str, ...] = _METHODS
  """Rows of the main table."""
  seeds: int = 3
  """Repetitions of the main table."""
  recipe: Recipe = dataclasses.field(default_factory=Recipe)
  """Of all trainings."""
  central_learning_rate: float | None = None
  """Of "Central", which takes many steps where federated training averages
  few, and is a bound only where its own is tuned; None: the recipe's."""
  personal: Personal = dataclasses.field(default_factory=Personal)
  """Of clients' own query towers."""
  exchange_top: int = 10
  """Of Fed-Negative: sentences that each partner returns for a question."""
  exchange_partners: int | None = None
  """Of Fed-Negative: partners that a client asks, drawn anew in each round;
  None: all."""
  negatives_tried: tuple[int, ...] = ()
  """Numbers of negatives of the base method, with the first seed alone."""
  tops_tried: tuple[int, ...] = ()
  """Values of `recipe.top`, the same way."""
  rates_tried: tuple[float, ...] = ()
  """Values of `recipe.learning_rate`, the same way."""
  shares_tried: tuple[float, ...] = ()
  """Shares of every client's train questions, the same way."""
  exchanges: Exchanges = dataclasses.field(default_factory=Exchanges)
  """The table of exchanges, with the first seed alone."""
  public_data: bool = False
  """Whether the texts are public. If not, everything lies in private/."""

  def __post_init__(self):
    config_types.one_of(self, "partition", _federated_data.PARTITIONS)
    config_types.some_of(self, "methods", _METHODS)
    config_types.positive(self, "alpha", "central_learning_rate")
    config_types.at_least(
      self, 1, "seeds", "exchange_top", "query_length",
      "sentence_length", "max_train_questions", "exchange_partners",
    )  # fmt: skip
    config_types.at_least(self, 2, "num_clients", "min_test_questions")
    if (self.partition == "genre") != bool(self.urls):
      raise ValueError(
        "federated_study.Config.urls must be given with partition='genre', and"
        f" only then, got partition={self.partition!r} and urls={self.urls}"
      )
    if (self.checkpoint is None) != (self.vocabulary is None):
      raise ValueError(
        "federated_study.Config.vocabulary must be given with checkpoint, and"
        f" only then, got checkpoint={self.checkpoint!r} and"
        f" vocabulary={self.vocabulary!r}"
      )
    if not all(0 < share <= 1 for share in self.shares_tried):
      raise ValueError(
        "federated_study.Config.shares_tried must be in (0, 1], got"
        f" {self.shares_tried}"
      )


def run(
  config: Config,
  workdir: str | os.PathLike,
  *,
  progress: bool = True,
  on_accepted: Callable[[], None] = lambda: None,
) -> str:
  """Trains and scores what is not finished, then writes the report.

  Args:
    config: the study.
    workdir: gets the outcome of each method and seed, study.md, study.svg and
      result.json, below private/ unless the data is public.
    progress: whether bars are shown.
    on_accepted: called once the working directory is ours.

  Returns:
    The tables, and where the report lies.

  Raises:
    ValueError: if another run uses the directory, the source is not there, or
      the clients cannot be built.
  """
  with workspace.study_root(
    workdir, is_public=config.public_data, on_accepted=on_accepted
  ) as root:
    data = _federated_data.build(config)
    config.exchanges.check(data.num_copies)
    contexts = _Contexts(config, data, root / "states")
    jobs = list(_jobs(config))
    outcomes = []
    with tqdm.tqdm(total=len(jobs), unit=" rows", disable=not progress) as bar:
      for job in jobs:
        bar.set_description(f"{job.method} {job.variant} seed {job.seed}")
        outcomes.append(_finished(config, contexts, job, root))
        bar.update()
    study = _federated_results.Study(
      facts=data.facts,
      notes=_federated_report.notes(config),
      outcomes=tuple(outcomes),
      seconds=sum(one.seconds for one in outcomes),
    )
    artifacts.save(root, study, artifacts.fingerprint(config, data.digest))
    return _federated_report.write(study, root)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
  """One method with one seed."""

  method: str
  seed: int
  recipe: Recipe
  share: float = 1.0
  variant: str = ""


def _jobs(config: Config) -> Iterator[_Job]:
  """Yields the rows of the main table, then those of the smaller ones."""
  trained = {one.name: one.is_trained for one in _federated_methods.METHODS}
  for seed in range(config.seeds):
    for method in config.methods:
      if trained[method] or not seed:
        recipe = config.recipe
        if method == _federated_methods.CENTRAL:
          rate = config.central_learning_rate or recipe.learning_rate
          recipe = dataclasses.replace(recipe, learning_rate=rate)
        yield _Job(method=method, seed=seed, recipe=recipe)
  base = {"method": _federated_methods.BASE, "seed": 0}
  for name, values in (
    ("num_negatives", config.negatives_tried),
    ("top", config.tops_tried),
    ("learning_rate", config.rates_tried),
  ):
    for value in values:
      recipe = dataclasses.replace(config.recipe, **{name: value})
      yield _Job(**base, recipe=recipe, variant=f"{name}={value:g}")
  for share in config.shares_tried:
    yield _Job(
      **base, recipe=config.recipe, share=share, variant=f"share={share:g}"
    )
  for kind in config.exchanges.kinds:
    yield _Job(
      method=_federated_methods.EXCHANGE,
      seed=0,
      recipe=config.recipe,
      variant=kind,
    )


class _Contexts:
  """What trainings of one recipe and one share of the data have in common."""

  def __init__(
    self, config: Config, data: _federated_data.Data, states: pathlib.Path
  ):
    place = pathlib.Path(config.checkpoint or shipped.DIRECTORY)
    params, model = t5_checkpoints.load(place)
    self._encoders = encoders_lib.Encoders(
      config=model, query_pooling=config.query_pooling
    )
    self._start = self._encoders.init(params)
    self._digest = _fingerprints.of_checkpoint(place)
    self._data, self._states = data, states
    self.public = _federated_exchanges.Public(
      settings=config.exchanges,
      params=params,
      model=model,
      vocabulary=_federated_data.vocabulary(config),
      length=config.sentence_length,
    )
    self._made: dict[tuple[Recipe, float], _federated_training.Context] = {}

  def of(self, recipe: Recipe, share: float) -> _federated_training.Context:
    """Returns the one context of a recipe and share."""
    if (recipe, share) not in self._made:
      data = self._data
      if share < 1:
        data = _federated_data.thinned(data, share)
      self._made[recipe, share] = _federated_training.Context(
        data=data,
        encoders=self._encoders,
        start=self._start,
        digest=artifacts.fingerprint(
          data.digest, self._digest, self._encoders.query_pooling
        ),
        states=self._states,
        recipe=recipe,
      )
    return self._made[recipe, share]


def _finished(
  config: Config, contexts: _Contexts, job: _Job, root: pathlib.Path
) -> _federated_results.Outcome:
  """Trains and scores, or reads what is finished."""
  context = contexts.of(job.recipe, job.share)
  is_exchange = job.method == _federated_methods.EXCHANGE
  how = config.exchange_top, config.exchange_partners
  if is_exchange:
    table = dataclasses.replace(config.exchanges, kinds=(job.variant,))
    how = table, table.public_digest()
  digest = artifacts.fingerprint(
    "federated_study",
    context.digest,
    job,
    config.test_split,
    config.personal,
    how,
  )
  place = root / "outcomes" / digest
  if artifacts.read_fingerprint(place) == digest:
    return artifacts.load(place, _federated_results.Outcome)
  options = {"test_split": config.test_split, "personal": config.personal}
  if is_exchange:
    began = time.monotonic()
    made = _federated_exchanges.build(
      contexts.public, job.variant, context, job.seed
    )
    found = _federated_methods.exchanged(
      context, job.variant, job.seed, exchange=made, began=began, **options
    )
  else:
    found = _federated_methods.outcome(
      context,
      job.method,
      job.seed,
      exchange=_fed_negative(config, job.seed),
      variant=job.variant,
      **options,
    )
  artifacts.save(place, found, digest)
  return found


def _fed_negative(config: Config, seed: int) -> exchange.FedNegative:
  chosen = exchange.Everyone()
  if config.exchange_partners is not None:
    chosen = exchange.RandomPartners(count=config.exchange_partners, seed=seed)
  return exchange.FedNegative(top=config.exchange_top, partners=chosen)
