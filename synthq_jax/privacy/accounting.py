"""From noise to epsilon and back.

Epsilons are upper bounds: the privacy loss distribution is discretized
pessimistically, and a calibrated noise multiplier is checked against its target
before it is returned. Everything is memoized.

Noise has standard deviation noise_multiplier x sensitivity, where sensitivity
is that of ADD_OR_REMOVE_ONE or REPLACE_SPECIAL, ALWAYS. Under REPLACE_ONE the
accountant itself allows for a record that moves from +C to -C: passing twice
the sensitivity as well would count it twice.

Drawn noise ends somewhere, unlike a Gaussian: what a record moves beyond that
end tells of it. The probability of that is paid from delta (`_ends`), and so is
what doubles lose in composing distributions (`arithmetic`).
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import numbers
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from synthq_jax import checks
from synthq_jax.privacy import arithmetic, batches, sampling

__all__ = [
  "Run",
  "check_delta",
  "composed_epsilon",
  "epsilon",
  "group_epsilon",
  "noise_multiplier",
  "owed_delta",
]

ACCOUNTANTS = ("pld", "rdp")

# Interval of the discretized privacy loss, and the epsilon below which the next
# finer one is tried: coarse intervals overstate a small epsilon, fine ones
# take seconds for a large one.
_INTERVALS = ((1e-3, 1.0), (1e-4, 0.03), (1e-5, 0.0))
_COARSE = ((1e-2, 1.0), (1e-3, 0.0))  # where to look for the noise
_TOLERANCE = 1e-4  # of a calibrated noise multiplier, relative
_NEGLIGIBLE = 1e-3  # share of delta that pays for truncation without regret
_END = 9.1  # standard deviations that drawn noise reaches at least
_COORDINATES = 2.0**34  # that one use moves, at most
_UNPAID = 1e-6  # share of delta that rounding takes as well
_RDP_ORDERS = (*(1.5 + i / 4 for i in range(35)), *range(11, 65), 128, 256, 512)


class Run(NamedTuple):
  """Noisy sums over batches of one sampler."""

  sampler: sampling.Sampler
  noise_multiplier: float
  steps: int


def epsilon(
  *,
  noise_multiplier: float,
  delta: float,
  sampler: sampling.Sampler,
  steps: int,
  relation: Any = "ADD_OR_REMOVE_ONE",
  accountant: str = "pld",
) -> float:
  """Returns the epsilon that noisy sums over sampled batches satisfy.

  Formal guarantee: for the sampler's records, the given relation and the given
  delta, `steps` adaptively chosen sums of vectors, each changed by one record
  of the batch by at most the sensitivity, plus Gaussian noise of standard
  deviation noise_multiplier x sensitivity, are (epsilon, delta)-DP, all of them
  published; the batches are not. The sampler's sizes are public.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> round(epsilon(noise_multiplier=1.0, delta=1 / 12000, sampler=sampler,
  ...               steps=300), 2)
  4.19

  Args:
    noise_multiplier: noise standard deviation over the sensitivity for
      ADD_OR_REMOVE_ONE, at least 0.
    delta: in (0, 1 / num_examples).
    sampler: how batches are drawn; it also says what can be claimed.
    steps: the number of sums, at least 1.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    accountant: "pld" (tight) or "rdp" (looser, a second opinion).

  Returns:
    An upper bound; infinite without noise, or with so little that a record moves
    sums past its end more often than delta allows.

  Raises:
    ValueError: if an argument is out of range or the relation is not one that
      the sampler and accountant can claim.
  """
  name = _check(delta, sampler, steps, relation, accountant)
  _check_noise(noise_multiplier)
  run = Run(sampler, float(noise_multiplier), int(steps))
  return _epsilon((run,), float(delta), name, accountant, _INTERVALS)


def composed_epsilon(
  runs: Sequence[Run],
  *,
  delta: float,
  relation: Any = "ADD_OR_REMOVE_ONE",
  accountant: str = "pld",
) -> float:
  """Returns the epsilon of several runs over the same records together.

  Formal guarantee: as for `epsilon`, for all runs together; later runs may
  depend on what earlier ones published.

  Args:
    runs: what was released; the order does not matter.
    delta: of the whole, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.
    accountant: "pld" or "rdp".

  Returns:
    An upper bound; 0 for no runs.

  Raises:
    ValueError: as for `epsilon`.
  """
  if not 0 < delta < 1:
    raise ValueError(f"expected delta in (0, 1), got {delta=}")
  name = _check_runs(runs, relation, accountant)
  if not runs:
    return 0.0
  return _epsilon(tuple(runs), float(delta), name, accountant, _INTERVALS)


def group_epsilon(
  runs: Sequence[Run], *, delta: float, relation: Any, size: int
) -> float:
  """Returns the epsilon of several runs for units that change together.

  Formal guarantee: as for `composed_epsilon`, for two data sets of which one
  has `size` units that the other lacks, or has emptied. The sum of a batch
  moves by at most the sensitivity for each record of theirs that it holds.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> run = Run(sampler, 1.0, 300)
  >>> one, two = (group_epsilon([run], delta=1 / 12000, size=size,
  ...     relation="ADD_OR_REMOVE_ONE") for size in (1, 2))
  >>> bool(4.1 < one < two < 12)
  True

  Args:
    runs: what was released.
    delta: of the whole, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.
    size: the number of units, at least 1.

  Returns:
    An upper bound; infinite where none is known: without noise, for REPLACE_ONE,
    for samplers other than Poisson and FixedOrder.

  Raises:
    ValueError: as for `epsilon`.
  """
  checks.count("size", size, 1)
  name = _check_runs(runs, relation, "pld")
  if not runs:
    return 0.0
  return _group_epsilon(tuple(runs), float(delta), name, size)


def _group_event(run: Run, size: int) -> tuple[Any, float] | None:
  """Returns what a group sees, as if batches had room, and a delta for that.

  None where no event is known. In a fixed order all of its records may be in one
  batch.
  """
  sampler, noise = run.sampler, run.noise_multiplier
  if isinstance(sampler, sampling.FixedOrder):
    owed = _ends(run._replace(noise_multiplier=noise / size), "REPLACE_SPECIAL")
    return sampler.untruncated_event(noise / size, run.steps), owed
  if not isinstance(sampler, sampling.Poisson):
    return None
  grouped = dataclasses.replace(sampler, group_size=size * sampler.group_size)
  if sampler.expected_batch_size == sampler.num_examples:  # all of it, always
    event = sampler.untruncated_event(noise / size, run.steps)
  else:
    event = grouped.untruncated_event(noise, run.steps)
  return event, owed_delta(run._replace(sampler=grouped), "ADD_OR_REMOVE_ONE")


@functools.lru_cache(maxsize=256)
def _group_epsilon(
  runs: tuple[Run, ...], delta: float, relation: str, size: int
) -> float:
  """Composes the events of a group."""
  if relation == "REPLACE_ONE" or not all(run.noise_multiplier for run in runs):
    return math.inf
  events = [_group_event(run, size) for run in runs]
  known = [event for event in events if event is not None]
  if len(known) < len(events):
    return math.inf
  left = delta - sum(owed for _, owed in known)
  left = arithmetic.subtract_rounding(runs, left)
  if left <= 0:
    return math.inf
  once = [(event, 1) for event, _ in known]
  return _least(
    lambda interval: _composed(once, relation, interval).get_epsilon(left),
    _INTERVALS,
  )


def noise_multiplier(
  *,
  epsilon: float,
  delta: float,
  sampler: sampling.Sampler,
  steps: int,
  relation: Any = "ADD_OR_REMOVE_ONE",
  accountant: str = "pld",
) -> float:
  """Returns the least noise that satisfies (epsilon, delta).

  Formal guarantee: the function `epsilon` of the returned value is at most the
  target, so its guarantee holds.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> round(noise_multiplier(epsilon=8.0, delta=1 / 12000, sampler=sampler,
  ...                        steps=300), 2)
  0.75

  Args:
    epsilon: the target, positive; infinite means no noise.
    delta: in (0, 1 / num_examples).
    sampler: how batches are drawn.
    steps: the number of sums, at least 1.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    accountant: "pld" or "rdp".

  Returns:
    The noise multiplier, at most about 0.02% above the least possible; 0 for
    an infinite target.

  Raises:
    ValueError: as for `epsilon`, or if no noise reaches the target.
  """
  name = _check(delta, sampler, steps, relation, accountant)
  if not isinstance(epsilon, numbers.Real) or not epsilon > 0:
    raise ValueError(f"expected a positive epsilon, got {epsilon=}")
  if epsilon == math.inf:
    return 0.0
  least = arithmetic.least_delta([Run(sampler, 1.0, int(steps))])
  if accountant == "pld" and delta < 1.01 * least:
    raise ValueError(
      f"expected delta above {least:.2g} for {steps:,} steps, which is what double"
      f" precision leaves unknown, got {delta=}: give a larger one"
    )
  return _calibrate(
    float(epsilon), float(delta), sampler, int(steps), name, accountant
  )


@functools.lru_cache(maxsize=256)
def _calibrate(
  target: float,
  delta: float,
  sampler: sampling.Sampler,
  steps: int,
  relation: str,
  accountant: str,
) -> float:
  """Finds the noise: a cheap search first, then an exact one around it."""

  def excess(intervals: Any) -> Callable[[float], float]:
    def log_ratio(log_noise: float) -> float:
      run = Run(sampler, math.exp(log_noise), steps)
      value = _epsilon((run,), delta, relation, accountant, intervals)
      return math.log(min(max(value, 1e-300), 1e300) / target)

    return log_ratio

  start = math.log(sampler.group_size)
  rough = _root(excess(_COARSE), start, width=0.5, tolerance=0.01)
  exact = excess(_INTERVALS)
  log_noise = _root(exact, rough, width=0.02, tolerance=_TOLERANCE, growth=1.5)
  while exact(log_noise) > 0:
    log_noise += _TOLERANCE
  return math.exp(log_noise)


def _root(
  function: Callable[[float], float],
  start: float,
  *,
  width: float,
  tolerance: float,
  growth: float = 1.0,
) -> float:
  """Finds where a decreasing function crosses zero, searching from `start`.

  The first step has this width; steps down grow by the factor `growth`.
  """
  from scipy import optimize

  low = high = start
  while function(high) > 0:
    low, high, width = high, high + width, width * 1.5
    if high > 50:
      raise ValueError(
        "expected a reachable privacy target, got none up to a noise "
        "multiplier of 1e20: raise epsilon, delta or max_batch_size"
      )
  while low == high or function(low) <= 0:
    high, low, width = low, low - width, width * growth
  if function(high) == 0:
    return high
  return optimize.brentq(function, low, high, xtol=tolerance)


@functools.lru_cache(maxsize=4096)
def _epsilon(
  runs: tuple[Run, ...],
  delta: float,
  relation: str,
  accountant: str,
  intervals: tuple[tuple[float, float], ...],
) -> float:
  """Computes one epsilon with arguments that are known to be good."""
  if any(run.noise_multiplier == 0 for run in runs):
    return math.inf
  if accountant == "rdp":
    return _rdp_epsilon(runs, delta, relation)
  return _least(
    lambda interval: _pld_epsilon(runs, delta, relation, interval), intervals
  )


def _least(
  bound: Callable[[float], float], intervals: Sequence[tuple[float, float]]
) -> float:
  """Returns the least bound of intervals that are finer while it is small."""
  value = math.inf
  for interval, finer_below in intervals:
    value = min(value, float(bound(interval)))
    if value >= finer_below:
      break
  return value


def _pld_epsilon(
  runs: tuple[Run, ...], delta: float, relation: str, interval: float
) -> float:
  """Composes privacy loss distributions, rounded up to `interval`.

  Truncation is either in the distribution, or, where it is so rare that this
  makes no difference, paid for from delta, which is five times faster. So it is
  for samplers whose event does not know truncation, however rare it is.
  """
  delta = _after_ends(runs, delta, relation)
  delta = arithmetic.subtract_rounding(runs, delta)
  left = delta - _overflow_delta(runs)
  is_rare = left >= (1 - _NEGLIGIBLE) * delta
  if not all(run.sampler.knows_truncation for run in runs):
    is_rare = True
  if (left if is_rare else delta) <= 0:
    return math.inf
  events = []
  for run, count in collections.Counter(runs).items():
    make = run.sampler.untruncated_event if is_rare else run.sampler.event
    events.append((make(run.noise_multiplier, run.steps), count))
  composed = _composed(events, relation, interval)
  return float(composed.get_epsilon(left if is_rare else delta))


def _composed(
  events: Sequence[tuple[Any, int]], relation: str, interval: float
) -> Any:
  """Returns an accountant that has composed each event so many times."""
  from synthq_jax.privacy import mixtures  # loads dp_accounting, which is slow

  accountant = mixtures.Accountant(_relation(relation), interval)
  for event, count in events:
    accountant.compose(event, count)
  return accountant


def _rdp_epsilon(runs: tuple[Run, ...], delta: float, relation: str) -> float:
  """Composes Renyi divergences; truncation is paid for from delta."""
  left = _after_ends(runs, delta, relation) - _overflow_delta(runs)
  if left <= 0:
    return math.inf
  with _quiet_orders():
    return float(_renyi(runs, relation).get_epsilon(left))


def _renyi(runs: Sequence[Run], relation: str) -> Any:
  """Returns an accountant that has composed the runs as if batches had room."""
  from dp_accounting import rdp

  accountant = rdp.RdpAccountant(_RDP_ORDERS, _relation(relation))
  for run in runs:
    event = run.sampler.untruncated_event(run.noise_multiplier, run.steps)
    accountant.compose(event)
  return accountant


@contextlib.contextmanager
def _quiet_orders() -> Generator[None]:
  """Keeps dp_accounting from warning of orders that it leaves out.

  A sum that does not converge makes the divergence of its order infinite: the
  bound, a minimum over orders, holds without it.
  """
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def _overflow_delta(runs: tuple[Run, ...]) -> float:
  """Sums what the runs owe for truncation: see `Poisson.overflow_delta`."""
  return sum(run.sampler.overflow_delta(run.steps) for run in runs)


def _after_ends(runs: tuple[Run, ...], delta: float, relation: str) -> float:
  """Returns what of delta is left when the ends of noise are paid for."""
  owed = sum(_ends(run, relation) for run in runs)
  return delta if owed <= _UNPAID * delta else delta - owed


def _ends(run: Run, relation: str) -> float:
  """Bounds the probability that a unit moves a sum beyond where noise ends.

  Let noise z be a Gaussian on [-m, m] in each of d coordinates, and let a unit
  move the sum by s, of norm S in standard deviations. What lies where the
  neighbour's noise cannot be is all that a Gaussian's (epsilon, delta) does not
  cover, and has probability sum g(s_i), g(s) = Q(m - s) - Q(m), Q the Gaussian
  tail. g is convex in s^2 above s = 0.117 and at most 1.73 phi(m) s below, so
  at the largest sum one coordinate has all that is above: it is at most
  Q(m - S) + 1.73 phi(m) sqrt(d) S. Steps add up, also adaptive ones.

  Args:
    run: noisy sums.
    relation: under REPLACE_ONE a record moves a sum twice.
  """
  shift = (2 if relation == "REPLACE_ONE" else 1) / run.noise_multiplier
  uses = run.sampler.uses(run.steps)
  return sum(often * _past_end(times * shift) for times, often in uses.items())


def _past_end(moved: float) -> float:
  """Bounds what a sum that moves by so many deviations has past the end."""
  from scipy import stats

  if moved >= _END - 0.2:
    return 1.0
  chance = stats.norm.sf(_END - moved)
  chance += 1.73 * stats.norm.pdf(_END) * math.sqrt(_COORDINATES) * moved
  return float(chance)


def owed_delta(run: Run, relation: Any) -> float:
  """Returns what a run owes of delta, for truncation and where noise ends."""
  overflow = run.sampler.overflow_delta(run.steps)
  return overflow + _ends(run, checks.relation(relation))


def _relation(name: str) -> Any:
  """Returns dp_accounting's constant; loads dp_accounting, which is slow."""
  import dp_accounting

  return dp_accounting.NeighboringRelation[name]


def _check(
  delta: float | None,
  sampler: sampling.Sampler,
  steps: int,
  relation: Any,
  accountant: str,
) -> str:
  checks.count("steps", steps, 1)
  batches.check_sampler(sampler)
  sampler.check_relation(relation)
  name = checks.relation(relation)
  if accountant not in ACCOUNTANTS:
    raise ValueError(f"expected accountant in {ACCOUNTANTS}, got {accountant=}")
  if accountant == "rdp" and name == "REPLACE_ONE":
    raise ValueError(
      'expected accountant="pld" for relation=REPLACE_ONE, '
      "got accountant='rdp', which has no bound for it"
    )
  if accountant == "rdp" and sampler.group_size > 1:
    raise ValueError(
      'expected accountant="pld" for units of several records, got'
      f" accountant='rdp' and group_size={sampler.group_size}, for which it has"
      " no bound: let each unit be one record"
    )
  if delta is not None:
    check_delta(delta, sampler)
  return name


def _check_runs(runs: Sequence[Run], relation: Any, accountant: str) -> str:
  for run in runs:
    _check(None, run.sampler, run.steps, relation, accountant)
    _check_noise(run.noise_multiplier)
  return checks.relation(relation)


def check_delta(delta: float, sampler: sampling.Sampler) -> None:
  """Refuses a delta at which a record may be published as it stands.

  Args:
    delta: of a promise about one training.
    sampler: of its batches.

  Raises:
    ValueError: unless it is in (0, 1 / units), units being records but for
      groups.
  """
  limit = 1 / sampler.units
  if not 0 < delta < limit:
    counted = "num_units" if sampler.num_units else "num_examples"
    raise ValueError(
      f"expected delta in (0, 1/{counted} = {limit:.3g}), got {delta=}; "
      f"1 / (2 {counted}) is usual"
    )


def _check_noise(value: float) -> None:
  if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
    raise ValueError(
      f"expected a finite noise_multiplier >= 0, got noise_multiplier={value}"
    )
