"""The rows of a federated study: how each comes to its towers, and its ranks."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from synthq_jax import typing
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import exchange as exchange_lib
from synthq_jax.federated import negatives, personalisation, ranking
from synthq_jax.pipeline import _federated_data, _federated_training
from synthq_jax.pipeline import _federated_results as results
from synthq_jax.privacy import statement

__all__ = [
  "BASE",
  "CENTRAL",
  "EXCHANGE",
  "METHODS",
  "Method",
  "Personal",
  "Towers",
  "exchanged",
  "outcome",
  "party",
  "personalised",
]

BASE = "PDD-AS2"
"""The method whose towers are personalised, and that others are tested
against."""

CENTRAL = "Central"
"""The method that has all data in one place."""

EXCHANGE = "exchange"
"""What rows of the table of exchanges are called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personal:
  """How clients train query towers of their own."""

  rounds: int = 2
  """In each of which negatives are exchanged, where they are."""
  settings: personalisation.Settings = dataclasses.field(
    default_factory=personalisation.Settings
  )
  """Of a client in a round."""


class Towers(NamedTuple):
  """What a method has come to."""

  sentence: Sequence[typing.Params]
  """A pair of towers for each client, of which sentences read one; often the
  same object for all."""
  query: Sequence[typing.Params]
  """A pair for each client, of which questions read one."""
  traffic: tuple[exchange_lib.Exchanged, ...] = ()
  """Of each round of an exchange."""


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


def outcome(
  context: _federated_training.Context,
  method: str,
  seed: int,
  *,
  test_split: str,
  personal: Personal,
  exchange: exchange_lib.Exchange,
  variant: str = "",
  after: Callable[[], object] = lambda: None,
) -> results.Outcome:
  """Trains and scores one method.

  Args:
    context: data and recipe.
    method: the name of one of `METHODS`.
    seed: of the training.
    test_split: whose questions are scored.
    personal: of the methods that personalise.
    exchange: of the one that exchanges negatives.
    variant: what differs from the main table.
    after: called when a round of federated training ends.
  """
  began = time.monotonic()
  towers = None
  if method != "BM25":
    towers = _towers(context, method, seed, personal, exchange, after)
  return _outcome(context, method, seed, variant, test_split, towers, began)


def exchanged(
  context: _federated_training.Context,
  kind: str,
  seed: int,
  *,
  test_split: str,
  personal: Personal,
  exchange: exchange_lib.Exchange | None,
  began: float,
) -> results.Outcome:
  """Personalises the public encoder, with one exchange of negatives or none.

  Args:
    context: data and recipe.
    kind: what the exchange is called.
    seed: of the training and of the exchange's secrets.
    test_split: whose questions are scored.
    personal: settings; one round is taken.
    exchange: of negatives.
    began: when work on this row began, by `time.monotonic`: an exchange may
      have been trained for it.
  """
  once = dataclasses.replace(personal, rounds=1)
  towers = personalised(
    context, context.start, seed, once, exchange, is_public=True
  )
  return _outcome(context, EXCHANGE, seed, kind, test_split, towers, began)


def _outcome(
  context: _federated_training.Context,
  method: str,
  seed: int,
  variant: str,
  test_split: str,
  towers: "Towers | None",
  began: float,
) -> results.Outcome:
  """Scores towers; None: BM25."""
  data = context.data
  if towers is None:
    found = [ranking.evaluate_bm25(one, test_split) for one in data.clients]
    rounds, skewness = (), math.nan
  else:
    found, skewness = _scored(context, towers, seed, test_split)
    rounds = towers.traffic
  sent, received = _bytes(data, rounds)
  questions, collection = _epsilons(rounds)
  return results.Outcome(
    method=method,
    seed=seed,
    variant=variant,
    ranks=tuple(map(results.ranks, found)),
    sent=sent,
    received=received,
    exchanges=len(rounds),
    epsilon_questions=questions,
    epsilon_collection=collection,
    hubness=skewness,
    seconds=time.monotonic() - began,
  )


def _towers(
  context: _federated_training.Context,
  method: str,
  seed: int,
  personal: Personal,
  exchange: exchange_lib.Exchange,
  after: Callable[[], object],
) -> Towers:
  """Trains what a method needs."""
  recipe, count = context.recipe, len(context.data.tokens)
  if method == "Public encoder":
    return Towers([context.start] * count, [context.start] * count)
  static = recipe.history("static", "bm25")
  if method == "STAR, each client alone":
    own = [
      _federated_training.alone(context, seed, static, client)
      for client in range(count)
    ]
    return Towers(own, own)
  if method == CENTRAL:
    everyone = _federated_training.central(context, seed, static)
    return Towers([everyone] * count, [everyone] * count)
  history = {
    "Random negatives": recipe.history("random"),
    "BM25 negatives": recipe.history("bm25"),
  }.get(method, static)
  shared = _federated_training.federated(context, seed, history, after)
  if method == "+ query encoder":
    return personalised(context, shared, seed, personal, None)
  if method == "+ Fed-Negative":
    return personalised(context, shared, seed, personal, exchange)
  return Towers([shared] * count, [shared] * count)


def personalised(
  context: _federated_training.Context,
  shared: typing.Params,
  seed: int,
  personal: Personal,
  exchange: exchange_lib.Exchange | None,
  *,
  is_public: bool = False,
) -> Towers:
  """Gives every client a query tower of its own.

  Args:
    context: data.
    shared: the towers of all, whose sentence tower stays.
    seed: of the order, and of the exchange's secrets.
    personal: rounds and settings.
    exchange: of negatives, before each round; None: only a client's own.
    is_public: whether `shared` has read none of the clients' texts.
  """
  members = context.data.tokens
  vectors = [context.sentences(shared, at) for at in range(len(members))]
  own = [shared] * len(members)
  traffic = []
  for number in range(personal.rounds):
    extra: Mapping[str, exchange_lib.Negatives] = {}
    if exchange is not None:
      parties = [
        party(
          context,
          at,
          own[at],
          vectors[at],
          is_public=is_public,
          is_first=not number,
        )
        for at in range(len(members))
      ]
      traffic.append(
        exchange.negatives(
          parties, round_number=number, key=jax.random.key(seed)
        )
      )
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


def party(
  context: _federated_training.Context,
  at: int,
  params: typing.Params,
  sentences: np.ndarray,
  *,
  is_public: bool,
  is_first: bool = True,
) -> exchange_lib.Party:
  """Returns what a client brings to an exchange.

  Args:
    context: data.
    at: the place of the client.
    params: its towers.
    sentences: vectors of its collection.
    is_public: whether training has begun from public towers alone, of which the
      sentence tower stays.
    is_first: whether no query tower has been trained yet.
  """
  tokens = context.data.tokens[at]
  return exchange_lib.Party(
    name=tokens.name,
    queries=context.encoders.encode_queries(
      params, tokens.questions[_federated_data.TRAIN]
    ),
    sentences=sentences,
    answers=tokens.answers[_federated_data.TRAIN],
    passages=tokens.passages,
    query_encoder=_read_by(
      exchange_lib.QUESTION_UNIT, is_public=is_public and is_first
    ),
    sentence_encoder=_read_by(
      exchange_lib.COLLECTION_UNIT, is_public=is_public
    ),
  )


def _read_by(unit: str, *, is_public: bool) -> statement.PrivacyStatement:
  """States what an encoder has read."""
  if is_public:
    return statement.none(unit=unit)
  return statement.non_private(
    "The encoder was trained on the clients' texts without noise.", unit=unit
  )


def _scored(
  context: _federated_training.Context,
  towers: Towers,
  seed: int,
  test_split: str,
) -> tuple[list[ranking.Scores], float]:
  """Ranks every client's test questions; returns the mean hubness, too."""
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
      split=_federated_data.TRAIN,
      sentence_vectors=vectors,
    )
    skewness.append(negatives.hubness(table, len(vectors)))
    weights.append(table.shape[1])
  return found, float(np.average(skewness, weights=weights))


def _bytes(
  data: _federated_data.Data, rounds: Sequence[exchange_lib.Exchanged]
) -> tuple[list[int], list[int]]:
  """Adds up what each client sent and received."""
  sides = []
  for side in ("sent", "received"):
    sides.append(
      [
        sum(getattr(one.traffic[tokens.name], side) for one in rounds)
        for tokens in data.tokens
      ]
    )
  return sides[0], sides[1]


def _epsilons(
  rounds: Sequence[exchange_lib.Exchanged],
) -> tuple[float, float]:
  """Returns the largest epsilons of a client, per question and per passage."""
  if not rounds:
    return math.nan, math.nan
  promises = [
    exchange_lib.over_rounds([one.promises[name] for one in rounds])
    for name in rounds[0].promises
  ]
  return (
    max(one.questions.epsilon for one in promises),
    max(one.collection.epsilon for one in promises),
  )
