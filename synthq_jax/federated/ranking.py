"""How well questions find the sentences that answer them, and their passages.

A client searches its own sentences, all of them, exactly. Sentences stand in
order of their scores, equal scores in order of position; a passage scores what
its best sentence does. Measures look at the first right answer:

- MRR@k: one divided by its rank, 0 behind rank k.
- R@k: 1 if it is among the first k. For a question with one answer that is
  recall; for one with several it is what trec_eval calls success and papers on
  question answering call recall: one right answer is enough.

Values of private questions are private. Where whole passages are judged
(`passages.from_documents`), any sentence of a right passage is a right
sentence.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.federated import clients as clients_lib
from synthq_jax.retrieval import bm25

__all__ = [
  "LEVELS",
  "MEASURES",
  "Scores",
  "evaluate",
  "evaluate_bm25",
]

LEVELS = ("sentence", "passage")
"""What is ranked."""

MEASURES = ("MRR@10", "R@1", "R@20", "R@100")
"""The usual measures; any other number may stand behind the "@"."""

_MEASURE = re.compile(r"(MRR|R)@([1-9]\d*)")
_BLOCK = 1 << 23  # scores at a time: 32 MiB
_CHUNK = 1 << 20  # numbers of sentences' vectors in double precision: 8 MiB

Blocks = Iterator[Float[np.ndarray, "question sentence"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Ranks of the first right answers to one client's questions.

  >>> scores = Scores(client="a", sentence=[2, 0], passage=[1, 20])
  >>> scores.means("passage")
  {'MRR@10': 0.5, 'R@1': 0.5, 'R@20': 1.0, 'R@100': 1.0}

  Attributes:
    client: its name.
    sentence: by question, from 1; 0 where no answer was found.
    passage: the same of passages.
  """

  client: str
  sentence: list[int] = dataclasses.field(repr=False)
  passage: list[int] = dataclasses.field(repr=False)

  def values(
    self, measure: str = "MRR@10", level: str = "sentence"
  ) -> Float[np.ndarray, " question"]:
    """Returns a measure for each question.

    Args:
      measure: such as those in `MEASURES`.
      level: one of `LEVELS`.

    Raises:
      ValueError: if there is no such measure or level.
    """
    match = _MEASURE.fullmatch(measure)
    if not match or level not in LEVELS:
      raise ValueError(
        f"expected a measure such as {MEASURES} and a level of {LEVELS}, got "
        f"measure={measure!r}, level={level!r}"
      )
    ranks = np.array(getattr(self, level), float)
    found = (ranks > 0) & (ranks <= int(match[2]))
    return found / np.maximum(ranks, 1) if match[1] == "MRR" else found * 1.0

  def means(self, level: str = "sentence") -> dict[str, float]:
    """Returns the means of `MEASURES` over the questions; NaN without any."""
    if not self.sentence:
      return dict.fromkeys(MEASURES, float("nan"))
    return {name: float(self.values(name, level).mean()) for name in MEASURES}


def evaluate(
  query_vectors: Float[np.ndarray, "question dim"],
  sentence_vectors: Float[np.ndarray, "sentence dim"],
  tokens: clients_lib.Tokens,
  split: str,
) -> Scores:
  """Ranks one client's sentences by inner products with its questions.

  Products are summed in double precision and rounded to single: equal vectors
  have equal scores, whatever the library that multiplies does with blocks.

  Args:
    query_vectors: of the questions of the split, in order.
    sentence_vectors: of all sentences, in order.
    tokens: the client, of which passages and answers are read.
    split: whose questions.

  Returns:
    The ranks.

  Raises:
    ValueError: if there are other numbers of vectors, or one is not finite.
  """
  queries = np.asarray(query_vectors)
  sentences = np.asarray(sentence_vectors)
  expected = (len(tokens.answers[split]), len(tokens.sentences))
  finite = np.isfinite(queries).all() and np.isfinite(sentences).all()
  if (len(queries), len(sentences)) != expected or not finite:
    raise ValueError(
      f"client {tokens.name!r}: expected finite vectors of {expected[0]} "
      f"{split} questions and {expected[1]} sentences, got {len(queries)} and "
      f"{len(sentences)}, finite={finite}"
    )
  blocks = _products(queries, sentences)
  return _scores(tokens, tokens.answers[split], blocks)


def evaluate_bm25(client: clients_lib.Client, split: str) -> Scores:
  """Ranks one client's sentences by BM25, with the client's own statistics.

  A sentence that shares no word with the question is not found.

  Args:
    client: whose texts.
    split: whose questions.

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
  return _scores(client, questions.answers, blocks)


def _products(queries: np.ndarray, sentences: np.ndarray) -> Blocks:
  """Yields inner products, some questions with all sentences."""
  rows = max(1, _BLOCK // len(sentences))
  columns = max(1, _CHUNK // sentences.shape[1])
  for start in range(0, len(queries), rows):
    block = queries[start : start + rows].astype(np.float64)
    products = np.empty((len(block), len(sentences)), np.float32)
    for place in range(0, len(sentences), columns):
      part = sentences[place : place + columns].astype(np.float64)
      products[:, place : place + columns] = block @ part.T
    yield products


def _scores(
  passages: clients_lib.Client | clients_lib.Tokens,
  answers: clients_lib.Answers,
  blocks: Blocks,
) -> Scores:
  """Ranks sentences and passages, block after block."""
  numbers = passages.passages
  starts = np.flatnonzero(np.diff(numbers, prepend=-1))
  sentence_ranks, passage_ranks, start = [], [], 0
  for block in blocks:
    right = [np.array(each) for each in answers[start : start + len(block)]]
    start += len(block)
    sentence_ranks += _first_ranks(block, right)
    best = np.maximum.reduceat(block, starts, axis=1)
    passage_ranks += _first_ranks(best, [numbers[each] for each in right])
  return Scores(
    client=passages.name, sentence=sentence_ranks, passage=passage_ranks
  )


def _first_ranks(
  scores: Float[np.ndarray, "question item"], right: Sequence[np.ndarray]
) -> list[int]:
  """Returns the rank of the right item that stands first, or 0.

  Items without a score (-inf) are not found.
  """
  ranks = [0] * len(scores)
  for question, (row, places) in enumerate(zip(scores, right, strict=True)):
    best = row[places].max()
    if best > -np.inf:
      first = places[row[places] == best].min()
      before = np.count_nonzero(row > best)
      ties = np.count_nonzero(row[:first] == best)
      ranks[question] = int(1 + before + ties)
  return ranks
