import numpy as np
import pytest

from synthq_jax.federated import clients, ranking
from synthq_jax.retrieval import bm25, measures


def tokens(answers, passages):
  """A client of which only answers and passages matter."""
  return clients.Tokens(
    name="site",
    sentences=np.ones((len(passages), 2), np.int32),
    passages=np.array(passages, np.int32),
    questions={"test": np.ones((len(answers), 2), np.int32)},
    answers={"test": tuple(answers)},
  )


def evaluate(scores, answers, passages):
  """Ranks by given scores: questions are unit vectors, sentences columns."""
  scores = np.array(scores, np.float32)
  queries = np.eye(len(scores), dtype=np.float32)
  return ranking.evaluate(queries, scores.T, tokens(answers, passages), "test")


def test_ranks_are_those_of_the_first_right_sentence_and_its_passage():
  found = evaluate(
    [[0.1, 0.9, 0.5, 0.7, 0.2], [0.1, 0.9, 0.5, 0.7, 0.2]],
    [(4, 0), (2,)],
    [0, 1, 1, 2, 2],
  )
  assert found.sentence == [4, 3]
  # The passages score .1, .9 and .7; those with an answer are 2, 0; and 1.
  assert found.passage == [2, 1]


def test_equal_scores_stand_in_order_of_position():
  found = evaluate([[0.5] * 4] * 3, [(2,), (3, 1), (0,)], [0, 0, 1, 2])
  assert found.sentence == [3, 2, 1]
  assert found.passage == [2, 1, 1]


def random_case(seed=0, questions=12, sentences=300):
  rng = np.random.default_rng(seed)
  passages = np.sort(rng.integers(0, 60, sentences))
  passages = np.unique(passages, return_inverse=True)[1]
  answers = [
    tuple(rng.choice(sentences, size=rng.integers(1, 5), replace=False))
    for _ in range(questions)
  ]
  # Few different vectors, so that many scores are equal.
  vectors = rng.normal(size=(90, 8))[rng.integers(0, 90, sentences)]
  noise = rng.normal(size=(questions, 8))
  queries = vectors[[each[0] for each in answers]] + noise
  return queries.astype("f4"), vectors.astype("f4"), answers, passages


def run_of(scores):
  """A run that keeps the order of positions among equal scores."""
  return {
    f"q{i}": {f"s{j}": -float(rank) for rank, j in enumerate(order)}
    for i, order in enumerate(np.argsort(-scores, axis=1, kind="stable"))
  }


def test_values_are_those_of_ir_measures():
  queries, vectors, answers, passages = random_case()
  found = ranking.evaluate(queries, vectors, tokens(answers, passages), "test")
  scores = (queries.astype(float) @ vectors.T.astype(float)).astype(np.float32)
  best = np.stack(
    [scores[:, passages == i].max(1) for i in range(passages[-1] + 1)], axis=1
  )
  levels = {
    "sentence": (scores, answers),
    "passage": (best, [tuple(passages[list(each)]) for each in answers]),
  }
  names = {
    "MRR@10": "RR@10", "R@1": "Success@1", "R@20": "Success@20",
    "R@100": "Success@100",
  }  # fmt: skip
  for level, (rows, right) in levels.items():
    qrels = {
      f"q{i}": {f"s{j}": 1 for j in each} for i, each in enumerate(right)
    }
    theirs = measures.evaluate(qrels, run_of(rows), tuple(names.values()))
    for ours, other in names.items():
      expected = [theirs.per_query[other][f"q{i}"] for i in range(len(queries))]
      np.testing.assert_allclose(found.values(ours, level), expected)
  assert len(set(found.values("MRR@10"))) > 3


def test_blocks_change_nothing(monkeypatch):
  queries, vectors, answers, passages = random_case(seed=2)
  whole = ranking.evaluate(queries, vectors, tokens(answers, passages), "test")
  monkeypatch.setattr(ranking, "_BLOCK", 5 * len(vectors))
  monkeypatch.setattr(ranking, "_CHUNK", 7 * vectors.shape[1])
  parts = ranking.evaluate(queries, vectors, tokens(answers, passages), "test")
  assert whole == parts


def client(sentences, passages, questions, answers):
  number = len(questions)
  return clients.Client(
    name="site",
    sentences=tuple(sentences),
    passages=np.array(passages, np.int32),
    passage_ids=tuple(f"p{i}" for i in range(passages[-1] + 1)),
    splits={
      "test": clients.Questions(
        ids=tuple(f"q{i}" for i in range(number)),
        texts=tuple(questions),
        answers=tuple(answers),
      )
    },
  )


def test_bm25_ranks_as_its_search_does_and_finds_only_shared_words():
  words = ["red", "green", "apple", "pear", "fruit", "tree", "leaf"]
  rng = np.random.default_rng(4)
  texts = [" ".join(rng.choice(words, size=5)) for _ in range(40)]
  questions = ["red apple", "pear tree leaf", "nothing here", "the green one"]
  answers = [(3, 17), (9,), (0,), (39,)]
  found = ranking.evaluate_bm25(
    client(texts, sorted(range(40)), questions, answers), "test"
  )
  ids = [str(i) for i in range(40)]
  _, rows = bm25.BM25().build(ids, texts).search(questions, k=40)
  expected = [
    min((row.index(str(i)) + 1 for i in each if str(i) in row), default=0)
    for row, each in zip(rows, answers, strict=True)
  ]
  assert found.sentence == expected
  assert expected[2] == 0 and found.passage[2] == 0
  assert found.values("R@100")[2] == 0


def test_a_client_without_questions_has_no_values():
  case = tokens([], [0, 1, 2])
  found = ranking.evaluate(np.ones((0, 4)), np.ones((3, 4)), case, "test")
  assert found.values("MRR@10").shape == (0,)


@pytest.mark.parametrize(
  ("queries", "vectors", "found"),
  [
    (np.ones((1, 2)), np.ones((3, 2)), "got 1 and 3"),
    (np.ones((2, 2)), np.ones((4, 2)), "got 2 and 4"),
    (np.ones((2, 2)), np.full((3, 2), np.nan), "finite vectors"),
  ],
)
def test_vectors_that_do_not_fit_are_refused(queries, vectors, found):
  case = tokens([(0,), (1,)], [0, 0, 1])
  with pytest.raises(ValueError, match=found):
    ranking.evaluate(queries, vectors, case, "test")


@pytest.mark.parametrize(
  ("answers", "passages", "said"),
  [
    ([(0,), ()], [0, 0, 1], "one answer or more"),
    ([(3,)], [0, 0, 1], "positions from 0 to 2"),
    ([(-1,)], [0, 0, 1], "positions from 0 to 2"),
    ([(0,)], [0, 1, 0], "ascending without gaps"),
    ([(0,)], [0, 0, 2], "ascending without gaps"),
  ],
)
def test_clients_that_would_rank_other_sentences_are_refused(
  answers, passages, said
):
  """NumPy counts -1 from the end; [0, 1, 0] ranked passage 0 as passage 1."""
  with pytest.raises(ValueError, match=f"client 'site': .*{said}"):
    tokens(answers, passages)
