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
import numpy as np
import optax

from synthq_jax import memory, typing
from synthq_jax.data import blocks, shipped
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import exchange, fedavg, negatives, training
from synthq_jax.models import bert, t5_checkpoints
from synthq_jax.runtime import fingerprints
from synthq_jax.storage import artifacts
from synthq_jax.studies.federated import data as data_lib
from synthq_jax.training import checkpoints

__all__ = [
  "KINDS",
  "Context",
  "Score",
  "alone",
  "best_round",
  "central",
  "contexts",
  "federated",
]

_KEPT_BYTES = 2**31
KINDS = ("random", "bm25", "static")
"""Negatives of a round."""

Score = Callable[[typing.Params], float]
"""Of towers, for dev questions; more is better."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
  """What all trainings share."""

  data: data_lib.Data
  encoders: encoders_lib.Encoders
  start: typing.Params
  """The public towers."""
  digest: str
  """Of data, encoders and start."""
  states: pathlib.Path
  """Where towers are kept between rounds."""
  recipe: Any
  kept: memory.Kept[np.ndarray]
  """Vectors of sentences by data, client and tower, for all recipes."""

  def sentences(self, params: typing.Params, client: int) -> np.ndarray:
    """Returns the vectors of a client's sentences.

    Methods, rounds and scores that share a sentence tower encode once, as long
    as the vectors have room.
    """
    leaves = jax.tree.leaves(params[encoders_lib.SENTENCE])
    tower = tuple(blocks.digest(np.asarray(leaf)) for leaf in leaves)
    return self.kept.get(
      (self.digest, client, tower),
      lambda: self.encoders.encode_sentences(
        params, self.data.tokens[client].sentences
      ),
    )

  @functools.cached_property
  def bm25(self) -> list[np.ndarray]:
    """BM25's negatives of each client, [1, question, n]."""
    return [
      negatives.bm25_negatives(client, n=self.recipe.num_negatives)
      for client in self.data.clients
    ]

  def table(
    self, kind: str, params: typing.Params, seed: int, client: int, number: int
  ) -> np.ndarray:
    """Returns a client's negatives of a round, [epoch, question, n].

    Args:
      kind: one of `KINDS`; static hard ones are mined by the towers `params`.
      params: the towers.
      seed: of the draws.
      client: its place among all.
      number: of the round.
    """
    recipe, tokens = self.recipe, self.data.tokens[client]
    if kind == "bm25":
      return np.repeat(self.bm25[client], recipe.epochs, axis=0)
    options = {
      "n": recipe.num_negatives,
      "seed": seed,
      "round_number": number,
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

  def party(
    self, client: int, params: typing.Params, sentences: np.ndarray
  ) -> exchange.Party:
    """Returns what a client brings to an exchange.

    Args:
      client: its place among all.
      params: its towers.
      sentences: vectors of its collection.
    """
    tokens = self.data.tokens[client]
    return exchange.Party(
      name=tokens.name,
      queries=self.encoders.encode_queries(
        params, tokens.questions[data_lib.TRAIN]
      ),
      sentences=sentences,
      answers=tokens.answers[data_lib.TRAIN],
    )


def contexts(
  config: Any, data: data_lib.Data, states: pathlib.Path
) -> Callable[[Any, float], Context]:
  """Returns what gives the one context of a recipe and a share of the data.

  Args:
    config: a `federated.Config`.
    data: all of it.
    states: where towers are kept between rounds.
  """
  place = pathlib.Path(config.bert or config.checkpoint or shipped.DIRECTORY)
  read = functools.partial(
    t5_checkpoints.load,
    token_ids=shipped.vocabulary(config.vocabulary).token_ids,
  )
  digested = fingerprints.of_checkpoint
  if config.bert is not None:
    read, digested = bert.load, fingerprints.of_folder
  params, model = read(place)
  encoders = encoders_lib.Encoders(
    config=model,
    query_pooling=config.query_pooling,
    sentence_pooling=config.sentence_pooling,
  )
  start, digest = encoders.init(params), digested(place)
  number = sum(len(one.sentences) for one in data.tokens)
  width = encoders.tower(encoders_lib.SENTENCE).dim
  kept = memory.Kept(
    most_bytes=max(_KEPT_BYTES, 4 * number * width),
    size=lambda vectors: vectors.nbytes,
  )

  @functools.cache
  def context(recipe: Any, share: float) -> Context:
    part = data_lib.thinned(data, share) if share < 1 else data
    return Context(
      data=part,
      encoders=encoders,
      start=start,
      digest=artifacts.fingerprint(
        part.digest, digest, encoders.query_pooling, encoders.sentence_pooling
      ),
      states=states,
      recipe=recipe,
      kept=kept,
    )

  return context


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
  weights = [len(one.answers[data_lib.TRAIN]) for one in members]
  recipe = context.recipe
  update = _local_training(
    context.encoders,
    recipe.learning_rate,
    recipe.weight_decay,
    recipe.temperature,
  )
  first, params = _newest(context, "federated", seed, history)
  slots: training.Slots = ()
  path = _slots(context.place("federated", seed, history[:first]))
  if path.exists():
    slots = tuple(map(tuple, json.loads(path.read_text())))
  for number in range(first, len(history)):
    plans = [
      training.make_plan(
        tokens,
        context.table(history[number], params, seed, at, number),
        batch_size=context.recipe.batch_size,
        seed=seed,
        round_number=number,
      )
      for at, tokens in enumerate(members)
    ]
    slots = training.compute_slots(
      plans, members[0].sentences.shape[1], at_least=slots
    )
    steps = max(len(plan.questions) for plan in plans)
    laid = functools.partial(training.make_arrays, slots=slots)
    params = fedavg.mean(
      (update(params, fedavg.padded(laid(plan, tokens), steps)), weight)
      for plan, tokens, weight in zip(plans, members, weights, strict=True)
    )
    done = number + 1
    place = context.place("federated", seed, history[:done])
    artifacts.write_atomically(_slots(place), json.dumps(slots))
    checkpoints.save(place, done, params)
    after()
  return params


def _slots(place: pathlib.Path) -> pathlib.Path:
  """Returns where the shapes of rounds are kept: they change last bits."""
  return place.with_name(f"{place.name}.slots.json")


@functools.lru_cache(maxsize=8)
def _local_training(
  encoders: encoders_lib.Encoders,
  learning_rate: float,
  weight_decay: float | None,
  temperature: float,
) -> fedavg.ClientUpdate:
  """Returns a client's part of a round, compiled."""
  loss = training.make_loss(encoders, temperature=temperature)
  optimizer = _optimizer(learning_rate, weight_decay)
  return jax.jit(fedavg.local_training(loss, optimizer))


@functools.cache  # so that what is compiled with it serves all clients
def _optimizer(
  learning_rate: float, weight_decay: float | None
) -> optax.GradientTransformation:
  if weight_decay is None:
    return optax.adam(learning_rate)
  return optax.adamw(learning_rate, weight_decay=weight_decay)


def best_round(
  context: Context, seed: int, history: Sequence[str], score: Score
) -> typing.Params:
  """Trains by federated averaging and returns the towers of the best round.

  A round is scored before the next: both need vectors of the same tower.
  """
  best, value = context.start, -np.inf
  for done in range(1, len(history) + 1):
    params = federated(context, seed, history[:done])
    if (found := score(params)) >= value:
      best, value = params, found
  return best


def alone(
  context: Context,
  seed: int,
  history: Sequence[str],
  client: int,
  score: Score | None = None,
) -> typing.Params:
  """Trains one client on its own questions, as many rounds as the others.

  Args:
    context: data and recipe.
    seed: of the order, and of the negatives.
    history: kinds of negatives, by round.
    client: its place among all.
    score: of the towers after each round, of which the best are returned; None:
      the last.
  """
  tokens = context.data.tokens[client]
  return _in_one_place(
    context,
    seed,
    history,
    f"client {client}",
    tokens,
    lambda kind, params, number: context.table(
      kind, params, seed, client, number
    ),
    score,
  )


def central(
  context: Context,
  seed: int,
  history: Sequence[str],
  score: Score | None = None,
  *,
  equal_updates: bool = False,
) -> typing.Params:
  """Trains on all questions in one place: the upper bound of no privacy.

  The negatives of a question are its own client's sentences, which are what it
  competes with when it is scored.

  Args:
    context: data and recipe.
    seed: of the order, and of the negatives.
    history: kinds of negatives, by round.
    score: as in `alone`.
    equal_updates: whether a round has as many steps as that of the largest
      client in federated training, and not as many epochs.
  """
  members = context.data.tokens

  def table(kind: str, params: typing.Params, number: int) -> np.ndarray:
    tables = [
      context.table(kind, params, seed, at, number)
      for at in range(len(members))
    ]
    return training.join_tables(tables, members)

  everyone = training.pool(members)
  if not equal_updates:
    return _in_one_place(
      context, seed, history, "everyone", everyone, table, score
    )
  recipe = context.recipe
  sizes = [len(one.answers[data_lib.TRAIN]) for one in members]
  steps = recipe.epochs * -(-max(sizes) // recipe.batch_size)
  name = f"everyone, {steps} steps"
  return _in_one_place(
    context, seed, history, name, everyone, table, score, max_steps=steps
  )


def _in_one_place(
  context: Context,
  seed: int,
  history: Sequence[str],
  name: str,
  tokens: Any,
  table: Callable[[str, typing.Params, int], np.ndarray],
  score: Score | None,
  max_steps: int | None = None,
) -> typing.Params:
  """Trains without averaging; the optimizer goes on from round to round."""
  name = name if score is None else f"{name}, best round"
  done, params = _newest(context, name, seed, history, whole=True)
  if done:
    return params
  best, value = params, -np.inf

  def look(params: typing.Params) -> None:
    nonlocal best, value
    if (found := score(params)) >= value:
      best, value = params, found

  params = training.train_alone(
    context.encoders,
    params,
    tokens,
    rounds=len(history),
    negatives=lambda params, number: table(history[number], params, number),
    optimizer=_optimizer(
      context.recipe.learning_rate, context.recipe.weight_decay
    ),
    batch_size=context.recipe.batch_size,
    temperature=context.recipe.temperature,
    seed=seed,
    max_steps=max_steps,
    **({} if score is None else {"after": look}),
  )
  params = params if score is None else best
  checkpoints.save(context.place(name, seed, history), len(history), params)
  return params


def _newest(
  context: Context,
  who: str,
  seed: int,
  history: Sequence[str],
  *,
  whole: bool = False,
) -> tuple[int, typing.Params]:
  """Returns after how many rounds there are towers, and these.

  With `whole` nothing but the end of the history will do.
  """
  for done in range(len(history), len(history) - 1 if whole else 0, -1):
    place = context.place(who, seed, history[:done])
    if checkpoints.latest_step(place) == done:
      return done, checkpoints.restore(place, done, context.start)
  return 0, context.start
