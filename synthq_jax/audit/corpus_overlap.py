"""Measures the overlap of private queries and documents with a public corpus.

A model that was pre-trained on a query needs no private data to repeat it, and
a test query that the pre-training saw is no fair test. So the papers search the
pre-training corpus for random samples of both. Words are compared in lower
case and without punctuation (`text_measures.words`), and no n-gram spans two
texts. Memory does not grow with the corpus.

Formal guarantee:
  None. Every figure that is computed from private queries here is private: no
  noise is added. The corpus is public and is read from its files, so no query
  leaves the machine.
"""

import collections
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax import checks
from synthq_jax.generation import text_measures

__all__ = ["Config", "KindOverlap", "Overlap", "Spread", "measure"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the search."""

  sample_size: int = 10_000
  """Items of each kind in one run, or all items if there are fewer."""
  runs: int = 5
  """Number of independent samples."""
  ngram: int = 8
  """Words of an n-gram."""
  seed: int = 0
  """Seed of the samples."""

  def __post_init__(self):
    checks.at_least(
      1, sample_size=self.sample_size, runs=self.runs, ngram=self.ngram
    )
    checks.at_least(0, seed=self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
  """Mean and spread of a share over the runs."""

  mean: float
  """Mean share, in [0, 1]."""
  deviation: float
  """Standard deviation over the runs (n - 1); 0 for one run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindOverlap:
  """Overlap of one kind of items with the corpus."""

  num_items: int
  """Items of the kind, sampled or not."""
  sample_size: int
  """Items of one run; if it is all of them, runs do not differ."""
  exact: Spread
  """Share of items whose words stand one after another in a text of the corpus."""
  contained: Spread
  """Mean over items of the share of their n-grams that the corpus holds."""
  half: Spread
  """Share of items with at least half of their n-grams in the corpus."""
  full: Spread
  """Share of items with all n-grams in the corpus, perhaps in several texts."""
  short: Spread
  """Share of items shorter than an n-gram; each counts as one n-gram of its own
  length. Every corpus holds a common word, so a large value here explains large
  values of the other shares."""
  empty: Spread
  """Share of items without any word; the corpus counts as not holding them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """The result of a search; private."""

  config: Config
  """Settings of the search."""
  num_texts: int
  """Texts of the corpus."""
  num_words: int
  """Words of the corpus."""
  kinds: dict[str, KindOverlap]
  """Overlap of each kind of items."""


def measure(
  config: Config,
  items: Mapping[str, Sequence[str]],
  corpus: Iterable[str],
  *,
  progress: Callable[[], object] = lambda: None,
) -> Overlap:
  """Searches a corpus once for samples of items.

  Args:
    config: settings of the search.
    items: items by kind, for example {"queries": ..., "documents": ...}; only
      sampled items are read.
    corpus: texts, read once.
    progress: function called after each text.

  Returns:
    Shares with their spread over the runs: the same for the same settings, items
    and texts, on every machine. Private if an item is.

  Raises:
    ValueError: if there is no kind, or a kind without items.

  >>> items = {"queries": ["Red apples!", "red apples rot", "blue"]}
  >>> overlap = measure(Config(ngram=2), items, ["All red apples.", "Rot."])
  >>> overlap.kinds["queries"].contained.mean  # all, half, nothing
  0.5
  """
  if not items or not all(map(len, items.values())):
    sizes = {kind: len(texts) for kind, texts in items.items()}
    raise ValueError(
      f"corpus_overlap expects items of each kind, got {sizes or 'no kind'}"
    )
  samples = {
    kind: _draw_positions(config, kind, len(texts))
    for kind, texts in items.items()
  }
  drawn = {
    kind: [text_measures.words(items[kind][i]) for i in np.unique(sample)]
    for kind, sample in samples.items()
  }
  rows = [words for kind in drawn.values() for words in kind]
  search = _Search(rows, config.ngram)
  num_texts = num_words = 0
  for text in corpus:
    num_words += search.read(text_measures.words(text))
    num_texts += 1
    progress()
  lengths, shares = np.array([len(words) for words in rows]), search.shares()
  values = {
    "exact": search.is_whole,
    "contained": shares,
    "half": shares >= 0.5,
    "full": shares == 1,
    "short": (lengths > 0) & (lengths < config.ngram),
    "empty": lengths == 0,
  }
  kinds, start = {}, 0
  for kind, sample in samples.items():
    positions = start + np.searchsorted(np.unique(sample), sample)
    start += len(drawn[kind])
    kinds[kind] = KindOverlap(
      num_items=len(items[kind]),
      sample_size=sample.shape[1],
      **{
        name: _compute_spread(value[positions])
        for name, value in values.items()
      },
    )
  return Overlap(
    config=config, num_texts=num_texts, num_words=num_words, kinds=kinds
  )


class _Search:
  """The n-grams of items, and the n-grams found in the texts so far."""

  def __init__(self, rows: Sequence[Sequence[str]], ngram: int):
    self.is_whole = np.zeros(len(rows), bool)
    self._rows, self._seen = rows, set()
    self._ngrams = [_cut_ngrams(row, ngram) for row in rows]
    self._searched = {sequence for row in self._ngrams for sequence in row}
    # Most words of a corpus begin no n-gram of an item.
    self._sizes = collections.defaultdict(set)
    self._begins = collections.defaultdict(list)
    for item, (row, ngrams) in enumerate(zip(rows, self._ngrams, strict=True)):
      for word in row[: len(ngrams)]:
        self._sizes[word].add(min(ngram, len(row)))
      if ngrams:
        self._begins[ngrams[0]].append(item)

  def read(self, words: Sequence[str]) -> int:
    """Searches one text for the n-grams; returns its number of words."""
    for position, word in enumerate(words):
      for size in self._sizes.get(word, ()):
        ngram = " ".join(words[position : position + size])
        if ngram not in self._searched:
          continue
        self._seen.add(ngram)
        missing = []
        for item in self._begins.get(ngram, ()):
          own = self._rows[item]
          if words[position : position + len(own)] == own:
            self.is_whole[item] = True
          else:
            missing.append(item)
        if ngram in self._begins:
          self._begins[ngram] = missing
    return len(words)

  def shares(self) -> np.ndarray:
    """Returns the share of each item's n-grams found so far."""
    return np.array(
      [
        sum(ngram in self._seen for ngram in row) / max(1, len(row))
        for row in self._ngrams
      ]
    )


def _cut_ngrams(row: Sequence[str], ngram: int) -> list[str]:
  """Returns the n-grams of an item: itself if it is shorter, none if empty."""
  size = min(ngram, len(row))
  number = len(row) - size + 1 if size else 0
  return [" ".join(row[i : i + size]) for i in range(number)]


def _draw_positions(
  config: Config, kind: str, total: int
) -> Int[np.ndarray, "run item"]:
  """Draws positions without replacement, independently for each run."""
  size = min(config.sample_size, total)
  return np.array(
    [
      np.random.default_rng(
        [config.seed, run, zlib.crc32(kind.encode())]
      ).permutation(total)[:size]
      for run in range(config.runs)
    ]
  )


def _compute_spread(values: np.ndarray) -> Spread:
  means = values.mean(axis=1)
  deviation = np.std(means, ddof=1) if len(means) > 1 else 0.0
  return Spread(mean=float(means.mean()), deviation=float(deviation))
