"""Tasks of the public pre-training, drawn from one cache of tokens.

A record of public text is a passage and, of most, something that was written
or asked about it: its *query*, of a kind. The tasks of an input and a target:

* `copy`: some consecutive tokens of a passage, which teaches to read it;
* `fill`: T5's span corruption (Raffel et al. 2020, section 3.1.4);
* any kind of query: the query is the target, its passage the input. `question`
  was asked by a person, `rule` made by a rule, `summary` is a docstring's
  first paragraph, `heading` stands above the passage; `sentence` says most of
  what the passage says (the gap sentence of Zhang et al. 2020, PEGASUS,
  section 3.1) and `keywords` are the words that set it apart. All but headings
  and keywords carry the prefix of private fine-tuning.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence

import numpy as np

from synthq_jax import array_files
from synthq_jax.data import docstrings
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = [
  "KINDS",
  "PREFIXES",
  "SHORTEST_FILL",
  "Cache",
  "Record",
  "inverse_frequency",
  "make",
  "records_of",
  "telling_sentence",
  "tokenize",
]

PREFIXES = {
  "copy": "copy: ",
  "fill": "fill: ",
  "heading": "title: ",
  "keywords": "keywords: ",
  "question": "generate_query: ",
  "rule": "generate_query: ",
  "sentence": "generate_query: ",
  "summary": "generate_query: ",
}
"""What stands before the input of each task."""

KINDS = ("", "heading", "keywords", "question", "rule", "sentence", "summary")
"""Kinds of queries; a passage that has none is of the first kind."""

_PASSAGE, _QUERY = 80, 24  # tokens that are kept
_NOISE_DENSITY = 0.15
_MEAN_SPAN = 3
_NUM_KEYWORDS = 5

SHORTEST_FILL = 1 + _MEAN_SPAN + 1
"""Tokens of a target with one gap: its sentinel, what stood there, EOS."""


@dataclasses.dataclass(frozen=True)
class Record:
  """A passage, and a query about it."""

  kind: str
  """One of `KINDS`."""
  query: str
  """Empty where the kind is."""
  passage: str
  """What the query is about."""


@dataclasses.dataclass(frozen=True)
class Cache:
  """Records as ids, and the ids that the tasks add: two bytes a token."""

  passages: np.ndarray  # uint16 [record, token]
  queries: np.ndarray  # uint16 [record, token]
  kinds: np.ndarray  # uint8 [record], a position in KINDS
  prefixes: np.ndarray  # uint16 [task, token], tasks in the order of PREFIXES
  sentinels: np.ndarray  # uint16, ids that stand for gaps
  eos: int  # the id that ends a text

  def save(self, path: str | os.PathLike) -> None:
    """Writes the cache as a compressed .npz file."""
    arrays = {k: np.asarray(v) for k, v in dataclasses.asdict(self).items()}
    array_files.save_npz(path, arrays, compressed=True)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Cache":
    """Reads what `save` wrote."""
    arrays = array_files.read_npz(path)
    # Older files are of a vocabulary that `vocabulary.train` made.
    eos = int(arrays.pop("eos", vocabulary_lib.EOS_ID))
    return cls(**arrays, eos=eos)


def inverse_frequency(passages: Sequence[Sequence[str]]) -> dict[str, float]:
  """Returns log(passages / passages with the word) of each word."""
  frequency: collections.Counter = collections.Counter()
  for passage in passages:
    frequency.update({w for s in passage for w in docstrings.words(s)})
  return {w: math.log(len(passages) / n) for w, n in frequency.items()}


def records_of(passages: Sequence[Sequence[str]]) -> list[Record]:
  """Makes records of passages that nobody wrote anything about.

  Args:
    passages: each a sequence of sentences.

  Returns:
    Each passage alone, with its keywords, and with its telling sentence where
    there is one; that sentence stays in every second passage, as in PEGASUS'
    own variant: writing a query is partly copying.
  """
  idf = inverse_frequency(passages)
  found = []
  for number, passage in enumerate(passages):
    text = " ".join(passage)
    found.append(Record("", "", text))
    words = docstrings.words(text)
    counts = collections.Counter(w for w in words if len(w) > 2)
    if len(counts) >= _NUM_KEYWORDS:
      salient = sorted(counts, key=lambda w: -counts[w] * idf[w])
      chosen = sorted(salient[:_NUM_KEYWORDS], key=words.index)
      found.append(Record("keywords", " ".join(chosen), text))
    best = telling_sentence(passage, idf)
    if best is not None:
      rest = [*passage[:best], *passage[best + number % 2 :]]
      found.append(Record("sentence", passage[best], " ".join(rest)))
  return found


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


def tokenize(
  vocabulary: vocabulary_lib.SentencePiece, records: Iterable[Record]
) -> Cache:
  """Tokenizes records once, for all tasks and lengths.

  Args:
    vocabulary: of at most 65,536 ids.
    records: what to keep; a query that is longer than a cache keeps is left
      out with its record, a passage is cut.

  Returns:
    The cache, in the order of the records.
  """
  passages, queries, kinds = [], [], []
  for record in records:
    query = vocabulary.encode(record.query) if record.query else []
    if len(query) < _QUERY:
      passages.append(vocabulary.encode(record.passage)[:_PASSAGE])
      queries.append(query)
      kinds.append(KINDS.index(record.kind))
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  prefixes = [vocabulary.encode(prefix) for prefix in PREFIXES.values()]
  return Cache(
    passages=vocabulary_lib.pad(passages, _PASSAGE).astype(np.uint16),
    queries=vocabulary_lib.pad(queries, _QUERY).astype(np.uint16),
    kinds=np.array(kinds, np.uint8),
    prefixes=vocabulary_lib.pad(prefixes, max(map(len, prefixes))).astype(
      np.uint16
    ),
    sentinels=np.arange(
      vocabulary.vocab_size - 1, first_extra - 1, -1, dtype=np.uint16
    ),
    eos=vocabulary.eos_id,
  )


def rows_of(cache: Cache, task: str, target_length: int) -> np.ndarray:
  """Returns which records have an example of a task, int64."""
  if task in ("copy", "fill"):
    return np.flatnonzero(cache.passages[:, 16] > 0)
  lengths = np.count_nonzero(cache.queries, axis=1)
  fits = (lengths > 0) & (lengths < target_length)
  return np.flatnonzero(fits & (cache.kinds == KINDS.index(task)))


def make(
  cache: Cache,
  task: str,
  rows: np.ndarray,
  *,
  input_length: int,
  target_length: int,
  rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """Makes one example of a task from each of some records.

  Args:
    cache: from `tokenize`.
    task: a key of `PREFIXES`.
    rows: positions of the records, from `rows_of`.
    input_length: columns of the input, prefix and EOS included.
    target_length: columns of the target, EOS included; for "fill" at least
      `SHORTEST_FILL`, and the cache has sentinels.
    rng: draws windows and gaps.

  Returns:
    The inputs and the targets, int32, padded with 0.
  """
  prefix = cache.prefixes[list(PREFIXES).index(task)]
  head = prefix[prefix > 0].astype(np.int32)
  room = input_length - len(head) - 1
  body = cache.passages[rows].astype(np.int32)
  if task in ("copy", "fill"):
    body = _window(body, room, rng)
  if task == "copy":
    target = _window(body, target_length - 1, rng)
  elif task == "fill":
    body, target = _fill(body, target_length - 1, cache.sentinels, rng)
  else:
    target = cache.queries[rows].astype(np.int32)
  before = np.broadcast_to(head, (len(rows), len(head)))
  inputs = np.concatenate([before, _ended(body, room + 1, cache.eos)], axis=1)
  return inputs, _ended(target, target_length, cache.eos)


def _window(ids: np.ndarray, length: int, rng) -> np.ndarray:
  """Returns up to `length` ids in a row of each row, from a place drawn."""
  lengths = np.count_nonzero(ids, axis=1)
  starts = rng.integers(0, np.maximum(1, lengths - length + 1))
  places = starts[:, None] + np.arange(min(length, ids.shape[1]))
  wide = np.pad(ids, ((0, 0), (0, places.shape[1])))
  return np.take_along_axis(wide, places, axis=1)


def _ended(ids: np.ndarray, length: int, eos: int) -> np.ndarray:
  """Returns the ids with EOS behind them, cut and padded to `length`."""
  kept = ids[:, : length - 1]
  made = np.pad(kept, ((0, 0), (0, length - kept.shape[1])))
  ends = np.count_nonzero(kept, axis=1)
  made[np.arange(len(made)), ends] = eos
  return made


def _fill(ids: np.ndarray, length: int, sentinels: np.ndarray, rng):
  """Takes spans out of each row of ids; returns what is left, and the spans."""
  lengths = np.count_nonzero(ids, axis=1)
  most = max(1, min(length // (_MEAN_SPAN + 1), len(sentinels)))
  wanted = np.rint(lengths * _NOISE_DENSITY / _MEAN_SPAN).astype(int)
  spans = np.clip(wanted, 1, most)
  stride = lengths // spans
  number = np.arange(most)
  starts = number * stride[:, None] + rng.integers(
    0, np.maximum(1, stride - _MEAN_SPAN)[:, None], (len(ids), most)
  )
  inside = starts[:, :, None] + np.arange(_MEAN_SPAN)  # [row, span, token]
  is_span = (number < spans[:, None])[:, :, None]
  is_there = is_span & (inside < lengths[:, None, None])
  wide = np.pad(ids, ((0, 0), (0, 1)))  # one column for what is not there
  places = np.where(is_there, inside, ids.shape[1]).reshape(len(ids), -1)
  hidden = np.take_along_axis(wide, places, axis=1).reshape(inside.shape)
  marks = np.where(is_span, sentinels[:most, None].astype(np.int32), 0)
  left = np.concatenate([marks, np.zeros_like(hidden[:, :, 1:])], axis=2)
  np.put_along_axis(wide, places, left.reshape(places.shape), axis=1)
  target = np.concatenate([marks, hidden], axis=2).reshape(len(ids), -1)
  return _without_gaps(wide[:, :-1]), _without_gaps(target)


def _without_gaps(ids: np.ndarray) -> np.ndarray:
  """Moves the ids of each row before its zeros, in their order."""
  order = np.argsort(ids == 0, axis=1, kind="stable")
  return np.take_along_axis(ids, order, axis=1)
