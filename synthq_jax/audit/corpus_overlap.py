"""How much of private queries and documents stands in a public corpus.

A model that was pre-trained on a query needs no private data to repeat it, and
a test query that the pre-training saw is no fair test. So the papers look for
random samples of both in the pre-training corpus. Words are compared in lower
case and without punctuation (`\w+` after case folding), and an n-gram never
reaches over the border of a text. `prepare` draws the samples,
`corpus_search.scan` goes over the corpus once, and `summarize` gives shares.

Formal guarantee:
  None. Whatever is computed from private queries here, also the marks of
  single shards, is a function of them without noise: private. The corpus is
  public, and read where it lies: no query leaves the machine.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax import checks
from synthq_jax.audit import corpus_search

__all__ = [
  "Config",
  "KindOverlap",
  "Overlap",
  "Plan",
  "Spread",
  "prepare",
  "summarize",
]


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
  """The samples, and what is looked for. Private where the items are."""

  config: Config
  """What was asked for."""
  num_items: dict[str, int]
  """All items by kind."""
  samples: dict[str, Int[np.ndarray, "run item"]]
  """By kind, the rows of the drawn items in the probe."""
  probe: corpus_search.Probe
  """All drawn items; `corpus_search.scan` takes it to a part of a corpus."""


def prepare(config: Config, items: Mapping[str, Sequence[str]]) -> Plan:
  """Draws the samples and lays out their n-grams.

  Args:
    config: what is looked for.
    items: by kind, for example {"queries": ..., "documents": ...}; only items
      that are drawn are read.

  Returns:
    The same for the same settings and items, on every machine.

  Raises:
    ValueError: if there is no kind, or one without items.

  >>> plan = prepare(
  ...     Config(ngram=2), {"queries": ["Red apples!", "red apples rot", "blue"]}
  ... )
  >>> found = corpus_search.scan(plan.probe, ["All red apples.", "Rot."])
  >>> summarize(plan, found).kinds["queries"].contained.mean  # all, half, nothing
  0.5
  """
  if not items or not all(map(len, items.values())):
    sizes = {kind: len(texts) for kind, texts in items.items()}
    raise ValueError(
      f"corpus_overlap expects items of each kind, got {sizes or 'no kind'}"
    )
  drawn = {
    kind: _draw(config, kind, len(texts)) for kind, texts in items.items()
  }
  probe, rows = corpus_search.prepare(
    (
      items[kind][position]
      for kind, sample in drawn.items()
      for position in np.unique(sample).tolist()
    ),
    config.ngram,
  )
  samples, start = {}, 0
  for kind, sample in drawn.items():
    positions = np.unique(sample)
    samples[kind] = rows[start + np.searchsorted(positions, sample)]
    start += len(positions)
  return Plan(
    config=config,
    num_items={kind: len(texts) for kind, texts in items.items()},
    samples=samples,
    probe=probe,
  )


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


def summarize(plan: Plan, found: corpus_search.Found) -> Overlap:
  """Turns what was found into shares, with their spread over the runs.

  Args:
    plan: from `prepare`.
    found: in the whole corpus: `corpus_search.merge` joins its parts.

  Returns:
    Shares with their spread over the runs. Private if an item is.
  """
  lengths, shares = plan.probe.lengths, plan.probe.shares(found.ngrams)
  values = {
    "exact": found.items,
    "contained": shares,
    "half": shares >= 0.5,
    "full": shares == 1,
    "short": (lengths > 0) & (lengths < plan.config.ngram),
    "empty": lengths == 0,
  }
  return Overlap(
    config=plan.config,
    num_texts=found.num_texts,
    num_words=found.num_words,
    kinds={
      kind: KindOverlap(
        num_items=plan.num_items[kind],
        sample_size=sample.shape[1],
        **{name: _spread(value[sample]) for name, value in values.items()},
      )
      for kind, sample in plan.samples.items()
    },
  )


def _spread(values: np.ndarray) -> Spread:
  means = values.mean(axis=1)
  deviation = np.std(means, ddof=1) if len(means) > 1 else 0.0
  return Spread(mean=float(means.mean()), deviation=float(deviation))
