"""Which of given items stand in a stream of texts, whole or in n-grams.

One pass, in memory that does not grow with the stream. N-grams of words are
hashed, and every hit is verified word by word. Parts of a corpus may be searched
by different machines; `merge` joins what they found.

Formal guarantee:
  None. Where items are private, so is what is found of them.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from synthq_jax.generation import text_measures

__all__ = [
  "Found",
  "Ngrams",
  "Probe",
  "Vocabulary",
  "merge",
  "prepare",
  "scan",
]

_PIECE = 1 << 17
"""Words of the corpus in memory."""


_UNKNOWN = 0
"""The id of words that no item has; it also stands between texts."""
_FILTER_BITS = (12, 27)  # at least, at most: 4 KiB to 128 MiB
_HASH_BITS = 64

Marks = dict[int, Bool[np.ndarray, " bucket"]]
"""For each length of n-grams, which first bits some hash has."""


class Vocabulary:
  """Ids of the words of the items, from 1; all other words are 0."""

  def __init__(self):
    self._ids: dict[str, int] = {}

  def __iter__(self) -> Iterator[str]:
    return iter(self._ids)

  def __len__(self) -> int:
    return len(self._ids)

  def add(self, text: str) -> Int[np.ndarray, " word"]:
    """Returns the ids of an item's words; new words get new ids."""
    known = self._ids
    ids = [
      known.setdefault(w, len(known) + 1) for w in text_measures.words(text)
    ]
    return np.array(ids, np.int32)

  def read(self, text: str) -> Iterator[int]:
    """Returns the ids of a text's words."""
    words = text_measures.words(text)
    return map(self._ids.get, words, itertools.repeat(_UNKNOWN))


def _pieces(
  vocabulary: Vocabulary, texts: Iterable[str], size: int
) -> Iterator[tuple[Int[np.ndarray, " word"], int]]:
  """Yields ids of about `size` words, a 0 behind each text, and its texts.

  No text is divided, so that a piece may be as long as the longest text.
  """
  ids: list[int] = []
  number = 0
  for text in texts:
    ids.extend(vocabulary.read(text))
    ids.append(_UNKNOWN)
    number += 1
    if len(ids) >= size:
      yield np.array(ids, np.int32), number
      ids, number = [], 0
  if number:
    yield np.array(ids, np.int32), number


@dataclasses.dataclass(frozen=True, eq=False)
class Ngrams:
  """Different n-grams of several lengths, in the order of their hashes."""

  words: Int[np.ndarray, " word"]
  """The items' words, one behind the other."""
  starts: Int[np.ndarray, " ngram"]
  """Where each n-gram stands in `words`."""
  lengths: Int[np.ndarray, " ngram"]
  """How many words each has."""
  hashes: UInt64[np.ndarray, " ngram"]
  """Ascending and all different."""
  values: UInt64[np.ndarray, " id"]
  """A random number for each word, behind the hashes."""
  factors: UInt64[np.ndarray, " length"]
  """A random odd number for each place in an n-gram."""

  @classmethod
  def make(
    cls,
    words: Int[np.ndarray, " word"],
    starts: Int[np.ndarray, " occurrence"],
    lengths: Int[np.ndarray, " occurrence"],
    vocabulary_size: int,
    *,
    seed: int = 0,
  ) -> tuple["Ngrams", Int[np.ndarray, " occurrence"]]:
    """Gathers equal n-grams; returns them, and the row of each given one."""
    rng = np.random.default_rng(seed)
    values = _random(rng, vocabulary_size)
    # Odd, so that no bit of a word's number is lost.
    factors = _random(rng, int(lengths.max(initial=1))) | np.uint64(1)
    hashes = np.zeros(len(starts), np.uint64)
    for length, row in enumerate(_rolling(values[words], factors), 1):
      chosen = lengths == length
      hashes[chosen] = row[starts[chosen]]
    hashes, first, row_of = np.unique(
      hashes, return_index=True, return_inverse=True
    )
    made = cls(words, starts[first], lengths[first], hashes, values, factors)
    if not made._are_at(words, starts, lengths, row_of).all():
      # Two have one hash: with 20 million of them, once in 10^5 times.
      return cls.make(words, starts, lengths, vocabulary_size, seed=seed + 1)
    return made, row_of

  def marks(self, wanted: Bool[np.ndarray, " ngram"]) -> Marks:
    """Marks the first bits of wanted hashes: most of a corpus stops there."""
    return {
      int(length): _marked(self.hashes[wanted & (self.lengths == length)])
      for length in np.unique(self.lengths[wanted])
    }

  def find(
    self, text: Int[np.ndarray, " word"], marks: Marks
  ) -> tuple[Int[np.ndarray, " hit"], Int[np.ndarray, " hit"]]:
    """Returns positions in a piece of text, and rows of n-grams that begin there.

    What was not wanted when the marks were made may be found or not.
    """
    positions, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    hashes_by_length = _rolling(self.values[text], self.factors)
    for length, hashes in enumerate(hashes_by_length, 1):
      if length not in marks:
        continue
      at = np.flatnonzero(marks[length][_buckets(hashes, marks[length])])
      row = np.searchsorted(self.hashes, hashes[at])
      row = np.minimum(row, len(self.hashes) - 1)
      same = self.hashes[row] == hashes[at]
      at, row = at[same], row[same]
      same = self._are_at(text, at, np.full(len(at), length), row)
      positions.append(at[same])
      rows.append(row[same])
    return np.concatenate(positions), np.concatenate(rows)

  def _are_at(self, text, at, lengths, rows) -> Bool[np.ndarray, " hit"]:
    """Compares word by word: a hash alone proves nothing."""
    same = self.lengths[rows] == lengths
    for place in range(int(lengths.max(initial=0))):
      inside = np.flatnonzero(same & (place < lengths))
      own = self.words[self.starts[rows[inside]] + place]
      same[inside] = text[at[inside] + place] == own
    return same


class Found(NamedTuple):
  """What a part of the corpus holds; parts are joined by `merge`."""

  ngrams: Bool[np.ndarray, " ngram"]
  items: Bool[np.ndarray, " item"]
  num_texts: int
  num_words: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
  """Different items, ready to be looked for. Private where the items are."""

  vocabulary: Vocabulary
  """Of the items."""
  ngrams: Ngrams
  """Their different n-grams."""
  starts: Int[np.ndarray, " item"]
  """Where each item begins in `ngrams.words`."""
  lengths: Int[np.ndarray, " item"]
  """How many words it has."""
  counts: Int[np.ndarray, " item"]
  """How many n-grams it has."""
  rows: Int[np.ndarray, " occurrence"]
  """The n-grams of all items, one item behind the other."""
  digest: str
  """Of items and n: what was found belongs to one probe."""

  def shares(
    self, ngrams: Bool[np.ndarray, " ngram"]
  ) -> Float[np.ndarray, " item"]:
    """Returns the share of each item's n-grams that are marked."""
    owners = np.repeat(np.arange(len(self.counts)), self.counts)
    found = np.bincount(
      owners, weights=ngrams[self.rows], minlength=len(self.counts)
    )
    return found / np.maximum(self.counts, 1)


def prepare(
  texts: Iterable[str], ngram: int
) -> tuple[Probe, Int[np.ndarray, " text"]]:
  """Lays out the n-grams of items.

  The same texts give the same probe on every machine.

  Args:
    texts: the items; those with the same words become one.
    ngram: words of an n-gram, at least 1. A shorter item is one n-gram of its
      own length.

  Returns:
    What `scan` looks for, and for each text its row among the different items.
  """
  vocabulary = Vocabulary()
  row_of: dict[bytes, int] = {}
  found = [
    row_of.setdefault(vocabulary.add(text).tobytes(), len(row_of))
    for text in texts
  ]
  words = np.frombuffer(b"".join(row_of), np.int32)
  lengths = np.array([len(one) // words.itemsize for one in row_of], np.int64)
  starts = np.cumsum(lengths) - lengths
  sizes = np.minimum(lengths, ngram)
  counts = np.where(sizes > 0, lengths - sizes + 1, 0)
  before = np.cumsum(counts) - counts
  ngrams, rows = Ngrams.make(
    words,
    np.repeat(starts - before, counts) + np.arange(counts.sum()),
    np.repeat(sizes, counts),
    len(vocabulary) + 1,
  )
  digest = hashlib.sha256(f"{ngram} {' '.join(vocabulary)} ".encode())
  digest.update(lengths.tobytes() + words.tobytes())
  probe = Probe(
    vocabulary=vocabulary,
    ngrams=ngrams,
    starts=starts,
    lengths=lengths,
    counts=counts,
    rows=rows,
    digest=digest.hexdigest()[:16],
  )
  return probe, np.array(found, np.int64)


def scan(
  probe: Probe,
  corpus: Iterable[str],
  *,
  progress: Callable[[int], object] | None = None,
) -> Found:
  """Marks what a corpus, or a part of it, holds.

  Hashes only choose what is compared: every hit is verified word by word.

  Args:
    probe: from `prepare`.
    corpus: texts, read once.
    progress: called with the number of texts after each piece.

  Returns:
    Marks of n-grams and of items.
  """
  ngrams = np.zeros(len(probe.ngrams.hashes), bool)
  long = _LongItems(probe)
  marks = probe.ngrams.marks(~ngrams)
  num_texts = num_words = 0
  pieces = _pieces(probe.vocabulary, corpus, _PIECE)
  for number, (text, texts) in enumerate(pieces, 1):
    at, rows = probe.ngrams.find(text, marks)
    ngrams[rows] = True
    long.look(text, at, rows)
    num_texts += texts
    num_words += len(text) - texts
    if number & (number - 1) == 0:  # less and less often
      marks = probe.ngrams.marks(~ngrams | long.is_anchor)
    if progress is not None:
      progress(texts)
  # A short item is its only n-gram.
  items = long.found | ((probe.counts == 1) & (probe.shares(ngrams) == 1))
  return Found(ngrams, items, num_texts, num_words)


class _LongItems:
  """Items of more than one n-gram: compared where their rarest one stands."""

  def __init__(self, probe: Probe):
    self._probe = probe
    self.found = np.zeros(len(probe.counts), bool)
    self.is_anchor = np.zeros(len(probe.ngrams.hashes), bool)
    self._missing: dict[int, list[tuple[int, int]]] = {}
    frequency = np.bincount(probe.rows, minlength=len(probe.ngrams.hashes))
    ends = np.cumsum(probe.counts)
    for item in np.flatnonzero(probe.counts > 1).tolist():
      rows = probe.rows[ends[item] - probe.counts[item] : ends[item]]
      place = int(np.argmin(frequency[rows]))
      anchor = int(rows[place])
      self._missing.setdefault(anchor, []).append((item, place))
      self.is_anchor[anchor] = True

  def look(self, text, at, rows) -> None:
    """Compares whole items with the text around each anchor."""
    chosen = np.flatnonzero(self.is_anchor[rows])
    hits = zip(at[chosen].tolist(), rows[chosen].tolist(), strict=True)
    for position, anchor in hits:
      missing = []
      for item, place in self._missing[anchor]:
        if self._is_at(text, position - place, item):
          self.found[item] = True
        else:
          missing.append((item, place))
      self._missing[anchor] = missing
      self.is_anchor[anchor] = bool(missing)

  def _is_at(self, text, start: int, item: int) -> bool:
    length, own = self._probe.lengths[item], self._probe.starts[item]
    if start < 0:
      return False
    words = self._probe.ngrams.words[own : own + length]
    return np.array_equal(text[start : start + length], words)


def merge(parts: Iterable[Found]) -> Found:
  """Joins what different parts of a corpus hold.

  Args:
    parts: of one probe, at least one; each part of the corpus once.

  Returns:
    What one pass over all of them would have found.
  """
  parts = iter(parts)
  first = next(parts)
  ngrams, items = first.ngrams.copy(), first.items.copy()
  num_texts, num_words = first.num_texts, first.num_words
  for one in parts:  # one at a time: there may be a thousand
    ngrams |= one.ngrams
    items |= one.items
    num_texts += one.num_texts
    num_words += one.num_words
  return Found(ngrams, items, num_texts, num_words)


def _marked(
  hashes: UInt64[np.ndarray, " ngram"],
) -> Bool[np.ndarray, " bucket"]:
  low, high = _FILTER_BITS
  bits = min(max((16 * len(hashes)).bit_length(), low), high)
  marks = np.zeros(1 << bits, bool)
  marks[_buckets(hashes, marks)] = True
  return marks


def _buckets(
  hashes: UInt64[np.ndarray, " n"], marks: Bool[np.ndarray, " bucket"]
) -> Int[np.ndarray, " n"]:
  """Returns the first bits of hashes; signed, which indexes twice as fast."""
  bits = len(marks).bit_length() - 1
  return (hashes >> np.uint64(_HASH_BITS - bits)).view(np.int64)


def _random(rng: np.random.Generator, number: int) -> UInt64[np.ndarray, " n"]:
  top = np.iinfo(np.uint64).max
  return rng.integers(0, top, number, np.uint64, endpoint=True)


def _rolling(
  values: UInt64[np.ndarray, " word"], factors: UInt64[np.ndarray, " length"]
) -> Iterator[UInt64[np.ndarray, " position"]]:
  """Yields the hashes of all 1-grams, then of all 2-grams, and so on.

  Each is the sum, modulo 2^64, of the words' numbers times their places'.
  """
  total = np.zeros(len(values), np.uint64)
  for place, factor in enumerate(factors):
    number = max(len(values) - place, 0)
    total = total[:number] + values[place : place + number] * factor
    yield total
