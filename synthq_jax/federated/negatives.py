"""Finds negatives, sentences that do not answer: random, BM25's, the encoders'.

A table of negatives is int32 [epoch, question, n]: positions of the client's
sentences, filled up with -1. Equal sentences count as one: the first represents
all of them. If one of them answers the question, none of them is a negative.

The draw for a question depends on (seed, client, round), on this question and on
the collection, never on the other questions. Each question has its own
generator, so an added question does not change the negatives of the others.

References:
  Xiong et al., "Approximate Nearest Neighbor Negative Contrastive Learning for
  Dense Text Retrieval", ICLR 2021.
  Zhan et al., "Optimizing Dense Retrieval Model Training with Hard Negatives",
  SIGIR 2021 (static hard negatives, STAR).
  Radovanovic et al., "Hubs in Space: Popular Nearest Neighbors in
  High-Dimensional Data", JMLR 11, 2010, section 2 (skewness of N_k).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from synthq_jax import typing
from synthq_jax.federated import clients
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.retrieval import bm25, index

__all__ = [
  "bm25_negatives",
  "find_hardest",
  "compute_hubness",
  "mine",
  "random_negatives",
]

_TAG = 0x6E656761  # keeps other uses of the same seed apart


def random_negatives(
  tokens: clients.Tokens,
  *,
  n: int,
  seed: int,
  round_number: int = 0,
  epochs: int = 1,
) -> Int[np.ndarray, "epoch question n"]:
  """Draws negatives uniformly from the sentences that are no answers.

  Args:
    tokens: tokens of the client.
    n: negatives of a question, drawn without replacement.
    seed: seed of the draws, with the client's name and the round.
    round_number: round of the federated training, from 0.
    epochs: number of tables, drawn one after the other.

  Returns:
    A table for each epoch.
  """
  same = clients.find_first_equal(tokens.sentences)
  candidates = np.unique(same)
  excluded = _find_excluded(same, tokens.answers[clients.TRAIN])
  table = np.full((epochs, len(excluded), n), -1, np.int32)
  streams = _make_generators(tokens, seed, round_number)
  for row, (generator, answers) in enumerate(
    zip(streams, excluded, strict=True)
  ):
    size = min(n + len(answers), len(candidates))
    for epoch in range(epochs):
      drawn = candidates[generator.choice(len(candidates), size, replace=False)]
      drawn = drawn[~np.isin(drawn, answers)][:n]
      table[epoch, row, : len(drawn)] = drawn
  return table


def bm25_negatives(
  client: clients.Client,
  *,
  n: int,
) -> Int[np.ndarray, "epoch question n"]:
  """Finds BM25's best sentences that are no answers.

  Args:
    client: client whose texts are searched.
    n: negatives of a question, or fewer if fewer share a word with it.

  Returns:
    One table, best sentences first.

  Raises:
    ValueError: if no sentence has a word.
  """
  questions = client.splits[clients.TRAIN]
  positions: dict[str, int] = {}
  same = np.array(
    [
      positions.setdefault(x, position)
      for position, x in enumerate(client.sentences)
    ]
  )
  excluded = _find_excluded(same, questions.answers)
  searched = bm25.BM25().build(
    [str(position) for position in positions.values()], list(positions)
  )
  table = np.full((len(excluded), n), -1, np.int32)
  k = n + max(map(len, excluded), default=0)
  _, rows = searched.search(questions.texts, k)
  for row, (ids, answers) in enumerate(zip(rows, excluded, strict=True)):
    best = np.array([int(x) for x in ids], np.int32)
    best = best[~np.isin(best, answers)][:n]
    table[row, : len(best)] = best
  return table[None]


def mine(
  encoders: encoders_lib.Encoders,
  params: typing.Params,
  tokens: clients.Tokens,
  *,
  n: int,
  k: int,
  seed: int,
  round_number: int = 0,
  epochs: int = 1,
  sentence_vectors: Float[np.ndarray, "sentence dim"],
) -> Int[np.ndarray, "epoch question n"]:
  """Draws static hard negatives: n of the k best under the current encoders.

  Static negatives stay the same until the next call, while the encoders change.
  A few sentences (hubs) are near very many questions; with the best n, they would
  be negatives of all of these. The draw is uniform over the best k, k being much
  larger than n, so a hub is drawn as often as any other of the k.

  Args:
    encoders: the two towers.
    params: parameters of the towers.
    tokens: tokens of the client.
    n: negatives of a question.
    k: number of best sentences without answers to draw from, >= n.
    seed: seed of the draws, with the client's name and the round; not secret.
    round_number: round of the federated training, from 0.
    epochs: number of tables, drawn one after the other from the same k.
    sentence_vectors: vectors of the client's sentences.

  Returns:
    A table for each epoch.
  """
  pool = find_hardest(
    encoders.encode_queries(params, tokens.questions[clients.TRAIN]),
    sentence_vectors,
    k=k,
    answers=tokens.answers[clients.TRAIN],
    same=clients.find_first_equal(tokens.sentences),
  )
  table = np.full((epochs, len(pool), n), -1, np.int32)
  sizes = (pool >= 0).sum(axis=1)
  streams = _make_generators(tokens, seed, round_number)
  for row, (generator, size) in enumerate(zip(streams, sizes, strict=True)):
    for epoch in range(epochs):
      chosen = generator.choice(size, min(n, size), replace=False)
      table[epoch, row, : len(chosen)] = pool[row, chosen]
  return table


def find_hardest(
  query_vectors: Float[np.ndarray, "question dim"],
  sentence_vectors: Float[np.ndarray, "sentence dim"],
  *,
  k: int,
  answers: Sequence[Sequence[int]],
  same: Int[np.ndarray, " sentence"],
) -> Int[np.ndarray, "question k"]:
  """Finds the sentences nearest to each question that are no answers.

  Args:
    query_vectors: vectors of the questions.
    sentence_vectors: vectors of the sentences.
    k: number of sentences for each question.
    answers: positions of the sentences that answer each question.
    same: positions from `clients.find_first_equal`.

  Returns:
    Positions, best first, equal scores in the order of the sentences; filled up
    with -1.
  """
  candidates = np.unique(same)
  excluded = _find_excluded(same, answers)
  pool = np.full((len(excluded), k), -1, np.int32)
  if not len(excluded):
    return pool
  searched = index.exact(np.asarray(sentence_vectors)[candidates])
  # Questions with equally many answers are searched together, so that one
  # question's long list does not widen the search for all.
  counts = np.array([len(x) for x in excluded])
  for count in np.unique(counts):
    rows = np.flatnonzero(counts == count)
    _, columns = searched.search(query_vectors[rows], k + int(count))
    nearest = candidates[columns]
    if count:
      own = np.array([excluded[row] for row in rows])
      is_answer = (nearest[:, :, None] == own[:, None, :]).any(axis=2)
      order = np.argsort(is_answer, axis=1, kind="stable")
      nearest = np.where(is_answer, -1, nearest)
      nearest = np.take_along_axis(nearest, order, axis=1)
    nearest = nearest[:, :k]
    pool[rows, : nearest.shape[1]] = nearest
  return pool


def compute_hubness(
  table: Int[np.ndarray, "... n"], num_sentences: int
) -> float:
  """Computes the skewness of the sentences' numbers of uses as negatives.

  In many dimensions, some points (hubs) are among the nearest of very many
  others. If hubs are the negatives, all questions learn to avoid them, while most
  sentences are never used. The skewness measures the spread of negatives, not
  whether they are hard or false. It compares only tables of equal size.

  >>> compute_hubness(np.array([[0, 1], [1, 0]]), 2)
  0.0

  Args:
    table: positions of sentences, -1 for none; the last axis holds the different
      negatives of one question.
    num_sentences: number of sentences that could occur.

  Returns:
    0 if the numbers of occurrences are symmetric about their mean or all
    equal; large if few sentences occur very often.
  """
  counts = np.bincount(table[table >= 0], minlength=num_sentences)
  return float(stats.skew(counts)) if np.ptp(counts) else 0.0


def _make_generators(
  tokens: clients.Tokens, seed: int, round_number: int
) -> Iterator[np.random.Generator]:
  """Yields a generator for each question, seeded by the question's tokens too."""
  words = [_TAG, seed, round_number, *clients.make_seed_words(tokens.name)]
  for question in tokens.questions[clients.TRAIN]:
    own = clients.make_seed_words(question.tobytes())
    yield np.random.default_rng([*words, *own])


def _find_excluded(
  same: np.ndarray, answers: Sequence[Sequence[int]]
) -> list[np.ndarray]:
  """Returns the representatives of each question's answers."""
  return [np.unique(same[list(of_question)]) for of_question in answers]
