"""Trains and scores the rows of a federated study, each with its own towers."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
  "jobs",
  "personalised",
]

BASE = "PDD-AS2"
"""The method whose towers are personalised, and that others are tested
against."""

CENTRAL = "Central"
"""The method that has all data in one place."""

EQUAL = "Central, equal updates"
"""The same, with no more steps than the largest client takes."""


_UNTRAINED = ("BM25", "Public encoder")  # no seed changes them

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
"""The rows of the main table, in the order of the thesis, and two more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
  """One method with one seed."""

  method: str
  """Its name in tables."""
  seed: int
  variant: str = ""
  """"" or the one setting that differs, as "top=300"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(_Row):
  """What a row has come to."""

  ranks: tuple[ranking.Scores, ...]
  """Of each client."""
  sent: list[int]
  """Bytes that each client sent in an exchange, all rounds together."""
  received: list[int]
  exchanges: int
  """Rounds of the exchange."""
  train: tuple[float, float]
  """MRR@10 of the train questions, over clients and over questions."""
  learning_rate: float
  """Trained with; nan for rows without training."""
  hubness: float
  """Skewness of how often a sentence is drawn as a hard negative of the train
  questions by the final towers, mean over clients; nan for BM25."""
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  facts: data_lib.Facts
  notes: tuple[str, ...]
  """What a reader must know of the settings."""
  outcomes: tuple[Outcome, ...]
  seconds: float
  """Of all trainings, those of earlier runs included."""


class Towers(NamedTuple):
  """What a method has come to."""

  sentence: Sequence[typing.Params]
  """A pair of towers for each client, of which sentences read one; often the
  same object for all."""
  query: Sequence[typing.Params]
  """A pair for each client, of which questions read one."""
  traffic: tuple[exchange_lib.Exchanged, ...] = ()
  """Of each round of an exchange."""

  @classmethod
  def shared(cls, params: typing.Params, context: training.Context) -> "Towers":
    """Returns one pair of towers for all clients."""
    every = [params] * len(context.data.tokens)
    return cls(every, every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job(_Row):
  """What a row depends on; the name stands in fingerprints."""

  recipe: Any
  share: float = 1.0


def jobs(task: frame.Task, data: data_lib.Data) -> list[frame.Job]:
  """Lists the rows of the main table, then those of the smaller ones."""
  config = task.config
  contexts = training.contexts(config, data, task.root / "states")
  listed = []
  for row in _rows(config):
    context = functools.partial(contexts, share=row.share)
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


def _rows(config: Any) -> Iterator[_Job]:
  for seed in range(config.seeds):
    for method in config.methods:
      if method not in _UNTRAINED or not seed:
        yield _Job(method=method, seed=seed, recipe=_recipe(config, method))
  for name, values in (
    ("num_negatives", config.negatives_tried),
    ("top", config.tops_tried),
    ("learning_rate", config.rates_tried),
  ):
    for method, value in itertools.product(config.methods_tried, values):
      recipe = dataclasses.replace(_recipe(config, method), **{name: value})
      yield _Job(
        method=method, seed=0, recipe=recipe, variant=f"{name}={value:g}"
      )
  for method, share in itertools.product(
    config.methods_tried, config.shares_tried
  ):
    yield _Job(
      method=method,
      seed=0,
      recipe=_recipe(config, method),
      share=share,
      variant=f"share={share:g}",
    )


def _recipe(config: Any, method: str) -> Any:
  """Returns the recipe of a method: those of Central may have another rate."""
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
      found, trained = (
        [ranking.evaluate_bm25(one, each) for one in data.clients]
        for each in (split, data_lib.TRAIN)
      )
      rounds, skewness = (), math.nan
    else:
      towers, rate = self._best()
      found, skewness = scored(context, towers, row.seed, split)
      trained = ranked(context, towers, data_lib.TRAIN)
      rounds = towers.traffic
    sent, received = (
      [
        sum(getattr(one.traffic[tokens.name], side) for one in rounds)
        for tokens in data.tokens
      ]
      for side in ("sent", "received")
    )
    return Outcome(
      method=row.method,
      seed=row.seed,
      variant=row.variant,
      ranks=tuple(found),
      sent=sent,
      received=received,
      exchanges=len(rounds),
      train=_means(trained),
      learning_rate=rate,
      hubness=skewness,
      seconds=time.monotonic() - began,
    )

  def _best(self) -> tuple[Towers, float]:
    """Returns the towers that dev questions choose, and their learning rate."""
    config, row = self.config, self.row
    if row.method == "Public encoder":
      context = self.contexts(row.recipe)
      return Towers.shared(context.start, context), math.nan
    own, shared = row.recipe.learning_rate, None
    if row.method in _PERSONAL:
      first = dataclasses.replace(row, method=_PERSONAL[row.method])
      towers, _ = dataclasses.replace(self, row=first)._best()
      own, shared = config.personal.settings.learning_rate, towers.sentence[0]
    is_chosen = config.rates and not row.variant.startswith("learning_rate")
    rates = config.rates if is_chosen else (own,)
    best, chosen, value = None, math.nan, -math.inf
    for rate in rates:
      towers = self._towers(rate, shared)
      if len(rates) == 1:
        return towers, rate
      if (found := self._dev(towers)) > value:
        best, chosen, value = towers, rate, found
    return best, chosen

  def _dev(self, towers: Towers) -> float:
    context = self.contexts(self.row.recipe)
    return _means(ranked(context, towers, self.config.dev_split))[0]

  def _towers(self, rate: float, shared: typing.Params | None) -> Towers:
    """Trains at one rate; with `shared` a query encoder for every client."""
    method, seed, config = self.row.method, self.row.seed, self.config
    recipe = self.row.recipe
    if shared is not None:
      settings = dataclasses.replace(
        config.personal.settings, learning_rate=rate
      )
      personal = dataclasses.replace(config.personal, settings=settings)
      exchange = None
      if method == "+ Fed-Negative":
        exchange = exchange_lib.FedNegative(top=config.exchange_top)
      context = self.contexts(recipe)
      return personalised(
        context, shared, seed, personal, exchange, self.config.dev_split
      )
    recipe = dataclasses.replace(recipe, learning_rate=rate)
    context = self.contexts(recipe)
    score = self._score_of(context) if config.rates else None
    static = recipe.history("static", "bm25")
    if method == "STAR, each client alone":
      own = [
        training.alone(
          context, seed, static, at, score and functools.partial(score, at=at)
        )
        for at in range(len(context.data.tokens))
      ]
      return Towers(own, own)
    if method in (CENTRAL, EQUAL):
      everyone = training.central(
        context, seed, static, score, equal_updates=method == EQUAL
      )
      return Towers.shared(everyone, context)
    history = {
      "Random negatives": recipe.history("random"),
      "BM25 negatives": recipe.history("bm25"),
    }.get(method, static)
    if score is None:
      towers = training.federated(context, seed, history)
    else:
      towers = training.best_round(context, seed, history, score)
    return Towers.shared(towers, context)

  def _score_of(self, context: training.Context) -> Callable[..., float]:
    """Returns what scores towers by the dev questions of all clients, or one."""
    split = self.config.dev_split

    def score(params: typing.Params, at: int | None = None) -> float:
      towers = Towers.shared(params, context)
      places = None if at is None else (at,)
      return _means(ranked(context, towers, split, places))[0]

    return score


_PERSONAL = {
  "+ query encoder": BASE,
  "+ Fed-Negative": BASE,
  "Central + query encoder": CENTRAL,
}
"""Rows whose query encoders go on from another row's towers."""


def _means(found: Sequence[ranking.Scores]) -> tuple[float, float]:
  """Returns MRR@10 over clients and over questions; 0 without questions."""
  values = [one.values("MRR@10") for one in found]
  values = [one for one in values if len(one)]
  if not values:
    return 0.0, 0.0
  over_clients = np.mean([one.mean() for one in values])
  return float(over_clients), float(np.concatenate(values).mean())


def ranked(
  context: training.Context,
  towers: Towers,
  split: str,
  places: Sequence[int] | None = None,
) -> list[ranking.Scores]:
  """Ranks clients' sentences for the questions of a split.

  Args:
    context: data.
    towers: of every client.
    split: whose questions; clients without any are left out.
    places: of the clients; None: all.
  """
  found = []
  for at in range(len(context.data.tokens)) if places is None else places:
    tokens = context.data.tokens[at]
    if split in tokens.answers and len(tokens.answers[split]):
      questions = context.encoders.encode_queries(
        towers.query[at], tokens.questions[split]
      )
      vectors = context.sentences(towers.sentence[at], at)
      found.append(ranking.evaluate(questions, vectors, tokens, split))
  return found


def personalised(
  context: training.Context,
  shared: typing.Params,
  seed: int,
  personal: Any,
  exchange: exchange_lib.FedNegative | None,
  dev_split: str = "dev",
) -> Towers:
  """Gives every client a query tower of its own.

  Args:
    context: data.
    shared: the towers of all, whose sentence tower stays.
    seed: of the order.
    personal: a `federated.Personal`.
    exchange: of negatives, before each round; None: only a client's own.
    dev_split: whose questions stop a client's training, if any do.
  """
  members = context.data.tokens
  vectors = [context.sentences(shared, at) for at in range(len(members))]
  own = [shared] * len(members)
  traffic = []
  for number in range(personal.rounds):
    extra: Mapping[str, exchange_lib.Negatives] = {}
    if exchange is not None:
      parties = [
        context.party(at, own[at], vectors[at]) for at in range(len(members))
      ]
      traffic.append(exchange.negatives(parties))
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


def scored(
  context: training.Context, towers: Towers, seed: int, test_split: str
) -> tuple[list[ranking.Scores], float]:
  """Ranks every client's test questions; returns the mean hubness, too.

  Args:
    context: data and recipe.
    towers: of every client.
    seed: of the draws of hard negatives, whose hubness is measured.
    test_split: whose questions are scored.
  """
  skewness, weights = [], []
  found = ranked(context, towers, test_split)
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
  return found, float(np.average(skewness, weights=weights))
