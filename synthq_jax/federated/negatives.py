"""Finds sentences that do not answer: at random, by BM25, by the encoders.

A table of negatives is int32 [epoch, question, n]: positions in the client's
sentences, -1 where a question has no further one. Equal sentences count as
one: the first of them stands for all, and none is drawn where one answers.

What is drawn for a question depends on (seed, client, round), on that question
and on the collection, never on the other questions: each has a generator of its
own, so that one question more does not change what the others learn from.

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

from synthq_jax import typing
from synthq_jax.federated import clients
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.retrieval import bm25, index

__all__ = [
  "bm25_negatives",
  "hardest",
  "hubness",
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
    tokens: of the client.
    n: negatives of a question, drawn without replacement.
    seed: with the client's name and the round, of the draws.
    round_number: of the federated training, from 0.
    epochs: tables, drawn one after the other.

  Returns:
    The tables.
  """
  same = clients.first_equal(tokens.sentences)
  candidates = np.unique(same)
  excluded = _excluded(same, tokens.answers[clients.TRAIN])
  found = np.full((epochs, len(excluded), n), -1, np.int32)
  streams = _generators(tokens, seed, round_number)
  for row, (generator, answers) in enumerate(
    zip(streams, excluded, strict=True)
  ):
    size = min(n + len(answers), len(candidates))
    for epoch in range(epochs):
      drawn = candidates[generator.choice(len(candidates), size, replace=False)]
      drawn = drawn[~np.isin(drawn, answers)][:n]
      found[epoch, row, : len(drawn)] = drawn
  return found


def bm25_negatives(
  client: clients.Client,
  *,
  n: int,
) -> Int[np.ndarray, "epoch question n"]:
  """Takes the best sentences of BM25 that are no answers.

  Args:
    client: with its texts, which are searched.
    n: negatives of a question; fewer where fewer share a word with it.

  Returns:
    One table, in each row the best first.

  Raises:
    ValueError: if no sentence has a word.
  """
  questions = client.splits[clients.TRAIN]
  positions: dict[str, int] = {}
  same = np.array(
    [positions.setdefault(x, at) for at, x in enumerate(client.sentences)]
  )
  excluded = _excluded(same, questions.answers)
  searched = bm25.BM25().build(
    [str(at) for at in positions.values()], list(positions)
  )
  found = np.full((len(excluded), n), -1, np.int32)
  k = n + max(map(len, excluded), default=0)
  _, rows = searched.search(questions.texts, k)
  for row, (ids, answers) in enumerate(zip(rows, excluded, strict=True)):
    best = np.array([int(x) for x in ids], np.int32)
    best = best[~np.isin(best, answers)][:n]
    found[row, : len(best)] = best
  return found[None]


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
  """Draws static hard negatives: n of the k best of the current encoders.

  Static: they stay as they are until the next call, while the encoders move. A
  few sentences (hubs) are near to very many questions, and would be everybody's
  negative if the best n were taken; drawn uniformly from the best k, with k
  much larger than n, they are drawn as often as any other of the k.

  Args:
    encoders: how texts become vectors.
    params: the two towers.
    tokens: of the client.
    n: negatives of a question.
    k: how many of the best that are no answers they are drawn from, >= n.
    seed: with the client's name and the round, of the draws; not secret.
    round_number: of the federated training, from 0.
    epochs: tables, drawn one after the other from the same k.
    sentence_vectors: of the client's sentences.

  Returns:
    The tables.
  """
  pool = hardest(
    encoders.encode_queries(params, tokens.questions[clients.TRAIN]),
    sentence_vectors,
    k=k,
    answers=tokens.answers[clients.TRAIN],
    same=clients.first_equal(tokens.sentences),
  )
  found = np.full((epochs, len(pool), n), -1, np.int32)
  sizes = (pool >= 0).sum(axis=1)
  streams = _generators(tokens, seed, round_number)
  for row, (generator, size) in enumerate(zip(streams, sizes, strict=True)):
    for epoch in range(epochs):
      chosen = generator.choice(size, min(n, size), replace=False)
      found[epoch, row, : len(chosen)] = pool[row, chosen]
  return found


def hardest(
  query_vectors: Float[np.ndarray, "question dim"],
  sentence_vectors: Float[np.ndarray, "sentence dim"],
  *,
  k: int,
  answers: Sequence[Sequence[int]],
  same: Int[np.ndarray, " sentence"],
) -> Int[np.ndarray, "question k"]:
  """Finds the sentences nearest to each question that are no answers.

  Args:
    query_vectors: of the questions.
    sentence_vectors: of the sentences.
    k: how many.
    answers: positions of the sentences that answer each question.
    same: from `clients.first_equal`.

  Returns:
    Positions, best first, equal scores in the order of the sentences; -1 where
    there are fewer than k.
  """
  candidates = np.unique(same)
  excluded = _excluded(same, answers)
  pool = np.full((len(excluded), k), -1, np.int32)
  if not len(excluded):
    return pool
  searched = index.exact(np.asarray(sentence_vectors)[candidates])
  # Searched together are questions with equally many answers, so that one
  # question's long list does not widen the search of all.
  counts = np.array([len(x) for x in excluded])
  for count in np.unique(counts):
    rows = np.flatnonzero(counts == count)
    _, places = searched.search(query_vectors[rows], k + int(count))
    found = candidates[places]
    if count:
      own = np.array([excluded[row] for row in rows])
      is_answer = (found[:, :, None] == own[:, None, :]).any(axis=2)
      order = np.argsort(is_answer, axis=1, kind="stable")
      found = np.where(is_answer, -1, found)
      found = np.take_along_axis(found, order, axis=1)
    found = found[:, :k]
    pool[rows, : found.shape[1]] = found
  return pool


def hubness(table: Int[np.ndarray, "... n"], num_sentences: int) -> float:
  """Returns the skewness of how often each sentence is a negative.

  In many dimensions some points, the hubs, are among the nearest of very many
  others. Taken as negatives, they are what all questions learn to avoid, while
  most sentences are never seen. The skewness says how negatives are spread, not
  whether they are hard or false; and compares tables of equal size alone.

  >>> hubness(np.array([[0, 1], [1, 0]]), 2)
  0.0

  Args:
    table: positions of sentences, -1 for none; the last axis are those of one
      question, all different.
    num_sentences: how many could occur.

  Returns:
    0 if the numbers of occurrences are symmetric about their mean or all
    equal, large where few sentences occur very often.
  """
  counts = np.bincount(table[table >= 0], minlength=num_sentences)
  spread = counts.std()
  deviations = counts - counts.mean()
  return float(np.mean((deviations / spread) ** 3)) if spread else 0.0


def _generators(
  tokens: clients.Tokens, seed: int, round_number: int
) -> Iterator[np.random.Generator]:
  """Yields a generator for each question, of the question's own tokens."""
  words = [_TAG, seed, round_number, *clients.seed_words(tokens.name)]
  for question in tokens.questions[clients.TRAIN]:
    own = clients.seed_words(question.tobytes())
    yield np.random.default_rng([*words, *own])


def _excluded(
  same: np.ndarray, answers: Sequence[Sequence[int]]
) -> list[np.ndarray]:
  """Returns what stands for the answers of each question."""
  return [np.unique(same[list(of_question)]) for of_question in answers]
