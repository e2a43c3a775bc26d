"""Trains the towers of a federated study, round by round.

The history of a training, the kinds of negatives of its rounds in order,
identifies it. Methods with the same beginning share their first rounds, and an
interrupted study resumes after the last finished round.
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
  "make_contexts",
  "train_alone",
  "train_best_round",
  "train_central",
  "train_federated",
]

_CACHE_BYTES = 2**31
KINDS = ("random", "bm25", "static")
"""Kinds of negatives of a round."""

Score = Callable[[typing.Params], float]
"""Function that scores towers by dev questions; more is better."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
  """Data, encoders and recipe that several trainings share."""

  data: data_lib.Data
  """Texts and tokens of all clients."""
  encoders: encoders_lib.Encoders
  """The two towers."""
  start: typing.Params
  """Parameters of the public towers."""
  digest: str
  """Fingerprint of data, encoders and start."""
  states: pathlib.Path
  """Folder of towers between rounds."""
  recipe: Any
  """A `federated.Recipe`."""
  cache: memory.Kept[np.ndarray]
  """Cache of sentence vectors by data, client and tower, for all recipes."""

  def sentences(self, params: typing.Params, client: int) -> np.ndarray:
    """Returns the vectors of a client's sentences.

    Methods, rounds and scores with the same sentence tower encode once, as long
    as the cache has room.
    """
    leaves = jax.tree.leaves(params[encoders_lib.SENTENCE])
    tower = tuple(blocks.digest(np.asarray(leaf)) for leaf in leaves)
    return self.cache.get(
      (self.digest, client, tower),
      lambda: self.encoders.encode_sentences(
        params, self.data.tokens[client].sentences
      ),
    )

  @functools.cached_property
  def bm25(self) -> list[np.ndarray]:
    """BM25's negatives of each client [1, question, n]."""
    return [
      negatives.bm25_negatives(client, n=self.recipe.num_negatives)
      for client in self.data.clients
    ]

  def make_table(
    self, kind: str, params: typing.Params, seed: int, client: int, number: int
  ) -> np.ndarray:
    """Returns a client's negatives of a round [epoch, question, n].

    Args:
      kind: one of `KINDS`.
      params: parameters of the towers, which mine static hard negatives.
      seed: seed of the draws.
      client: index of the client.
      number: number of the round.
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

  def get_path(
    self, who: str, seed: int, history: Sequence[str]
  ) -> pathlib.Path:
    """Returns the path of the towers that `who` trained in the rounds of `history`."""
    name = artifacts.fingerprint(
      self.digest, self.recipe, who, seed, list(history)
    )
    return self.states / name

  def make_party(
    self, client: int, params: typing.Params, sentences: np.ndarray
  ) -> exchange.Party:
    """Returns a client's vectors and answers for an exchange.

    Args:
      client: index of the client.
      params: parameters of its towers.
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


def make_contexts(
  config: Any, data: data_lib.Data, states: pathlib.Path
) -> Callable[[Any], Context]:
  """Returns a cached function from a recipe to a context.

  Args:
    config: a `federated.Config`.
    data: data with all questions.
    states: folder of towers between rounds.
  """
  path = pathlib.Path(config.bert or config.checkpoint or shipped.DIRECTORY)
  read = functools.partial(
    t5_checkpoints.load,
    token_ids=shipped.vocabulary(config.vocabulary).token_ids,
  )
  digested = fingerprints.of_checkpoint
  if config.bert is not None:
    read, digested = bert.load, fingerprints.of_folder
  params, model = read(path)
  encoders = encoders_lib.Encoders(
    config=model,
    query_pooling=config.query_pooling,
    sentence_pooling=config.sentence_pooling,
  )
  start, digest = encoders.init(params), digested(path)
  number = sum(len(tokens.sentences) for tokens in data.tokens)
  width = encoders.tower(encoders_lib.SENTENCE).dim
  cache = memory.Kept(
    most_bytes=max(_CACHE_BYTES, 4 * number * width),
    size=lambda vectors: vectors.nbytes,
  )

  @functools.cache
  def context(recipe: Any) -> Context:
    return Context(
      data=data,
      encoders=encoders,
      start=start,
      digest=artifacts.fingerprint(
        data.digest, digest, encoders.query_pooling, encoders.sentence_pooling
      ),
      states=states,
      recipe=recipe,
      cache=cache,
    )

  return context


def train_federated(
  context: Context,
  seed: int,
  history: Sequence[str],
) -> typing.Params:
  """Trains by federated averaging; numbers of train questions weight clients.

  Args:
    context: data and recipe.
    seed: seed of the order and of the negatives.
    history: kind of negatives of each round.

  Returns:
    The towers that all clients share.
  """
  members = context.data.tokens
  weights = [len(tokens.answers[data_lib.TRAIN]) for tokens in members]
  *_, update = _compile(context.encoders, context.recipe)
  first, params = _restore_newest(context, "federated", seed, history)
  slots: training.Slots = ()
  path = _get_slots_path(context.get_path("federated", seed, history[:first]))
  if path.exists():
    slots = tuple(map(tuple, json.loads(path.read_text())))
  for number in range(first, len(history)):
    plans = [
      training.make_plan(
        tokens,
        context.make_table(history[number], params, seed, at, number),
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
    lay_out = functools.partial(training.make_arrays, slots=slots)
    params = fedavg.mean(
      (update(params, fedavg.padded(lay_out(plan, tokens), steps)), weight)
      for plan, tokens, weight in zip(plans, members, weights, strict=True)
    )
    done = number + 1
    path = context.get_path("federated", seed, history[:done])
    artifacts.write_atomically(_get_slots_path(path), json.dumps(slots))
    checkpoints.save(path, done, params)
  return params


def _get_slots_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the file of the slots of towers' rounds.

  A resumed training needs the same slots: other shapes change last bits.
  """
  return path.with_name(f"{path.name}.slots.json")


@functools.lru_cache(maxsize=8)  # all clients share compiled programs
def _compile(
  encoders: encoders_lib.Encoders, recipe: Any
) -> tuple[
  optax.GradientTransformation,
  Callable[..., tuple[typing.Params, optax.OptState, jax.Array]],
  fedavg.ClientUpdate,
]:
  """Returns the optimizer, a step with it, and a client's training in a round."""
  loss = training.make_loss(encoders, temperature=recipe.temperature)
  optimizer = optax.adam(recipe.learning_rate)
  if recipe.weight_decay is not None:
    optimizer = optax.adamw(
      recipe.learning_rate, weight_decay=recipe.weight_decay
    )
  step = jax.jit(fedavg.step(loss, optimizer))
  return optimizer, step, jax.jit(fedavg.local_training(loss, optimizer))


def train_best_round(
  context: Context, seed: int, history: Sequence[str], score: Score
) -> typing.Params:
  """Trains by federated averaging and returns the towers of the best round.

  Each round is scored before the next one, because both need the vectors of the
  same sentence tower. Of equally good rounds, the last wins.
  """
  best, value = context.start, -np.inf
  for done in range(1, len(history) + 1):
    params = train_federated(context, seed, history[:done])
    if (round_score := score(params)) >= value:
      best, value = params, round_score
  return best


def train_alone(
  context: Context,
  seed: int,
  history: Sequence[str],
  client: int,
  score: Score | None = None,
) -> typing.Params:
  """Trains one client only on its own questions, for all rounds of `history`.

  Args:
    context: data and recipe.
    seed: seed of the order and of the negatives.
    history: kind of negatives of each round.
    client: index of the client.
    score: function that scores the towers of each round; the best are returned.
      None returns the last.
  """
  tokens = context.data.tokens[client]
  return _train_in_one_place(
    context,
    seed,
    history,
    f"client {client}",
    tokens,
    lambda kind, params, number: context.make_table(
      kind, params, seed, client, number
    ),
    score,
  )


def train_central(
  context: Context,
  seed: int,
  history: Sequence[str],
  score: Score | None = None,
  *,
  equal_updates: bool = False,
) -> typing.Params:
  """Trains on all questions in one place; meant as an upper bound.

  The negatives of a question are its own client's sentences, among which it is
  also scored.

  Args:
    context: data and recipe.
    seed: seed of the order and of the negatives.
    history: kind of negatives of each round.
    score: function that scores towers, as in `train_alone`.
    equal_updates: whether a round has as many steps as a federated round of the
      largest client, in place of as many epochs.
  """
  members = context.data.tokens

  def table(kind: str, params: typing.Params, number: int) -> np.ndarray:
    tables = [
      context.make_table(kind, params, seed, at, number)
      for at in range(len(members))
    ]
    return training.join_tables(tables, members)

  everyone = training.pool(members)
  if not equal_updates:
    return _train_in_one_place(
      context, seed, history, "everyone", everyone, table, score
    )
  recipe = context.recipe
  sizes = [len(tokens.answers[data_lib.TRAIN]) for tokens in members]
  steps = recipe.epochs * -(-max(sizes) // recipe.batch_size)
  name = f"everyone, {steps} steps"
  return _train_in_one_place(
    context, seed, history, name, everyone, table, score, max_steps=steps
  )


def _train_in_one_place(
  context: Context,
  seed: int,
  history: Sequence[str],
  name: str,
  tokens: Any,
  table: Callable[[str, typing.Params, int], np.ndarray],
  score: Score | None,
  max_steps: int | None = None,
) -> typing.Params:
  """Trains without averaging; the optimizer keeps its state between rounds."""
  name = name if score is None else f"{name}, best round"
  path, rounds = context.get_path(name, seed, history), len(history)
  if checkpoints.latest_step(path) == rounds:
    return checkpoints.restore(path, rounds, context.start)
  params = best = context.start
  value = -np.inf
  optimizer, step, _ = _compile(context.encoders, context.recipe)
  state, slots = optimizer.init(params), ()
  for number, kind in enumerate(history):
    plan = training.make_plan(
      tokens,
      table(kind, params, number),
      batch_size=context.recipe.batch_size,
      seed=seed,
      round_number=number,
    )
    slots = training.compute_slots(
      [plan], tokens.sentences.shape[1], at_least=slots
    )
    rows = training.make_arrays(plan, tokens, slots)
    for at in range(len(plan.questions))[:max_steps]:
      batch = {name: array[at] for name, array in rows.items()}
      params, state, _ = step(params, state, batch)
    if score is not None and (round_score := score(params)) >= value:
      best, value = params, round_score
  params = params if score is None else best
  checkpoints.save(path, rounds, params)
  return params


def _restore_newest(
  context: Context,
  who: str,
  seed: int,
  history: Sequence[str],
) -> tuple[int, typing.Params]:
  """Restores the newest towers of a history; also returns their number of rounds.

  Without saved towers, returns 0 and the public towers.
  """
  for done in range(len(history), 0, -1):
    path = context.get_path(who, seed, history[:done])
    if checkpoints.latest_step(path) == done:
      return done, checkpoints.restore(path, done, context.start)
  return 0, context.start
