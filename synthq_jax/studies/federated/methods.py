"""Trains and scores the rows of a federated study, each with its own towers."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synthq_jax import artifacts, typing
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import exchange as exchange_lib
from synthq_jax.federated import negatives, personalisation, ranking
from synthq_jax.studies import frame
from synthq_jax.studies.federated import data as data_lib
from synthq_jax.studies.federated import training

__all__ = [
  "BASE",
  "CENTRAL",
  "METHODS",
  "Method",
  "Outcome",
  "Ranks",
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


class Method(NamedTuple):
  """A row of the main table."""

  name: str
  is_trained: bool
  """Whether it depends on a seed."""


METHODS = (
  Method("BM25", False),
  Method("Public encoder", False),
  Method("Random negatives", True),
  Method("BM25 negatives", True),
  Method("STAR, each client alone", True),
  Method(BASE, True),
  Method("+ query encoder", True),
  Method("+ Fed-Negative", True),
  Method(CENTRAL, True),
)
"""The rows of the main table, in the order of the thesis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
  """Where a client's test questions find their first right answer."""

  client: str
  sentence: list[int]
  """By question, from 1; 0 where none was found."""
  passage: list[int]

  @classmethod
  def of(cls, found: ranking.Scores) -> "Ranks":
    """Turns ranks into JSON's numbers."""
    sentence, passage = (
      np.where(np.isfinite(ranks), ranks, 0).astype(int).tolist()
      for ranks in (found.sentence_ranks, found.passage_ranks)
    )
    return cls(client=found.client, sentence=sentence, passage=passage)

  def scores(self, split: str = "test") -> ranking.Scores:
    """Turns ranks back, for their measures."""
    sentence, passage = (
      np.array([rank or np.inf for rank in ranks], float)
      for ranks in (self.sentence, self.passage)
    )
    return ranking.Scores(
      client=self.client,
      split=split,
      sentence_ranks=sentence,
      passage_ranks=passage,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """One method with one seed."""

  method: str
  """Its name in tables."""
  seed: int
  variant: str
  """"" or the one setting that differs, as "top=300"."""
  ranks: tuple[Ranks, ...]
  """Of each client."""
  sent: list[int]
  """Bytes that each client sent in an exchange, all rounds together."""
  received: list[int]
  exchanges: int
  """Rounds of the exchange."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
  """One method with one seed; the name stands in fingerprints."""

  method: str
  seed: int
  recipe: Any
  share: float = 1.0
  variant: str = ""


def jobs(task: frame.Task, data: data_lib.Data) -> list[frame.Job]:
  """Lists the rows of the main table, then those of the smaller ones."""
  config = task.config
  contexts = training.contexts(config, data, task.root / "states")
  listed = []
  for row in _rows(config):
    context = contexts(row.recipe, row.share)
    digest = artifacts.fingerprint(
      "federated_study 2",
      context.digest,
      row,
      config.test_split,
      config.personal,
      (config.exchange_top, config.exchange_partners),
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
  trained = {one.name: one.is_trained for one in METHODS}
  for seed in range(config.seeds):
    for method in config.methods:
      if trained[method] or not seed:
        recipe = config.recipe
        if method == CENTRAL:
          rate = config.central_learning_rate or recipe.learning_rate
          recipe = dataclasses.replace(recipe, learning_rate=rate)
        yield _Job(method=method, seed=seed, recipe=recipe)
  for name, values in (
    ("num_negatives", config.negatives_tried),
    ("top", config.tops_tried),
    ("learning_rate", config.rates_tried),
  ):
    for value in values:
      recipe = dataclasses.replace(config.recipe, **{name: value})
      yield _Job(
        method=BASE, seed=0, recipe=recipe, variant=f"{name}={value:g}"
      )
  one = _Job(method=BASE, seed=0, recipe=config.recipe)
  for share in config.shares_tried:
    yield dataclasses.replace(one, share=share, variant=f"share={share:g}")


@dataclasses.dataclass(frozen=True, eq=False)
class _Maker:
  """Trains and scores one row."""

  config: Any
  context: training.Context
  row: _Job

  def __call__(self) -> Outcome:
    began, row = time.monotonic(), self.row
    data, split = self.context.data, self.config.test_split
    if row.method == "BM25":
      found = [ranking.evaluate_bm25(one, split) for one in data.clients]
      rounds, skewness = (), math.nan
    else:
      towers = self._towers()
      found, skewness = scored(self.context, towers, row.seed, split)
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
      ranks=tuple(map(Ranks.of, found)),
      sent=sent,
      received=received,
      exchanges=len(rounds),
      hubness=skewness,
      seconds=time.monotonic() - began,
    )

  def _towers(self) -> Towers:
    context, method, seed = self.context, self.row.method, self.row.seed
    personal, start = self.config.personal, context.start
    count = len(context.data.tokens)
    if method == "Public encoder":
      return Towers([start] * count, [start] * count)
    recipe = context.recipe
    static = recipe.history("static", "bm25")
    if method == "STAR, each client alone":
      own = [
        training.alone(context, seed, static, client) for client in range(count)
      ]
      return Towers(own, own)
    if method == CENTRAL:
      everyone = training.central(context, seed, static)
      return Towers([everyone] * count, [everyone] * count)
    history = {
      "Random negatives": recipe.history("random"),
      "BM25 negatives": recipe.history("bm25"),
    }.get(method, static)
    shared = training.federated(context, seed, history)
    if method == "+ query encoder":
      return personalised(context, shared, seed, personal, None)
    if method == "+ Fed-Negative":
      exchange = exchange_lib.FedNegative(
        top=self.config.exchange_top,
        partners=self.config.exchange_partners,
        seed=seed,
      )
      return personalised(context, shared, seed, personal, exchange)
    return Towers([shared] * count, [shared] * count)


def personalised(
  context: training.Context,
  shared: typing.Params,
  seed: int,
  personal: Any,
  exchange: exchange_lib.FedNegative | None,
) -> Towers:
  """Gives every client a query tower of its own.

  Args:
    context: data.
    shared: the towers of all, whose sentence tower stays.
    seed: of the order.
    personal: a `federated.Personal`.
    exchange: of negatives, before each round; None: only a client's own.
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
      traffic.append(exchange.negatives(parties, round_number=number))
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
      )
      own[at] = {**own[at], encoders_lib.QUERY: trained.query}
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
  found, skewness, weights = [], [], []
  for at, (tokens, sentence, query) in enumerate(
    zip(context.data.tokens, towers.sentence, towers.query, strict=True)
  ):
    vectors = context.sentences(sentence, at)
    questions = context.encoders.encode_queries(
      query, tokens.questions[test_split]
    )
    found.append(ranking.evaluate(questions, vectors, tokens, test_split))
    table = negatives.mine(
      context.encoders,
      query,
      tokens,
      n=context.recipe.num_negatives,
      k=context.recipe.top,
      seed=seed,
      split=data_lib.TRAIN,
      sentence_vectors=vectors,
    )
    skewness.append(negatives.hubness(table, len(vectors)))
    weights.append(table.shape[1])
  return found, float(np.average(skewness, weights=weights))
