"""Measures the ranks at which questions find their sentences and passages.

A client searches all of its own sentences, exactly. Sentences are ranked by
score, equal scores by position. The score of a passage is the score of its best
sentence. Measures depend on the first correct answer:

- MRR@k: one divided by its rank, 0 after rank k.
- R@k: 1 if it is among the first k. For a question with one answer, this is
  recall. For a question with several, trec_eval calls it success and papers on
  question answering call it recall: one correct answer is enough.

Values of private questions are private. If whole passages are judged
(`passages.from_documents`), any sentence of a correct passage is correct.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.federated import clients as clients_lib
from synthq_jax.retrieval import bm25

__all__ = [
  "MEASURES",
  "Scores",
  "evaluate",
  "evaluate_bm25",
]

MEASURES = {"MRR@10": 10, "R@1": 1, "R@20": 20, "R@100": 100}
"""Measures, with the last rank that counts."""

_BLOCK = 1 << 23  # scores at a time: 32 MiB
_CHUNK = 1 << 20  # coordinates of sentences in double precision: 8 MiB

Blocks = Iterator[Float[np.ndarray, "question sentence"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Ranks of the first correct answers to one client's questions.

  >>> scores = Scores(client="a", sentence=[2, 0], passage=[1, 20])
  >>> scores.values("R@1", "passage").tolist()
  [1.0, 0.0]

  Attributes:
    client: name of the client.
    sentence: rank of each question's first correct sentence, from 1; 0 if no
      answer was found.
    passage: rank of each question's first correct passage, likewise.
  """

  client: str
  sentence: list[int] = dataclasses.field(repr=False)
  passage: list[int] = dataclasses.field(repr=False)

  def values(
    self, measure: str = "MRR@10", level: str = "sentence"
  ) -> Float[np.ndarray, " question"]:
    """Returns a measure for each question.

    Args:
      measure: one of `MEASURES`.
      level: "sentence" or "passage".
    """
    ranks = np.array(getattr(self, level), float)
    hits = (ranks > 0) & (ranks <= MEASURES[measure])
    return hits / np.maximum(ranks, 1) if measure == "MRR@10" else hits * 1.0


def evaluate(
  query_vectors: Float[np.ndarray, "question dim"],
  sentence_vectors: Float[np.ndarray, "sentence dim"],
  tokens: clients_lib.Tokens,
  split: str,
) -> Scores:
  """Ranks one client's sentences by inner products with its questions.

  Products are summed in double precision and rounded to single precision. So
  equal vectors have equal scores, however the matrix product forms blocks.

  Args:
    query_vectors: vectors of the split's questions, in order.
    sentence_vectors: vectors of all sentences, in order.
    tokens: tokens of the client; only passages and answers are read.
    split: split of the questions.

  Returns:
    The ranks.

  Raises:
    ValueError: if the numbers of vectors are wrong, or a vector is not finite.
  """
  queries = np.asarray(query_vectors)
  sentences = np.asarray(sentence_vectors)
  expected = len(tokens.answers[split]), len(tokens.sentences)
  if (len(queries), len(sentences)) != expected:
    raise ValueError(
      f"client {tokens.name!r}: expected vectors of {expected[0]} {split} questions"
      f" and {expected[1]} sentences, got {len(queries)} and {len(sentences)}:"
      " encode this client's tokens"
    )
  if not (np.isfinite(queries).all() and np.isfinite(sentences).all()):
    raise ValueError(
      f"client {tokens.name!r}: expected finite vectors, got others: its"
      " training diverged, take a smaller learning rate"
    )
  blocks = _compute_products(queries, sentences)
  return _rank_blocks(tokens, tokens.answers[split], blocks)


def evaluate_bm25(client: clients_lib.Client, split: str) -> Scores:
  """Ranks one client's sentences by BM25, with the client's own statistics.

  A sentence without a common word with the question counts as not found.

  Args:
    client: client with texts.
    split: split of the questions.

  Returns:
    The ranks.
  """
  ids = tuple(map(str, range(len(client.sentences))))
  config, every = bm25.BM25(), np.arange(len(ids))
  index = config.build(ids, client.sentences)
  questions = client.splits[split]
  words = config.words(questions.texts)
  rows = (index.scores_at(of_question, every) for of_question in words)
  blocks = (np.where(row > 0, row, -np.inf)[None] for row in rows)
  return _rank_blocks(client, questions.answers, blocks)


def _compute_products(queries: np.ndarray, sentences: np.ndarray) -> Blocks:
  """Yields inner products of blocks of questions with all sentences."""
  rows = max(1, _BLOCK // len(sentences))
  columns = max(1, _CHUNK // sentences.shape[1])
  for start in range(0, len(queries), rows):
    block = queries[start : start + rows].astype(np.float64)
    products = np.empty((len(block), len(sentences)), np.float32)
    for start_column in range(0, len(sentences), columns):
      part = sentences[start_column : start_column + columns].astype(np.float64)
      products[:, start_column : start_column + columns] = block @ part.T
    yield products


def _rank_blocks(
  passages: clients_lib.Client | clients_lib.Tokens,
  answers: clients_lib.Answers,
  blocks: Blocks,
) -> Scores:
  """Ranks sentences and passages from blocks of scores."""
  numbers = passages.passages
  starts = np.flatnonzero(np.diff(numbers, prepend=-1))
  sentence_ranks, passage_ranks, start = [], [], 0
  for block in blocks:
    right = [np.array(each) for each in answers[start : start + len(block)]]
    start += len(block)
    sentence_ranks += _find_first_ranks(block, right)
    best = np.maximum.reduceat(block, starts, axis=1)
    passage_ranks += _find_first_ranks(best, [numbers[each] for each in right])
  return Scores(
    client=passages.name, sentence=sentence_ranks, passage=passage_ranks
  )


def _find_first_ranks(
  scores: Float[np.ndarray, "question item"], right: Sequence[np.ndarray]
) -> list[int]:
  """Returns the rank of each question's first correct item, or 0 for none.

  Items with a score of -inf count as not found.
  """
  ranks = [0] * len(scores)
  for question, (row, positions) in enumerate(zip(scores, right, strict=True)):
    best = row[positions].max()
    if best > -np.inf:
      first = positions[row[positions] == best].min()
      before = np.count_nonzero(row > best)
      ties = np.count_nonzero(row[:first] == best)
      ranks[question] = int(1 + before + ties)
  return ranks
