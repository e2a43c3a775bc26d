"""How much of private queries and documents stands in a public corpus.

A model that was pre-trained on a query needs no private data to repeat it, and
a test query that the pre-training saw is no fair test. So the papers look for
random samples of both in the pre-training corpus. Words are compared in lower
case and without punctuation (`text_measures.words`), and an n-gram never
reaches over the border of a text. Memory does not grow with the corpus.

Formal guarantee:
  None. Whatever is computed from private queries here is a function of them without
  noise: private. The corpus is public, and read where it lies: no query leaves
  the machine.
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
  """What is looked for."""

  sample_size: int = 10_000
  """Items of each kind in one run; all of them where there are fewer."""
  runs: int = 5
  """Independent samples."""
  ngram: int = 8
  """Words of an n-gram."""
  seed: int = 0
  """Of the samples."""

  def __post_init__(self):
    checks.at_least(
      1, sample_size=self.sample_size, runs=self.runs, ngram=self.ngram
    )
    checks.at_least(0, seed=self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
  """A share over the runs."""

  mean: float
  """In [0, 1]."""
  deviation: float
  """Standard deviation of the runs (n - 1); 0 for one run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindOverlap:
  """What was found of one kind of items."""

  num_items: int
  """All of the kind."""
  sample_size: int
  """Items of one run; where it is all of them, runs do not differ."""
  exact: Spread
  """Items whose whole sequence of words stands in one text of the corpus."""
  contained: Spread
  """Mean over items of the share of their n-grams that the corpus holds."""
  half: Spread
  """Items of whose n-grams at least half were found."""
  full: Spread
  """Items of whose n-grams all were found, perhaps in different texts."""
  short: Spread
  """Items shorter than an n-gram, which count as one n-gram of their length:
  one common word is found in any corpus, so read the others beside it."""
  empty: Spread
  """Items without any word; they count as not found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """The result of a search; private."""

  config: Config
  """What was looked for."""
  num_texts: int
  """Texts of the corpus."""
  num_words: int
  """Words of the corpus."""
  kinds: dict[str, KindOverlap]
  """By kind of items."""


def measure(
  config: Config,
  items: Mapping[str, Sequence[str]],
  corpus: Iterable[str],
  *,
  progress: Callable[[], object] = lambda: None,
) -> Overlap:
  """Searches a corpus once for samples of items.

  Args:
    config: what is looked for.
    items: by kind, for example {"queries": ..., "documents": ...}; only items
      that are drawn are read.
    corpus: texts, read once.
    progress: called after each text.

  Returns:
    Shares with their spread over the runs: the same for the same settings, items
    and texts, on every machine. Private if an item is.

  Raises:
    ValueError: if there is no kind, or one without items.

  >>> items = {"queries": ["Red apples!", "red apples rot", "blue"]}
  >>> found = measure(Config(ngram=2), items, ["All red apples.", "Rot."])
  >>> found.kinds["queries"].contained.mean  # all, half, nothing
  0.5
  """
  if not items or not all(map(len, items.values())):
    sizes = {kind: len(texts) for kind, texts in items.items()}
    raise ValueError(
      f"corpus_overlap expects items of each kind, got {sizes or 'no kind'}"
    )
  samples = {
    kind: _draw(config, kind, len(texts)) for kind, texts in items.items()
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
  lengths, shares = np.array([len(one) for one in rows]), search.shares()
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
    at = start + np.searchsorted(np.unique(sample), sample)
    start += len(drawn[kind])
    kinds[kind] = KindOverlap(
      num_items=len(items[kind]),
      sample_size=sample.shape[1],
      **{name: _spread(value[at]) for name, value in values.items()},
    )
  return Overlap(
    config=config, num_texts=num_texts, num_words=num_words, kinds=kinds
  )


class _Search:
  """The n-grams of items, and which of them stood in the texts so far."""

  def __init__(self, rows: Sequence[Sequence[str]], ngram: int):
    self.is_whole = np.zeros(len(rows), bool)
    self._rows, self._seen = rows, set()
    self._ngrams = [_cut(row, ngram) for row in rows]
    self._wanted = {one for row in self._ngrams for one in row}
    # Most words of a corpus begin no n-gram of an item.
    self._sizes = collections.defaultdict(set)
    self._begins = collections.defaultdict(list)
    for place, (row, ngrams) in enumerate(zip(rows, self._ngrams, strict=True)):
      for word in row[: len(ngrams)]:
        self._sizes[word].add(min(ngram, len(row)))
      if ngrams:
        self._begins[ngrams[0]].append(place)

  def read(self, words: Sequence[str]) -> int:
    """Looks at one text; returns how many words it has."""
    for place, word in enumerate(words):
      for size in self._sizes.get(word, ()):
        one = " ".join(words[place : place + size])
        if one not in self._wanted:
          continue
        self._seen.add(one)
        missing = []
        for item in self._begins.get(one, ()):
          own = self._rows[item]
          if words[place : place + len(own)] == own:
            self.is_whole[item] = True
          else:
            missing.append(item)
        if one in self._begins:
          self._begins[one] = missing
    return len(words)

  def shares(self) -> np.ndarray:
    """Returns the share of each item's n-grams that were seen."""
    return np.array(
      [
        sum(one in self._seen for one in row) / max(1, len(row))
        for row in self._ngrams
      ]
    )


def _cut(row: Sequence[str], ngram: int) -> list[str]:
  """Returns all n-grams; of a shorter item itself, of an empty one none."""
  size = min(ngram, len(row))
  number = len(row) - size + 1 if size else 0
  return [" ".join(row[i : i + size]) for i in range(number)]


def _draw(config: Config, kind: str, total: int) -> Int[np.ndarray, "run item"]:
  """Draws positions without replacement, run by run."""
  size = min(config.sample_size, total)
  return np.array(
    [
      np.random.default_rng(
        [config.seed, run, zlib.crc32(kind.encode())]
      ).permutation(total)[:size]
      for run in range(config.runs)
    ]
  )


def _spread(values: np.ndarray) -> Spread:
  means = values.mean(axis=1)
  deviation = np.std(means, ddof=1) if len(means) > 1 else 0.0
  return Spread(mean=float(means.mean()), deviation=float(deviation))
