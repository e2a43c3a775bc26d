"""Lays out a client's training of the two towers: steps, loss, pools of clients.

A client's round of training becomes arrays whose shapes clients share:

1. A plan holds positions: the questions of each step, their sentences, and the
   sentences that are no negatives of a question.
2. Slots are the same for all clients that are trained side by side.
3. Arrays hold the tokens of a plan, in slots.

Most sentences are short and a few are long. In rows of the longest, four of five
tokens would be padding. So the sentences of a step are sorted by length into
slots of several widths. The number of slots of a width is the largest number
that any step needs.

Central training, meant as a bound, is on the `pool` of all clients.
Only a party with all texts can take negatives from the union of all sentences. A
test question competes only with its own client's sentences; `join_tables` gives
the training such negatives. Either may be the better bound.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import typing
from synthq_jax.federated import clients
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.losses import contrastive
from synthq_jax.models import length_batches

__all__ = [
  "WIDTHS",
  "Plan",
  "Recipe",
  "Slots",
  "make_arrays",
  "join_tables",
  "make_loss",
  "make_plan",
  "pool",
  "compute_slots",
]

WIDTHS = (32, 64, 128)
"""Widths of slots in tokens, in rising order."""

Slots = tuple[tuple[int, int], ...]
"""Pairs (width, number of a step's columns in slots of this width or a larger
one), with widths in rising order."""

_SENTENCES = "sentences_"  # prefix of the arrays' names; the width follows
_ORDER_TAG = 0x6F726472
_ROUNDED = 8  # multiple of slots of a width, so that few programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """Training settings of a client in every round."""

  epochs: int = 1
  """Maximum number of passes over the questions."""
  batch_size: int = 8
  """Questions of a step."""
  learning_rate: float = 3e-4
  """Learning rate; every round of averaging has a fresh optimizer."""
  temperature: float = 0.05
  """Divisor of the cosines."""
  num_negatives: int = 4
  """Negatives of each question, besides the answers of the step's other
  questions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Questions and sentences of each step.

  The columns of a step are the answers of its questions, then the negatives of
  the first question, of the second, and so on.

  Attributes:
    questions: positions of train questions; -1 is padding.
    columns: positions of sentences; -1 is padding.
    is_masked: True if a column is no negative of a question: it is padding, or
      equal to a sentence that answers the question. The question's own answer is
      not masked.
    lengths: tokens of each column; 0 for padding.
  """

  questions: Int[np.ndarray, "step batch"]
  columns: Int[np.ndarray, "step column"]
  is_masked: Bool[np.ndarray, "step batch column"]
  lengths: Int[np.ndarray, "step column"]


def make_plan(
  tokens: clients.Tokens,
  table: Int[np.ndarray, "epoch question n"],
  *,
  batch_size: int,
  seed: int,
  round_number: int = 0,
) -> Plan:
  """Plans a client's epochs in shuffled batches.

  Every epoch is one pass over all questions; padding fills up its last batch.
  The order depends only on (seed, client, round, epoch).

  Args:
    tokens: tokens of the client.
    table: table of negatives for each epoch, from `negatives`.
    batch_size: questions of a step.
    seed: seed of the order.
    round_number: round of the federated training, from 0.

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
      *clients.make_seed_words(tokens.name),
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
    is_masked=_compute_mask(tokens, rows, columns),
    lengths=np.where(columns < 0, 0, lengths[columns]).astype(np.int32),
  )


def _compute_mask(
  tokens: clients.Tokens, rows: np.ndarray, columns: np.ndarray
) -> Bool[np.ndarray, "step batch column"]:
  """Marks columns that are padding or another answer to a row's question."""
  same = clients.find_first_equal(tokens.sentences).astype(np.int64)
  answers = tokens.answers[clients.TRAIN]
  size = len(same)
  keys = [q * size + same[a] for q, own in enumerate(answers) for a in own]
  asked = rows.astype(np.int64)[:, :, None] * size  # padding is below 0
  pairs = asked + np.where(columns < 0, 0, same[columns])[:, None, :]
  is_masked = np.isin(pairs, np.array(keys, np.int64)) & (asked >= 0)
  is_masked |= (columns < 0)[:, None, :]
  batch = np.arange(rows.shape[1])
  is_masked[:, batch, batch] = False
  return is_masked


def compute_slots(
  plans: Iterable[Plan],
  sentence_length: int,
  *,
  at_least: Slots = (),
) -> Slots:
  """Returns the fewest slots into which all steps of all plans fit.

  Counts are rounded up to multiples of 8. Clients that are trained side by side
  need the same slots, and each choice of slots compiles a program. With
  `at_least`, the slots of earlier rounds, later rounds reuse that program.

  Args:
    plans: plans, at least one, with the same number of columns.
    sentence_length: columns of the sentences' tokens. It replaces the `WIDTHS`
      that are not below it.
    at_least: slots of the same widths and number of columns, or none.

  Returns:
    The slots.
  """
  fitting = (*(w for w in WIDTHS if w < sentence_length), sentence_length)
  needs = [
    tuple(
      (width, min(-(-count // _ROUNDED) * _ROUNDED, layout.columns.shape[1]))
      for width, count in zip(
        fitting, _count_columns(layout, fitting), strict=True
      )
    )
    for layout in plans
  ]
  needs += [at_least] if at_least else []
  return tuple(
    (same[0][0], max(count for _, count in same))
    for same in zip(*needs, strict=True)
  )


def _count_columns(layout: Plan, widths: tuple[int, ...]) -> list[int]:
  """Returns the most columns of any step that need each width or more."""
  longer = ((layout.lengths > w).sum(axis=1) for w in widths[:-1])
  columns = layout.columns.shape[1]
  return [columns, *(int(count.max(initial=0)) for count in longer)]


def make_arrays(
  layout: Plan, tokens: clients.Tokens, slots: Slots
) -> dict[str, np.ndarray]:
  """Makes the arrays of a plan, each with a leading axis of steps.

  Args:
    layout: plan of the client.
    tokens: tokens of the same client.
    slots: slots from `compute_slots`, for this plan and perhaps others.

  Returns:
    "questions" [step, batch, length]; "sentences_WIDTH" [step, slot, WIDTH] for
    each width that has slots; "places" [step, column], the slot of each column,
    counted from the widest; "is_masked" [step, batch, column]; "is_padding"
    [step, batch].
  """
  order = np.argsort(-layout.lengths, axis=1, kind="stable")  # slot -> column
  laid = np.take_along_axis(layout.columns, order, axis=1)
  result = {
    "questions": _select_rows(
      tokens.questions[clients.TRAIN], layout.questions
    ),
    "places": np.argsort(order, axis=1).astype(np.int32),
    "is_masked": layout.is_masked,
    "is_padding": layout.questions < 0,
  }
  start = 0
  for width, stop in reversed(slots):
    if stop > start:
      name = f"{_SENTENCES}{width:03d}"
      result[name] = _select_rows(
        tokens.sentences[:, :width], laid[:, start:stop]
      )
    start = max(start, stop)
  return result


def _select_rows(
  tokens: Int[np.ndarray, "row length"], positions: np.ndarray
) -> np.ndarray:
  """Returns the rows at positions, and rows of 0 at -1."""
  rows = tokens[positions]
  rows[positions < 0] = 0
  return rows


def make_loss(
  encoders: encoders_lib.Encoders, *, temperature: float
) -> Callable[..., Float[jax.Array, " batch"]]:
  """Makes the function that computes the loss of each question of a step.

  The loss is the softmax of a question's answer against the other questions'
  answers and the negatives of all questions of the step. A sentence that answers
  the question is never its negative.

  The loss couples the questions of a step, so `optim.clipped_grad` cannot use it.

  Args:
    encoders: the towers.
    temperature: divisor of the cosines, above 0.

  Returns:
    A function from (params, batch) to losses [batch], 0 for padding; `batch` is a
    step of `make_arrays`.
  """

  def losses(
    params: typing.Params, batch: Mapping[str, jax.Array]
  ) -> Float[jax.Array, " batch"]:
    names = sorted(
      (name for name in batch if name.startswith(_SENTENCES)),
      key=lambda name: int(name.removeprefix(_SENTENCES)),
      reverse=True,  # slots are counted from the widest
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


def pool(members: Sequence[clients.Tokens]) -> clients.Tokens:
  """Joins several clients' sentences and questions into one client.

  Args:
    members: tokens of the clients, with the same lengths and splits.

  Returns:
    The sentences in the order of the clients, and their questions.
  """
  starts = _compute_starts(members)
  passages = np.cumsum([0, *(member.passages[-1] + 1 for member in members)])
  splits = members[0].questions
  return clients.Tokens(
    name="everyone",
    sentences=np.concatenate([member.sentences for member in members]),
    passages=np.concatenate(
      [
        member.passages + p
        for member, p in zip(members, passages[:-1], strict=True)
      ]
    ).astype(np.int32),
    questions={
      split: np.concatenate([member.questions[split] for member in members])
      for split in splits
    },
    answers={
      split: tuple(
        tuple(start + at for at in answers)
        for member, start in zip(members, starts, strict=True)
        for answers in member.answers[split]
      )
      for split in splits
    },
  )


def join_tables(
  tables: Sequence[Int[np.ndarray, "epoch question n"]],
  members: Sequence[clients.Tokens],
) -> Int[np.ndarray, "epoch question n"]:
  """Joins clients' tables of negatives into tables of their `pool`.

  Args:
    tables: a table of each client, with equal numbers of epochs and n.
    members: tokens of the clients, in the order of the pool.

  Returns:
    The tables of the pool, in which each question's negatives are sentences of
    its own client.
  """
  return np.concatenate(
    [
      np.where(table < 0, -1, table + start)
      for table, start in zip(tables, _compute_starts(members), strict=True)
    ],
    axis=1,
  ).astype(np.int32)


def _compute_starts(members: Sequence[clients.Tokens]) -> list[int]:
  """Returns the position of each client's first sentence in the pool."""
  sizes = [len(member.sentences) for member in members]
  return np.cumsum([0, *sizes])[:-1].tolist()
