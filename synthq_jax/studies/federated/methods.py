"""Trains and scores the rows of a federated study, each with its own towers."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from synthq_jax import typing
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import exchange as exchange_lib
from synthq_jax.federated import negatives, personalisation, ranking
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame
from synthq_jax.studies.federated import data as data_lib
from synthq_jax.studies.federated import training

__all__ = [
  "BASE",
  "CENTRAL",
  "EQUAL",
  "METHODS",
  "Outcome",
  "Study",
  "Towers",
  "list_jobs",
  "personalise",
]

BASE = "PDD-AS2"
"""The method whose towers are personalised; tests compare others with it."""

CENTRAL = "Central"
"""The method that trains on all data in one place."""

EQUAL = "Central, equal updates"
"""Central training with as many steps as the largest client takes."""


_UNTRAINED = ("BM25", "Public encoder")  # independent of the seed

METHODS = (
  *_UNTRAINED,
  "Random negatives",
  "BM25 negatives",
  "STAR, each client alone",
  BASE,
  "+ query encoder",
  "+ Fed-Negative",
  CENTRAL,
  EQUAL,
  "Central + query encoder",
)
"""Rows of the main table: the thesis' rows in its order, and three more. Its rows of
random and BM25's negatives are of clients alone (section 3.4.4), ours federated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
  """One method with one seed."""

  method: str
  """Name of the method in tables."""
  seed: int
  """Seed of the repetition."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(_Row):
  """The scores and costs of a row."""

  ranks: tuple[ranking.Scores, ...]
  """Ranks of each client's test questions."""
  sent: list[int]
  """Bytes that each client sent in the exchange, over all rounds."""
  received: list[int]
  """Bytes that each client received in the exchange, over all rounds."""
  exchanges: int
  """Rounds of the exchange."""
  train: tuple[float, float]
  """Mean MRR@10 of the train questions, over clients and over questions."""
  learning_rate: float
  """Learning rate of the training; nan for rows without training."""
  hubness: float
  """Skewness of the sentences' numbers of uses as hard negatives of the train
  questions, under the final towers. Mean over clients by questions; nan for
  BM25."""
  seconds: float
  """Seconds of training and scoring in the run that finished the row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The result of the study."""

  facts: data_lib.Facts
  """Counts of the data."""
  notes: tuple[str, ...]
  """Descriptions of the settings for readers."""
  outcomes: tuple[Outcome, ...]
  """Outcomes of all rows."""


class Towers(NamedTuple):
  """The trained towers of a method."""

  sentence: Sequence[typing.Params]
  """A pair of towers for each client, whose sentence tower is used; often the same
  object for all."""
  query: Sequence[typing.Params]
  """A pair of towers for each client, whose question tower is used."""
  traffic: tuple[exchange_lib.Exchanged, ...] = ()
  """Negatives and traffic of each round of an exchange."""

  @classmethod
  def shared(cls, params: typing.Params, context: training.Context) -> "Towers":
    """Returns the same pair of towers for all clients."""
    every = [params] * len(context.data.tokens)
    return cls(every, every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job(_Row):
  """Everything a row depends on; fingerprints contain the class's name."""

  GONE: ClassVar[Mapping[str, Any]] = {"variant": "", "share": 1.0}

  recipe: Any


def list_jobs(task: frame.Task, data: data_lib.Data) -> list[frame.Job]:
  """Lists the rows of the table."""
  config = task.config
  context = training.make_contexts(config, data, task.root / "states")
  listed = []
  for row in _list_rows(config):
    digest = artifacts.fingerprint(
      "federated_study 3",
      context(row.recipe).digest,
      row,
      config.test_split,
      config.personal,
      config.exchange_top,
      (config.rates, config.dev_split),
    )
    listed.append(
      frame.Job(
        directory=task.root / "outcomes" / digest,
        kind=Outcome,
        digest=digest,
        make=_Maker(config, context, row),
      )
    )
  return listed


def _list_rows(config: Any) -> Iterator[_Job]:
  for seed in range(config.seeds):
    for method in config.methods:
      if method not in _UNTRAINED or not seed:
        yield _Job(method=method, seed=seed, recipe=_get_recipe(config, method))


def _get_recipe(config: Any, method: str) -> Any:
  """Returns the recipe of a method; Central's may have another learning rate."""
  rate = config.central_learning_rate
  if rate is None or not method.startswith(CENTRAL):
    return config.recipe
  return dataclasses.replace(config.recipe, learning_rate=rate)


@dataclasses.dataclass(frozen=True, eq=False)
class _Maker:
  """Trains and scores one row."""

  config: Any
  contexts: Callable[[Any], training.Context]
  row: _Job

  def __call__(self) -> Outcome:
    began, row = time.monotonic(), self.row
    context = self.contexts(row.recipe)
    data, split = context.data, self.config.test_split
    rate = math.nan
    if row.method == "BM25":
      tested, trained = (
        [ranking.evaluate_bm25(client, each) for client in data.clients]
        for each in (split, data_lib.TRAIN)
      )
      rounds, skewness = (), math.nan
    else:
      towers, rate = self._choose_towers()
      tested, skewness = score_towers(context, towers, row.seed, split)
      trained = rank_sentences(context, towers, data_lib.TRAIN)
      rounds = towers.traffic
    sent, received = (
      [
        sum(
          getattr(exchanged.traffic[tokens.name], side) for exchanged in rounds
        )
        for tokens in data.tokens
      ]
      for side in ("sent", "received")
    )
    return Outcome(
      method=row.method,
      seed=row.seed,
      ranks=tuple(tested),
      sent=sent,
      received=received,
      exchanges=len(rounds),
      train=_compute_means(trained),
      learning_rate=rate,
      hubness=skewness,
      seconds=time.monotonic() - began,
    )

  def _choose_towers(self) -> tuple[Towers, float]:
    """Trains at every rate; returns the towers best on dev questions, with rate."""
    config, row = self.config, self.row
    if row.method == "Public encoder":
      context = self.contexts(row.recipe)
      return Towers.shared(context.start, context), math.nan
    own, shared = row.recipe.learning_rate, None
    if row.method in _PERSONAL:
      first = dataclasses.replace(row, method=_PERSONAL[row.method])
      towers, _ = dataclasses.replace(self, row=first)._choose_towers()
      own, shared = config.personal.settings.learning_rate, towers.sentence[0]
    rates = config.rates or (own,)
    best, chosen, value = None, math.nan, -math.inf
    for rate in rates:
      towers = self._train_towers(rate, shared)
      if len(rates) == 1:
        return towers, rate
      if (dev_score := self._score_on_dev(towers)) > value:
        best, chosen, value = towers, rate, dev_score
    return best, chosen

  def _score_on_dev(self, towers: Towers) -> float:
    context = self.contexts(self.row.recipe)
    ranks = rank_sentences(context, towers, self.config.dev_split)
    return _compute_means(ranks)[0]

  def _train_towers(self, rate: float, shared: typing.Params | None) -> Towers:
    """Trains at one rate; with `shared` towers, a query encoder of every client."""
    method, seed, config = self.row.method, self.row.seed, self.config
    recipe = self.row.recipe
    if shared is not None:
      settings = dataclasses.replace(
        config.personal.settings, learning_rate=rate
      )
      personal = dataclasses.replace(config.personal, settings=settings)
      exchanged = config.exchange_top if method == "+ Fed-Negative" else None
      context = self.contexts(recipe)
      return personalise(
        context, shared, seed, personal, exchanged, self.config.dev_split
      )
    recipe = dataclasses.replace(recipe, learning_rate=rate)
    context = self.contexts(recipe)
    score = self._make_score(context) if config.rates else None
    static = recipe.history("static", "bm25")
    if method == "STAR, each client alone":
      own = [
        training.train_alone(
          context, seed, static, at, score and functools.partial(score, at=at)
        )
        for at in range(len(context.data.tokens))
      ]
      return Towers(own, own)
    if method in (CENTRAL, EQUAL):
      everyone = training.train_central(
        context, seed, static, score, equal_updates=method == EQUAL
      )
      return Towers.shared(everyone, context)
    history = {
      "Random negatives": recipe.history("random"),
      "BM25 negatives": recipe.history("bm25"),
    }.get(method, static)
    if score is None:
      towers = training.train_federated(context, seed, history)
    else:
      towers = training.train_best_round(context, seed, history, score)
    return Towers.shared(towers, context)

  def _make_score(self, context: training.Context) -> Callable[..., float]:
    """Returns a function that scores towers by dev questions of all clients or one."""
    split = self.config.dev_split

    def score(params: typing.Params, at: int | None = None) -> float:
      towers = Towers.shared(params, context)
      indices = None if at is None else (at,)
      return _compute_means(rank_sentences(context, towers, split, indices))[0]

    return score


_PERSONAL = {
  "+ query encoder": BASE,
  "+ Fed-Negative": BASE,
  "Central + query encoder": CENTRAL,
}
"""Rows whose query encoders start from another row's towers."""


def _compute_means(scores: Sequence[ranking.Scores]) -> tuple[float, float]:
  """Returns mean MRR@10 over clients and over questions; 0 without questions."""
  values = [client.values("MRR@10") for client in scores]
  values = [client for client in values if len(client)]
  if not values:
    return 0.0, 0.0
  over_clients = np.mean([client.mean() for client in values])
  return float(over_clients), float(np.concatenate(values).mean())


def rank_sentences(
  context: training.Context,
  towers: Towers,
  split: str,
  indices: Sequence[int] | None = None,
) -> list[ranking.Scores]:
  """Ranks clients' sentences for the questions of a split.

  Args:
    context: data and encoders.
    towers: towers of every client.
    split: split of the questions; clients without any are left out.
    indices: indices of the clients; None for all.
  """
  scores = []
  for at in range(len(context.data.tokens)) if indices is None else indices:
    tokens = context.data.tokens[at]
    if split in tokens.answers and len(tokens.answers[split]):
      questions = context.encoders.encode_queries(
        towers.query[at], tokens.questions[split]
      )
      vectors = context.sentences(towers.sentence[at], at)
      scores.append(ranking.evaluate(questions, vectors, tokens, split))
  return scores


def personalise(
  context: training.Context,
  shared: typing.Params,
  seed: int,
  personal: Any,
  exchanged: int | None,
  dev_split: str = "dev",
) -> Towers:
  """Trains a query tower of its own for every client.

  Args:
    context: data and encoders.
    shared: the shared towers, whose sentence tower does not change.
    seed: seed of the order of the questions.
    personal: a `federated.Personal`.
    exchanged: number of negatives that a question gets from the other clients
      before each round; None for only a client's own negatives.
    dev_split: split of the questions that may stop a client's training.
  """
  members = context.data.tokens
  vectors = [context.sentences(shared, at) for at in range(len(members))]
  own = [shared] * len(members)
  traffic = []
  for number in range(personal.rounds):
    extra: Mapping[str, exchange_lib.Negatives] = {}
    if exchanged is not None:
      parties = [
        context.make_party(at, own[at], vectors[at])
        for at in range(len(members))
      ]
      traffic.append(exchange_lib.fed_negative(parties, top=exchanged))
      extra = traffic[-1].negatives
    for at, tokens in enumerate(members):
      trained = personalisation.customise(
        context.encoders,
        own[at],
        tokens,
        personal.settings,
        seed=seed * personal.rounds + number,
        extra=extra.get(tokens.name),
        sentence_vectors=vectors[at],
        dev_split=dev_split,
      )
      own[at] = {**own[at], encoders_lib.QUERY: trained}
  return Towers([shared] * len(members), own, tuple(traffic))


def score_towers(
  context: training.Context, towers: Towers, seed: int, test_split: str
) -> tuple[list[ranking.Scores], float]:
  """Ranks every client's test questions; also returns the mean hubness.

  Args:
    context: data and recipe.
    towers: towers of every client.
    seed: seed of the draw of hard negatives whose hubness is measured.
    test_split: split of the questions to score.
  """
  skewness, weights = [], []
  scores = rank_sentences(context, towers, test_split)
  for at, tokens in enumerate(context.data.tokens):
    vectors = context.sentences(towers.sentence[at], at)
    table = negatives.mine(
      context.encoders,
      towers.query[at],
      tokens,
      n=context.recipe.num_negatives,
      k=context.recipe.top,
      seed=seed,
      sentence_vectors=vectors,
    )
    skewness.append(negatives.compute_hubness(table, len(vectors)))
    weights.append(table.shape[1])
  return scores, float(np.average(skewness, weights=weights))
