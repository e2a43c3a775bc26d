"""Exchanges: what is found, what it costs, what is promised about it."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from synthq_jax.federated import (
  exchange,
  messages,
  noised_vectors,
)
from synthq_jax.privacy import statement

KEY = jax.random.key(2)
DIM, QUESTIONS, TOP = 16, 5, 3
SIZES = {"a": 30, "b": 20, "c": 25}
HEADER = 128  # of an array in NumPy's format


def make_party(name, **changes):
  rng = np.random.default_rng(ord(name))
  sentences = noised_vectors.unit(rng.normal(size=(SIZES[name], DIM)))
  noise = 0.1 * rng.normal(size=(QUESTIONS, DIM))
  fields = dict(
    name=name,
    queries=noised_vectors.unit(sentences[:QUESTIONS] + noise),
    sentences=sentences,
    answers=[(i,) for i in range(QUESTIONS)],
    passages=np.arange(SIZES[name]) // 2,
    query_encoder=statement.none(unit=messages.QUESTION_UNIT),
    sentence_encoder=statement.none(unit=messages.COLLECTION_UNIT),
  )
  return messages.Party(**(fields | changes))


PARTIES = [make_party(name) for name in SIZES]
A, B, C = PARTIES


def run(made, parties=PARTIES, round_number=0, key=KEY):
  return made.negatives(parties, round_number=round_number, key=key)


def best(queries, sentences, top=TOP):
  """The oracle: positions by inner product, the best first."""
  return np.argsort(-(queries @ sentences.T), axis=1)[:, :top]


def noised_rows(noise=0.2, **changes):
  return messages.NoisedRows(
    run="run", noise_multiplier=noise, capacity=8, **changes
  )


def noised_cells(noise=0.2):
  return messages.NoisedCells(
    run="run", noise_multiplier=noise, capacity=8, centres=np.eye(4, DIM)
  )


class Fixed:
  """Client a asks b, and nobody else asks anybody."""

  def choose(self, asking, names, round_number):
    del names, round_number
    return ("b",) if asking == "a" else ()


# Fed-Negative.


def test_negatives_are_the_partners_best_sentences_partner_after_partner():
  found = run(exchange.FedNegative(top=TOP)).negatives["a"]
  assert found.rows.shape == (QUESTIONS, 2 * TOP)
  for number, other in enumerate((B, C)):
    rows = found.rows[:, number * TOP : (number + 1) * TOP]
    expected = other.sentences[best(A.queries, other.sentences)]
    np.testing.assert_array_equal(found.vectors[rows], expected)


def test_bytes_are_those_of_the_arrays_that_cross():
  traffic = run(exchange.FedNegative(top=TOP)).traffic
  request = HEADER + QUESTIONS * DIM * 4

  def reply(asking, answering):
    distinct = len(np.unique(best(asking.queries, answering.sentences)))
    rows = QUESTIONS * TOP
    return 2 * HEADER + distinct * DIM * 4 + rows * 4

  assert traffic["a"].sent == 2 * request + reply(B, A) + reply(C, A)
  assert traffic["a"].received == 2 * request + reply(A, B) + reply(A, C)
  total = np.sum(list(traffic.values()), axis=0)
  assert total[0] == total[1]


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("int8", 1)])
def test_smaller_types_cost_less_and_find_much_the_same(dtype, size):
  exact = run(exchange.FedNegative(top=TOP))
  small = run(exchange.FedNegative(top=TOP, dtype=dtype))
  request = HEADER + QUESTIONS * DIM
  assert small.traffic["b"].sent < exact.traffic["b"].sent
  assert small.traffic["b"].sent > 2 * request * size * 0.9
  before, after = exact.negatives["a"], small.negatives["a"]
  cosines = np.sum(
    before.vectors[before.rows] * after.vectors[after.rows], axis=-1
  )
  assert np.mean(cosines > 0.99) > 0.8


def test_what_is_as_similar_as_an_answer_to_an_answer_is_dropped():
  overlapping = B.sentences.copy()
  overlapping[7] = A.sentences[2]  # an answer of A's question 2
  other = make_party("b", sentences=overlapping)
  found = run(exchange.FedNegative(top=TOP), [A, other]).negatives["a"]
  kept = run(exchange.FedNegative(top=TOP, same_as=1.1), [A, other]).negatives[
    "a"
  ]
  dropped = (found.rows < 0) & (kept.rows >= 0)
  assert dropped.sum() == 1
  question, place = np.argwhere(dropped)[0]
  assert question == 2
  np.testing.assert_array_equal(
    kept.vectors[kept.rows[question, place]], A.sentences[2]
  )


def test_only_the_chosen_partners_hear_of_a_question():
  choice = Fixed()
  result = run(exchange.FedNegative(top=TOP, partners=choice))
  assert result.traffic["c"] == (0, 0)
  assert result.negatives["b"].rows.shape == (QUESTIONS, 0)
  assert result.negatives["a"].rows.shape == (QUESTIONS, TOP)
  assert result.promises["c"] == messages.nothing()
  assert result.promises["a"].questions.epsilon == math.inf
  assert result.promises["a"].collection.epsilon == 0
  assert result.promises["b"].questions.epsilon == 0
  assert result.promises["b"].collection.epsilon == math.inf


def test_clients_of_one_name_are_refused():
  with pytest.raises(ValueError, match="different names"):
    run(exchange.FedNegative(), [A, A])


def test_a_client_without_questions_takes_part():
  silent = make_party("b", queries=np.zeros((0, DIM), np.float32), answers=[])
  result = run(exchange.FedNegative(top=TOP), [A, silent])
  assert result.negatives["b"].rows.shape == (0, TOP)
  assert result.negatives["a"].rows.shape == (QUESTIONS, TOP)


# Noised questions.


def test_hardly_any_noise_finds_what_raw_vectors_find_for_each_question():
  raw = run(exchange.FedNegative(top=TOP)).negatives["a"]
  noised = run(
    exchange.FedNegative(top=TOP, queries=noised_rows(1e-6))
  ).negatives["a"]
  np.testing.assert_allclose(
    noised.vectors[noised.rows], raw.vectors[raw.rows], atol=1e-6
  )


def test_questions_of_a_cell_get_what_their_sum_finds():
  message = noised_cells(0.0).write(A, 0, KEY)
  cells = np.argmax(A.queries @ np.eye(4, DIM).T, axis=1)
  np.testing.assert_array_equal(message.places, cells)
  for cell in set(cells.tolist()):
    total = A.queries[cells == cell].sum(axis=0)
    np.testing.assert_allclose(
      message.vectors[cell], total / np.linalg.norm(total), atol=1e-6
    )


class Overheard:
  """Keeps every message that is written."""

  def __init__(self, inner):
    self.inner, self.heard = inner, []

  def write(self, party, round_number, key):
    message = self.inner.write(party, round_number, key)
    self.heard.append((party.name, round_number, message))
    return message


def overheard(parties=PARTIES):
  ear = Overheard(noised_rows(5.0))
  made = exchange.FedNegative(top=TOP, queries=ear)
  for round_number in range(2):
    run(made, parties, round_number)
  return ear.heard


def check_noise_is_fresh():
  rows = [message.vectors.reshape(-1) for _, _, message in overheard()]
  assert len(rows) == len(PARTIES) * 2  # one message for all partners
  correlation = np.corrcoef(rows) - np.eye(len(rows))
  assert np.max(np.abs(correlation)) < 5 / math.sqrt(rows[0].size)


def test_every_client_and_round_has_noise_of_its_own():
  check_noise_is_fresh()


@pytest.mark.parametrize("forgotten", ["round", "client"])
def test_noise_that_comes_twice_is_caught(monkeypatch, forgotten):
  own_key = exchange._own_key

  def forgets(key, round_number, name):
    if forgotten == "round":
      return own_key(key, 0, name)
    return own_key(key, round_number, "")

  monkeypatch.setattr(exchange, "_own_key", forgets)
  with pytest.raises(AssertionError):
    check_noise_is_fresh()


def test_a_clients_message_does_not_hang_on_who_else_is_there():
  alone = {m[:2]: m[2].vectors for m in overheard([C, A])}
  together = {m[:2]: m[2].vectors for m in overheard()}
  for name in alone:
    np.testing.assert_array_equal(alone[name], together[name])


def test_the_number_of_questions_does_not_show_in_the_traffic():
  made = exchange.FedNegative(
    top=TOP, queries=noised_rows(5.0), partners=Fixed()
  )
  fewer = make_party("a", queries=A.queries[:1], answers=[(0,)])
  sent = [run(made, [one, B]).traffic["a"].sent for one in (A, fewer)]
  assert sent[0] == sent[1]


# Promises.


def test_raw_exchange_promises_nothing():
  promise = run(exchange.FedNegative()).promises["a"]
  assert promise.questions.epsilon == promise.collection.epsilon == math.inf
  assert not promise.is_private


@pytest.mark.parametrize("queries", [noised_rows(), noised_cells()])
def test_noise_on_questions_alone_is_not_called_private(queries):
  made = exchange.FedNegative(queries=queries)
  promise = run(made).promises["a"]
  assert 0 < promise.questions.epsilon < math.inf
  assert promise.collection.epsilon == math.inf
  assert not promise.is_private
  made = dataclasses.replace(made, collections_are_public=True)
  assert run(made).promises["a"].is_private


def test_public_sentences_promise_what_their_encoder_does():
  made = exchange.FedNegative(
    queries=noised_rows(2.0), collections_are_public=True
  )
  has_read = statement.non_private(unit=messages.COLLECTION_UNIT)
  parties = [
    dataclasses.replace(one, sentence_encoder=has_read) for one in PARTIES
  ]
  promise = run(made, parties).promises["a"]
  assert promise.collection.epsilon == math.inf
  assert not promise.is_private
  assert run(made).promises["a"].collection.epsilon == 0


def test_rounds_of_noised_questions_are_releases_of_their_own():
  made = exchange.FedNegative(queries=noised_rows(2.0))
  promises = [run(made, round_number=i).promises["a"] for i in range(3)]
  rounds = [promise.questions for promise in promises]
  added = exchange.over_rounds(promises)
  assert added.collection.epsilon == math.inf
  whole = added.questions
  assert len(whole.ledger) == 3
  expected = noised_vectors.promise(
    identifier="all",
    unit="question",
    mechanism="",
    capacity=8,
    noise_multiplier=2.0,
    delta=None,
    relation="ADD_OR_REMOVE_ONE",
    encoder=statement.none(),
    releases=3,
  )
  assert whole.epsilon == pytest.approx(expected.epsilon, rel=1e-6)
  assert whole.epsilon > 1.5 * rounds[0].epsilon


def test_a_query_tower_trained_without_noise_voids_the_claim():
  trained = make_party("a", query_encoder=statement.non_private())
  made = exchange.FedNegative(queries=noised_rows())
  promises = run(made, [trained, B]).promises
  assert promises["a"].questions.epsilon == math.inf
  assert promises["b"].questions.epsilon < math.inf


# Shared once, and public.


def summaries(noise=1.0):
  return {
    party.name: messages.summary(
      party,
      np.eye(4, DIM, dtype=np.float32),
      run="run",
      noise_multiplier=noise,
      capacity=20,
      key=jax.random.fold_in(KEY, number),
    )
    for number, party in enumerate(PARTIES)
  }


def test_summaries_are_private_and_sent_once():
  made = exchange.SharedOnce(shared=summaries(), top=4)
  rounds = [run(made, round_number=i) for i in range(2)]
  size = HEADER + 4 * DIM * 4
  assert rounds[0].traffic["a"] == (2 * size, 2 * size)
  assert rounds[1].traffic["a"] == (0, 0)
  promises = [one.promises["a"].collection for one in rounds]
  assert rounds[0].promises["a"].is_private
  assert statement.compose(promises).epsilon == promises[0].epsilon > 0
  assert promises[0].unit == "passage"


def test_a_client_searches_what_others_shared_and_not_its_own():
  made = exchange.SharedOnce(shared=summaries(), top=3)
  found = run(made).negatives["a"]
  pool = np.concatenate([made.shared[name].vectors for name in "bc"])
  np.testing.assert_array_equal(
    found.vectors[found.rows], pool[best(A.queries, pool)]
  )


def test_a_summary_holds_a_passage_to_norm_one():
  """All sentences of a passage are one unit, whatever their number."""
  one = make_party("a", passages=np.zeros(SIZES["a"], int))
  centres = np.eye(1, DIM, dtype=np.float32)
  sums = noised_vectors.cells(
    one.sentences, one.passages, centres, noise_multiplier=0.0, key=KEY
  )
  assert np.linalg.norm(sums) == pytest.approx(1.0)
  with pytest.raises(ValueError, match="capacity=3 passages"):
    messages.summary(
      A, centres, run="r", noise_multiplier=1.0, capacity=3, key=KEY
    )


def test_generated_sentences_carry_their_generators_promise():
  generator = messages.Promise(
    questions=statement.none(),
    collection=noised_vectors.promise(
      identifier="generator", unit="passage", mechanism="training",
      capacity=100, noise_multiplier=1.0, delta=None,
      relation="ADD_OR_REMOVE_ONE", encoder=statement.none(unit="passage"),
    ),
  )  # fmt: skip
  made = messages.sentences(
    ["one", "two"], B.sentences[:2], generator=generator
  )
  result = run(exchange.SharedOnce(shared={"b": made}, top=5))
  assert result.traffic["a"].received == len(b'"one"\n"two"\n')
  promise = result.promises["b"].collection
  assert promise.epsilon == generator.collection.epsilon
  assert promise.ledger == generator.collection.ledger
  assert result.negatives["a"].rows.shape == (QUESTIONS, 2)
  assert result.negatives["b"].rows.shape == (QUESTIONS, 0)
  assert result.promises["a"] == messages.nothing()


def test_a_public_corpus_is_searched_at_home():
  result = run(exchange.PublicCorpus(vectors=B.sentences, top=TOP))
  found = result.negatives["a"]
  np.testing.assert_array_equal(
    found.vectors[found.rows], B.sentences[best(A.queries, B.sentences)]
  )
  assert all(one == (0, 0) for one in result.traffic.values())
  assert all(one.is_private for one in result.promises.values())


# Partners.


NAMES = ("a", "b", "c", "d")


def test_everyone_is_all_others():
  assert exchange.Everyone().choose("b", NAMES, 0) == ("a", "c", "d")


def test_random_partners_change_with_the_round_and_not_with_time():
  choice = exchange.RandomPartners(count=2, seed=3)
  rounds = [choice.choose("a", NAMES, i) for i in range(20)]
  assert rounds == [choice.choose("a", NAMES, i) for i in range(20)]
  assert set(rounds) == {("b", "c"), ("b", "d"), ("c", "d")}
  assert choice.choose("a", ("a", "b"), 0) == ("b",)


def test_a_negative_count_is_refused():
  with pytest.raises(ValueError, match="count >= 0"):
    exchange.RandomPartners(count=-1, seed=0)
