"""Local training of the two towers, and a client alone with its data.

The loss is for clients of a federation and for those that train alone. Which
negatives there are (at random, of BM25, static hard ones) is the business of
`negatives`, and with which of them a training begins that of its caller.

Central training, the upper bound, is `train_alone` on the `pool` of all clients.
Negatives from the union of all sentences are what only whoever has all texts
can do; what a test question competes with are its own client's sentences, and
`join_tables` gives the training these. Either may be the better bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from synthq_jax import typing
from synthq_jax.federated import batches as batches_lib
from synthq_jax.federated import clients
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.losses import contrastive

__all__ = ["join_tables", "loss_fn", "pool", "train_alone"]

Negatives = Callable[[typing.Params, int], Int[np.ndarray, "epoch question n"]]
"""From the parameters and number of a round to its tables of negatives."""


def loss_fn(
  encoders: encoders_lib.Encoders, *, temperature: float
) -> Callable[..., Float[jax.Array, " batch"]]:
  """Returns the loss of each question of a step.

  The softmax of a question's answer against the negatives of all questions of
  the step and the other questions' answers. What answers the question itself is
  never its negative, whoever brought it.

  The questions of a step are coupled: this loss is not for `silo`, nor for
  `optim.clipped_grad`.

  Args:
    encoders: the towers.
    temperature: divides the cosines, above 0.

  Returns:
    From (params, batch, key) to losses [batch], 0 for padding; `batch` is a
    step of `batches.arrays`. The key is not used.
  """

  def losses(
    params: typing.Params,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
  ) -> Float[jax.Array, " batch"]:
    del key
    names = sorted(
      (name for name in batch if name.startswith(batches_lib.SENTENCES)),
      key=lambda name: int(name.removeprefix(batches_lib.SENTENCES)),
      reverse=True,  # the widest first, as the slots are counted
    )
    laid = [encoders.sentences(params, batch[name]) for name in names]
    columns = jnp.concatenate(laid)[batch["places"]]  # [column, dim]
    questions = encoders.queries(params, batch["questions"])
    return contrastive.softmax(
      questions @ columns.T,
      temperature=temperature,
      is_padding_example=batch["is_padding"],
      duplicate_mask=batch["is_masked"],
    )

  return losses


def train_alone(
  encoders: encoders_lib.Encoders,
  params: typing.Params,
  tokens: clients.Tokens,
  *,
  rounds: int,
  negatives: Negatives,
  optimizer: optax.GradientTransformation,
  batch_size: int,
  temperature: float,
  seed: int,
  first_round: int = 0,
  max_steps: int | None = None,
  split: str = "train",
  after: Callable[[int, typing.Params, float], object] | None = None,
) -> typing.Params:
  """Trains on one client's data, or on those of clients that were pooled.

  Every round asks for its negatives and goes through its tables' epochs. The
  optimizer goes on from round to round: nothing is averaged.

  Args:
    encoders: the towers.
    params: where to start.
    tokens: of the client.
    rounds: how many.
    negatives: gives the tables of a round, e.g. `negatives.mine` with the rest
      of its arguments.
    optimizer: takes the gradient of the mean loss.
    batch_size: questions of a step.
    temperature: as in `loss_fn`.
    seed: of the order of the questions.
    first_round: the number of the first one.
    max_steps: of a round, at most.
    split: whose questions.
    after: called with the number of the round that ended, the parameters, and
      the mean loss of its steps.

  Returns:
    The trained parameters.

  Raises:
    ValueError: if the client has no questions to train on.
  """
  if not len(tokens.answers[split]):
    raise ValueError(
      f"client {tokens.name!r}: expected {split} questions, got none; leave out"
      " clients without (clients.with_questions)"
    )
  loss = loss_fn(encoders, temperature=temperature)

  def mean_loss(params: typing.Params, batch: Any) -> jax.Array:
    count = jnp.sum(~batch["is_padding"])
    return jnp.sum(loss(params, batch)) / jnp.maximum(count, 1)

  @jax.jit
  def step(
    params: typing.Params, state: Any, batch: Any
  ) -> tuple[typing.Params, Any, jax.Array]:
    value, grads = jax.value_and_grad(mean_loss)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  state, slots = optimizer.init(params), ()
  for number in range(first_round, first_round + rounds):
    plan = batches_lib.plan(
      tokens,
      negatives(params, number),
      batch_size=batch_size,
      seed=seed,
      round_number=number,
      split=split,
      max_steps=max_steps,
    )
    slots = batches_lib.slots([plan], tokens.sentences.shape[1], at_least=slots)
    values = []
    for batch in _steps(batches_lib.arrays(plan, tokens, slots, split=split)):
      params, state, value = step(params, state, batch)
      values.append(value)
    if after is not None:
      after(number, params, float(np.mean(jax.device_get(values))))
  return params


def _steps(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
  for step in range(len(arrays["is_padding"])):
    yield {name: array[step] for name, array in arrays.items()}


def pool(members: Sequence[clients.Tokens], name: str) -> clients.Tokens:
  """Puts clients' sentences and questions together, as if they were one's.

  Args:
    members: with tokens of the same lengths and the same splits.
    name: of the whole.

  Returns:
    The sentences in the order of the clients, and their questions.

  Raises:
    ValueError: if there are no clients.
  """
  if not members:
    raise ValueError("expected clients, got none; pass one or more")
  starts = _starts(members)
  passages = np.cumsum([0, *(one.passages[-1] + 1 for one in members)])
  splits = members[0].questions
  return clients.Tokens(
    name=name,
    sentences=np.concatenate([one.sentences for one in members]),
    passages=np.concatenate(
      [one.passages + p for one, p in zip(members, passages[:-1], strict=True)]
    ).astype(np.int32),
    questions={
      split: np.concatenate([one.questions[split] for one in members])
      for split in splits
    },
    answers={
      split: tuple(
        tuple(start + at for at in answers)
        for one, start in zip(members, starts, strict=True)
        for answers in one.answers[split]
      )
      for split in splits
    },
  )


def join_tables(
  tables: Sequence[Int[np.ndarray, "epoch question n"]],
  members: Sequence[clients.Tokens],
) -> Int[np.ndarray, "epoch question n"]:
  """Puts clients' tables of negatives together, for their `pool`.

  Args:
    tables: one of each client, of equal epochs and n.
    members: the clients in the order of the pool.

  Returns:
    The tables of the pool, in which each question's negatives are sentences of
    its own client.
  """
  return np.concatenate(
    [
      np.where(table < 0, -1, table + start)
      for table, start in zip(tables, _starts(members), strict=True)
    ],
    axis=1,
  ).astype(np.int32)


def _starts(members: Sequence[clients.Tokens]) -> list[int]:
  """Returns where each client's sentences begin in the pool."""
  sizes = [len(one.sentences) for one in members]
  return np.cumsum([0, *sizes])[:-1].tolist()
