import dataclasses

import numpy as np
import pytest

from synthq_jax.federated import clients, negatives


def _tokens(num_sentences=12, answers=((0, 5), (1,), (2, 2)), name="one"):
  """Sentence i is the token 10 + i; questions are the tokens 50, 51, ..."""
  sentences = np.zeros((num_sentences, 3), np.int32)
  sentences[:, 0] = 10 + np.arange(num_sentences)
  questions = np.zeros((len(answers), 2), np.int32)
  questions[:, 0] = 50 + np.arange(len(answers))
  return clients.Tokens(
    name=name,
    sentences=sentences,
    passages=np.zeros(num_sentences, np.int32),
    questions={"train": questions},
    answers={"train": answers},
  )


class Lookup:
  """Encoders by table: the vector of a text is that of its first token."""

  def __init__(self, vectors):
    self.vectors = vectors

  def encode_sentences(self, params, tokens):
    return self.vectors[tokens[:, 0]] * params

  encode_queries = encode_sentences


def _lookup(dim=8, seed=0):
  vectors = np.random.default_rng(seed).normal(size=(64, dim))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  return Lookup(vectors.astype(np.float32))


def _mine(tokens, encoders=None, **options):
  options = {"n": 2, "k": 4, "seed": 3, **options}
  encoders = encoders or _lookup()
  vectors = encoders.encode_sentences(1.0, tokens.sentences)
  return negatives.mine(
    encoders, 1.0, tokens, sentence_vectors=vectors, **options
  )


def test_random_negatives_are_uniform_over_sentences_that_are_no_answers():
  tokens = _tokens(6, answers=((0, 5),) * 400)
  questions = np.stack([50 + np.arange(400), np.arange(400)], axis=1)
  tokens = dataclasses.replace(
    tokens, questions={"train": questions.astype(np.int32)}
  )
  table = negatives.random_negatives(tokens, n=2, seed=0, epochs=5)
  assert table.shape == (5, 400, 2)
  assert (table[..., 0] != table[..., 1]).all()
  counts = np.bincount(table.ravel(), minlength=6)
  assert counts[0] == counts[5] == 0
  # 4000 draws of 4 sentences: 5 standard deviations are about 135.
  assert np.abs(counts[1:5] - 1000).max() < 135


def test_where_there_are_too_few_sentences_places_stay_empty():
  tokens = _tokens(4, answers=((0, 1, 2), (3,)))
  table = negatives.random_negatives(tokens, n=3, seed=0)
  np.testing.assert_array_equal(table[0, 0], [3, -1, -1])
  assert set(table[0, 1]) == {0, 1, 2}
  mined = _mine(tokens, n=3, k=3)
  np.testing.assert_array_equal(mined[0, 0], [3, -1, -1])


def test_a_sentence_equal_to_an_answer_is_no_negative():
  tokens = _tokens(5, answers=((0,), (1,)))
  sentences = tokens.sentences.copy()
  sentences[[3, 4]] = sentences[[0, 1]]
  tokens = dataclasses.replace(tokens, sentences=sentences)
  for table in (
    negatives.random_negatives(tokens, n=4, seed=0),
    _mine(tokens, n=4, k=4),
  ):
    # Of equal sentences the first stands for all.
    assert set(table[0, 0]) == {1, 2, -1}
    assert set(table[0, 1]) == {0, 2, -1}


def test_the_hardest_are_those_a_plain_search_finds():
  tokens = _tokens(30, answers=((0, 5, 7), (1,), (2, 2), (20, 3)))
  encoders = _lookup()
  sentences = encoders.encode_sentences(1.0, tokens.sentences)
  queries = encoders.encode_queries(1.0, tokens.questions["train"])
  found = negatives.find_hardest(
    queries,
    sentences,
    k=6,
    answers=tokens.answers["train"],
    same=clients.find_first_equal(tokens.sentences),
  )
  for row, answers in enumerate(tokens.answers["train"]):
    scores = sentences.astype(np.float64) @ queries[row].astype(np.float64)
    order = [at for at in np.argsort(-scores) if at not in answers]
    np.testing.assert_array_equal(found[row], order[:6])


def test_mined_negatives_are_uniform_over_the_best_k():
  tokens = _tokens(40, answers=((0,), (1,)))
  pools = _mine(tokens, n=8, k=8)[0]
  table = _mine(tokens, n=2, k=8, epochs=2000)
  for row in range(2):
    values, counts = np.unique(table[:, row], return_counts=True)
    np.testing.assert_array_equal(values, np.sort(pools[row]))
    # 4000 draws of 8: 5 standard deviations are about 105.
    assert np.abs(counts - 500).max() < 105


def test_draws_depend_on_seed_client_and_round():
  tokens = _tokens(40)
  first = _mine(tokens)
  np.testing.assert_array_equal(first, _mine(tokens))
  others = (
    _mine(tokens, seed=4),
    _mine(tokens, round_number=1),
    _mine(dataclasses.replace(tokens, name="two")),
  )
  assert all((first != other).any() for other in others)


@pytest.mark.parametrize("kind", ["random", "mined"])
def test_a_question_less_does_not_change_the_draws_of_the_others(kind):
  tokens = _tokens(40)
  less = dataclasses.replace(
    tokens,
    questions={"train": tokens.questions["train"][[0, 2]]},
    answers={"train": (tokens.answers["train"][0], (2, 2))},
  )

  def draw(tokens):
    if kind == "mined":
      return _mine(tokens, n=3, k=10)
    return negatives.random_negatives(tokens, n=3, seed=3)

  np.testing.assert_array_equal(draw(tokens)[:, [0, 2]], draw(less))


def _client(sentences, texts, answers):
  return clients.Client(
    name="one",
    sentences=sentences,
    passages=np.zeros(len(sentences), np.int32),
    passage_ids=("p",),
    splits={
      "train": clients.Questions(
        ids=tuple(map(str, range(len(texts)))), texts=texts, answers=answers
      )
    },
  )


def test_bm25_gives_the_best_sentences_that_are_no_answers():
  client = _client(
    (
      "Apples are red fruits of trees.",
      "Red apples.",
      "Red apples.",
      "Pears are green.",
      "Apples grow in autumn.",
    ),
    ("red apples", "green pears"),
    ((0,), (3,)),
  )
  table = negatives.bm25_negatives(client, n=2)
  np.testing.assert_array_equal(table[0], [[1, 4], [-1, -1]])
  assert table.shape == (1, 2, 2)
  # An answer's equal is no negative either.
  client = _client(client.sentences, ("red apples",), ((2,),))
  np.testing.assert_array_equal(
    negatives.bm25_negatives(client, n=2)[0], [[0, 4]]
  )


def test_drawing_from_more_spreads_hubs():
  """Sentence 0 is near to everything."""
  generator = np.random.default_rng(0)
  vectors = 0.2 * generator.normal(size=(400, 32))
  vectors[10] = 0
  vectors[:, 0] += 4
  vectors[10, 0] = 1
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  tokens = _tokens(40, answers=((1,),) * 60)
  questions = np.zeros((60, 2), np.int32)
  questions[:, 0] = 100 + np.arange(60)
  tokens = dataclasses.replace(tokens, questions={"train": questions})
  encoders = Lookup(vectors.astype(np.float32))
  best, spread = (_mine(tokens, encoders, n=2, k=k) for k in (2, 20))
  assert np.mean(np.any(best == 0, axis=-1)) == 1.0
  assert np.mean(np.any(spread == 0, axis=-1)) < 0.3
  assert negatives.compute_hubness(best, 40) > 2 * negatives.compute_hubness(
    spread, 40
  )
