"""Trains a client's own query tower; the sentence tower stays fixed.

The sentence tower is frozen, so the vectors of a collection are computed once. A
negative then costs a row of a matrix product and no backward pass. Hundreds of
negatives are cheap, and so is a search of the collection for the hardest ones in
every step.

The trained tower stays with the client. Its training adds no noise, so neither
the tower nor its vectors may be published as private.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from synthq_jax import checks, typing
from synthq_jax.federated import clients, exchange, fedavg, ranking, training
from synthq_jax.federated import encoders as encoders_lib

__all__ = [
  "Collection",
  "Settings",
  "collect",
  "customise",
]

_TAG = 0x70657273  # keeps other uses of the same seed apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(training.Recipe):
  """Training settings of a client's query tower."""

  epochs: int = 5
  batch_size: int = 32
  num_negatives: int = 100
  """Negatives of each question among the client's own sentences: the hardest ones
  of the step, or all if there are fewer."""
  weight_decay: float = 0.0
  """Weight decay of AdamW; 0 gives Adam."""
  patience: int | None = None
  """Epochs without a better mean reciprocal rank of the dev questions before
  training stops and returns the best tower. None reads no dev questions and
  returns the last tower."""

  def __post_init__(self):
    """Refuses values that are out of range."""
    checks.at_least(
      1,
      epochs=self.epochs,
      batch_size=self.batch_size,
      patience=1 if self.patience is None else self.patience,
    )
    checks.at_least(0, num_negatives=self.num_negatives)
    checks.within("[0, inf)", weight_decay=self.weight_decay)
    checks.within(
      "(0, inf)", temperature=self.temperature, learning_rate=self.learning_rate
    )


def customise(
  encoders: encoders_lib.Encoders,
  params: typing.Params,
  tokens: clients.Tokens,
  settings: Settings,
  *,
  seed: int,
  extra: exchange.Negatives | None = None,
  sentence_vectors: Float[np.ndarray, "sentence dim"],
  dev_split: str = "dev",
) -> typing.Params:
  """Trains a client's query tower on its train questions.

  The loss of a question is the softmax of its first answer against vectors of
  negatives. Negatives are the client's own sentences that are hardest for the
  present tower, the answers of the step's other questions, and exchanged vectors.
  No sentence that answers the question, nor an equal one, is its negative.

  Args:
    encoders: the towers.
    params: initial parameters; the sentence tower does not change.
    tokens: tokens of the client.
    settings: length, negatives, stopping.
    seed: seed of the order of the questions, which differs between epochs.
    extra: negatives from `exchange`, rows in the order of the train questions.
    sentence_vectors: vectors of all sentences by the sentence tower, a row each.
    dev_split: split of the questions that `settings.patience` reads. A client
      without any gets the last tower.

  Returns:
    The tower that replaces the parameters under "query"; as private as its
    training data. A client without train questions gets its initial tower.
  """
  tower, questions = params[encoders_lib.QUERY], tokens.questions[clients.TRAIN]
  if extra is None:
    extra = exchange.Negatives(
      vectors=np.zeros((0, sentence_vectors.shape[1]), np.float32),
      rows=np.zeros((len(questions), 0), np.int32),
    )
  if not len(questions):
    return tower
  collection, answers = collect(tokens, sentence_vectors)
  extra_vectors = _pad(extra.vectors)
  arrays = {"questions": questions, "extra": extra.rows, "answers": answers}
  # Arguments of the compiled step, because a client may try several values.
  rates = np.float32(
    [settings.learning_rate, settings.temperature, settings.weight_decay]
  )
  state = optax.adamw(rates[0]).init(tower)
  watch = _Watch(
    encoders, tokens, sentence_vectors, settings.patience, dev_split
  )
  watch.look(tower, 0)
  for epoch in range(settings.epochs):
    for batch in _draw_batches(arrays, settings.batch_size, seed, epoch):
      tower, state, _ = _step(
        tower, state, batch, collection, extra_vectors, *rates,
        encoders=encoders, num_negatives=settings.num_negatives,
      )  # fmt: skip
    if watch.look(tower, epoch + 1):
      break
  if watch.best is not None:
    tower, _ = watch.best
  return jax.tree.map(jnp.asarray, tower)


class _Watch:
  """Scores dev questions and keeps the best tower, if `patience` is given."""

  def __init__(self, encoders, tokens, vectors, patience, split):
    self.scores: list[float] = []
    self.best: tuple[typing.Params, int] | None = None
    self._encoders, self._tokens, self._vectors = encoders, tokens, vectors
    self._patience = patience if len(tokens.answers.get(split, ())) else None
    self._split = split

  def look(self, tower: typing.Params, epoch: int) -> bool:
    if self._patience is None:
      return False
    queries = self._encoders.encode_queries(
      {encoders_lib.QUERY: tower}, self._tokens.questions[self._split]
    )
    scores = ranking.evaluate(queries, self._vectors, self._tokens, self._split)
    score = float(scores.values().mean())
    if self.best is None or score > max(self.scores):
      self.best = tower, epoch
    self.scores.append(score)
    return epoch - self.best[1] >= self._patience


def _draw_batches(
  arrays: Mapping[str, np.ndarray], size: int, seed: int, epoch: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields an epoch's questions in random order, the last batch padded."""
  count = len(arrays["questions"])
  order = np.random.default_rng([seed, _TAG, epoch]).permutation(count)
  for first in range(0, count, size):
    positions = order[first : first + size]
    is_padding = np.arange(size) >= len(positions)
    positions = np.pad(positions, (0, size - len(positions)))
    yield {name: rows[positions] for name, rows in arrays.items()} | {
      "is_padding": is_padding
    }


@functools.partial(jax.jit, static_argnames=("encoders", "num_negatives"))
def _step(
  tower: typing.Params,
  state: optax.OptState,
  batch: Mapping[str, Array],
  collection: "Collection",
  extra_vectors: Float[Array, "extra dim"],
  learning_rate: Any,
  temperature: Any,
  weight_decay: Any,
  *,
  encoders: encoders_lib.Encoders,
  num_negatives: int,
) -> tuple[typing.Params, optax.OptState, Float[Array, ""]]:
  def losses(tower: typing.Params, batch: Any) -> Array:
    queries = encoders.encode(
      {encoders_lib.QUERY: tower}, encoders_lib.QUERY, batch["questions"]
    )
    return _compute_losses(
      queries, batch, collection, extra_vectors,
      num_negatives=num_negatives, temperature=temperature,
    )  # fmt: skip

  optimizer = optax.adamw(learning_rate, weight_decay=weight_decay)
  step = fedavg.step(losses, optimizer)
  return step(tower, state, batch)


class Collection(NamedTuple):
  """A client's distinct sentences, padded to one of few shapes."""

  vectors: Float[Array, "sentence dim"]
  count: Int[Array, ""]  # sentences without padding


def collect(
  tokens: clients.Tokens, vectors: Float[np.ndarray, "sentence dim"]
) -> tuple[Collection, Int[np.ndarray, "question answer"]]:
  """Returns a client's distinct sentences and the positions of the answers.

  Args:
    tokens: tokens of the client.
    vectors: vectors of all its sentences; the first of equal sentences counts.

  Returns:
    The distinct sentences, and for each train question the positions among them
    that answer: first the one to train on, then the others, then -1.
  """
  same = clients.find_first_equal(tokens.sentences)
  firsts, indices = np.unique(same, return_inverse=True)
  train_answers = tokens.answers[clients.TRAIN]
  width = _round_up(max(map(len, train_answers)))
  answers = np.full((len(train_answers), width), -1, np.int32)
  for row, positions in zip(answers, train_answers, strict=True):
    # The answer to train on comes first.
    distinct = list(dict.fromkeys(indices[list(positions)].tolist()))
    row[: len(distinct)] = distinct
  return Collection(_pad(vectors[firsts]), jnp.int32(len(firsts))), answers


def _pad(vectors: np.ndarray) -> Float[Array, "row dim"]:
  """Pads vectors with rows of zeros, so that clients share few compiled steps."""
  rows = _round_up(len(vectors))
  return jnp.pad(
    jnp.asarray(vectors, jnp.float32), ((0, rows - len(vectors)), (0, 0))
  )


def _round_up(count: int) -> int:
  return 1 << max(count - 1, 0).bit_length()


def _is_negative(
  answers: Int[Array, "question answer"], collection: Collection
) -> Bool[Array, "question sentence"]:
  """Marks sentences that are no padding and do not answer."""
  total = collection.vectors.shape[0]
  is_negative = jnp.arange(total) < collection.count
  is_negative = jnp.broadcast_to(is_negative[None], (answers.shape[0], total))
  outside = jnp.where(answers < 0, total, answers)
  rows = jnp.arange(answers.shape[0])[:, None]
  return is_negative.at[rows, outside].set(False, mode="drop")


def _compute_losses(
  queries: Float[Array, "question dim"],
  batch: Mapping[str, Array],
  collection: Collection,
  extra_vectors: Float[Array, "extra dim"],
  *,
  num_negatives: int,
  temperature: float,
) -> Float[Array, " question"]:
  """Returns the softmax loss of each question's answer, in nats.

  Gradients flow only through `queries`.
  """
  # [question, dim]
  positive = collection.vectors[batch["answers"][:, 0]]
  right = jnp.sum(queries * positive, axis=1, keepdims=True)
  # [question, sentence]
  scores = queries @ collection.vectors.T
  counts = _is_negative(batch["answers"], collection)
  scores = jnp.where(counts, scores, -jnp.inf)
  own, _ = jax.lax.top_k(scores, min(num_negatives, scores.shape[1]))
  extra = _compute_cosines(queries, extra_vectors, batch["extra"])
  first = batch["answers"][:, 0]  # [question]
  is_answer = (batch["answers"][:, :, None] == first[None, None]).any(axis=1)
  others = jnp.where(
    is_answer | batch["is_padding"][None], -jnp.inf, queries @ positive.T
  )
  # [question, 1 + own + others + extra]
  logits = jnp.concatenate([right, own, others, extra], axis=1) / temperature
  return jax.nn.logsumexp(logits, axis=1) - logits[:, 0]


def _compute_cosines(
  queries: Float[Array, "question dim"],
  vectors: Float[Array, "row dim"],
  rows: Int[Array, "question some"],
) -> Float[Array, "question some"]:
  """Returns products of each question with its rows of vectors; -inf for -1."""
  products = jnp.einsum("qd,qnd->qn", queries, vectors[rows])
  return jnp.where(rows < 0, -jnp.inf, products)
