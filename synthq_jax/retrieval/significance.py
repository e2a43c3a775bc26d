"""Computes confidence intervals of means over queries, and tests of differences.

All methods treat queries as draws from a larger set. They say nothing about another
training run, another collection or another kind of query. Queries of one user are
similar: with `owners`, users are drawn, each with all of their queries. For a mean
over several sets, the sets are fixed and queries are drawn within each set
("strata").

No interval accounts for kinds of queries that its sample lacks. If rare kinds of
query carry most of the difference, the interval is too narrow. Take a system that
is a little better on 98% of queries, but loses the others and so is no better on
average. It is found better "at 95%" in 47% of sets of 40 queries, 24 to 30% of 65,
12 to 16% of 100, 5 to 8% of 300.

References:
  Smucker, Allan and Carterette, "A Comparison of Statistical Significance Tests
  for Information Retrieval Evaluation", CIKM 2007.
  Fieller, "Some Problems in Interval Estimation", JRSS B 1954 (shares).
  Welch, "The Generalization of 'Student's' Problem When Several Different
  Population Variances Are Involved", Biometrika 1947.
  Cameron and Miller, "A Practitioner's Guide to Cluster-Robust Inference", JHR
  2015 (owners).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from synthq_jax import checks, intervals

__all__ = [
  "Comparison",
  "bonferroni",
  "bootstrap_interval",
  "compare",
  "paired_bootstrap",
  "share_of_gain",
  "stratified_interval",
  "stratified_t_test",
]

Values = Mapping[str, float] | Sequence[float] | np.ndarray
_BLOCK = 1 << 20  # numbers resampled at a time: 8 MiB
_ROUNDING = 1e-12
_LEVEL = 0.95
_FEW = 20  # values that differ from the rest, the least number for a bootstrap

Owners = Values | None


def bootstrap_interval(
  values: Values,
  owners: Owners = None,
  *,
  samples: int = 2000,
  seed: int,
) -> intervals.Interval:
  """Computes the 95% percentile bootstrap interval of a mean over queries.

  Queries, or users, are resampled with replacement, and the interval holds the
  middle 95% of the means. For few queries it is too narrow. With reciprocal
  ranks, half of them 0, 95% intervals cover 78% for 10 queries, 83% for 20 and 92%
  for 50. It is also too narrow if fewer than twenty values differ from the rest,
  however many there are. If these values are 0 and 1, Wilson's interval is returned
  instead.

  >>> bootstrap_interval([0.5, 0.5, 0.5], seed=0)
  Interval(mean=0.5, low=0.5, high=0.5)
  >>> f"{bootstrap_interval([1.0] * 50, seed=0):.3f}"
  '1.000 [0.929, 1.000]'

  Args:
    values: one per query, an array [query] or query id -> value.
    owners: the user of each query, in the form of `values`; None: all different.
    samples: the number of resampled means.
    seed: the seed of NumPy's generator; equal seeds give equal intervals.

  Returns:
    The mean and its interval.

  Raises:
    ValueError: if there are no values, one is not finite, a query has no owner,
      or `samples` is out of range.
  """
  array = _check_array("values", values)
  users = _number_owners(values, owners)
  interval = _bootstrap([array], [users], None, _LEVEL, samples, seed)
  shares = array
  if users is not None:
    shares = np.bincount(users, array) / np.bincount(users)
  few = min(np.sum(shares != 1), np.sum(shares != 0)) < _FEW
  if few and np.isin(array, (0, 1)).all():
    total = len(shares)
    return intervals.wilson(interval.mean * total, total)
  return interval


def stratified_interval(
  strata: Sequence[Values],
  weights: Sequence[float] | None = None,
  *,
  samples: int = 2000,
  seed: int,
) -> intervals.Interval:
  """Computes the 95% bootstrap interval of a mean over several sets of queries.

  The n queries of each set are resampled within the set, and deviations of its mean
  are widened by sqrt(n / (n - 1)).

  >>> stratified_interval([[1.0, 1.0, 1.0], [0.0]], seed=0).mean
  0.5

  Args:
    strata: the values of each set: one per query, an array [query] or query
      id -> value.
    weights: the weights of the sets' means, above 0, which are divided by their
      sum; None: equal.
    samples: the number of resampled means.
    seed: the seed of NumPy's generator.

  Returns:
    The weighted mean of the sets' means, and its interval.

  Raises:
    ValueError: as `bootstrap_interval`, or if a weight is missing or not above
      0.
  """
  arrays = [_check_array("values", values) for values in strata]
  no_owners = [None] * len(arrays)
  factors = [math.sqrt(len(x) / max(len(x) - 1, 1)) for x in arrays]
  return _bootstrap(arrays, no_owners, weights, _LEVEL, samples, seed, factors)


def _bootstrap(
  arrays: Sequence[np.ndarray],
  owners: Sequence[np.ndarray | None],
  weights: Sequence[float] | None,
  level: float,
  samples: int,
  seed: int,
  factors: Sequence[float] | None = None,
) -> intervals.Interval:
  shares = _normalize(weights, len(arrays))
  checks.within("(0, 1)", level=level)
  checks.at_least(1, samples=samples)
  rng = np.random.default_rng(seed)
  means = 0.0
  for share, array, users, factor in zip(
    shares, arrays, owners, factors or [1.0] * len(arrays), strict=True
  ):
    middle, drawn = array.mean(), _resample(array, users, samples, rng)
    means += share * (
      drawn if factor == 1 else middle + factor * (drawn - middle)
    )
  tail = (1 - level) / 2
  low, high = np.quantile(means, [tail, 1 - tail])
  mean = _compute_mean(shares, arrays)
  return intervals.Interval(mean=mean, low=float(low), high=float(high))


def _normalize(weights: Sequence[float] | None, number: int) -> np.ndarray:
  shares = np.asarray([1.0] * number if weights is None else weights, float)
  sound = np.isfinite(shares).all() and (shares > 0).all()
  if not number or shares.shape != (number,) or not sound:
    raise ValueError(
      f"expected sets of queries and a weight above 0 for each, got {number} "
      f"sets and weights={weights}; change them"
    )
  return shares / shares.sum()


def _compute_mean(shares: np.ndarray, arrays: Sequence[np.ndarray]) -> float:
  return float(sum(x * a.mean() for x, a in zip(shares, arrays, strict=True)))


def _resample(
  array: np.ndarray,
  users: np.ndarray | None,
  samples: int,
  rng: np.random.Generator,
) -> np.ndarray:
  """Computes the means of resampled queries, or users, shape [samples]."""
  sums = array if users is None else np.bincount(users, array)
  counts = None if users is None else np.bincount(users)
  means, block = [], max(1, _BLOCK // len(sums))
  for start in range(0, samples, block):
    rows = min(block, samples - start)
    drawn = rng.integers(len(sums), size=(rows, len(sums)))
    total = len(sums) if counts is None else counts[drawn].sum(axis=1)
    means.append(sums[drawn].sum(axis=1) / total)
  return np.concatenate(means)


def _number_owners(values: Values, owners: Owners) -> np.ndarray | None:
  """Returns the number of each query's owner, from 0, int [query]; or None."""
  if owners is None:
    return None
  if isinstance(values, Mapping):
    lacking = values.keys() - (owners if isinstance(owners, Mapping) else ())
    if lacking:
      raise ValueError(
        f"expected the owner of every query, got {len(lacking)} queries without"
        " one; pass query id -> owner"
      )
    owners = [owners[query] for query in values]
  if len(owners) != len(values):
    raise ValueError(
      f"expected the owner of every query, got {len(owners)} for {len(values)}"
      " queries"
    )
  return np.unique(np.asarray(owners), return_inverse=True)[1]


def paired_bootstrap(
  first: Values,
  second: Values,
  owners: Owners = None,
  *,
  level: float = 0.95,
  samples: int = 2000,
  seed: int,
) -> intervals.Interval:
  """Computes the bootstrap interval of the mean of paired differences.

  If it does not hold 0, the two systems differ at level 1 - `level`, with the
  limits that the module names. If fewer than twenty queries (or users) differ, the
  bootstrap is too narrow. Then the interval also covers exact intervals for the
  numbers of gains and losses, each of the size of the largest difference. It holds
  0 unless gains and losses differ significantly in number.

  >>> interval = paired_bootstrap([1.0] + [0.0] * 99, [0.0] * 100, seed=0)
  >>> interval.low < 0 < interval.mean
  True

  Args:
    first: values of one system, an array [query] or query id -> value.
    second: values of the other system on the same queries.
    owners: the user of each query, in the form of `first`; None: all different.
    level: the level of the interval, in (0, 1).
    samples: the number of resampled means.
    seed: the seed of NumPy's generator.

  Returns:
    Mean of `first` minus mean of `second`, and its interval.

  Raises:
    ValueError: as `bootstrap_interval`, or if the queries differ.
  """
  difference = _subtract(first, second)
  users = _number_owners(first, owners)
  interval = _bootstrap([difference], [users], None, level, samples, seed)
  if users is not None:  # a user's share of the mean, times the number of users
    sums = np.bincount(users, difference)
    difference = sums * (len(sums) / len(users))
  wins, losses = int(np.sum(difference > 0)), int(np.sum(difference < 0))
  if not 0 < wins + losses < _FEW:
    return interval
  up, down, win_share = (
    intervals.clopper_pearson(count, total, confidence=level)
    for count, total in (
      (wins, len(difference)),
      (losses, len(difference)),
      (wins, wins + losses),
    )
  )
  most = float(np.abs(difference).max())
  below = math.hypot(up.mean - up.low, down.high - down.mean)
  above = math.hypot(up.high - up.mean, down.mean - down.low)
  low = min(interval.low, interval.mean - most * below)
  high = max(interval.high, interval.mean + most * above)
  return intervals.Interval(
    mean=interval.mean,
    low=low if win_share.low > 0.5 else min(low, 0.0),
    high=high if win_share.high < 0.5 else max(high, 0.0),
  )


def stratified_t_test(
  first: Sequence[Values],
  second: Sequence[Values],
  weights: Sequence[float] | None = None,
  owners: Sequence[Owners] | None = None,
) -> float:
  """Tests whether two systems have the same mean over several sets of queries.

  The difference is the weighted mean of the sets' mean differences. Its variance is
  the sum of theirs, times squared weights, and its degrees of freedom are Welch's.
  With one set it is the paired t test. With owners the errors are cluster-robust.

  Args:
    first: values of one system for each set, an array [query] or query id ->
      value.
    second: values of the other system on the same queries.
    weights: the weights of the sets' means, above 0, which are divided by their
      sum; None: equal.
    owners: the users of each set's queries, in the form of its values; None: all
      different.

  Returns:
    The two-sided p value; 1 if the systems are equal on every query.

  Raises:
    ValueError: if the queries differ, a set has fewer than two queries (or users,
      with owners), or a weight is missing or not above 0.
  """
  triples = zip(first, second, owners or [None] * len(first), strict=True)
  differences = [
    _sum_by_owner(_subtract(ours, other), _number_owners(ours, users))
    for ours, other, users in triples
  ]
  shares = _normalize(weights, len(differences))
  for difference in differences:
    if len(difference) < 2:
      raise ValueError(
        f"expected at least 2 queries or users, got {len(difference)}; a t test"
        " needs a variance"
      )
  mean = _compute_mean(shares, differences)
  variances = shares**2 * [_estimate_variance(each) for each in differences]
  if not variances.any():
    largest = max(np.abs(each).max() for each in differences)
    if abs(mean) <= _ROUNDING * largest:
      return 1.0
    # The differences of a set are equal: the sign test, over those that are not 0.
    signs = np.concatenate([np.sign(each) for each in differences])
    gains, number = int(np.sum(signs > 0)), int(np.sum(signs != 0))
    return float(stats.binomtest(gains, number).pvalue)
  freedom = np.array([len(each) - 1 for each in differences])
  welch = variances.sum() ** 2 / (variances**2 / freedom).sum()
  statistic = mean / np.sqrt(variances.sum())
  return float(2 * stats.t.sf(abs(statistic), welch))


def _sum_by_owner(array: np.ndarray, users: np.ndarray | None) -> np.ndarray:
  """Returns one value per owner, with the mean of all queries.

  An owner's value sums the deviations of their queries from the mean. So the
  variance of the mean of these values is cluster-robust.
  """
  if users is None:
    return array
  mean = array.mean()
  deviations = np.bincount(users, array - mean)
  return mean + deviations * (len(deviations) / len(array))


def share_of_gain(
  row: Values, baseline: Values, reference: Values, owners: Owners = None
) -> intervals.Interval | None:
  """Computes (row - baseline) / (reference - baseline) with Fieller's 95% interval.

  The means are over the same queries, whose differences are taken as normal. Below
  0 the row is worse than the baseline, above 1 better than the reference.

  >>> baseline, reference = [0.0, 0.1, 0.0, 0.1], [0.9, 1.0, 1.0, 0.9]
  >>> half = [0.4, 0.6, 0.5, 0.5]
  >>> f"{share_of_gain(half, baseline, reference):.2f}"
  '0.50 [0.43, 0.57]'

  Args:
    row: values of the row, an array [query] or query id -> value.
    baseline: values of the system with none of the gain.
    reference: values of the system with all of the gain.
    owners: the user of each query, in the form of `row`; None: all different.

  Returns:
    The share and its interval. None if the reference is not significantly above the
    baseline: then the interval is unbounded.

  Raises:
    ValueError: if the queries differ or there are fewer than two (or users).
  """
  users = _number_owners(row, owners)
  top = _sum_by_owner(_subtract(row, baseline), users)
  bottom = _sum_by_owner(_subtract(reference, baseline), users)
  number = len(top)
  if number < 2:
    raise ValueError(f"expected at least 2 queries or users, got {number}")
  a, b = float(top.mean()), float(bottom.mean())
  (va, vab), (_, vb) = np.cov(top, bottom) / number
  t = float(stats.t.ppf((1 + _LEVEL) / 2, number - 1))
  g = t**2 * vb / b**2 if b else np.inf
  if b <= 0 or g >= 1:
    return None
  share = a / b
  middle = share - (g * vab / vb if vb else 0.0)
  left = va - 2 * share * vab + share**2 * vb
  left -= g * (va - (vab**2 / vb if vb else 0.0))
  half = t / b * max(left, 0.0) ** 0.5
  low, high = (middle - half) / (1 - g), (middle + half) / (1 - g)
  return intervals.Interval(mean=share, low=float(low), high=float(high))


def _estimate_variance(difference: np.ndarray) -> float:
  """Estimates the variance of the mean; 0 if differences differ by rounding."""
  if np.ptp(difference) <= _ROUNDING * np.abs(difference).max():
    return 0.0
  return float(difference.var(ddof=1)) / len(difference)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The comparison of a system with its baseline on the same queries.

  Attributes:
    label: the name of the comparison.
    difference: mean of the system minus mean of the baseline, with its bootstrap
      interval, which is not corrected for the number of tests.
    p_value: the two-sided p value of the paired t test, not corrected.
    corrected: the p value after Bonferroni's correction.
    is_significant: whether `corrected` is below alpha.
  """

  label: str
  difference: intervals.Interval
  p_value: float
  corrected: float
  is_significant: bool


def compare(
  pairs: Mapping[str, tuple[Values, Values]],
  owners: Owners = None,
  *,
  alpha: float = 0.05,
  samples: int = 2000,
  seed: int,
) -> tuple[Comparison, ...]:
  """Tests several systems, each against its baseline, as one family.

  Formal guarantee:
    If no system differs from its baseline, the probability that any comparison is
    significant is at most `alpha`, however the tests depend on each other.
    Assumed: the t test is valid for this number of queries.

  Args:
    pairs: label -> values of the system and of its baseline, on one set of
      queries each. Pass all tests that are made, also unreported ones.
    owners: the user of each query, in the form of the values; None: all
      different.
    alpha: the significance level, in (0, 1); intervals have level 1 - alpha.
    samples: the number of resampled means.
    seed: the seed of the bootstrap, which also depends on the order of queries.

  Returns:
    One comparison for each pair, in their order.

  Raises:
    ValueError: if the queries of a pair differ or are fewer than two.
  """
  p_values = [
    stratified_t_test([a], [b], owners=[owners]) for a, b in pairs.values()
  ]
  corrected = bonferroni(p_values)
  return tuple(
    Comparison(
      label=label,
      difference=paired_bootstrap(
        *pair, owners, level=1 - alpha, samples=samples, seed=seed
      ),
      p_value=p_value,
      corrected=joint,
      is_significant=joint < alpha,
    )
    for (label, pair), p_value, joint in zip(
      pairs.items(), p_values, corrected, strict=True
    )
  )


def bonferroni(p_values: Sequence[float]) -> list[float]:
  """Corrects p values for the number of tests.

  The probability that any true null hypothesis has a corrected value below x is at
  most x, however the tests depend on each other.

  >>> bonferroni([0.01, 0.5])
  [0.02, 1.0]

  Args:
    p_values: a p value for each test, also for unreported ones, in [0, 1].

  Returns:
    min(1, number of tests * p) for each.

  Raises:
    ValueError: if a value is outside [0, 1].
  """
  if any(not 0 <= p <= 1 for p in p_values):
    raise ValueError(
      f"expected p values in [0, 1], got p_values={list(p_values)}; check "
      "the tests that made them"
    )
  return [min(1.0, len(p_values) * p) for p in p_values]


def _subtract(first: Values, second: Values) -> np.ndarray:
  """Subtracts values query by query, matched by query id if there are ids."""
  if isinstance(first, Mapping) != isinstance(second, Mapping):
    raise ValueError(
      "expected two mappings or two arrays, got one of each; pass "
      "Evaluation.per_query[name] twice"
    )
  if isinstance(first, Mapping):
    if first.keys() != second.keys():
      odd = first.keys() ^ second.keys()
      raise ValueError(
        f"expected the same queries, got {len(odd)} of one system only;"
        " evaluate both on the same judgements"
      )
    second = [second[query] for query in first]
  a, b = _check_array("first", first), _check_array("second", second)
  if a.shape != b.shape:
    raise ValueError(
      f"expected the same queries, got {len(a)} and {len(b)} values; "
      "evaluate both on the same judgements"
    )
  return a - b


def _check_array(name: str, values: Values) -> np.ndarray:
  if isinstance(values, Mapping):
    values = list(values.values())
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or not array.size or not np.isfinite(array).all():
    raise ValueError(
      f"expected finite values, one per query, got {name} of shape "
      f"{array.shape}; check the evaluation"
    )
  return array
