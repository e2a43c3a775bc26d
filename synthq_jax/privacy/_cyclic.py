"""Batches that keep the steps of one record apart."""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from synthq_jax.privacy import _checks, _draws

__all__ = ["BallsInBins", "CyclicPoisson"]

_GROUP_TAG = 0x67727073  # keeps other uses of the same seed apart
_DRAW_TAG = 0x6379636C


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
  """Poisson batches from one group of the records after the other.

  Each record belongs to one of `cycle_length` groups, drawn independently for
  each record with the secret seed. Step t draws from group t mod cycle_length:
  each of its records independently, with cycle_length times the probability of
  plain Poisson sampling, so that the expected batch is the same.

  Formal guarantee: two batches with the same record are at least cycle_length
  steps apart, and a record is drawn in at most ceil(steps / cycle_length) steps,
  in each independently with `probability`, apart from truncation, whose price
  `overflow_delta` bounds. Groups and draws of a record do not depend on the
  others, so adding or removing one leaves those alone. The numbers are public;
  seed, groups and batches are secret. This is what `optim.banded` noise asks for
  (with cycle_length of at least its bands); with independent noise it is valid
  and amplifies less than plain Poisson sampling.

  >>> sampler = CyclicPoisson(
  ...     num_examples=1000, expected_batch_size=50, max_batch_size=100,
  ...     cycle_length=4)
  >>> sampler.probability
  0.2

  References:
    Choquette-Choo et al. (2023), arXiv:2306.08153, section 4.
  """

  num_examples: int
  """The number of private records n, public."""
  expected_batch_size: int
  """The mean number of records in a batch, before truncation."""
  max_batch_size: int
  """The number of rows of a batch, at least expected_batch_size."""
  cycle_length: int
  """Groups; times expected_batch_size it is at most num_examples."""

  take = staticmethod(_draws.take)
  knows_truncation = False

  def __post_init__(self):
    """Refuses sizes that contradict each other."""
    _checks.check_count("num_examples", self.num_examples, 1)
    _checks.check_count("cycle_length", self.cycle_length, 1, self.num_examples)
    most = self.num_examples // self.cycle_length
    _checks.check_count(
      "expected_batch_size", self.expected_batch_size, 1, most
    )
    _checks.check_count(
      "max_batch_size", self.max_batch_size, self.expected_batch_size
    )

  @classmethod
  def with_margin(
    cls,
    *,
    num_examples: int,
    expected_batch_size: int,
    cycle_length: int,
    multiple_of: int = 1,
    overflow: float = 1e-12,
  ) -> "CyclicPoisson":
    """Chooses max_batch_size so that hardly any batch is ever truncated.

    Groups are drawn, too: over them and the coins, a step draws each of the n
    records with probability expected_batch_size / n.

    >>> CyclicPoisson.with_margin(num_examples=6000, expected_batch_size=256,
    ...                           cycle_length=4, multiple_of=32).max_batch_size
    384

    Args:
      num_examples: the number of private records.
      expected_batch_size: the mean number of records in a batch.
      cycle_length: the number of groups.
      multiple_of: max_batch_size is rounded up to a multiple of this.
      overflow: the largest acceptable probability, in (0, 1), that one batch
        is truncated.

    Returns:
      A sampler.

    Raises:
      ValueError: if an argument is out of range.
    """
    small = cls(
      num_examples=num_examples,
      expected_batch_size=expected_batch_size,
      max_batch_size=expected_batch_size,
      cycle_length=cycle_length,
    )
    rows = _draws.max_batch_size(
      count=num_examples,
      probability=expected_batch_size / num_examples,
      multiple_of=multiple_of,
      overflow=overflow,
    )
    return dataclasses.replace(small, max_batch_size=rows)

  @property
  def min_separation(self) -> int:
    """Steps between two batches that may hold the same record, at least."""
    return self.cycle_length

  @property
  def probability(self) -> float:
    """The probability that a step draws a given record of its group."""
    return self.cycle_length * self.expected_batch_size / self.num_examples

  def batch(self, seed: int | Sequence[int], step: int) -> _draws.Batch:
    """Draws the batch of one step, a function of (seed, step) alone.

    Args:
      seed: a non-negative integer, or several; secret.
      step: the number of the step, from 0.

    Returns:
      Indices of records in random order, then padding.
    """
    generator = _draws.generator(seed, _DRAW_TAG, step)
    key = (seed,) if isinstance(seed, numbers.Integral) else tuple(seed)
    groups = _groups(self.num_examples, self.cycle_length, key)
    members = groups[step % self.cycle_length]
    drawn = generator.binomial(len(members), self.probability)
    size = min(int(drawn), self.max_batch_size)
    chosen = generator.choice(members, size=size, replace=False)
    return _draws.padded(chosen, self.max_batch_size)

  def overflow_delta(self, steps: int) -> float:
    """Bounds the probability that truncation ever concerns a given record.

    As for `Poisson.overflow_delta`: of the others, the step's batch holds
    binomial(n, expected_batch_size / n) many, whatever the record's own group
    and coins are, and the record itself is drawn with that probability too.
    """
    share = self.expected_batch_size / self.num_examples
    tail = _draws.binomial_tail(
      self.num_examples, share, np.array(self.max_batch_size)
    )
    return float(steps * share * tail)

  def event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the event without truncation, which is paid from delta."""
    return self.untruncated_event(noise_multiplier, steps)

  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns one Poisson-sampled release for every cycle begun."""
    import dp_accounting

    step = dp_accounting.PoissonSampledDpEvent(
      self.probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    rounds = -(-steps // self.cycle_length)
    return dp_accounting.SelfComposedDpEvent(step, rounds)

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError if the relation is unknown; all three are claimed."""
    _checks.relation_name(relation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBins:
  """Puts each record into one of `cycle_length` bins, and reads bin after bin.

  Each record is in one bin, drawn independently for each record with the secret
  seed, and in every batch of that bin: step t reads bin t mod cycle_length, so a
  cycle is one pass over all records.

  Formal guarantee: a record is in at most ceil(steps / cycle_length) batches,
  cycle_length steps apart, apart from truncation, whose price `overflow_delta`
  bounds. Nothing is claimed from the secrecy of the bins (no amplification): the
  known amplification bounds are Monte Carlo estimates, which hold with a
  confidence only. The bin of a record does not depend on the others, so adding
  or removing one leaves those alone, unlike batches in a fixed order. The
  numbers are public; seed, bins and batches are secret. This is what `optim.blt`
  noise asks for.

  >>> sampler = BallsInBins.with_margin(num_examples=1000, cycle_length=10)
  >>> sampler.expected_batch_size
  100

  References:
    Chua et al. (2024), arXiv:2412.16802. Choquette-Choo et al. (2024),
    arXiv:2410.06266.
  """

  num_examples: int
  """The number of private records n, public."""
  cycle_length: int
  """Bins, at most num_examples."""
  max_batch_size: int
  """The number of rows of a batch, at least expected_batch_size."""

  take = staticmethod(_draws.take)
  knows_truncation = False

  def __post_init__(self):
    """Refuses sizes that contradict each other."""
    _checks.check_count("num_examples", self.num_examples, 1)
    _checks.check_count("cycle_length", self.cycle_length, 1, self.num_examples)
    _checks.check_count(
      "max_batch_size", self.max_batch_size, self.expected_batch_size
    )

  @classmethod
  def with_margin(
    cls,
    *,
    num_examples: int,
    cycle_length: int,
    multiple_of: int = 1,
    overflow: float = 1e-12,
  ) -> "BallsInBins":
    """Chooses max_batch_size so that hardly any bin is ever truncated.

    Args:
      num_examples: the number of private records.
      cycle_length: the number of bins.
      multiple_of: max_batch_size is rounded up to a multiple of this.
      overflow: the largest acceptable probability, in (0, 1), that one bin has
        more records than a batch has rows.

    Returns:
      A sampler.

    Raises:
      ValueError: if an argument is out of range.
    """
    _checks.check_count("num_examples", num_examples, 1)
    _checks.check_count("cycle_length", cycle_length, 1, num_examples)
    rows = _draws.max_batch_size(
      count=num_examples,
      probability=1 / cycle_length,
      multiple_of=multiple_of,
      overflow=overflow,
    )
    return cls(
      num_examples=num_examples, cycle_length=cycle_length, max_batch_size=rows
    )

  @property
  def expected_batch_size(self) -> int:
    """The mean number of records in a batch, rounded down."""
    return self.num_examples // self.cycle_length

  @property
  def min_separation(self) -> int:
    """Steps between two batches that may hold the same record, at least."""
    return self.cycle_length

  def batch(self, seed: int | Sequence[int], step: int) -> _draws.Batch:
    """Returns the batch of one step, a function of (seed, step) alone.

    Args:
      seed: a non-negative integer, or several; secret.
      step: the number of the step, from 0.

    Returns:
      Indices of records in random order, then padding.
    """
    generator = _draws.generator(seed, _DRAW_TAG, step)
    key = (seed,) if isinstance(seed, numbers.Integral) else tuple(seed)
    groups = _groups(self.num_examples, self.cycle_length, key)
    in_bin = groups[step % self.cycle_length]
    size = min(len(in_bin), self.max_batch_size)
    chosen = generator.choice(in_bin, size=size, replace=False)
    return _draws.padded(chosen, self.max_batch_size)

  def overflow_delta(self, steps: int) -> float:
    """Bounds the probability that truncation ever concerns a given record.

    As for `Poisson.overflow_delta`, with bins that stay: it does if the record's
    own bin holds max_batch_size of the others, which is decided once.
    """
    del steps
    return float(
      _draws.binomial_tail(
        self.num_examples, 1 / self.cycle_length, np.array(self.max_batch_size)
      )
    )

  def event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the event without truncation, which is paid from delta."""
    return self.untruncated_event(noise_multiplier, steps)

  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns one Gaussian release for every cycle begun."""
    import dp_accounting

    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.GaussianDpEvent(noise_multiplier),
      -(-steps // self.cycle_length),
    )

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError if the relation is unknown; all three are claimed."""
    _checks.relation_name(relation)


@functools.lru_cache(maxsize=2)
def _groups(
  num_examples: int, cycle_length: int, seed: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
  """Returns the records of each group, int32."""
  generator = _draws.generator(seed, _GROUP_TAG, 0)
  group = generator.integers(cycle_length, size=num_examples)
  return tuple(
    np.flatnonzero(group == i).astype(np.int32) for i in range(cycle_length)
  )
