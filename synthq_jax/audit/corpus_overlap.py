"""Measures the overlap of private queries and documents with a public corpus.

A model that was pre-trained on a query needs no private data to repeat it, so the
guarantee protects little; the papers search the pre-training corpus for random
samples of both. A test query that the pre-training saw is no fair test either.
Words are compared in lower case and without punctuation
(`text_measures.words`), and no item spans two texts. Memory does not grow with
the corpus.

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

_FEW = 8
"""Words at the beginning of an item that are looked up first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the search."""

  sample_size: int = 10_000
  """Items of each kind in one run, or all items if there are fewer."""
  runs: int = 5
  """Number of independent samples."""
  seed: int = 0
  """Seed of the samples."""

  def __post_init__(self):
    checks.at_least(1, sample_size=self.sample_size, runs=self.runs)
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
  short: Spread
  """Share of items of fewer than eight words, or none. Every corpus holds a
  common word, so a large value here explains a large one of `exact`."""


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

  >>> items = {"queries": ["Red apples!", "red apples rot"]}
  >>> overlap = measure(Config(), items, ["All red apples.", "Rot."])
  >>> overlap.kinds["queries"].exact.mean
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
  search = _Search(rows)
  num_texts = num_words = 0
  for text in corpus:
    num_words += search.read(text_measures.words(text))
    num_texts += 1
    progress()
  lengths = np.array([len(words) for words in rows])
  values = {"exact": search.is_whole, "short": lengths < _FEW}
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
  """Items, and whether a text so far holds them."""

  def __init__(self, rows: Sequence[Sequence[str]]):
    self.is_whole = np.zeros(len(rows), bool)
    self._rows = rows
    # Most words of a corpus begin no item.
    self._sizes = collections.defaultdict(set)
    self._begins = collections.defaultdict(list)
    for item, row in enumerate(rows):
      if row:
        self._sizes[row[0]].add(min(_FEW, len(row)))
        self._begins[" ".join(row[:_FEW])].append(item)

  def read(self, words: Sequence[str]) -> int:
    """Searches one text for the items; returns its number of words."""
    for position, word in enumerate(words):
      for size in self._sizes.get(word, ()):
        beginning = " ".join(words[position : position + size])
        missing = []
        for item in self._begins.get(beginning, ()):
          own = self._rows[item]
          if words[position : position + len(own)] == own:
            self.is_whole[item] = True
          else:
            missing.append(item)
        if beginning in self._begins:
          self._begins[beginning] = missing
    return len(words)


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
