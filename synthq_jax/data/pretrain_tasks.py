"""Tasks of the public pre-training, made from passages of sentences.

Each turns a passage into an input and a target of token ids:

* `copy`: some consecutive tokens of the input, which teaches to read it;
* `fill`: T5's span corruption (Raffel et al. 2020, section 3.1.4);
* `keywords`: the words that set the passage apart, in their order;
* `query`: the sentence that shares most with the rest, taken out of the input
  (the gap sentence of Zhang et al. 2020, PEGASUS, section 3.1). It carries the
  prefix that private fine-tuning uses, and is the nearest that public text
  comes to a query.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from synthq_jax.data import docstrings
from synthq_jax.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
  import seqio

__all__ = ["Examples", "Tokenized", "make", "tokenize_passages"]

PREFIXES = {
    "copy": "copy: ",
    "fill": "fill: ",
    "keywords": "keywords: ",
    "query": "generate_query: ",
}
_NOISE_DENSITY = 0.15
_MEAN_SPAN = 3
_NUM_KEYWORDS = 5


@dataclasses.dataclass(frozen=True)
class Tokenized:
  """Passages as ids, with what the tasks need to choose words."""

  passages: list[list[list[int]]]
  """Per passage and sentence: token ids."""
  words: list[list[list[str]]]
  """Per passage and sentence: words."""
  statement: list[list[bool]]
  """Per passage and sentence: whether it ends like a statement."""
  word_ids: dict[str, list[int]]
  """Token ids of each word on its own."""
  idf: dict[str, float]
  """Inverse passage frequency of each word."""
  prefixes: dict[str, list[int]]
  """Token ids of each task's prefix."""
  sentinels: list[int]
  """Ids that stand for the gaps of span corruption."""


@dataclasses.dataclass(frozen=True)
class Examples:
  """Fixed-shape examples of one task."""

  inputs: np.ndarray  # int32 [example, input_length]
  targets: np.ndarray  # int32 [example, target_length]


def tokenize_passages(
    vocabulary: "seqio.SentencePieceVocabulary",
    passages: Sequence[Sequence[str]],
) -> Tokenized:
  """Tokenizes passages once, for all tasks and lengths."""
  words = [[docstrings.words(s) for s in passage] for passage in passages]
  frequency: collections.Counter = collections.Counter()
  for passage in words:
    frequency.update({word for sentence in passage for word in sentence})
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  return Tokenized(
      passages=[[list(vocabulary.encode(s)) for s in p] for p in passages],
      words=words,
      statement=[[s.endswith(".") for s in p] for p in passages],
      word_ids={word: list(vocabulary.encode(word)) for word in frequency},
      idf={w: math.log(len(words) / n) for w, n in frequency.items()},
      prefixes={k: list(vocabulary.encode(p)) for k, p in PREFIXES.items()},
      sentinels=list(range(vocabulary.vocab_size - 1, first_extra - 1, -1)),
  )


def make(
    data: Tokenized,
    task: str,
    *,
    input_length: int,
    target_length: int,
    seed: int,
) -> Examples:
  """Makes one example of a task from every passage that has one.

  Args:
    data: from `tokenize_passages`.
    task: a key of `PREFIXES`.
    input_length: columns of the input, prefix and EOS included.
    target_length: columns of the target, EOS included.
    seed: decides which windows and gaps are drawn.

  Returns:
    The examples, in the order of the passages.
  """
  rng = np.random.default_rng([seed, sorted(PREFIXES).index(task)])
  head = data.prefixes[task]
  room = input_length - len(head) - 1
  inputs, targets = [], []
  for index in range(len(data.passages)):
    made = _TASKS[task](data, index, room, target_length - 1, rng)
    if made is not None:
      body, target = made
      inputs.append(head + body[:room] + [vocabulary_lib.EOS_ID])
      targets.append(target[: target_length - 1] + [vocabulary_lib.EOS_ID])
  return Examples(
      vocabulary_lib.pad(inputs, input_length),
      vocabulary_lib.pad(targets, target_length),
  )


def _flat(sentences: Sequence[list[int]]) -> list[int]:
  return [token for sentence in sentences for token in sentence]


def _window(ids: list[int], room: int, rng) -> list[int]:
  """Returns `room` consecutive ids from a random place."""
  start = rng.integers(0, max(1, len(ids) - room + 1))
  return ids[start : start + room]


def _copy(data: Tokenized, index: int, room: int, length: int, rng):
  body = _window(_flat(data.passages[index]), room, rng)
  if len(body) < 8:
    return None
  start = rng.integers(0, max(1, len(body) - length + 1))
  return body, body[start : start + length]


def _fill(data: Tokenized, index: int, room: int, length: int, rng):
  ids = _window(_flat(data.passages[index]), room, rng)
  if len(ids) < 12:
    return None
  spans = max(1, round(len(ids) * _NOISE_DENSITY / _MEAN_SPAN))
  spans = min(spans, length // (_MEAN_SPAN + 1), len(data.sentinels))
  stride = len(ids) // spans
  body, target, position = [], [], 0
  for span in range(spans):
    start = span * stride + rng.integers(0, max(1, stride - _MEAN_SPAN))
    body += ids[position:start] + [data.sentinels[span]]
    position = start + _MEAN_SPAN
    target += [data.sentinels[span]] + ids[start:position]
  return body + ids[position:], target


def _keywords(data: Tokenized, index: int, room: int, length: int, rng):
  del rng
  body = _flat(data.passages[index])[:room]
  words = [word for sentence in data.words[index] for word in sentence]
  words = words[: max(8, int(len(body) / 1.5))]  # those that fit the input
  counts = collections.Counter(w for w in words if len(w) > 2)
  if len(counts) < _NUM_KEYWORDS:
    return None
  salient = sorted(counts, key=lambda w: -counts[w] * data.idf[w])
  chosen = sorted(salient[:_NUM_KEYWORDS], key=words.index)
  return body, _flat([data.word_ids[word] for word in chosen])[:length]


def _query(data: Tokenized, index: int, room: int, length: int, rng):
  """Picks the sentence that shares most of its weight with the rest.

  Half of the time it stays in the input, as in PEGASUS' own variant: writing
  a query is partly copying.
  """
  passage, words = data.passages[index], data.words[index]
  best, best_share = None, 0.3
  for position, sentence in enumerate(words):
    if not (4 <= len(sentence) <= 20 and len(passage[position]) <= length):
      continue
    if not data.statement[index][position]:
      continue
    others = passage[:position] + passage[position + 1 :]
    if sum(map(len, others)) < 12:
      continue
    rest = {w for i, s in enumerate(words) if i != position for w in s}
    weights = {w: data.idf[w] for w in sentence}
    share = sum(v for w, v in weights.items() if w in rest)
    share /= sum(weights.values()) + 1e-9
    if share > best_share:
      best, best_share = position, share
  if best is None:
    return None
  kept = passage[:best] + passage[best + rng.integers(0, 2) :]
  return _flat(kept)[:room], passage[best]


_TASKS = {"copy": _copy, "fill": _fill, "keywords": _keywords, "query": _query}
