"""Exchanges: what is found, and what it costs."""

import numpy as np
import pytest

from synthq_jax.federated import exchange

DIM, QUESTIONS, TOP = 16, 5, 3
SIZES = {"a": 30, "b": 20, "c": 25}


def unit(vectors):
  norms = np.linalg.norm(vectors, axis=1, keepdims=True)
  return (vectors / norms).astype(np.float32)


def make_party(name, **changes):
  rng = np.random.default_rng(ord(name))
  sentences = unit(rng.normal(size=(SIZES[name], DIM)))
  noise = 0.1 * rng.normal(size=(QUESTIONS, DIM))
  fields = dict(
    name=name,
    queries=unit(sentences[:QUESTIONS] + noise),
    sentences=sentences,
    answers=[(i,) for i in range(QUESTIONS)],
  )
  return exchange.Party(**(fields | changes))


PARTIES = [make_party(name) for name in SIZES]
A, B, C = PARTIES


def run(parties=PARTIES, top=TOP):
  return exchange.fed_negative(parties, top=top)


def best(queries, sentences, top=TOP):
  """The oracle: positions by inner product, the best first."""
  return np.argsort(-(queries @ sentences.T), axis=1)[:, :top]


def test_negatives_are_the_best_of_all_partners_together():
  found = run().negatives["a"]
  assert found.rows.shape == (QUESTIONS, TOP)
  sentences = np.concatenate([B.sentences, C.sentences])
  expected = best(A.queries, sentences)
  np.testing.assert_array_equal(found.vectors[found.rows], sentences[expected])
  of_b = (expected < len(B.sentences)).sum(axis=1)
  assert len(set(of_b.tolist())) > 1  # no partner has a share of its own


def test_bytes_are_those_of_the_arrays_that_cross():
  traffic = run().traffic
  request = QUESTIONS * DIM * 4

  def reply(asking, answering):
    distinct = len(np.unique(best(asking.queries, answering.sentences)))
    return distinct * DIM * 4 + QUESTIONS * TOP * 4

  assert traffic["a"].sent == 2 * request + reply(B, A) + reply(C, A)
  assert traffic["a"].received == 2 * request + reply(A, B) + reply(A, C)
  total = np.sum(list(traffic.values()), axis=0)
  assert total[0] == total[1]


def test_what_is_as_similar_as_an_answer_to_an_answer_is_dropped(monkeypatch):
  overlapping = B.sentences.copy()
  overlapping[7] = A.sentences[2]  # an answer of A's question 2
  parties = [A, make_party("b", sentences=overlapping)]
  found = run(parties).negatives["a"]
  monkeypatch.setattr(exchange, "SAME_AS", 1.1)
  kept = run(parties).negatives["a"]
  holders = [
    [
      question
      for question, row in enumerate(each.rows)
      if (each.vectors[row[row >= 0]] == A.sentences[2]).all(axis=1).any()
    ]
    for each in (found, kept)
  ]
  assert 2 not in holders[0] and 2 in holders[1]
  # The one partner sent no more than `top`: nothing stands in its place.
  assert (found.rows < 0).sum() == 1 and (kept.rows >= 0).all()


def test_clients_of_one_name_are_refused():
  with pytest.raises(ValueError, match="different names"):
    run([A, A])


@pytest.mark.parametrize("part", ["queries", "sentences"])
@pytest.mark.parametrize("factor", [10.0, 0.5])
def test_vectors_of_another_length_are_refused(part, factor):
  """With sentences ten times as long, every negative counted as an answer."""
  vectors = getattr(PARTIES[0], part)
  with pytest.raises(ValueError, match="expected vectors of length 1"):
    make_party("a", **{part: factor * vectors})
  make_party("a", **{part: vectors.astype(np.float16)})


def test_a_client_without_questions_takes_part():
  silent = make_party("b", queries=np.zeros((0, DIM), np.float32), answers=[])
  result = run([A, silent])
  assert result.negatives["b"].rows.shape == (0, TOP)
  assert result.negatives["a"].rows.shape == (QUESTIONS, TOP)


@pytest.mark.parametrize("position", [-1, SIZES["a"]])
def test_answers_outside_of_the_sentences_are_refused(position):
  """At -1, the last sentence was taken for the answer and sent no negatives."""
  answers = [(position,)] * QUESTIONS
  with pytest.raises(ValueError, match="client 'a': .* from 0 to 29"):
    make_party("a", answers=answers)
