import dataclasses
import functools

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax.federated import clients, encoders, negatives, training
from synthq_jax.models import t5_config

_CONFIG = t5_config.get("tiny")
_ENCODERS = encoders.Encoders(config=_CONFIG)
_TEMPERATURE = 0.1


@functools.cache
def _params():
  return _ENCODERS.init(random_t5.params(_CONFIG))


def _tokens(questions=6, sentences=16, name="one", seed=0):
  generator = np.random.default_rng(seed)
  texts = generator.integers(2, 128, (sentences, 12)).astype(np.int32)
  for row, length in enumerate(generator.integers(2, 13, sentences)):
    texts[row, length:] = 0
  return clients.Tokens(
    name=name,
    sentences=texts,
    passages=np.arange(sentences, dtype=np.int32) // 2,
    questions={
      "train": generator.integers(2, 128, (questions, 5)).astype(np.int32)
    },
    answers={"train": tuple((at, at + 1) for at in range(questions))},
  )


def _table(tokens, n=2, epochs=1):
  return negatives.random_negatives(tokens, n=n, seed=0, epochs=epochs)


def _arrays(tokens, table, *, widths=(4, 8), batch_size=4):
  plan = training.make_plan(tokens, table, batch_size=batch_size, seed=0)
  slots = _slots(plan, 12, widths)
  return plan, training.make_arrays(plan, tokens, slots)


def _slots(plan, longest, widths):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training, "WIDTHS", widths)
    return training.compute_slots([plan], longest)


@functools.cache
def _loss_fn():
  return jax.jit(training.make_loss(_ENCODERS, temperature=_TEMPERATURE))


def _step(arrays, step):
  return {name: array[step] for name, array in arrays.items()}


@pytest.mark.parametrize("widths", [(4, 8), ()])
def test_the_loss_is_that_of_a_plain_softmax_over_what_may_count(widths):
  tokens = _tokens()
  plan, arrays = _arrays(tokens, _table(tokens), widths=widths)
  loss = _loss_fn()
  sentences = _ENCODERS.encode_sentences(_params(), tokens.sentences)
  questions = _ENCODERS.encode_queries(_params(), tokens.questions["train"])
  for step, rows in enumerate(plan.questions):
    found = loss(_params(), _step(arrays, step))
    for i, row in enumerate(rows):
      if row < 0:
        assert found[i] == 0
        continue
      own, *others = (
        float(questions[row] @ sentences[column]) / _TEMPERATURE
        for j, column in enumerate(plan.columns[step])
        if j == i or (column >= 0 and column not in (row, row + 1))
      )
      # Row i's own answer stands at place i, behind earlier rows' answers.
      before = sum(
        column not in (row, row + 1, -1) for column in plan.columns[step, :i]
      )
      scores = [own, *others]
      expected = np.log(np.sum(np.exp(scores))) - scores[before]
      assert found[i] == pytest.approx(expected, rel=1e-4)


def test_a_pool_holds_every_clients_questions_with_their_answers():
  one = _tokens()
  two = _tokens(4, 10, name="two", seed=1)
  pool = training.pool([one, two])
  assert pool.passages.tolist() == [*one.passages, *(two.passages + 8)]
  for tokens, first, start in ((one, 0, 0), (two, 6, 16)):
    for row, answers in enumerate(tokens.answers["train"]):
      np.testing.assert_array_equal(
        pool.questions["train"][first + row], tokens.questions["train"][row]
      )
      np.testing.assert_array_equal(
        pool.sentences[list(pool.answers["train"][first + row])],
        tokens.sentences[list(answers)],
      )
      assert min(pool.answers["train"][first + row]) >= start


def test_joined_tables_are_of_each_questions_own_client():
  members = [_tokens(), _tokens(4, 5, name="two", seed=1)]
  members[1] = dataclasses.replace(
    members[1], answers={"train": ((0, 1, 2, 3),) * 4}
  )
  table = training.join_tables([_table(one) for one in members], members)
  assert table.shape == (1, 10, 2)
  assert ((table[0, :6] >= 0) & (table[0, :6] < 16)).all()
  np.testing.assert_array_equal(table[0, 6:], [[20, -1]] * 4)


# Plans, slots and arrays.


def _long_tokens(answers, lengths, name="one"):
  """Sentence i is `lengths[i]` times the token 10 + i."""
  longest = 128
  sentences = np.zeros((len(lengths), longest), np.int32)
  for row, length in enumerate(lengths):
    sentences[row, :length] = 10 + row
  questions = np.zeros((len(answers), 4), np.int32)
  questions[:, 0] = 500 + np.arange(len(answers))
  return clients.Tokens(
    name=name,
    sentences=sentences,
    passages=np.zeros(len(lengths), np.int32),
    questions={"train": questions},
    answers={"train": answers},
  )


def _random(questions=11, sentences=40, seed=0):
  generator = np.random.default_rng(seed)
  longest = generator.choice(
    [8, 32, 64, 128], sentences, p=[0.5, 0.2, 0.2, 0.1]
  )
  lengths = longest - generator.integers(0, 8, sentences)
  answers = tuple(
    tuple(generator.choice(sentences, generator.integers(1, 4), replace=False))
    for _ in range(questions)
  )
  return _long_tokens(answers, lengths)


def _plan(tokens, n=3, epochs=2, batch_size=4, **options):
  table = negatives.random_negatives(tokens, n=n, seed=0, epochs=epochs)
  return table, training.make_plan(
    tokens, table, batch_size=batch_size, seed=1, **options
  )


def test_every_epoch_goes_once_through_all_questions():
  tokens = _random()
  _, plan = _plan(tokens)
  assert plan.questions.shape == (6, 4)  # 11 questions twice, 3 steps each
  for epoch in range(2):
    rows = plan.questions[3 * epoch : 3 * epoch + 3].ravel()
    np.testing.assert_array_equal(np.sort(rows), [-1, *range(11)])
  assert (plan.questions[:3] != plan.questions[3:]).any()


def test_columns_are_answers_and_then_each_questions_negatives():
  tokens = _random()
  table, plan = _plan(tokens)
  for step, rows in enumerate(plan.questions):
    for i, row in enumerate(rows):
      own = plan.columns[step, 4 + 3 * i : 4 + 3 * (i + 1)]
      if row < 0:
        assert plan.columns[step, i] == -1
        assert (own == -1).all()
      else:
        assert plan.columns[step, i] == tokens.answers["train"][row][0]
        np.testing.assert_array_equal(own, table[step // 3, row])


def test_what_answers_a_question_is_never_its_negative():
  tokens = _random(sentences=12)
  sentences = tokens.sentences.copy()
  sentences[7] = sentences[3]
  tokens = dataclasses.replace(tokens, sentences=sentences)
  _, plan = _plan(tokens)
  texts = [row.tobytes() for row in sentences]
  several = 0
  for step, rows in enumerate(plan.questions):
    for i, row in enumerate(rows):
      for j, column in enumerate(plan.columns[step]):
        expected = column < 0
        if row >= 0 and column >= 0:
          answers = tokens.answers["train"][row]
          expected = texts[column] in {texts[at] for at in answers}
        expected &= i != j
        several += expected and column >= 0
        assert plan.is_masked[step, i, j] == expected
  assert several > 5  # so that the loop above has seen the case


def test_arrays_hold_the_columns_in_slots_as_wide_as_they_need():
  tokens = _random()
  _, plan = _plan(tokens, n=8)
  slots = training.compute_slots([plan], 128)
  arrays = training.make_arrays(plan, tokens, slots)
  names = sorted((name for name in arrays if "sent" in name), reverse=True)
  assert names == ["sentences_128", "sentences_064", "sentences_032"]
  for step, columns in enumerate(plan.columns):
    laid = [
      np.trim_zeros(row).tolist()
      for name in names
      for row in arrays[name][step]
    ]
    assert len(laid) == len(columns) == 4 * 9
    for column, place in zip(columns, arrays["places"][step], strict=True):
      row = tokens.sentences[column] if column >= 0 else np.zeros(1, np.int32)
      assert laid[place] == np.trim_zeros(row).tolist()
  np.testing.assert_array_equal(arrays["is_padding"], plan.questions < 0)
  np.testing.assert_array_equal(
    arrays["questions"][:, :, 0],
    np.where(plan.questions < 0, 0, 500 + plan.questions),
  )


def test_slots_of_several_clients_hold_each_of_them():
  one, other = _random(seed=0), _random(questions=5, seed=1)
  plans = [_plan(tokens)[1] for tokens in (one, other)]
  slots = training.compute_slots(plans, 128)
  shapes = [
    {name: x.shape[1:] for name, x in arrays.items()}
    for arrays in (
      training.make_arrays(plan, tokens, slots)
      for plan, tokens in zip(plans, (one, other), strict=True)
    )
  ]
  assert shapes[0] == shapes[1]
  # The later rounds keep what is compiled.
  few = ((32, 16), (64, 0), (128, 0))
  short = _long_tokens(((0,),) * 3, [3] * 9)
  _, plan = _plan(short)
  assert training.compute_slots([plan], 128) == few
  assert training.compute_slots([plan], 128, at_least=slots) == slots


def test_the_order_depends_on_seed_client_and_round_alone():
  tokens = _random()
  table = negatives.random_negatives(tokens, n=1, seed=0)

  def order(tokens=tokens, seed=1, **options):
    plan = training.make_plan(tokens, table, batch_size=4, seed=seed, **options)
    return plan.questions

  np.testing.assert_array_equal(order(), order())
  renamed = dataclasses.replace(tokens, name="two")
  for other in (order(seed=2), order(round_number=1), order(renamed)):
    assert (order() != other).any()
