"""Trains the towers of a federated study, round by round.

What has been trained is known by its history: the kinds of negatives of its
rounds, in order. Methods that begin alike share their first rounds, and a study
that was killed goes on after the last round that was finished.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import artifacts, typing
from synthq_jax.federated import (
  aggregation,
  cohorts,
  fedavg,
  local_training,
  negatives,
  training,
)
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.pipeline import _federated_data, config_types
from synthq_jax.retrieval import vector_files
from synthq_jax.training import checkpoints

__all__ = ["KINDS", "Context", "Recipe", "alone", "central", "federated"]

KINDS = ("random", "bm25", "static")
"""Negatives of a round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How towers are trained, whoever has the data."""

  warmup_rounds: int = 1
  """Rounds with BM25's negatives before static hard ones."""
  rounds: int = 3
  """Rounds after those. Every method gets the sum of both."""
  epochs: int = 1
  """Of every client in every round."""
  batch_size: int = 8
  """Questions of a step."""
  num_negatives: int = 4
  """Of each question, beside the other questions' answers and negatives."""
  top: int = 100
  """The best sentences of the current encoders, from which static hard
  negatives are drawn."""
  learning_rate: float = 3e-4
  """Of Adam, which starts afresh in every round of federated training."""
  temperature: float = 0.05
  """Divides the cosines."""

  def __post_init__(self):
    config_types.at_least(self, 0, "warmup_rounds", "rounds")
    config_types.at_least(self, 1, "epochs", "batch_size", "num_negatives")
    config_types.positive(self, "learning_rate", "temperature")
    if self.top < self.num_negatives:
      raise ValueError(
        "federated_study.Recipe: expected top of at least num_negatives, got"
        f" top={self.top} and num_negatives={self.num_negatives}"
      )
    if not self.warmup_rounds + self.rounds:
      raise ValueError(
        "federated_study.Recipe: expected rounds, got warmup_rounds=0 and"
        " rounds=0"
      )

  def history(self, kind: str, warmup: str | None = None) -> tuple[str, ...]:
    """Returns the negatives of all rounds.

    >>> Recipe(warmup_rounds=1, rounds=2).history("static", "bm25")
    ('bm25', 'static', 'static')
    """
    first = kind if warmup is None else warmup
    return (first,) * self.warmup_rounds + (kind,) * self.rounds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
  """What all trainings share."""

  data: _federated_data.Data
  encoders: encoders_lib.Encoders
  start: typing.Params
  """The public towers."""
  digest: str
  """Of data, encoders and start."""
  states: pathlib.Path
  """Where towers are kept between rounds."""
  recipe: Recipe
  kept: dict[int, tuple[list[str], np.ndarray]] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  """By client the digests of a sentence tower, and its vectors."""

  def sentences(self, params: typing.Params, client: int) -> np.ndarray:
    """Returns the vectors of a client's sentences.

    Methods that share a sentence tower encode once: the vectors of the last
    tower that each client was encoded with are kept.

    Args:
      params: the towers, of which that of sentences is read.
      client: its place.
    """
    leaves = jax.tree.leaves(params[encoders_lib.SENTENCE])
    tower = [vector_files.digest(np.asarray(leaf)) for leaf in leaves]
    if client not in self.kept or self.kept[client][0] != tower:
      vectors = self.encoders.encode_sentences(
        params, self.data.tokens[client].sentences
      )
      self.kept[client] = tower, vectors
    return self.kept[client][1]

  @functools.cached_property
  def bm25(self) -> list[np.ndarray]:
    """BM25's negatives of each client, [1, question, n]."""
    return [
      negatives.bm25_negatives(
        client, n=self.recipe.num_negatives, split=_federated_data.TRAIN
      )
      for client in self.data.clients
    ]

  def table(
    self, kind: str, params: typing.Params, seed: int, client: int, number: int
  ) -> np.ndarray:
    """Returns a client's negatives of a round, [epoch, question, n].

    Args:
      kind: one of `KINDS`.
      params: the towers, for static hard negatives.
      seed: of the draws.
      client: its place.
      number: of the round.
    """
    recipe, tokens = self.recipe, self.data.tokens[client]
    if kind == "bm25":
      return np.repeat(self.bm25[client], recipe.epochs, axis=0)
    options = {
      "n": recipe.num_negatives,
      "seed": seed,
      "round_number": number,
      "split": _federated_data.TRAIN,
      "epochs": recipe.epochs,
    }
    if kind == "random":
      return negatives.random_negatives(tokens, **options)
    return negatives.mine(
      self.encoders,
      params,
      tokens,
      k=recipe.top,
      sentence_vectors=self.sentences(params, client),
      **options,
    )

  def place(self, who: str, seed: int, history: Sequence[str]) -> pathlib.Path:
    """Returns where the towers after some rounds are kept."""
    name = artifacts.fingerprint(
      self.digest, self.recipe, who, seed, list(history)
    )
    return self.states / name


def federated(
  context: Context,
  seed: int,
  history: Sequence[str],
  after: Callable[[], object] = lambda: None,
) -> typing.Params:
  """Trains by federated averaging, clients weighted by their questions.

  Args:
    context: data and recipe.
    seed: of the order, and of the negatives.
    history: kinds of negatives, by round.
    after: called when a round ends.

  Returns:
    The towers that all clients share.
  """
  members = context.data.tokens
  weights = [len(one.answers[_federated_data.TRAIN]) for one in members]
  begin, add, finish = _averaging(
    context.encoders, context.recipe.learning_rate, context.recipe.temperature
  )
  key = jax.random.key(seed)
  first, params = _newest(context, "federated", seed, history)
  state = fedavg.State(params, (), jnp.int32(first))
  slots = _read_slots(context.place("federated", seed, history[:first]))
  for number in range(first, len(history)):
    plans = [
      _plan(context, history[number], state.params, seed, at, number)
      for at in range(len(members))
    ]
    slots = training.slots(plans, members[0].sentences.shape[1], at_least=slots)
    steps = max(len(plan.questions) for plan in plans)
    total = begin(state)
    for at, (plan, tokens) in enumerate(zip(plans, members, strict=True)):
      rows = training.arrays(plan, tokens, slots, split=_federated_data.TRAIN)
      cohort = cohorts.stack([rows], [at], weights=[weights[at]], steps=steps)
      total = add(total, state, cohort, key)
    state, _ = finish(state, total)
    done = number + 1
    place = context.place("federated", seed, history[:done])
    artifacts.write_atomically(_slots_path(place), json.dumps(slots))
    checkpoints.save(place, done, state.params)
    after()
  return state.params


def _slots_path(place: pathlib.Path) -> pathlib.Path:
  return place.with_name(f"{place.name}.slots.json")


def _read_slots(place: pathlib.Path) -> training.Slots:
  """Returns the shapes that the rounds before had: they change last bits."""
  path = _slots_path(place)
  if not path.exists():
    return ()
  return tuple((width, rows) for width, rows in json.loads(path.read_text()))


@functools.lru_cache(maxsize=4)
def _averaging(
  encoders: encoders_lib.Encoders, learning_rate: float, temperature: float
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
  """Returns compiled parts of a round: begin, add a client, finish."""
  update = local_training.local_training(
    training.loss_fn(encoders, temperature=temperature),
    optax.adam(learning_rate),
  )
  found = fedavg.fedavg(update, aggregation=aggregation.Mean())
  return jax.jit(found.begin), jax.jit(found.add), jax.jit(found.finish)


def alone(
  context: Context, seed: int, history: Sequence[str], client: int
) -> typing.Params:
  """Trains one client on its own questions, as many rounds as the others."""

  def table(kind: str, params: typing.Params, number: int) -> np.ndarray:
    return context.table(kind, params, seed, client, number)

  name = f"client {client}"
  return _alone(
    context, seed, history, name, context.data.tokens[client], table
  )


def central(
  context: Context, seed: int, history: Sequence[str]
) -> typing.Params:
  """Trains on all questions in one place: the upper bound of no privacy.

  The negatives of a question are its own client's sentences, which are what it
  competes with when it is scored.
  """
  members = context.data.tokens

  def table(kind: str, params: typing.Params, number: int) -> np.ndarray:
    tables = [
      context.table(kind, params, seed, at, number)
      for at in range(len(members))
    ]
    return training.join_tables(tables, members)

  everyone = training.pool(members, "everyone")
  return _alone(context, seed, history, "everyone", everyone, table)


def _alone(
  context: Context,
  seed: int,
  history: Sequence[str],
  name: str,
  tokens: Any,
  table: Callable[[str, typing.Params, int], np.ndarray],
) -> typing.Params:
  """Trains without averaging; the optimizer goes on from round to round."""
  done, params = _newest(context, name, seed, history, whole=True)
  if done:
    return params
  params = training.train_alone(
    context.encoders,
    params,
    tokens,
    rounds=len(history),
    negatives=lambda params, number: table(history[number], params, number),
    optimizer=optax.adam(context.recipe.learning_rate),
    batch_size=context.recipe.batch_size,
    temperature=context.recipe.temperature,
    seed=seed,
    split=_federated_data.TRAIN,
  )
  checkpoints.save(context.place(name, seed, history), len(history), params)
  return params


def _plan(
  context: Context,
  kind: str,
  params: typing.Params,
  seed: int,
  client: int,
  number: int,
) -> training.Plan:
  return training.plan(
    context.data.tokens[client],
    context.table(kind, params, seed, client, number),
    batch_size=context.recipe.batch_size,
    seed=seed,
    round_number=number,
    split=_federated_data.TRAIN,
  )


def _newest(
  context: Context,
  who: str,
  seed: int,
  history: Sequence[str],
  *,
  whole: bool = False,
) -> tuple[int, typing.Params]:
  """Returns after how many rounds there are towers, and these.

  Args:
    context: data and recipe.
    who: trains.
    seed: of the training.
    history: of all rounds.
    whole: whether nothing but the end will do.
  """
  for done in range(len(history), len(history) - 1 if whole else 0, -1):
    place = context.place(who, seed, history[:done])
    if checkpoints.latest_step(place) == done:
      return done, checkpoints.restore(place, done, context.start)
  return 0, context.start
