"""MinHash and locality-sensitive hashing, with datasketch.

References:
  Broder, "On the Resemblance and Containment of Documents", SEQUENCES 1997,
  section 3.
  Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4:
  bands.
"""

import dataclasses
import functools
from collections.abc import Sequence

import datasketch
import numpy as np
from jaxtyping import Float, Int, UInt32

from synthq_jax.leakage import _set_search, _words

__all__ = ["MinHash"]

_SCHEME = "affine32"
_CACHED = 1 << 16  # n-grams whose hashes are kept: 32 MiB with 128 of them
_ELEMENTS = 1 << 15  # n-grams whose hashes are gathered at a time: 16 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinHash:
  """Jaccard's coefficient of n-grams of characters, searched with MinHash-LSH.

  Equal bands of signatures make candidates, whose coefficient is then computed
  exactly: nothing is found that is not there. Some pairs are missed; bands are
  as long as they may be with a chance of at most `most_missed` to miss a pair
  at the threshold, which falls quickly above it. Hashes are fixed by the seed,
  so that the same pairs are found each time.

  >>> detector = MinHash(threshold=0.6)
  >>> detector.scores(["measles outbreak"], ["measles outbreaks"]).round(2).tolist()
  [0.83]

  Attributes:
    threshold: the least coefficient of a match, in (0, 1].
    n: characters of an n-gram.
    num_hashes: of a signature; more make fewer false candidates.
    most_missed: the chance to miss a pair at the threshold, in (0, 1).
    seed: of the hashes, >= 0.
  """

  threshold: float = 0.6
  n: int = 3
  num_hashes: int = 128
  most_missed: float = 0.05
  seed: int = 1
  name = "minhash"

  def __post_init__(self):
    """Checks the fields."""
    _set_search.check_threshold(self.threshold)
    _words.check_ngrams(self.n)
    sound = self.num_hashes >= 2 and 0 < self.most_missed < 1
    if not sound or self.seed < 0:
      raise ValueError(
        "expected num_hashes >= 2, most_missed in (0, 1) and seed >= 0, got"
        f" num_hashes={self.num_hashes}, most_missed={self.most_missed},"
        f" seed={self.seed}; change them"
      )
    if self.bands[0] == 0:
      raise ValueError(
        f"expected num_hashes enough for threshold={self.threshold} and"
        f" most_missed={self.most_missed}, got num_hashes={self.num_hashes};"
        " raise one of them"
      )

  @property
  def bands(self) -> tuple[int, int]:
    """The number of bands and the hashes in each; (0, 0) if none will do."""
    for length in range(self.num_hashes // 2, 0, -1):
      number = self.num_hashes // length
      if (1 - self.threshold**length) ** number <= self.most_missed:
        return number, length
    return 0, 0

  @property
  def features(self) -> _words.Features:
    """Turns texts into sets of n-grams."""
    return functools.partial(_words.character_ngrams, n=self.n)

  def index(self, targets: Sequence[str]) -> "Index":
    """Indexes the smaller side.

    Args:
      targets: their texts.
    """
    return Index(self, self.features(targets))

  def scores(
    self, left: Sequence[str], right: Sequence[str]
  ) -> Float[np.ndarray, " pair"]:
    """Returns the exact coefficients, which no hash has a part in.

    Args:
      left: texts.
      right: as many texts.
    """
    sides = self.features(left), self.features(right)
    return _set_search.pairwise(*sides, _set_search.Jaccard())


class Index:
  """Bands of the targets' signatures."""

  def __init__(self, detector: MinHash, sets: _set_search.Sets):
    self._detector = detector
    self._sets = sets
    self._signatures = _Signatures(detector.num_hashes, detector.seed)
    self._bands = datasketch.MinHashLSH(
      num_perm=detector.num_hashes, params=detector.bands
    )
    for place, values in zip(*self._signatures(sets), strict=True):
      self._bands.insert(
        int(place), self._lean(values), check_duplication=False
      )

  def match(self, queries: Sequence[str]) -> _set_search.Matches:
    """Finds the targets that share a band and are similar.

    Args:
      queries: their texts.

    Returns:
      Positions of queries and of targets, and exact coefficients.
    """
    sets = self._detector.features(queries)
    places, signatures = self._signatures(sets)
    found = [self._bands.query(self._lean(values)) for values in signatures]
    left = np.repeat(places, [len(each) for each in found])
    right = np.array([t for each in found for t in sorted(each)], np.int64)
    scores = _set_search.pairwise(
      [sets[i] for i in left],
      [self._sets[j] for j in right],
      _set_search.Jaccard(),
    )
    kept = scores >= self._detector.threshold
    return left[kept], right[kept], scores[kept]

  def _lean(self, values: UInt32[np.ndarray, " hash"]):
    """Wraps a signature for datasketch."""
    seed = self._detector.seed
    return datasketch.LeanMinHash(seed=seed, hashvalues=values, scheme=_SCHEME)


class _Signatures:
  """The least hashes of sets; those of an n-gram are worked out once."""

  def __init__(self, num_hashes: int, seed: int):
    self._empty = datasketch.MinHash(num_hashes, seed=seed, scheme=_SCHEME)
    self._clear()

  def _clear(self) -> None:
    self._places: dict[str, int] = {}
    self._table = np.zeros((1024, len(self._empty)), np.uint32)

  def __call__(
    self, sets: _set_search.Sets
  ) -> tuple[Int[np.ndarray, " set"], UInt32[np.ndarray, "set hash"]]:
    """Returns the positions of the sets that are not empty, and signatures."""
    kept = np.array([i for i, each in enumerate(sets) if each], np.int64)
    signatures = np.zeros((len(kept), len(self._empty)), np.uint32)
    sizes = np.array([len(sets[i]) for i in kept], np.int64)
    for start, stop in _set_search.blocks(sizes, _ELEMENTS):
      rows = [self._place(x) for i in kept[start:stop] for x in sets[i]]
      firsts = np.cumsum(sizes[start:stop]) - sizes[start:stop]
      hashes = self._table[rows]
      signatures[start:stop] = np.minimum.reduceat(hashes, firsts)
      if len(self._places) > _CACHED:
        self._clear()
    return kept, signatures

  def _place(self, ngram: str) -> int:
    """Returns the row of the n-gram's hashes; the table grows."""
    place = self._places.get(ngram)
    if place is None:
      place = self._places[ngram] = len(self._places)
      if place == len(self._table):
        self._table = np.concatenate([self._table, np.zeros_like(self._table)])
      one = self._empty.copy()
      one.update(ngram.encode())
      self._table[place] = one.digest()
    return place
