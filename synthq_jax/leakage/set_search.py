"""Finds pairs of similar sets without comparing all pairs.

Order the elements of every set by one rule, and let n be the size of a set. Two
sets with at least s common elements share one of the first n - s + 1 elements of
each. Here the rarest elements come first, so frequent ones such as "the" are
seldom looked up. The number of shared first elements bounds the number of all
shared elements. Pairs within the bound are measured exactly, so the search
misses no pair and reports no false one.

References:
  Bayardo, Ma and Srikant, "Scaling Up All Pairs Similarity Search", WWW 2007,
  section 4: the order and the prefix.
  Xiao, Wang, Lin and Yu, "Efficient Similarity Joins for Near Duplicate
  Detection", WWW 2008, section 4.1: the bound.
  Chaudhuri, Ganti and Kaushik, "A Primitive Operator for Similarity Joins in
  Data Cleaning", ICDE 2006, section 4: the prefix filter.
"""

import collections
import dataclasses
import itertools
from collections.abc import (
  Callable,
  Collection,
  Hashable,
  Iterable,
  Iterator,
  Sequence,
)

import numpy as np
import scipy.sparse
from jaxtyping import Float, Int

__all__ = [
  "Bags",
  "Index",
  "Matches",
  "Measure",
  "Numbers",
  "split_blocks",
  "build",
  "containment",
  "jaccard",
  "pairwise",
]

_POSTINGS = 1 << 20
"""Elements looked up at a time, which bounds the memory at some 200 MiB."""
_ROUNDING = 1e-9  # error of threshold times size, subtracted before rounding up


class Numbers(dict):
  """Numbers keys from 0 in the order in which they are first looked up."""

  def __missing__(self, key: Hashable) -> int:
    self[key] = number = len(self)
    return number

  def of(self, keys: Iterable[Hashable]) -> Int[np.ndarray, " key"]:
    """Returns the number of each key."""
    return np.fromiter(map(self.__getitem__, keys), np.int64)


@dataclasses.dataclass(frozen=True)
class Bags:
  """Sets of numbered elements, fast to build for many texts.

  Attributes:
    values: distinct elements.
    ids: positions in `values`, set after set; a set may repeat a position.
    sizes: number of `ids` of each set.
  """

  values: Sequence[Hashable]
  ids: Int[np.ndarray, " element"]
  sizes: Int[np.ndarray, " set"]

  @classmethod
  def of(cls, sets: Sequence[Collection[Hashable]]) -> "Bags":
    """Numbers the elements of sets; a collection may repeat an element."""
    numbers = Numbers()
    ids = numbers.of(itertools.chain.from_iterable(sets))
    sizes = np.fromiter(map(len, sets), np.int64, len(sets))
    return cls([*numbers], ids, sizes)

  def sets(self) -> list[set[Hashable]]:
    """Returns the sets with their elements."""
    elements = iter([self.values[i] for i in self.ids.tolist()])
    return [set(itertools.islice(elements, n)) for n in self.sizes.tolist()]


Matches = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Positions of sets and of targets, and similarities: an entry for each pair."""


Counts = Int[np.ndarray, " pair"]
Measure = Callable[[Counts, Counts, Counts], Float[np.ndarray, " pair"]]
"""Similarity from the number of common elements and both sets' sizes: `jaccard`
or `containment`."""


def jaccard(
  common: Counts, left: Counts, right: Counts
) -> Float[np.ndarray, " pair"]:
  """Divides common elements by all elements; 0 if a set is empty."""
  return common / np.maximum(left + right - common, 1)


def containment(
  common: Counts, left: Counts, right: Counts
) -> Float[np.ndarray, " pair"]:
  """Divides common elements by the smaller set's elements; 0 if it is empty."""
  return common / np.maximum(np.minimum(left, right), 1)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Sets as rows of zeros and ones."""

  table: scipy.sparse.csr_array  # [set, element], elements of targets only
  sizes: Int[np.ndarray, " set"]  # including elements that no target has

  def need(self, threshold: float) -> Int[np.ndarray, " set"]:
    """Returns the least number of elements that a similar set shares with each."""
    need = np.ceil(threshold * self.sizes - _ROUNDING).astype(np.int64)
    return np.maximum(need, 1)

  def first(self, threshold: float) -> scipy.sparse.csr_array:
    """Returns the rows with only the first elements, which are looked up."""
    need = self.need(threshold)
    starts = self.table.indptr
    lengths = np.diff(starts)
    # Elements that no target has are the rarest: they precede the others.
    num_first = self.sizes - need + 1 - (self.sizes - lengths)
    positions = np.arange(len(self.table.indices)) - np.repeat(
      starts[:-1], lengths
    )
    keep = positions < np.repeat(num_first, lengths)
    ends = np.concatenate([[0], np.cumsum(keep)])[starts]
    return _build_table(self.table.indices[keep], ends, self.table.shape[1])


def _build_table(indices, ends, columns: int) -> scipy.sparse.csr_array:
  shape = (len(ends) - 1, columns)
  ones = np.ones(len(indices), np.int32)
  return scipy.sparse.csr_array((ones, indices, ends), shape=shape)


def _build_rows(bags: Bags, columns: dict[Hashable, int]) -> _Rows:
  """Builds rows of zeros and ones; elements without a column only count."""
  total = len(columns) + len(bags.values)
  free = range(len(columns), total)  # numbers for elements that no target has
  numbers = np.fromiter(map(columns.get, bags.values, free), np.int64)
  number = len(bags.sizes)
  keys = np.repeat(np.arange(number) * total, bags.sizes) + numbers[bags.ids]
  keys.sort()
  owners, ids = np.divmod(keys[np.diff(keys, prepend=-1) > 0], max(1, total))
  sizes = np.bincount(owners, minlength=number)
  in_targets = ids < len(columns)
  ends = np.zeros(number + 1, np.int64)
  np.cumsum(np.bincount(owners[in_targets], minlength=number), out=ends[1:])
  return _Rows(_build_table(ids[in_targets], ends, max(1, len(columns))), sizes)


@dataclasses.dataclass(frozen=True)
class Index:
  """Indexed target sets, from `build`."""

  measure: Measure
  threshold: float  # least similarity of a match, in (0, 1]
  columns: dict[Hashable, int] = dataclasses.field(repr=False)  # rarest first
  _rows: _Rows = dataclasses.field(repr=False)
  _first: scipy.sparse.csr_array = dataclasses.field(repr=False)
  _all: scipy.sparse.csr_array = dataclasses.field(repr=False)

  def match(self, bags: Bags) -> Matches:
    """Finds all targets that are similar to each set.

    Returns positions of sets and of targets, and similarities of at least
    `threshold`, one per pair, in the order of the sets and then the targets.
    """
    rows = _build_rows(bags, self.columns)
    first = rows.first(self.threshold)
    lookups = [(first, self._first)]
    # Similar sets share first elements of BOTH by Jaccard. By containment, the
    # first elements of ONE set meet any element of the other.
    if self.measure is containment:
      lookups = [(first, self._all), (rows.table, self._first)]
    matches = [self._verify(rows, *some) for some in _find_candidates(lookups)]
    matches = [np.concatenate(parts) for parts in zip(*matches, strict=True)]
    if not matches:
      return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    return tuple(matches)

  def _verify(self, rows: _Rows, left, right, looked_up) -> Matches:
    """Measures candidate pairs and returns the similar ones."""
    sizes = rows.sizes[left], self._rows.sizes[right]
    most = np.minimum(*sizes)
    if self.measure is not containment:
      # Other common elements lie behind the first elements of one of the sets.
      needs = [side.need(self.threshold) for side in (rows, self._rows)]
      rest = np.maximum(needs[0][left], needs[1][right]) - 1
      most = np.minimum(most, looked_up + rest)
    possible = self.measure(most, *sizes) >= self.threshold
    left, right = left[possible], right[possible]
    order = np.lexsort((right, left))
    left, right = left[order], right[order]
    common = rows.table[left].multiply(self._rows.table[right]).sum(axis=1)
    scores = self.measure(common, rows.sizes[left], self._rows.sizes[right])
    similar = scores >= self.threshold
    return left[similar], right[similar], scores[similar]


def _find_candidates(lookups) -> Iterator[tuple[np.ndarray, ...]]:
  """Yields pairs that share looked-up elements, each once, and their number."""
  width = max(len(lookups), 1)
  costs = sum(
    table @ np.diff(targets.indptr).astype(np.int64)
    for table, targets in lookups
  )
  for start, stop in split_blocks(costs, _POSTINGS // width):
    pairs = sum(table[start:stop] @ targets for table, targets in lookups)
    pairs = pairs.tocsr()
    left = np.repeat(np.arange(start, stop), np.diff(pairs.indptr))
    yield left, pairs.indices.astype(np.int64), pairs.data


def split_blocks(
  costs: Int[np.ndarray, " row"], most: int
) -> Iterator[tuple[int, int]]:
  """Yields (start, stop) of blocks of rows that cost at most `most`.

  A row that costs more is a block of its own.

  >>> list(split_blocks(np.array([2, 2, 9, 1]), most=4))
  [(0, 2), (2, 3), (3, 4)]
  """
  ends = np.cumsum(costs)
  start = 0
  while start < len(costs):
    spent = ends[start - 1] if start else 0
    stop = int(np.searchsorted(ends, spent + most, side="right"))
    stop = max(stop, start + 1)
    yield start, stop
    start = stop


def build(bags: Bags, measure: Measure, threshold: float) -> Index:
  """Indexes the targets, the smaller side.

  >>> targets = Bags.of([{"red", "apple"}, {"pear"}])
  >>> index = build(targets, jaccard, threshold=0.5)
  >>> queries = Bags.of([{"plum"}, {"apple", "red"}, {"red"}])
  >>> left, right, scores = index.match(queries)
  >>> left.tolist(), right.tolist(), scores.tolist()
  ([1, 2], [0, 0], [1.0, 0.5])
  """
  counts = collections.Counter(itertools.chain.from_iterable(bags.sets()))
  rarest = sorted(counts, key=counts.__getitem__)
  columns = {element: number for number, element in enumerate(rarest)}
  rows = _build_rows(bags, columns)
  first = rows.first(threshold).T.tocsr()
  return Index(measure, threshold, columns, rows, first, rows.table.T.tocsr())


def pairwise(
  left: Bags, right: Bags, measure: Measure
) -> Float[np.ndarray, " pair"]:
  """Measures the similarity of the i-th set of each side."""
  pairs = zip(left.sets(), right.sets(), strict=True)
  counts = [(len(a & b), len(a), len(b)) for a, b in pairs]
  return measure(*np.array(counts, np.int64).reshape(-1, 3).T)
