import dataclasses

import numpy as np
import pytest

from synthq_jax.federated import batches, clients, negatives


def _tokens(answers, lengths, name="one"):
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
  return _tokens(answers, lengths)


def _plan(tokens, n=3, epochs=2, batch_size=4, **options):
  table = negatives.random_negatives(tokens, n=n, seed=0, epochs=epochs)
  return table, batches.plan(
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
  slots = batches.slots([plan], 128)
  arrays = batches.arrays(plan, tokens, slots)
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
  slots = batches.slots(plans, 128)
  shapes = [
    {name: x.shape[1:] for name, x in arrays.items()}
    for arrays in (
      batches.arrays(plan, tokens, slots)
      for plan, tokens in zip(plans, (one, other), strict=True)
    )
  ]
  assert shapes[0] == shapes[1]
  # The later rounds keep what is compiled.
  few = ((32, 16), (64, 0), (128, 0))
  short = _tokens(((0,),) * 3, [3] * 9)
  _, plan = _plan(short)
  assert batches.slots([plan], 128) == few
  assert batches.slots([plan], 128, at_least=slots) == slots


def test_short_collections_have_one_width():
  tokens = _random()
  tokens = dataclasses.replace(tokens, sentences=tokens.sentences[:, :48])
  _, plan = _plan(tokens)
  slots = batches.slots([plan], 48, widths=(64, 128))
  assert slots == ((48, 16),)
  assert "sentences_048" in batches.arrays(plan, tokens, slots)


def test_the_order_depends_on_seed_client_and_round_alone():
  tokens = _random()
  table = negatives.random_negatives(tokens, n=1, seed=0)

  def order(tokens=tokens, seed=1, **options):
    plan = batches.plan(tokens, table, batch_size=4, seed=seed, **options)
    return plan.questions

  np.testing.assert_array_equal(order(), order())
  np.testing.assert_array_equal(order(max_steps=2), order()[:2])
  renamed = dataclasses.replace(tokens, name="two")
  for other in (order(seed=2), order(round_number=1), order(renamed)):
    assert (order() != other).any()


def test_a_client_without_questions_has_no_steps():
  tokens = _tokens((), [3, 4])
  plan = batches.plan(
    tokens, np.zeros((1, 0, 2), np.int32), batch_size=4, seed=0
  )
  arrays = batches.arrays(plan, tokens, batches.slots([plan], 128))
  assert arrays["questions"].shape == (0, 4, 4)


def test_what_does_not_fit_is_refused():
  tokens = _random()
  table, plan = _plan(tokens)
  with pytest.raises(ValueError, match="11 questions"):
    batches.plan(tokens, table[:, :4], batch_size=4, seed=0)
  with pytest.raises(ValueError, match="fits into"):
    batches.arrays(plan, tokens, ((32, 16), (64, 0), (128, 0)))
  _, wider = _plan(tokens, n=4)
  with pytest.raises(ValueError, match="one number of columns"):
    batches.slots([plan, wider], 128)
