"""Computes epsilon from noise, and noise from epsilon.

Epsilons are upper bounds: the privacy loss distribution is discretized
pessimistically, and a calibrated noise multiplier is checked against its target
before it is returned. All results are memoized.

Noise has standard deviation noise_multiplier x sensitivity, where sensitivity
is that of ADD_OR_REMOVE_ONE or REPLACE_SPECIAL, ALWAYS. Under REPLACE_ONE the
accountant itself allows for a record that moves from +C to -C: passing twice
the sensitivity as well would count it twice.

Drawn noise has a bounded range, unlike a Gaussian. A sum that a record moves past
the end of that range reveals the record. Delta pays for the probability of this
(`_bound_end_delta`) and for the rounding of doubles (`arithmetic`).
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
  "extra_delta",
  "group_epsilon",
  "noise_multiplier",
]

ACCOUNTANTS = ("pld", "rdp")

# Pairs of (interval of the discretized privacy loss, epsilon below which the next
# finer interval is tried). Coarse intervals overstate a small epsilon; fine ones
# take seconds for a large epsilon.
_INTERVALS = ((1e-3, 1.0), (1e-4, 0.03), (1e-5, 0.0))
_COARSE = ((1e-2, 1.0), (1e-3, 0.0))  # for the first search for the noise
_TOLERANCE = 1e-4  # of a calibrated noise multiplier, relative
_NEGLIGIBLE = 1e-3  # share of delta that may pay for truncation
_END = 9.1  # standard deviations that drawn noise reaches at least
_COORDINATES = 2.0**34  # most coordinates that one use of a record moves
_UNPAID = 1e-6  # share of delta below which the ends of noise are not charged
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

  Formal guarantee: take `steps` adaptively chosen sums of vectors over the
  sampler's batches. One record of a batch changes a sum by at most the
  sensitivity, and each sum gets Gaussian noise of standard deviation
  noise_multiplier x sensitivity. Publishing all noisy sums is
  (epsilon, delta)-DP for the sampler's records, this relation and this delta.
  The batches stay secret. The sampler's sizes are public.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> round(epsilon(noise_multiplier=1.0, delta=1 / 12000, sampler=sampler,
  ...               steps=300), 2)
  4.19

  Args:
    noise_multiplier: noise standard deviation over the sensitivity for
      ADD_OR_REMOVE_ONE, at least 0.
    delta: in (0, 1 / sampler.units).
    sampler: draws the batches; it limits the relations that can be claimed.
    steps: the number of sums, at least 1.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    accountant: "pld" (tight) or "rdp" (looser, a second opinion).

  Returns:
    An upper bound. It is infinite without noise, and if the ends of the noise,
    truncation and rounding cost all of delta.

  Raises:
    ValueError: if an argument is out of range, or if the sampler or the
      accountant has no bound for the relation.
  """
  name = _check(delta, sampler, steps, relation, accountant)
  _check_noise(noise_multiplier)
  run = Run(sampler, float(noise_multiplier), int(steps))
  return _compute_epsilon((run,), float(delta), name, accountant, _INTERVALS)


def composed_epsilon(
  runs: Sequence[Run],
  *,
  delta: float,
  relation: Any = "ADD_OR_REMOVE_ONE",
) -> float:
  """Returns the joint epsilon of several runs over the same records.

  Formal guarantee: as for `epsilon`, for all runs together; later runs may
  depend on what earlier ones published.

  Args:
    runs: the released runs, in any order.
    delta: of all runs together, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    An upper bound; 0 for no runs.

  Raises:
    ValueError: as for `epsilon`.
  """
  if not 0 < delta < 1:
    raise ValueError(f"expected delta in (0, 1), got {delta=}")
  name = _check_runs(runs, relation)
  if not runs:
    return 0.0
  return _compute_epsilon(tuple(runs), float(delta), name, "pld", _INTERVALS)


def group_epsilon(
  runs: Sequence[Run], *, delta: float, relation: Any, size: int
) -> float:
  """Returns the joint epsilon of several runs for a group of `size` units.

  Formal guarantee: as for `composed_epsilon`, for two data sets of which one
  has `size` units that the other lacks (ADD_OR_REMOVE_ONE) or holds as empty
  units (REPLACE_SPECIAL). The sum of a batch moves by at most the sensitivity for
  each of their records in the batch.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> run = Run(sampler, 1.0, 300)
  >>> single, pair = (group_epsilon([run], delta=1 / 12000, size=size,
  ...     relation="ADD_OR_REMOVE_ONE") for size in (1, 2))
  >>> bool(4.1 < single < pair < 12)
  True

  Args:
    runs: the released runs.
    delta: of all runs together, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.
    size: the number of units, at least 1.

  Returns:
    An upper bound. It is infinite if no bound is known: without noise, for
    REPLACE_ONE, for samplers other than Poisson and FixedOrder, and if the costs
    use up delta.

  Raises:
    ValueError: as for `epsilon`.
  """
  checks.count("size", size, 1)
  name = _check_runs(runs, relation)
  if not runs:
    return 0.0
  return _compute_group_epsilon(tuple(runs), float(delta), name, size)


def _make_group_event(run: Run, size: int) -> tuple[Any, float] | None:
  """Returns the untruncated event of a group of units, and its extra delta.

  None if no event is known. In a fixed order, one batch may hold all records of
  the group.
  """
  sampler, noise = run.sampler, run.noise_multiplier
  if isinstance(sampler, sampling.FixedOrder):
    group_run = run._replace(noise_multiplier=noise / size)
    extra = _bound_end_delta(group_run, "REPLACE_SPECIAL")
    return sampler.untruncated_event(noise / size, run.steps), extra
  if not isinstance(sampler, sampling.Poisson):
    return None
  grouped = dataclasses.replace(sampler, group_size=size * sampler.group_size)
  if sampler.expected_batch_size == sampler.num_examples:  # every record
    event = sampler.untruncated_event(noise / size, run.steps)
  else:
    event = grouped.untruncated_event(noise, run.steps)
  return event, extra_delta(run._replace(sampler=grouped), "ADD_OR_REMOVE_ONE")


@functools.lru_cache(maxsize=256)
def _compute_group_epsilon(
  runs: tuple[Run, ...], delta: float, relation: str, size: int
) -> float:
  """Composes the events of a group."""
  if relation == "REPLACE_ONE" or not all(run.noise_multiplier for run in runs):
    return math.inf
  events = [_make_group_event(run, size) for run in runs]
  known_events = [event for event in events if event is not None]
  if len(known_events) < len(events):
    return math.inf
  left = delta - sum(extra for _, extra in known_events)
  left = arithmetic.subtract_rounding(runs, left)
  if left <= 0:
    return math.inf
  once = [(event, 1) for event, _ in known_events]
  return _find_least(
    lambda interval: _compose(once, relation, interval).get_epsilon(left),
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
  """Returns the smallest noise multiplier that satisfies (epsilon, delta).

  Formal guarantee: the function `epsilon`, called with the returned value,
  returns at most the target. So the guarantee of `epsilon` holds at the target.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> round(noise_multiplier(epsilon=8.0, delta=1 / 12000, sampler=sampler,
  ...                        steps=300), 2)
  0.75

  Args:
    epsilon: the target, positive; infinite means no noise.
    delta: in (0, 1 / sampler.units).
    sampler: draws the batches.
    steps: the number of sums, at least 1.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    accountant: "pld" or "rdp".

  Returns:
    The noise multiplier, at most about 0.02% above the least possible; 0 for
    an infinite target.

  Raises:
    ValueError: as for `epsilon`, or if no noise reaches the target, or if delta
      is below the rounding of doubles.
  """
  name = _check(delta, sampler, steps, relation, accountant)
  if not isinstance(epsilon, numbers.Real) or not epsilon > 0:
    raise ValueError(f"expected a positive epsilon, got {epsilon=}")
  if epsilon == math.inf:
    return 0.0
  least = arithmetic.least_delta([Run(sampler, 1.0, int(steps))])
  if accountant == "pld" and delta < 1.01 * least:
    raise ValueError(
      f"expected delta above {least:.2g} for {steps:,} steps, twice the rounding"
      f" error of double precision, got {delta=}: give a larger delta"
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
  """Finds the noise: a coarse search first, then an exact one around it."""

  def excess(intervals: Any) -> Callable[[float], float]:
    def log_ratio(log_noise: float) -> float:
      run = Run(sampler, math.exp(log_noise), steps)
      value = _compute_epsilon((run,), delta, relation, accountant, intervals)
      return math.log(min(max(value, 1e-300), 1e300) / target)

    return log_ratio

  start = math.log(sampler.group_size)
  rough = _find_root(excess(_COARSE), start, width=0.5, tolerance=0.01)
  exact = excess(_INTERVALS)
  log_noise = _find_root(
    exact, rough, width=0.02, tolerance=_TOLERANCE, growth=1.5
  )
  while exact(log_noise) > 0:
    log_noise += _TOLERANCE
  return math.exp(log_noise)


def _find_root(
  function: Callable[[float], float],
  start: float,
  *,
  width: float,
  tolerance: float,
  growth: float = 1.0,
) -> float:
  """Finds the zero of a decreasing function, searching from `start`.

  The first step of the search is `width` wide. Each further step down is wider by
  the factor `growth`, each further step up by the factor 1.5.
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
def _compute_epsilon(
  runs: tuple[Run, ...],
  delta: float,
  relation: str,
  accountant: str,
  intervals: tuple[tuple[float, float], ...],
) -> float:
  """Computes one epsilon from checked arguments."""
  if any(run.noise_multiplier == 0 for run in runs):
    return math.inf
  if accountant == "rdp":
    return _compute_rdp_epsilon(runs, delta, relation)
  return _find_least(
    lambda interval: _compute_pld_epsilon(runs, delta, relation, interval),
    intervals,
  )


def _find_least(
  bound: Callable[[float], float], intervals: Sequence[tuple[float, float]]
) -> float:
  """Returns the least bound, trying finer intervals while it is small."""
  value = math.inf
  for interval, finer_below in intervals:
    value = min(value, float(bound(interval)))
    if value >= finer_below:
      break
  return value


def _compute_pld_epsilon(
  runs: tuple[Run, ...], delta: float, relation: str, interval: float
) -> float:
  """Composes privacy loss distributions, rounded up to `interval`.

  If truncation is so rare that it makes no difference, delta pays for it, which
  is five times faster. Otherwise the distribution models it. Samplers whose event
  does not model truncation always pay from delta.
  """
  delta = _subtract_end_delta(runs, delta, relation)
  delta = arithmetic.subtract_rounding(runs, delta)
  left = delta - _sum_overflow_delta(runs)
  is_rare = left >= (1 - _NEGLIGIBLE) * delta
  if not all(run.sampler.knows_truncation for run in runs):
    is_rare = True
  if not is_rare:
    delta -= _bound_pushed_past_end(runs)
  if (left if is_rare else delta) <= 0:
    return math.inf
  events = []
  for run, count in collections.Counter(runs).items():
    make = run.sampler.untruncated_event if is_rare else run.sampler.event
    events.append((make(run.noise_multiplier, run.steps), count))
  composed = _compose(events, relation, interval)
  return float(composed.get_epsilon(left if is_rare else delta))


def _compose(
  events: Sequence[tuple[Any, int]], relation: str, interval: float
) -> Any:
  """Returns an accountant that has composed each (event, count) pair."""
  from synthq_jax.privacy import mixtures  # loads dp_accounting, which is slow

  accountant = mixtures.Accountant(_load_relation(relation), interval)
  for event, count in events:
    accountant.compose(event, count)
  return accountant


def _compute_rdp_epsilon(
  runs: tuple[Run, ...], delta: float, relation: str
) -> float:
  """Composes Renyi divergences; delta pays for truncation."""
  from dp_accounting import rdp

  left = _subtract_end_delta(runs, delta, relation) - _sum_overflow_delta(runs)
  if left <= 0:
    return math.inf
  accountant = rdp.RdpAccountant(_RDP_ORDERS, _load_relation(relation))
  with _silence_order_warnings():
    for run in runs:
      event = run.sampler.untruncated_event(run.noise_multiplier, run.steps)
      accountant.compose(event)
    return float(accountant.get_epsilon(left))


@contextlib.contextmanager
def _silence_order_warnings() -> Generator[None]:
  """Silences dp_accounting's warnings about Renyi orders that it leaves out.

  A sum that does not converge makes the divergence of its order infinite. The
  bound is a minimum over orders, so it holds without this order.
  """
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def _sum_overflow_delta(runs: tuple[Run, ...]) -> float:
  """Sums the `overflow_delta` of all runs, their cost of truncation."""
  return sum(run.sampler.overflow_delta(run.steps) for run in runs)


def _subtract_end_delta(
  runs: tuple[Run, ...], delta: float, relation: str
) -> float:
  """Subtracts the cost of the ends of noise from delta, unless negligible."""
  extra = sum(_bound_end_delta(run, relation) for run in runs)
  return delta if extra <= _UNPAID * delta else delta - extra


def _bound_end_delta(run: Run, relation: str) -> float:
  """Bounds the probability that a unit moves a sum past the end of the noise.

  Let noise z be a Gaussian on [-m, m] in each of d coordinates, and let a unit
  move the sum by s, of norm S in standard deviations. A Gaussian's
  (epsilon, delta) covers all outcomes but those that the neighbour's noise cannot
  reach. These have probability sum g(s_i), where g(s) = Q(m - s) - Q(m) and Q is
  the Gaussian tail. g is convex in s^2 above s = 0.117, and at most 1.73 phi(m) s
  below. So at the largest sum, one coordinate holds everything above 0.117, and
  the probability is at most Q(m - S) + 1.73 phi(m) sqrt(d) S. The bounds of all
  steps add up, also of adaptive ones.

  Args:
    run: noisy sums.
    relation: under REPLACE_ONE a record moves a sum by twice the sensitivity.
  """
  shift = (2 if relation == "REPLACE_ONE" else 1) / run.noise_multiplier
  uses = run.sampler.uses(run.steps)
  return sum(
    expected_steps * _bound_past_end(times * shift)
    for times, expected_steps in uses.items()
  )


def _bound_past_end(moved: float) -> float:
  """Bounds the probability that a moved sum lies past the end of the noise.

  `moved` is the distance in standard deviations of the noise.
  """
  from scipy import stats

  if moved >= _END - 0.2:
    return 1.0
  chance = stats.norm.sf(_END - moved)
  chance += 1.73 * stats.norm.pdf(_END) * math.sqrt(_COORDINATES) * moved
  return float(chance)


def _bound_pushed_past_end(runs: tuple[Run, ...]) -> float:
  """Bounds the probability that truncation moves a sum past the end of the noise.

  A record that takes another one's place moves the sum twice as far.
  """
  return sum(
    run.sampler.overflow_delta(run.steps)
    * _bound_past_end(2 / run.noise_multiplier)
    for run in runs
  )


def extra_delta(run: Run, relation: Any) -> float:
  """Returns the delta that truncation and the ends of noise cost a run."""
  overflow = run.sampler.overflow_delta(run.steps)
  return overflow + _bound_end_delta(run, checks.relation(relation))


def _load_relation(name: str) -> Any:
  """Returns the constant of dp_accounting, whose import is slow."""
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


def _check_runs(runs: Sequence[Run], relation: Any) -> str:
  for run in runs:
    _check(None, run.sampler, run.steps, relation, "pld")
    _check_noise(run.noise_multiplier)
  return checks.relation(relation)


def check_delta(delta: float, sampler: sampling.Sampler) -> None:
  """Refuses a delta so large that it allows publishing a whole record.

  Args:
    delta: of a claim about one training.
    sampler: the sampler of the training.

  Raises:
    ValueError: unless delta is in (0, 1 / sampler.units). Units are records,
      unless the sampler has groups of records.
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
