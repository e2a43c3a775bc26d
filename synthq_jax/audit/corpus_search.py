"""Which of given items stand in a stream of texts, whole or in n-grams.

One pass, in memory that does not grow with the stream. Parts of a corpus may
be searched by different machines; `merge` joins what they found.

Formal guarantee:
  None. Where items are private, so is what is found of them.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax.audit import _word_ngrams

__all__ = ["Found", "Probe", "merge", "prepare", "scan"]

_PIECE = 1 << 17
"""Words of the corpus in memory."""


class Found(NamedTuple):
  """What a part of the corpus holds; parts are joined by `merge`."""

  ngrams: Bool[np.ndarray, " ngram"]
  items: Bool[np.ndarray, " item"]
  num_texts: int
  num_words: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
  """Different items, ready to be looked for. Private where the items are."""

  vocabulary: _word_ngrams.Vocabulary
  """Of the items."""
  ngrams: _word_ngrams.Ngrams
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
  vocabulary = _word_ngrams.Vocabulary()
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
  ngrams, rows = _word_ngrams.Ngrams.make(
    words,
    np.repeat(starts - before, counts) + np.arange(counts.sum()),
    np.repeat(sizes, counts),
    vocabulary.size,
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
  pieces = _word_ngrams.batches(probe.vocabulary, corpus, _PIECE)
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
