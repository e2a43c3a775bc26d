import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_t5

from synthq_jax import optim
from synthq_jax.federated import (
  clients,
  cohorts,
  encoders,
  fedavg,
  negatives,
  silo,
  silo_privacy,
)
from synthq_jax.models import t5_config
from synthq_jax.privacy import ledger, sampling, terms
from synthq_jax.retrieval import index

_CONFIG = t5_config.get("tiny")
_ENCODERS = encoders.Encoders(config=_CONFIG)
_BATCH = 24
_CLIP = 1e-3  # below the norm of every record's gradient


@functools.cache
def _params():
  return _ENCODERS.init(random_t5.params(_CONFIG))


def _texts(rows, length, seed):
  generator = np.random.default_rng(seed)
  texts = generator.integers(2, 128, (rows, length)).astype(np.int32)
  texts[::3, length - 2 :] = 0
  return texts


def _tokens(questions=6, sentences=8):
  return clients.Tokens(
    name="one",
    sentences=_texts(sentences, 6, 0),
    passages=np.zeros(sentences, np.int32),
    questions={"train": _texts(questions, 4, 1)},
    answers={"train": tuple((at,) for at in range(questions))},
  )


def _without(tokens, row):
  """The neighbour without a question; its answer stays a sentence."""
  keep = np.arange(len(tokens.answers["train"])) != row
  return dataclasses.replace(
    tokens,
    questions={"train": tokens.questions["train"][keep]},
    answers={
      "train": tuple(
        answers
        for answers, kept in zip(tokens.answers["train"], keep, strict=True)
        if kept
      )
    },
  )


_CORPUS = _texts(20, 6, 2)


@functools.cache
def _vectors():
  return _ENCODERS.encode_sentences(_params(), _CORPUS)


def _mine(tokens, corpus=_CORPUS, **options):
  options = {"n": 2, "k": 5, "seed": 0, **options}
  return negatives.mine(_ENCODERS, _params(), tokens, corpus=corpus, **options)[
    0
  ]


def _clipped(clip=_CLIP):
  return silo.clipped_grad(_ENCODERS, temperature=0.1, l2_clip_norm=clip)


@functools.cache
def _jitted():
  return jax.jit(_clipped())


def _sum(rows):
  """The clipped sum of all rows, in a batch of one shape for all tests."""
  count = len(rows["questions"])
  padded = {
    name: np.concatenate([x, np.repeat(x[:1], _BATCH - count, axis=0)])
    for name, x in rows.items()
  }
  is_padding = np.arange(_BATCH) >= count
  return _jitted()(_params(), padded, is_padding_example=is_padding)


def _moved(one, other):
  return float(optax.tree.norm(optax.tree.sub(_sum(one)[0], _sum(other)[0])))


def test_public_negatives_of_a_question_do_not_depend_on_the_others():
  tokens = _tokens()
  np.testing.assert_array_equal(_mine(tokens)[1:], _mine(_without(tokens, 0)))
  table = _mine(tokens)
  assert (table != _mine(tokens, round_number=1)).any()
  assert table.min() >= 0
  np.testing.assert_array_equal(
    table, _mine(tokens, sentence_vectors=_vectors())
  )


def test_nearly_equal_sentences_are_chosen_for_each_question_by_itself(
  monkeypatch,
):
  """Scores that float32 rounds as it likes: the last bits choose."""
  tokens = _tokens(questions=31, sentences=31)
  close = np.repeat(_vectors()[:4], 10, axis=0)
  noise = np.random.default_rng(0).normal(size=close.shape)
  corpus = _texts(40, 6, 3)
  nearly = (close + 1e-7 * noise).astype(np.float32)

  def mined(tokens):
    return _mine(tokens, corpus, n=4, sentence_vectors=nearly)

  def check():
    whole = mined(tokens)
    for left_out in (0, 15, 30):
      less = mined(_without(tokens, left_out))
      np.testing.assert_array_equal(np.delete(whole, left_out, axis=0), less)

  check()

  def planted(self, queries, k):
    order = slice(None, None, -1 if len(queries) % 2 else 1)  # of the sum
    products = (queries[:, None] * self.vectors).astype(np.float32)
    scores = np.cumsum(products[..., order], axis=2)[..., -1]
    places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, places, axis=1), places

  monkeypatch.setattr(index.Index, "search", planted)
  with pytest.raises(AssertionError):
    check()


def test_a_public_sentence_equal_to_an_answer_is_no_negative():
  tokens = _tokens()
  corpus = np.concatenate([tokens.sentences[:3], _CORPUS[:3]])
  table = _mine(tokens, corpus, n=6, k=6)
  for row in range(6):
    expected = set(range(6)) - ({row} if row < 3 else set())
    assert set(table[row]) - {-1} == expected


def test_a_question_with_its_answer_moves_the_sum_by_the_clip_norm_at_most():
  tokens = _tokens()
  rows, less = (
    silo.records(one, _mine(one), _CORPUS)
    for one in (tokens, _without(tokens, 0))
  )
  moved = _moved(rows, less)
  assert moved <= _CLIP * 1.0001
  assert moved >= _CLIP * 0.9999  # the bound is attained


def test_own_negatives_hide_a_question_but_not_its_answer_sentence():
  """The record's sentence is the nearest negative of twenty other questions."""
  tokens = _tokens(questions=21, sentences=24)
  questions = np.repeat(tokens.questions["train"][:1], 21, axis=0)
  tokens = dataclasses.replace(
    tokens,
    questions={"train": questions},
    answers={"train": ((0,), *(((1,),) * 20))},
  )

  def table(tokens, copy):
    """The nearest, twice; sentence `copy` counts as equal to sentence 1."""
    nearest = negatives.hardest(
      _ENCODERS.encode_queries(_params(), tokens.questions["train"]),
      vectors,
      k=1,
      answers=tokens.answers["train"],
      same=np.where(np.arange(24) == copy, 1, np.arange(24)),
    )
    return np.repeat(nearest, 2, axis=1)

  vectors = np.zeros((24, 16), np.float32)
  vectors[0] = _ENCODERS.encode_queries(_params(), questions[:1])[0]
  whole = silo.records(tokens, table(tokens, None), tokens.sentences)
  stays = silo.records(
    _without(tokens, 0), table(_without(tokens, 0), None), tokens.sentences
  )
  assert _moved(whole, stays) <= _CLIP * 1.0001
  # Now the sentence goes with its question, as a copy of another's answer.
  goes = silo.records(
    _without(tokens, 0), table(_without(tokens, 0), 0), tokens.sentences
  )
  assert _moved(whole, goes) > 3 * _CLIP


def test_the_loss_of_a_record_is_its_own_softmax():
  tokens = _tokens()
  table = _mine(tokens)
  table[2] = [-1, 4]
  _, aux = _sum(silo.records(tokens, table, _CORPUS))
  questions = _ENCODERS.encode_queries(_params(), tokens.questions["train"])
  answers = _ENCODERS.encode_sentences(_params(), tokens.sentences)
  for row, columns in enumerate(table):
    own = questions[row] @ answers[row] / 0.1
    others = questions[row] @ _vectors()[columns[columns >= 0]].T / 0.1
    expected = np.log(np.exp(own) + np.exp(others).sum()) - own
    assert aux.losses[row] == pytest.approx(expected, rel=1e-4, abs=1e-5)
  assert (np.asarray(aux.norms)[:6] > _CLIP).all()


def test_a_loss_with_other_questions_answers_would_be_refused():
  tokens = _tokens()
  rows = silo.records(tokens, _mine(tokens), _CORPUS)
  loss = _clipped().loss_fn
  optim.check_independence(loss, _params(), rows)

  def coupled(params, batch):
    answers = jnp.roll(batch["answers"], 1, axis=0)
    more = jnp.concatenate([batch["negatives"], answers[:, None]], axis=1)
    return loss(params, {**batch, "negatives": more})

  with pytest.raises(ValueError, match="independent losses"):
    optim.check_independence(coupled, _params(), rows)


def _privacy(**options):
  options = {
    "sampler": sampling.Poisson(
      num_examples=6, expected_batch_size=3, max_batch_size=_BATCH
    ),
    "steps": 8,
    "l2_clip_norm": _CLIP,
    "noise_multiplier": 2.0,
    "delta": 1e-2,
    **options,
  }
  return silo_privacy.claim(**options)


def _batches(tokens, privacy, **options):
  rows = silo.records(tokens, _mine(tokens), _CORPUS)
  options = {"client": "one", "seed": [1, 2], "first_step": 0, **options}
  return silo.batches(rows, privacy.sampler, steps=8, **options)


def test_batches_depend_on_secret_client_and_step_alone():
  tokens, privacy = _tokens(), _privacy()
  drawn = _batches(tokens, privacy)
  assert drawn["negatives"].shape == (8, _BATCH, 2, 6)
  sizes = (~drawn["is_padding"]).sum(axis=1)
  assert len(set(sizes.tolist())) > 1  # Poisson
  later = _batches(tokens, privacy, first_step=2)
  for name, x in drawn.items():
    np.testing.assert_array_equal(x[2:], later[name][:-2])
  for other in ({"client": "two"}, {"seed": [1, 3]}):
    again = _batches(tokens, privacy, **other)
    assert (drawn["is_padding"] != again["is_padding"]).any()
  with pytest.raises(ValueError, match="expected 6 records"):
    _batches(_without(tokens, 0), privacy)


def _plain():
  """A loss that compiles fast: an example's gradient is itself."""
  return optim.clipped_grad(
    lambda params, batch: batch["x"] @ params, l2_clip_norm=_CLIP
  )


def test_a_step_without_records_is_a_step_of_noise():
  update = silo.private_training(_plain(), _privacy(), optax.sgd(1.0))
  params = jnp.zeros(20_000)
  empty = {
    "x": np.zeros((8, 4, 20_000), np.float32),
    "is_padding": np.ones((8, 4), bool),
  }
  noise = jax.jit(update)(params, empty, jax.random.key(0))
  # 8 steps of standard deviation 2 C / 3; that of 20,000 numbers is off by
  # half a percent.
  std = float(jnp.std(noise))
  assert std == pytest.approx(8**0.5 * 2.0 * _CLIP / 3, rel=0.02)
  assert std != pytest.approx(8**0.5 * 2.1 * _CLIP / 3, rel=0.02)


def test_every_client_and_round_has_noise_of_its_own():
  update = silo.private_training(_plain(), _privacy(), optax.sgd(1.0))
  rounds = fedavg.fedavg(update, clients_at_once=2)
  empty = {
    "x": np.zeros((8, 4, 50), np.float32),
    "is_padding": np.ones((8, 4), bool),
  }
  apply = jax.jit(rounds.apply)

  def sent(ids, state):
    cohort = cohorts.stack([empty] * len(ids), ids, size=2)
    return np.asarray(apply(state, cohort, jax.random.key(0))[0].params)

  state = rounds.init(jnp.zeros(50))
  one, two = sent([4], state), sent([9], state)
  later = sent([4], state._replace(round=state.round + 1))
  assert (one != two).all()
  assert (one != later).all()
  np.testing.assert_allclose(sent([4, 9], state), (one + two) / 2, atol=1e-8)


def test_without_noise_private_training_is_steps_of_clipped_sums():
  privacy = _privacy(noise_multiplier=0.0)
  update = jax.jit(silo.private_training(_clipped(), privacy, optax.sgd(1.0)))
  drawn = _batches(_tokens(), privacy)
  found = update(_params(), drawn, jax.random.key(0))
  params = _params()
  for step in range(8):
    batch = {name: x[step] for name, x in drawn.items()}
    is_padding = batch.pop("is_padding")
    total, _ = _jitted()(params, batch, is_padding_example=is_padding)
    params = optax.tree.add_scale(params, -1 / 3, total)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, params
  )


def test_a_clients_claim_says_its_unit_and_goes_into_its_ledger(tmp_path):
  sampler = sampling.Poisson.with_margin(
    num_examples=700, expected_batch_size=32
  )
  privacy = _privacy(sampler=sampler, steps=200, delta=5e-4)
  claim = privacy.statement("silo/one/seed0")
  assert claim.epsilon == privacy.epsilon
  assert claim.unit == "question with its answer"
  ledger.enter(tmp_path / "ledger.jsonl", "silo/one/seed0", claim)
  assert "epsilon" in ledger.describe(tmp_path / "ledger.jsonl")
  own = _privacy(negatives="own").statement("own")
  assert own.unit == "question"
  assert any("sentences say" in line for line in own.not_protected)
  small = dataclasses.replace(
    privacy,
    sampler=sampling.Poisson.with_margin(
      num_examples=150, expected_batch_size=32
    ),
  )
  assert small.epsilon > 2 * privacy.epsilon


def test_settings_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="negatives='batch'"):
    _privacy(negatives="batch")
  with pytest.raises(ValueError, match="FixedOrder"):
    _privacy(sampler=sampling.FixedOrder(num_examples=6, batch_size=3))
  users = dataclasses.replace(_privacy(), words=terms.CLIENT)
  with pytest.raises(ValueError, match="one client: make it"):
    silo.private_training(_clipped(_CLIP), users, optax.sgd(1.0))
  with pytest.raises(ValueError, match="l2_clip_norm=0.001, got 0.5"):
    silo.private_training(_clipped(0.5), _privacy(), optax.sgd(1.0))
  with pytest.raises(ValueError, match="k=1"):
    _mine(_tokens(), k=1)
  with pytest.raises(ValueError, match="sentences of 6 tokens"):
    _mine(_tokens(), _CORPUS[:, :5])
