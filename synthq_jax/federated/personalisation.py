"""A query tower of a client's own: the sentences stay, the questions move.

The sentence tower is frozen, so the vectors of a collection are computed once
and are only numbers from then on: a negative costs a row of a matrix product
and no backward pass. Hundreds are cheap, and so is to search the collection
again for those that are hardest now, in every step.

What is trained here stays with the client. It was trained without noise: a
tower that is published, or whose vectors are, is not private.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.federated import _frozen_sentences, clients, ranking
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated._exchange_types import Negatives

__all__ = ["Customised", "Settings", "customise"]

_TAG = 0x70657273  # keeps other uses of the same seed apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a client trains its query tower."""

  epochs: int = 5
  """Times that every question is trained on, at most."""
  batch_size: int = 32
  """Questions of a step."""
  learning_rate: float = 3e-4
  """Of Adam."""
  temperature: float = 0.05
  """Divides the cosines."""
  num_negatives: int | None = 100
  """Of the client's own sentences for each question: the hardest. None: all."""
  search_every: int = 1
  """Steps between two searches for them: with 1 a question meets the hardest of
  its own step; with more they were found up to that many steps before."""
  patience: int | None = None
  """Epochs without a better mean reciprocal rank of the dev questions, after
  which training stops and the best tower is returned; None: no such questions
  are looked at, and the last tower is returned."""

  def __post_init__(self):
    """Refuses what is out of range."""
    counts = {
      "epochs": self.epochs,
      "batch_size": self.batch_size,
      "search_every": self.search_every,
      "patience": 1 if self.patience is None else self.patience,
    }
    for name, value in counts.items():
      if value < 1:
        raise ValueError(f"Settings.{name} must be at least 1, got {value}")
    if self.num_negatives is not None and self.num_negatives < 0:
      raise ValueError(
        "Settings.num_negatives must be at least 0, or None for all, got"
        f" {self.num_negatives}"
      )
    if not (self.temperature > 0 and self.learning_rate > 0):
      raise ValueError(
        "Settings.temperature and learning_rate must be positive, got"
        f" {self.temperature} and {self.learning_rate}"
      )


class Customised(NamedTuple):
  """A client's own query tower, and how it came about; all of it private."""

  query: typing.Params
  """Stands in place of the parameters under "query"."""
  losses: Float[np.ndarray, " step"]
  """Mean loss of each step that was taken, in nats."""
  dev_scores: tuple[float, ...]
  """MRR@10 of the dev questions before training and after each epoch; empty
  where nobody looked."""
  epochs: int
  """After how many the tower is as returned."""


def customise(
  encoders: encoders_lib.Encoders,
  params: typing.Params,
  tokens: clients.Tokens,
  settings: Settings,
  *,
  seed: int,
  extra: Negatives | None = None,
  sentence_vectors: Float[np.ndarray, "sentence dim"] | None = None,
  progress: Callable[[int, float], object] | None = None,
) -> Customised:
  """Trains a client's query tower on its train questions.

  The loss of a question is the softmax of its first answer against negatives
  that are vectors: the client's own sentences that are hardest for the tower as
  it is, and what an exchange has brought. No sentence that answers the question,
  nor one of the same text, is its negative.

  Args:
    encoders: the towers.
    params: where to start; the sentence tower stays as it is.
    tokens: of the client.
    settings: length, negatives, stopping.
    seed: with the number of the epoch, of the order of the questions.
    extra: from `exchange`, rows in the order of the train questions.
    sentence_vectors: of all sentences by the sentence tower, where they are
      there already; one row each.
    progress: called after each epoch with its number and mean loss.

  Returns:
    The tower. A client without train questions gets the one it had.

  Raises:
    ValueError: if `extra` is for other questions.
  """
  if sentence_vectors is None:
    sentence_vectors = encoders.encode_sentences(params, tokens.sentences)
  tower, questions = params[encoders_lib.QUERY], tokens.questions["train"]
  rows = _extra_rows(extra, len(questions))
  if not len(questions):
    return Customised(tower, np.zeros(0, np.float32), (), 0)
  collection, answers = _frozen_sentences.collect(tokens, sentence_vectors)
  extra_vectors = _frozen_sentences.padded(
    np.zeros((0, sentence_vectors.shape[1]), np.float32)
    if extra is None
    else extra.vectors
  )
  arrays = {
    "questions": questions,
    "extra": rows,
    "answers": answers,
  }
  # Arguments of the compiled step, as clients may try several.
  rates = _Rates(
    np.float32(settings.learning_rate), np.float32(settings.temperature)
  )
  state = optax.adam(rates.learning).init(tower)
  watch = _Watch(encoders, tokens, sentence_vectors, settings.patience)
  watch.look(tower, 0)
  losses: list[Any] = []
  for epoch in range(settings.epochs):
    before = len(losses)
    for block in _blocks(arrays, settings, seed, epoch):
      found = _found_ahead(encoders, settings, tower, block, collection)
      for batch in _steps(block, found, settings.batch_size):
        tower, state, loss = _step(
          tower, state, batch, collection, extra_vectors, rates,
          encoders=encoders, num_negatives=settings.num_negatives,
        )  # fmt: skip
        losses.append(loss)
    losses[before:] = jax.device_get(losses[before:])
    if progress is not None:
      progress(epoch, float(np.mean(losses[before:])))
    if watch.look(tower, epoch + 1):
      break
  tower, epochs = watch.best or (tower, settings.epochs)
  return Customised(
    jax.tree.map(jnp.asarray, tower),
    np.array(losses, np.float32),
    tuple(watch.scores),
    epochs,
  )


class _Rates(NamedTuple):
  learning: Any
  temperature: Any


class _Watch:
  """Scores dev questions and keeps the best tower, where that was asked for."""

  def __init__(self, encoders, tokens, vectors, patience):
    self.scores: list[float] = []
    self.best: tuple[typing.Params, int] | None = None
    self._encoders, self._tokens, self._vectors = encoders, tokens, vectors
    self._patience = patience if len(tokens.answers.get("dev", ())) else None

  def look(self, tower: typing.Params, epoch: int) -> bool:
    """Scores a tower; returns whether it is time to stop."""
    if self._patience is None:
      return False
    queries = self._encoders.encode_queries(
      {encoders_lib.QUERY: tower}, self._tokens.questions["dev"]
    )
    found = ranking.evaluate(queries, self._vectors, self._tokens, "dev")
    score = found.means()["MRR@10"]
    if self.best is None or score > max(self.scores):
      self.best = tower, epoch
    self.scores.append(score)
    return epoch - self.best[1] >= self._patience


def _extra_rows(
  extra: Negatives | None, questions: int
) -> Int[np.ndarray, "question extra"]:
  if extra is None:
    return np.zeros((questions, 0), np.int32)
  if len(extra.rows) != questions:
    raise ValueError(
      f"expected extra negatives for {questions} train questions, got"
      f" {len(extra.rows)} rows: pass those of this client"
    )
  return extra.rows


def _blocks(
  arrays: Mapping[str, np.ndarray], settings: Settings, seed: int, epoch: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields the questions of the steps between two searches, in random order."""
  count = len(arrays["questions"])
  order = np.random.default_rng([seed, _TAG, epoch]).permutation(count)
  size = settings.batch_size * settings.search_every
  for first in range(0, count, size):
    at = order[first : first + size]
    is_padding = np.arange(size) >= len(at)
    at = np.pad(at, (0, size - len(at)))
    yield {name: rows[at] for name, rows in arrays.items()} | {
      "is_padding": is_padding
    }


def _steps(
  block: Mapping[str, np.ndarray], found: Array | None, batch_size: int
) -> Iterator[dict[str, Any]]:
  """Cuts a block into steps, without those that would be all padding."""
  rows = block if found is None else {**block, "found": found}
  for first in range(0, len(block["is_padding"]), batch_size):
    if not block["is_padding"][first]:
      yield {
        name: one[first : first + batch_size] for name, one in rows.items()
      }


def _found_ahead(
  encoders: encoders_lib.Encoders,
  settings: Settings,
  tower: typing.Params,
  block: Mapping[str, np.ndarray],
  collection: _frozen_sentences.Collection,
) -> Int[Array, "question found"] | None:
  """Searches for all steps of a block at once; None: each searches itself."""
  if settings.search_every == 1 or settings.num_negatives is None:
    return None
  return _encode_and_search(
    tower,
    block["questions"],
    block["answers"],
    collection,
    encoders=encoders,
    num_negatives=settings.num_negatives,
  )


@functools.partial(jax.jit, static_argnames=("encoders", "num_negatives"))
def _encode_and_search(
  tower: typing.Params,
  questions: Int[Array, "question length"],
  answers: Int[Array, "question answer"],
  collection: _frozen_sentences.Collection,
  *,
  encoders: encoders_lib.Encoders,
  num_negatives: int,
) -> Int[Array, "question found"]:
  queries = encoders.queries({encoders_lib.QUERY: tower}, questions)
  return _frozen_sentences.search(
    queries @ collection.vectors.T, answers, collection, num_negatives
  )


@functools.partial(jax.jit, static_argnames=("encoders", "num_negatives"))
def _step(
  tower: typing.Params,
  state: optax.OptState,
  batch: Mapping[str, Array],
  collection: _frozen_sentences.Collection,
  extra_vectors: Float[Array, "extra dim"],
  rates: _Rates,
  *,
  encoders: encoders_lib.Encoders,
  num_negatives: int | None,
) -> tuple[typing.Params, optax.OptState, Float[Array, ""]]:
  """Takes one step of the query tower."""

  def mean_loss(tower: typing.Params) -> Float[Array, ""]:
    queries = encoders.queries({encoders_lib.QUERY: tower}, batch["questions"])
    losses = _frozen_sentences.losses(
      queries, batch, collection, extra_vectors,
      num_negatives=num_negatives, temperature=rates.temperature,
    )  # fmt: skip
    losses = jnp.where(batch["is_padding"], 0.0, losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(~batch["is_padding"]), 1)

  loss, grads = jax.value_and_grad(mean_loss)(tower)
  updates, state = optax.adam(rates.learning).update(grads, state, tower)
  return optax.apply_updates(tower, updates), state, loss
