import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_t5

from synthq_jax.federated import (
  batches,
  clients,
  encoders,
  fedavg,
  local_training,
  negatives,
  training,
)
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
  plan = batches.plan(tokens, table, batch_size=batch_size, seed=0)
  slots = batches.slots([plan], 12, widths=widths)
  return plan, batches.arrays(plan, tokens, slots)


def _loss_fn():
  return jax.jit(training.loss_fn(_ENCODERS, temperature=_TEMPERATURE))


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


def test_sentences_of_a_thousand_tokens_are_laid_with_the_widest():
  tokens = _tokens()
  long = np.pad(tokens.sentences, ((0, 0), (0, 988)))
  long[::2, 12:200] = 7
  tokens = dataclasses.replace(tokens, sentences=long)
  plan = batches.plan(tokens, _table(tokens), batch_size=4, seed=0)
  losses = []
  for widths in ((1000,), (128, 1000)):
    slots = batches.slots([plan], 1000, widths=widths)
    arrays = batches.arrays(plan, tokens, slots)
    losses.append(_loss_fn()(_params(), _step(arrays, 0)))
  assert {"sentences_128", "sentences_1000"} <= arrays.keys()
  np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_step_of_padding_has_finite_gradients():
  tokens = _tokens()
  _, arrays = _arrays(tokens, _table(tokens))
  empty = {
    name: np.zeros_like(array[0]) if name != "is_padding" else array[0] | True
    for name, array in arrays.items()
  }
  loss = training.loss_fn(_ENCODERS, temperature=_TEMPERATURE)
  value, gradient = jax.jit(
    jax.value_and_grad(lambda params: jnp.sum(loss(params, empty)))
  )(_params())
  assert value == 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def _train(tokens, negatives_fn=None, **options):
  options = {
    "rounds": 3,
    "optimizer": optax.adam(3e-3),
    "batch_size": 4,
    "temperature": _TEMPERATURE,
    "seed": 0,
    **options,
  }
  if negatives_fn is None:
    negatives_fn = lambda params, number: _table(tokens)  # noqa: E731
  return training.train_alone(
    _ENCODERS, _params(), tokens, negatives=negatives_fn, **options
  )


def test_a_client_alone_learns_and_mines_with_the_encoders_of_the_round():
  tokens = _tokens()
  seen, losses = [], []

  def mined(params, number):
    seen.append((number, params))
    return negatives.mine(
      _ENCODERS, params, tokens, n=2, k=8, seed=0, round_number=number
    )

  trained = _train(
    tokens,
    mined,
    rounds=4,
    first_round=2,
    after=lambda number, params, loss: losses.append((number, params, loss)),
  )
  assert [number for number, _ in seen] == [2, 3, 4, 5]
  assert seen[0][1] is not seen[1][1]
  assert seen[1][1] is losses[0][1]
  assert losses[-1][1] is trained
  assert losses[-1][2] < 0.7 * losses[0][2]


def test_a_client_alone_is_what_its_round_of_averaging_gives():
  tokens = _tokens()
  _, arrays = _arrays(tokens, _table(tokens), widths=batches.WIDTHS)
  # Adam would make whole steps of what rounding leaves of a gradient.
  optimizer = optax.sgd(0.1)
  update = local_training.local_training(
    training.loss_fn(_ENCODERS, temperature=_TEMPERATURE), optimizer
  )
  rounds = fedavg.fedavg(update)
  cohort = fedavg.Cohort(
    batches={name: array[None] for name, array in arrays.items()},
    ids=np.array([7], np.int32),
    is_dropped=np.array([False]),
  )
  state, _ = jax.jit(rounds.apply)(
    rounds.init(_params()), cohort, jax.random.key(0)
  )
  alone = _train(tokens, rounds=1, optimizer=optimizer)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6),
    state.params,
    alone,
  )
  moved = jax.tree.map(lambda x, y: abs(x - y).max(), alone, _params())
  assert max(jax.tree.leaves(moved)) > 1e-2


def test_a_pool_holds_every_clients_questions_with_their_answers():
  one = _tokens()
  two = _tokens(4, 10, name="two", seed=1)
  pool = training.pool([one, two], "central")
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


def test_what_cannot_be_trained_is_refused():
  tokens = _tokens()
  tokens = dataclasses.replace(
    tokens,
    questions={"train": tokens.questions["train"][:0]},
    answers={"train": ()},
  )
  with pytest.raises(ValueError, match="'one': expected train questions"):
    _train(tokens)
  with pytest.raises(ValueError, match="expected clients"):
    training.pool([], "central")
