"""Finds given n-grams of words in a stream of texts: hashed, then verified."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool, Int, UInt64

from synthq_jax.generation import text_measures

__all__ = ["Ngrams", "Vocabulary", "batches"]

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

  @property
  def size(self) -> int:
    """The largest id + 1."""
    return len(self._ids) + 1

  def __iter__(self) -> Iterator[str]:
    return iter(self._ids)

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


def batches(
  vocabulary: Vocabulary, texts: Iterable[str], size: int
) -> Iterator[tuple[Int[np.ndarray, " word"], int]]:
  """Yields the words of texts in pieces of about `size` words.

  Args:
    vocabulary: of the items.
    texts: read once. None is divided, so that a piece may be as long as the
      longest text.
    size: words after which a piece ends.

  Yields:
    Ids, with a 0 behind each text, and the number of texts.
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
    """Gathers equal n-grams.

    Args:
      words: ids of the items' words, above 0.
      starts: where each n-gram stands.
      lengths: how many words each has.
      vocabulary_size: the largest id + 1.
      seed: of the hashes.

    Returns:
      The different ones, in the order of their hashes, and for each that was
      given its row among them.
    """
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
    """Returns where which n-grams stand in a piece of text.

    Args:
      text: ids, 0 where a word is unknown or a text ends.
      marks: of the same n-grams; what wasn't wanted there may be found or not.

    Returns:
      Positions, and rows of the n-grams that begin there.
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
