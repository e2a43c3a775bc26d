"""Trains the two towers on a client's questions: steps, loss, a client alone.

What a client trains on in a round becomes arrays of shapes that clients share.
First a plan, in positions: which questions stand together in a step, with which
sentences, and which of these may not count as a question's negatives. Then the
slots, the same for all clients that are trained side by side. Then arrays.

Most sentences are short and a few are long. Encoded as rows of the longest,
four of five tokens would be padding. So the sentences of a step are sorted by
length into slots of several widths; how many slots of each are needed is the
most that any step needs.

Central training, the upper bound, is `train_alone` on the `pool` of all clients.
Negatives from the union of all sentences are what only whoever has all texts
can do; what a test question competes with are its own client's sentences, and
`join_tables` gives the training these. Either may be the better bound.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from synthq_jax import typing
from synthq_jax.federated import clients, fedavg
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.losses import contrastive
from synthq_jax.models import length_batches

__all__ = [
  "WIDTHS",
  "Plan",
  "Recipe",
  "Slots",
  "arrays",
  "join_tables",
  "loss_fn",
  "plan",
  "pool",
  "slots",
  "train_alone",
]

WIDTHS = (32, 64, 128)
"""Of slots, in tokens, in rising order."""

Slots = tuple[tuple[int, int], ...]
"""For widths in rising order: (width, how many columns of a step are laid into
slots of this width or a larger one)."""

Negatives = Callable[[typing.Params, int], Int[np.ndarray, "epoch question n"]]
"""From the parameters and number of a round to its tables of negatives."""

_SENTENCES = "sentences_"  # begins the names of arrays; the width follows
_ORDER_TAG = 0x6F726472
_ROUNDED = 8  # slots of a width, so that few programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How a client trains, in every round."""

  epochs: int = 1
  """Times that every question is trained on, at most."""
  batch_size: int = 8
  """Questions of a step."""
  learning_rate: float = 3e-4
  """Of the optimizer, which starts afresh in every round."""
  temperature: float = 0.05
  """Divides the cosines."""
  num_negatives: int = 4
  """Of each question, beside the answers of the step's other questions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Which questions and sentences stand together in a step.

  The columns of a step are the answers of its questions, and then the negatives
  of the first question, of the second, and so on.

  Attributes:
    questions: positions in the train questions; -1 is padding.
    columns: positions in the sentences; -1 is padding.
    is_masked: whether a column may not count as a question's negative: it is
      padding, or equal to a sentence that answers the question. Its own answer
      is not masked.
    lengths: tokens of each column; 0 for padding.
  """

  questions: Int[np.ndarray, "step batch"]
  columns: Int[np.ndarray, "step column"]
  is_masked: Bool[np.ndarray, "step batch column"]
  lengths: Int[np.ndarray, "step column"]


def plan(
  tokens: clients.Tokens,
  table: Int[np.ndarray, "epoch question n"],
  *,
  batch_size: int,
  seed: int,
  round_number: int = 0,
) -> Plan:
  """Lays out a client's epochs in shuffled batches.

  Every epoch goes once through all questions; its last batch is filled up with
  padding. The order depends on (seed, client, round, epoch) alone.

  Args:
    tokens: of the client.
    table: a table of negatives for each epoch, from `negatives`.
    batch_size: questions of a step.
    seed: of the order.
    round_number: of the federated training, from 0.

  Returns:
    The plan.
  """
  answers = tokens.answers[clients.TRAIN]
  epochs, total, n = table.shape
  per_epoch = -(-total // batch_size)
  rows = np.full((epochs, per_epoch * batch_size), -1, np.int32)
  for epoch in range(epochs):
    words = [
      _ORDER_TAG,
      seed,
      round_number,
      epoch,
      *clients.seed_words(tokens.name),
    ]
    rows[epoch, :total] = np.random.default_rng(words).permutation(total)
  epoch_of = np.repeat(np.arange(epochs), per_epoch)  # [step]
  rows = rows.reshape(-1, batch_size)  # [step, batch]
  trained = np.array([of_question[0] for of_question in answers], np.int32)
  own = np.where(rows < 0, -1, trained[rows])
  others = np.where(rows[:, :, None] < 0, -1, table[epoch_of[:, None], rows])
  columns = np.concatenate(
    [own, others.reshape(len(rows), batch_size * n)], axis=1
  )
  lengths = length_batches.lengths(tokens.sentences)
  return Plan(
    questions=rows,
    columns=columns.astype(np.int32),
    is_masked=_is_masked(tokens, rows, columns),
    lengths=np.where(columns < 0, 0, lengths[columns]).astype(np.int32),
  )


def _is_masked(
  tokens: clients.Tokens, rows: np.ndarray, columns: np.ndarray
) -> Bool[np.ndarray, "step batch column"]:
  """Marks columns that are padding or answer a row's question."""
  same = clients.first_equal(tokens.sentences).astype(np.int64)
  answers = tokens.answers[clients.TRAIN]
  size = len(same)
  keys = [q * size + same[a] for q, of in enumerate(answers) for a in of]
  asked = rows.astype(np.int64)[:, :, None] * size  # padding is below 0
  found = asked + np.where(columns < 0, 0, same[columns])[:, None, :]
  is_masked = np.isin(found, np.array(keys, np.int64)) & (asked >= 0)
  is_masked |= (columns < 0)[:, None, :]
  batch = np.arange(rows.shape[1])
  is_masked[:, batch, batch] = False
  return is_masked


def slots(
  plans: Iterable[Plan],
  sentence_length: int,
  *,
  at_least: Slots = (),
) -> Slots:
  """Returns the fewest slots into which all steps of all plans fit.

  Counts are rounded up to multiples of 8. Clients that are trained side by side
  need the same slots, and a program is compiled for each: `at_least`, the slots
  of the rounds before, lets later rounds run what is compiled.

  Args:
    plans: one or more, with the same number of columns.
    sentence_length: columns of the sentences' tokens; instead of `WIDTHS` that
      are not below it there is one of that.
    at_least: slots of the same widths and number of columns, or none.

  Returns:
    The slots.
  """
  fitting = (*(w for w in WIDTHS if w < sentence_length), sentence_length)
  found = [
    tuple(
      (width, min(-(-count // _ROUNDED) * _ROUNDED, one.columns.shape[1]))
      for width, count in zip(fitting, _counts(one, fitting), strict=True)
    )
    for one in plans
  ]
  found += [at_least] if at_least else []
  return tuple(
    (same[0][0], max(count for _, count in same))
    for same in zip(*found, strict=True)
  )


def _counts(one: Plan, widths: tuple[int, ...]) -> list[int]:
  """Returns how many columns of a step need each width or more, at most."""
  longer = ((one.lengths > w).sum(axis=1) for w in widths[:-1])
  columns = one.columns.shape[1]
  return [columns, *(int(count.max(initial=0)) for count in longer)]


def arrays(
  one: Plan, tokens: clients.Tokens, slots: Slots
) -> dict[str, np.ndarray]:
  """Turns a plan into arrays, each with a leading axis of steps.

  Args:
    one: the client's plan.
    tokens: of the same client.
    slots: from `slots`, for this plan and maybe others.

  Returns:
    "questions" [step, batch, length]; "sentences_WIDTH" [step, slot, WIDTH] for
    each width that has slots; "places" [step, column], the slot of each column,
    counted from the widest; "is_masked" [step, batch, column]; "is_padding"
    [step, batch].
  """
  order = np.argsort(-one.lengths, axis=1, kind="stable")  # slot -> column
  laid = np.take_along_axis(one.columns, order, axis=1)
  result = {
    "questions": _rows(tokens.questions[clients.TRAIN], one.questions),
    "places": np.argsort(order, axis=1).astype(np.int32),
    "is_masked": one.is_masked,
    "is_padding": one.questions < 0,
  }
  start = 0
  for width, stop in reversed(slots):
    if stop > start:
      name = f"{_SENTENCES}{width:03d}"
      result[name] = _rows(tokens.sentences[:, :width], laid[:, start:stop])
    start = max(start, stop)
  return result


def _rows(
  tokens: Int[np.ndarray, "row length"], positions: np.ndarray
) -> np.ndarray:
  """Returns the rows at positions, and rows of 0 at -1."""
  found = tokens[positions]
  found[positions < 0] = 0
  return found


def loss_fn(
  encoders: encoders_lib.Encoders, *, temperature: float
) -> Callable[..., Float[jax.Array, " batch"]]:
  """Returns the loss of each question of a step.

  The softmax of a question's answer against the negatives of all questions of
  the step and the other questions' answers. What answers the question itself is
  never its negative, whoever brought it.

  The questions of a step are coupled: this loss is not for `optim.clipped_grad`.

  Args:
    encoders: the towers.
    temperature: divides the cosines, above 0.

  Returns:
    From (params, batch) to losses [batch], 0 for padding; `batch` is a step of
    `arrays`.
  """

  def losses(
    params: typing.Params, batch: Mapping[str, jax.Array]
  ) -> Float[jax.Array, " batch"]:
    names = sorted(
      (name for name in batch if name.startswith(_SENTENCES)),
      key=lambda name: int(name.removeprefix(_SENTENCES)),
      reverse=True,  # the widest first, as the slots are counted
    )
    laid = [
      encoders.encode(params, encoders_lib.SENTENCE, batch[name])
      for name in names
    ]
    columns = jnp.concatenate(laid)[batch["places"]]  # [column, dim]
    questions = encoders.encode(params, encoders_lib.QUERY, batch["questions"])
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
  max_steps: int | None = None,
  after: Callable[[typing.Params], object] = lambda params: None,
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
    max_steps: of a round, at most: the first of its shuffled ones.
    after: called with the parameters when a round ends.

  Returns:
    The trained parameters.
  """
  step = _step(encoders, temperature, optimizer)
  state, shapes = optimizer.init(params), ()
  for number in range(rounds):
    laid = plan(
      tokens,
      negatives(params, number),
      batch_size=batch_size,
      seed=seed,
      round_number=number,
    )
    shapes = slots([laid], tokens.sentences.shape[1], at_least=shapes)
    rows = arrays(laid, tokens, shapes)
    for place in range(len(laid.questions))[:max_steps]:
      batch = {name: array[place] for name, array in rows.items()}
      params, state, _ = step(params, state, batch)
    after(params)
  return params


@functools.lru_cache(maxsize=8)
def _step(
  encoders: encoders_lib.Encoders,
  temperature: float,
  optimizer: optax.GradientTransformation,
) -> Callable[..., tuple[typing.Params, optax.OptState, jax.Array]]:
  """Returns a step, compiled once for all clients that have one optimizer."""
  loss = loss_fn(encoders, temperature=temperature)
  return jax.jit(fedavg.step(loss, optimizer))


def pool(members: Sequence[clients.Tokens]) -> clients.Tokens:
  """Puts clients' sentences and questions together, as if they were one's.

  Args:
    members: with tokens of the same lengths and the same splits.

  Returns:
    The sentences in the order of the clients, and their questions.
  """
  starts = _starts(members)
  passages = np.cumsum([0, *(one.passages[-1] + 1 for one in members)])
  splits = members[0].questions
  return clients.Tokens(
    name="everyone",
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
