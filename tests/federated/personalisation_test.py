"""A client's own query tower: what it learns, and against what."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.federated import clients, encoders, exchange, personalisation
from synthq_jax.models import t5, t5_config

CONFIG = t5_config.T5Config(
  vocab_size=32, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=16,
  num_encoder_layers=1, num_decoder_layers=1,
)  # fmt: skip
ENCODERS = encoders.Encoders(config=CONFIG)
SENTENCES, QUESTIONS, LENGTH = 24, 10, 4
SETTINGS = personalisation.Settings(
  epochs=2, batch_size=4, learning_rate=1e-2, num_negatives=5, temperature=0.2
)


@pytest.fixture(scope="module")
def params():
  tokens = jnp.ones((1, LENGTH), jnp.int32)
  made = t5.Transformer(CONFIG).init(jax.random.key(0), tokens, tokens)
  return ENCODERS.init(made["params"])


def make_tokens(seed=0, questions=QUESTIONS):
  """Question i is answered by sentence i; sentence 20 says what 0 says."""
  rng = np.random.default_rng(seed)
  sentences = rng.integers(2, 32, (SENTENCES, LENGTH)).astype(np.int32)
  sentences[20] = sentences[0]
  asked = rng.integers(2, 32, (questions, LENGTH)).astype(np.int32)
  answers = tuple((i,) if i else (0, 23) for i in range(questions))
  return clients.Tokens(
    name="client",
    sentences=sentences,
    passages=np.arange(SENTENCES, dtype=np.int32),
    questions={"train": asked, "dev": asked[:3]},
    answers={"train": answers, "dev": answers[:3]},
  )


TOKENS = make_tokens()


def customise(
  params, tokens=TOKENS, seed=0, extra=None, dev_split="dev", sentences=None,
  **changes,
):  # fmt: skip
  """The tower, with the loss of each step and what the dev questions said."""
  settings = dataclasses.replace(SETTINGS, **changes)
  step, watches, losses = personalisation._step, [], []
  if sentences is None:
    sentences = ENCODERS.encode_sentences(params, tokens.sentences)

  class Watch(personalisation._Watch):
    def __init__(self, *args):
      super().__init__(*args)
      watches.append(self)

  def noted(*args, **named):
    *result, loss = step(*args, **named)
    losses.append(float(loss))
    return *result, loss

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(personalisation, "_Watch", Watch)
    patch.setattr(personalisation, "_step", noted)
    query = personalisation.customise(
      ENCODERS, params, tokens, settings, seed=seed, extra=extra,
      sentence_vectors=sentences, dev_split=dev_split,
    )  # fmt: skip
  best = [watch.best[1] for watch in watches if watch.best]
  return types.SimpleNamespace(
    query=query,
    losses=losses,
    dev_scores=tuple(score for watch in watches for score in watch.scores),
    epochs=best[0] if best else settings.epochs,
  )


def vectors(params, tokens=TOKENS):
  queries = ENCODERS.encode_queries(params, tokens.questions["train"])
  return queries, ENCODERS.encode_sentences(params, tokens.sentences)


def leaves(tree):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def equal(one, other):
  return all(map(np.array_equal, leaves(one), leaves(other)))


def first_loss(params, extra=None, **changes):
  """The loss of all questions before anything was learned."""
  changes = {"epochs": 1, "batch_size": 16} | changes
  return customise(params, extra=extra, **changes).losses[0]


def oracle(params, num_negatives, extra=None):
  """The same in NumPy: the hardest distinct sentences that do not answer."""
  queries, sentences = vectors(params)
  losses = []
  for number, query in enumerate(queries):
    answers = set(TOKENS.answers["train"][number]) | {20}  # 20 says what 0 does
    if number:
      answers = {number, 20}  # counted once, as sentence 0
    scores = [query @ v for i, v in enumerate(sentences) if i not in answers]
    scores = sorted(scores, reverse=True)[:num_negatives]
    # What the other questions are trained on.
    scores += [query @ sentences[i] for i in range(len(queries)) if i != number]
    if extra is not None:
      scores += [query @ extra.vectors[i] for i in extra.rows[number] if i >= 0]
    logits = np.array([query @ sentences[number], *scores], np.float64) / 0.2
    losses.append(np.log(np.sum(np.exp(logits))) - logits[0])
  return np.mean(losses)


@pytest.mark.parametrize("num_negatives", [0, 5, 1000])
def test_the_loss_is_the_softmax_against_the_hardest(params, num_negatives):
  expected = oracle(params, num_negatives)
  found = first_loss(params, num_negatives=num_negatives)
  assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def make_extra(columns=3):
  rng = np.random.default_rng(5)
  rows = rng.integers(-1, 6, (QUESTIONS, columns)).astype(np.int32)
  made = rng.normal(size=(6, 16))
  made /= np.linalg.norm(made, axis=1, keepdims=True)
  return exchange.Negatives(vectors=made.astype(np.float32), rows=rows)


def test_extra_negatives_join_each_questions_own(params):
  extra = make_extra()
  expected = oracle(params, 5, extra)
  assert first_loss(params, extra) == pytest.approx(expected, rel=1e-4)
  assert first_loss(params, extra) > first_loss(params)


def test_training_lowers_the_loss_and_finds_the_answers(params):
  made = customise(params, epochs=40, patience=40)
  assert np.mean(made.losses[-3:]) < 0.5 * np.mean(made.losses[:3])
  assert max(made.dev_scores) > made.dev_scores[0] + 0.2
  assert len(made.losses) == 40 * 3  # ten questions, four a step


def test_weight_decay_is_that_of_adamw(params):
  """One step: Adam's, minus rate x decay x the weights before it."""
  one_step = {"epochs": 1, "batch_size": QUESTIONS}
  plain = customise(params, **one_step).query
  decayed = customise(params, **one_step, weight_decay=0.5).query
  rate = SETTINGS.learning_rate
  for before, a, b in zip(
    *map(leaves, (params["query"], plain, decayed)), strict=True
  ):
    np.testing.assert_allclose(b, a - rate * 0.5 * before, rtol=1e-4, atol=1e-6)


def test_padding_counts_nothing(params):
  """Ten questions in one step of ten or of sixteen rows."""
  exact = customise(params, epochs=1, batch_size=10)
  padded = customise(params, epochs=1, batch_size=16)
  assert padded.losses[0] == pytest.approx(exact.losses[0], rel=1e-5)
  for one, other in zip(leaves(exact.query), leaves(padded.query), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-4)


def test_the_best_tower_on_dev_questions_is_returned(params):
  made = customise(params, epochs=30, patience=2, learning_rate=0.5)
  best = int(np.argmax(made.dev_scores))
  assert made.epochs == best
  assert len(made.dev_scores) - 1 == min(best + 2, 30)
  again = customise(params, epochs=max(best, 1), learning_rate=0.5)
  assert equal(made.query, again.query if best else params["query"])


def test_a_client_without_questions_keeps_its_tower(params):
  made = customise(params, make_tokens(questions=0))
  assert equal(made.query, params["query"])
  assert not made.losses


def test_clients_of_similar_size_share_one_compiled_step(params):
  personalisation._step.clear_cache()
  for questions in (5, 7, 10):
    customise(params, make_tokens(seed=questions, questions=questions))
  assert personalisation._step._cache_size() == 1


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("epochs", 0),
    ("num_negatives", -1),
    ("temperature", 0.0),
    ("patience", 0),
    ("weight_decay", -0.1),
  ],
)
def test_settings_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"expected {name} "):
    dataclasses.replace(SETTINGS, **{name: value})


def test_dev_questions_are_those_of_the_split_that_is_named(params):
  asked, known = TOKENS.questions["train"], TOKENS.answers["train"]
  tokens = dataclasses.replace(
    TOKENS,
    questions={"train": asked, "validation": asked[:3]},
    answers={"train": known, "validation": known[:3]},
  )
  named = customise(
    params, tokens, dev_split="validation", epochs=4, patience=4
  )
  assert named.dev_scores == customise(params, epochs=4, patience=4).dev_scores
  assert len(named.dev_scores) == 5
