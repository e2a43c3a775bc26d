"""Draws batches of private records, of fixed shape and with known accounting.

A record is one unit of privacy. If the unit is the query, a query with several
relevant documents is ONE record: group its pairs before sampling and let
`num_examples` count queries.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from synthq_jax import checks
from synthq_jax.privacy import batches
from synthq_jax.privacy.batches import IS_PADDING, Batch, Sampler, split, take

__all__ = [
  "IS_PADDING",
  "Batch",
  "CyclicPoisson",
  "FixedOrder",
  "Poisson",
  "Sampler",
  "split",
  "take",
]

_FEW = 16
"""Records of a batch that may come again, in the same order, by chance."""
_GUESSABLE_BITS = 33  # of a seed below 2^32, and of the 1 in [seed, 1]
_log = logging.getLogger(__name__)
_MOST_SAMPLERS = 8
_first_taken: dict["_Truncated", tuple[bytes, bool]] = {}
"""Records of the first batch of each of the latest samplers, and whether it took
others since."""

_POISSON_TAG = 0x706F6973  # keeps other uses of the same seed apart
_ORDER_TAG = 0x6F726472
_GROUP_TAG = 0x67727073
_CYCLIC_TAG = 0x6379636C
_Sampler = TypeVar("_Sampler", bound="_Truncated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Truncated(Sampler):
  """Draws batches of random size and cuts or pads them to max_batch_size."""

  num_examples: int
  """The number of private records n, public."""
  expected_batch_size: int
  """The mean number of records in a batch, before truncation."""
  max_batch_size: int
  """The number of rows of a batch, at least expected_batch_size."""

  @property
  def share(self) -> float:
    """The mean fraction of the records that a batch holds, before truncation."""
    return self.expected_batch_size / self.num_examples

  @classmethod
  def with_margin(
    cls: type[_Sampler],
    *,
    num_examples: int,
    multiple_of: int = 1,
    overflow: float = 1e-12,
    **sizes: Any,
  ) -> _Sampler:
    """Chooses max_batch_size so that hardly any batch is ever truncated.

    The default leaves about seven standard deviations of room, so truncation
    costs next to nothing in epsilon, and accounting is at its fastest. For
    `CyclicPoisson`, the probability is over the random groups, too: a step draws
    each record with probability `share`.

    >>> Poisson.with_margin(num_examples=6000, expected_batch_size=256,
    ...                     multiple_of=32).max_batch_size
    384

    Args:
      num_examples: the number of private records.
      multiple_of: max_batch_size is rounded up to a multiple of this, e.g. the
        number of devices times the microbatch size.
      overflow: the largest acceptable probability, in (0, 1), that one batch
        is truncated.
      **sizes: the other fields of the class. A group_size above 1 adds room for
        one more group.

    Raises:
      ValueError: if an argument is out of range.
    """
    roomy = cls(num_examples=num_examples, max_batch_size=num_examples, **sizes)
    rows = batches.choose_max_batch_size(
      count=num_examples,
      probability=roomy.share,
      multiple_of=multiple_of,
      overflow=overflow,
      more=roomy.group_size if roomy.group_size > 1 else 0,
    )
    return dataclasses.replace(roomy, max_batch_size=rows)

  def take(self, records: Mapping[str, Any], drawn: Batch) -> dict[str, Any]:
    """Reads the records of a batch and adds the mask, as `Sampler.take`.

    Logs if a training begins again with its first batch. With epochs that all
    begin at step 0, 60 steps with the noise of epsilon 3 have epsilon 8.93: as
    four epochs of 15, of 4,000 records in batches of 256.
    """
    indices, is_padding = drawn.to_arrays(padding_index=-1)
    numbers = indices.tobytes()
    first, has_others = _first_taken.pop(self, (numbers, False))
    is_by_chance = np.sum(~is_padding) < _FEW  # such as two empty batches
    if has_others and numbers == first and not is_by_chance:
      _log.warning(
        "the first batch is taken again after others: if both are trained on, no"
        " claim covers it; number steps over all epochs, and give another training"
        " another secret"
      )
    _first_taken[self] = first, has_others or numbers != first
    while len(_first_taken) > _MOST_SAMPLERS:
      del _first_taken[next(iter(_first_taken))]
    return super().take(records, drawn)

  def overflow_delta(self, steps: int) -> float:
    """Bounds the probability that truncation ever affects a given record.

    Used by accountants that do not model truncation: if the untruncated mechanism
    is (epsilon, delta)-DP, the truncated one is (epsilon, delta + bound)-DP.

    Derivation. Fix neighbours that differ in the record x, and let K be the
    number of OTHER records a step draws. K has the same distribution under both
    neighbours and does not depend on x or on earlier outputs. An independent coin
    of probability q draws x. Call a step bad if K >= max_batch_size and the coin
    draws x. Take a step that is not bad. Either x was not drawn, and the batch is
    a function of the others alone, the same under both neighbours; or x was drawn
    with K < max_batch_size, and nothing was cut. The probability b of any bad step
    is the same under both, and b <= steps q P[K >= max_batch_size]. Given no bad
    step and the K, a step with K < max_batch_size is the Poisson-sampled mechanism
    with the same q, and all other steps do not depend on x. So
    M(D) = (1-b) P + b P', M(D') = (1-b) Q + b Q', where (P, Q) obeys
    the untruncated bound, and M(D)(A) <= e^epsilon M(D')(A) + delta + b. No
    factor e^epsilon is due, because both sides share the weight b. K is at most
    binomial(n, q): n others when x is added, n - 1 when it is removed.

    For `CyclicPoisson`, q is expected_batch_size / n. The batch holds
    binomial(n, q) of the other records, whatever the group and coins of x are,
    and x itself is drawn with probability q, too.

    For a group of G = group_size records, a step is bad if one of them is drawn
    and the others leave fewer than G rows.

    Args:
      steps: the number of batches.

    Returns:
      steps G q P[binomial(n, q) >= max_batch_size - G + 1].
    """
    room = self.max_batch_size - self.group_size + 1
    tail = 1.0
    if room > 0:
      tail = batches.compute_binomial_tail(
        self.num_examples, self.share, np.array(room)
      )
    return float(steps * self.group_size * self.share * tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson(_Truncated):
  """Draws every record into a batch independently, with one probability.

  The batch has `max_batch_size` rows, filled up with padding. It may be all
  padding, which is a legal step (noise alone). If more records are drawn than
  fit, a uniformly random `max_batch_size` of them stay.

  Formal guarantee: at every step, independently of the other steps, the batch is
  a Poisson sample with probability expected_batch_size / num_examples, truncated
  uniformly at random. Truncation is not free: a record in an overfull batch
  pushes another one out. `event` models this for the accountant, at
  num_examples + 1 records to cover a neighbour with one record more. With a
  group_size K above 1 the unit is a group (a user) of at most K records, each
  drawn independently. At most binomial(K, q) of them are in a batch, and move its
  sum by at most as many sensitivities: a mixture of Gaussians. Numbers and sizes
  are public; seed and batches are secret.

  >>> sampler = Poisson(
  ...     num_examples=1000, expected_batch_size=50, max_batch_size=100)
  >>> sampler.probability
  0.05
  >>> sampler.batch(seed=7, step=0).indices.shape
  (100,)

  References:
    Truncation: Ganesh et al., https://arxiv.org/abs/2508.15089. Groups: Charles
    et al. (2024), arXiv:2407.07737; Choquette-Choo et al., arXiv:2310.15526,
    corollary 4.7 for vectors.
  """

  group_size: int = 1
  """The most records of one unit of privacy."""
  num_units: int | None = None
  """The number of units that have a record, public; None: num_examples."""

  def __post_init__(self):
    """Refuses sizes that contradict each other."""
    checks.count("num_examples", self.num_examples, 1)
    checks.count(
      "expected_batch_size", self.expected_batch_size, 1, self.num_examples
    )
    checks.count(
      "max_batch_size", self.max_batch_size, self.expected_batch_size
    )
    checks.count("group_size", self.group_size, 1)
    if self.num_units is not None:
      least = -(-self.num_examples // self.group_size)
      checks.count("num_units", self.num_units, least, self.num_examples)

  @property
  def probability(self) -> float:
    """The probability that a step draws a given record."""
    return self.share

  @property
  def knows_truncation(self) -> bool:
    """Whether `event` models truncation, as it does except for groups."""
    return self.group_size == 1

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError for groups under REPLACE_ONE."""
    if checks.relation(relation) == "REPLACE_ONE" and self.group_size > 1:
      raise ValueError(
        "expected relation=ADD_OR_REMOVE_ONE for groups of records, got"
        f" relation=REPLACE_ONE and group_size={self.group_size}"
      )

  def batch(self, seed: int | Sequence[int], step: int) -> Batch:
    """Draws the batch of one step.

    The size is binomial and the records are a uniform subset of that size, which
    equals a coin per record. Cutting the size at max_batch_size leaves a uniform
    subset of the overfull sample.
    """
    generator = batches.make_generator(seed, _POISSON_TAG, step)
    _check_secret(seed)
    drawn = generator.binomial(self.num_examples, self.probability)
    size = min(int(drawn), self.max_batch_size)
    chosen = generator.choice(self.num_examples, size=size, replace=False)
    return batches.pad_batch(chosen, self.max_batch_size)

  def event(self, noise_multiplier: float, steps: int) -> Any:
    """Makes the event of `steps` noisy sums over truncated batches.

    Args:
      noise_multiplier: noise standard deviation over sensitivity.
      steps: the number of noisy sums.

    Returns:
      A `dp_accounting.DpEvent`, which RDP accountants do not support.
    """
    import dp_accounting  # takes a second: only when needed

    if self.group_size > 1:
      raise ValueError("expected untruncated_event for groups of records")
    step = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
      dataset_size=self.num_examples + 1,
      sampling_probability=self.probability,
      truncated_batch_size=self.max_batch_size,
      noise_multiplier=noise_multiplier,
    )
    return dp_accounting.SelfComposedDpEvent(step, steps)

  def uses(self, steps: int) -> dict[int, float]:
    """Returns steps x P[binomial(group_size, probability) = k], for k from 1."""
    from scipy import stats  # takes a second: only when needed

    drawn = np.arange(1, self.group_size + 1)
    shares = stats.binom.pmf(drawn, self.group_size, self.probability)
    return dict(zip(drawn.tolist(), (steps * shares).tolist(), strict=True))

  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Makes the event without truncation; add `overflow_delta` to its delta."""
    return batches.make_sampled_event(
      self.probability, noise_multiplier, steps, self.group_size
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson(_Truncated):
  """Draws Poisson batches from one group of records after the other.

  Each record belongs to one of `cycle_length` groups, drawn independently for
  each record with the secret seed. Step t draws from group t mod cycle_length:
  each of its records independently, with cycle_length times the probability of
  plain Poisson sampling, so that the expected batch is the same.

  Formal guarantee: with one seed for all steps, two batches with the same record
  are at least cycle_length steps apart. At most ceil(steps / cycle_length) steps can draw a given record,
  each independently with `probability`, apart from truncation, whose cost
  `overflow_delta` bounds. Groups and draws of a record do not depend on other
  records, so adding or removing one leaves the others unchanged. The numbers are
  public; seed, groups and batches are secret. `optim.banded` noise needs this
  sampler, with cycle_length of at least its bands. With independent noise it is
  valid, too, and amplifies less than plain Poisson sampling.

  >>> sampler = CyclicPoisson(
  ...     num_examples=1000, expected_batch_size=50, max_batch_size=100,
  ...     cycle_length=4)
  >>> sampler.probability
  0.2

  References:
    Choquette-Choo et al. (2023), arXiv:2306.08153, section 4.
  """

  cycle_length: int
  """The number of groups, at most num_examples / expected_batch_size."""

  def __post_init__(self):
    """Refuses sizes that contradict each other."""
    checks.count("num_examples", self.num_examples, 1)
    checks.count("cycle_length", self.cycle_length, 1, self.num_examples)
    most = self.num_examples // self.cycle_length
    checks.count("expected_batch_size", self.expected_batch_size, 1, most)
    checks.count(
      "max_batch_size", self.max_batch_size, self.expected_batch_size
    )

  @property
  def probability(self) -> float:
    """The probability that a step draws a given record of its group."""
    return self.cycle_length * self.expected_batch_size / self.num_examples

  @property
  def min_separation(self) -> int:
    """The least number of steps between two batches with the same record."""
    return self.cycle_length

  @property
  def knows_truncation(self) -> bool:
    """False: no event models truncation in cycles, so delta pays for it."""
    return False

  def batch(self, seed: int | Sequence[int], step: int) -> Batch:
    """Draws the batch of one step from group step mod cycle_length."""
    generator = batches.make_generator(seed, _CYCLIC_TAG, step)
    _check_secret(seed)
    key = (seed,) if isinstance(seed, int | np.integer) else tuple(seed)
    groups = _draw_groups(self.num_examples, self.cycle_length, key)
    members = groups[step % self.cycle_length]
    drawn = int(generator.binomial(len(members), self.probability))
    size = min(drawn, self.max_batch_size)
    chosen = generator.choice(members, size=size, replace=False)
    return batches.pad_batch(chosen, self.max_batch_size)

  def uses(self, steps: int) -> dict[int, float]:
    """Returns {1: (number of begun cycles) x probability}."""
    return {1: -(-steps // self.cycle_length) * self.probability}

  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Makes the event of one Poisson-sampled release per begun cycle."""
    rounds = -(-steps // self.cycle_length)
    return batches.make_sampled_event(
      self.probability, noise_multiplier, rounds
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedOrder(Sampler):
  """Reads the shuffled records in full batches, epoch by epoch.

  Each epoch has a fresh order and leaves out the last num_examples % batch_size
  records of that order.

  Formal guarantee: with one seed for all steps, a record is in at most one batch
  per epoch, so in at most ceil(steps / steps_per_epoch) batches. Nothing is claimed from the secrecy of
  the order (no amplification). Claims hold only for REPLACE_SPECIAL, where an
  empty record replaces a record and every other record keeps its position. Adding
  a record would shift the batches.

  >>> FixedOrder(num_examples=10, batch_size=4).steps_per_epoch
  2
  """

  num_examples: int
  """The number of private records, public."""
  batch_size: int
  """The number of records in each batch."""

  def __post_init__(self):
    """Refuses a batch larger than the data."""
    checks.count("num_examples", self.num_examples, 1)
    checks.count("batch_size", self.batch_size, 1, self.num_examples)

  @property
  def expected_batch_size(self) -> int:
    """The number of records in each batch."""
    return self.batch_size

  @property
  def max_batch_size(self) -> int:
    """The number of rows of each batch, none of them padding."""
    return self.batch_size

  @property
  def steps_per_epoch(self) -> int:
    """The number of full batches in one pass."""
    return self.num_examples // self.batch_size

  def batch(self, seed: int | Sequence[int], step: int) -> Batch:
    """Returns the batch of one step: batch_size records and no padding."""
    checks.count("step", step, 0)
    epoch, batch_number = divmod(step, self.steps_per_epoch)
    key = (seed,) if isinstance(seed, int | np.integer) else tuple(seed)
    order = _shuffle(self.num_examples, key, epoch)
    start = batch_number * self.batch_size
    indices = order[start : start + self.batch_size].copy()
    return Batch(indices, np.zeros(self.batch_size, bool))

  def uses(self, steps: int) -> dict[int, float]:
    """Returns {1: number of begun epochs}."""
    return {1: -(-steps // self.steps_per_epoch)}

  def overflow_delta(self, steps: int) -> float:
    """Returns 0, since no batch is ever truncated."""
    del steps
    return 0.0

  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Makes the `DpEvent` of one Gaussian release per begun epoch."""
    import dp_accounting

    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.GaussianDpEvent(noise_multiplier),
      -(-steps // self.steps_per_epoch),
    )

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError unless the relation is REPLACE_SPECIAL."""
    name = checks.relation(relation)
    if name != "REPLACE_SPECIAL":
      raise ValueError(
        "expected relation=REPLACE_SPECIAL for batches in a fixed order, "
        f"got relation={name}; use sampling.Poisson for other relations"
      )


def _check_secret(seed: int | Sequence[int]) -> None:
  """Logs a seed of random batches that all seeds below 2^32 include, once."""
  if sum(int(word).bit_length() for word in np.ravel(seed)) <= _GUESSABLE_BITS:
    _log_guessable()


@functools.cache
def _log_guessable() -> None:
  _log.warning(
    "the seed of the batches is below 2^32: who tries all seeds knows which batches"
    " hold a record, and no claim covers that; draw them with [secret, 1], where"
    " secret = numpy.random.SeedSequence().entropy"
  )


@functools.lru_cache(maxsize=2)
def _shuffle(
  num_examples: int, seed: tuple[int, ...], epoch: int
) -> np.ndarray:
  """Returns the order of records in one epoch, [num_examples] int32."""
  generator = batches.make_generator(seed, _ORDER_TAG, epoch)
  return generator.permutation(num_examples).astype(np.int32)


@functools.lru_cache(maxsize=2)
def _draw_groups(
  num_examples: int, cycle_length: int, seed: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
  """Returns the record numbers of each group, int32."""
  generator = batches.make_generator(seed, _GROUP_TAG, 0)
  group = generator.integers(cycle_length, size=num_examples)
  return tuple(
    np.flatnonzero(group == i).astype(np.int32) for i in range(cycle_length)
  )
