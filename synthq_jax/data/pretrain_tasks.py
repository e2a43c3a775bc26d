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

import numpy as np

from synthq_jax.data import docstrings
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = [
  "PREFIXES",
  "Examples",
  "Tokenized",
  "inverse_frequency",
  "make",
  "telling_sentence",
  "tokenize_passages",
]

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

  sentences: list[list[str]]
  """Per passage: its sentences."""
  passages: list[list[list[int]]]
  """Per passage and sentence: token ids."""
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


def inverse_frequency(passages: Sequence[Sequence[str]]) -> dict[str, float]:
  """Returns log(passages / passages with the word) of each word."""
  frequency: collections.Counter = collections.Counter()
  for passage in passages:
    frequency.update({w for s in passage for w in docstrings.words(s)})
  return {w: math.log(len(passages) / n) for w, n in frequency.items()}


def tokenize_passages(
  vocabulary: vocabulary_lib.SentencePiece,
  passages: Sequence[Sequence[str]],
) -> Tokenized:
  """Tokenizes passages once, for all tasks and lengths."""
  idf = inverse_frequency(passages)
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  return Tokenized(
    sentences=[list(passage) for passage in passages],
    passages=[[list(vocabulary.encode(s)) for s in p] for p in passages],
    word_ids={word: list(vocabulary.encode(word)) for word in idf},
    idf=idf,
    prefixes={k: list(vocabulary.encode(p)) for k, p in PREFIXES.items()},
    sentinels=list(range(vocabulary.vocab_size - 1, first_extra - 1, -1)),
  )


def telling_sentence(
  sentences: Sequence[str], idf: dict[str, float], *, min_share: float = 0.3
) -> int | None:
  """Returns which sentence says most of what the others say.

  The sentence of 4 to 20 words, ending in a full stop, whose words have the
  largest share of their weight (inverse frequency) in the other sentences.

  Args:
    sentences: of one text.
    idf: weight of each word, from `inverse_frequency`.
    min_share: the share it must reach.

  Returns:
    Its position, or None if there is none.
  """
  words = [docstrings.words(sentence) for sentence in sentences]
  best, best_share = None, min_share
  for position, sentence in enumerate(words):
    fits = 4 <= len(sentence) <= 20 and sentences[position].endswith(".")
    if not fits or sum(map(len, words)) - len(sentence) < 10:
      continue
    rest = {w for i, s in enumerate(words) if i != position for w in s}
    weights = {w: idf.get(w, 0.0) for w in sentence}
    share = sum(v for w, v in weights.items() if w in rest)
    share /= sum(weights.values()) + 1e-9
    if share > best_share:
      best, best_share = position, share
  return best


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
  words = docstrings.words(" ".join(data.sentences[index]))
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
  passage = data.passages[index]
  best = telling_sentence(data.sentences[index], data.idf)
  if best is None or len(passage[best]) > length:
    return None
  kept = passage[:best] + passage[best + rng.integers(0, 2) :]
  return _flat(kept)[:room], passage[best]


_TASKS = {"copy": _copy, "fill": _fill, "keywords": _keywords, "query": _query}
