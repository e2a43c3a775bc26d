"""Measures the precision of near-duplicate detectors on labelled pairs.

Somebody chose the labelled pairs, for example all pairs above some cosine. A
recall is a share of these pairs alone. Several pairs often belong to one topic
and are not independent, so intervals resample whole groups of pairs.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from synthq_jax import checks, intervals

__all__ = ["grouped_interval", "threshold"]


def threshold(
  scores: Float[np.ndarray, " pair"],
  labels: Bool[np.ndarray, " pair"],
  *,
  precision: float,
) -> float:
  """Returns the lowest threshold above 0 that reaches a precision.

  Pairs without a common feature score 0: no threshold of a detector is 0.

  Precision is the share of near-duplicates among the pairs that score at least
  the threshold. It need not rise with the threshold; the lowest threshold finds
  the most pairs. The labels choose the threshold, so the precision on other
  pairs is lower on average. Quote its interval, at best on held-out pairs.

  >>> scores = np.array([0.9, 0.8, 0.7, 0.6])
  >>> threshold(scores, np.array([True, True, False, False]), precision=0.6)
  0.7

  Args:
    scores: scores of labelled pairs.
    labels: True for near-duplicates.
    precision: the least precision, in (0, 1].

  Returns:
    One of the scores.

  Raises:
    ValueError: if no threshold reaches the precision, there is no pair, labels
      are missing, or a score is not finite.
  """
  checks.within("(0, 1]", precision=precision)
  scores, labels = np.asarray(scores, float), np.asarray(labels)
  if (
    not scores.size
    or scores.ndim != 1
    or scores.shape != labels.shape
    or labels.dtype != bool
    or not np.isfinite(scores).all()
  ):
    raise ValueError(
      "expected finite scores and a boolean label for each, got shapes"
      f" {scores.shape} and {labels.shape} of {labels.dtype}; check the pairs"
    )
  order = np.argsort(-scores, kind="stable")
  scores, right = scores[order], np.cumsum(labels[order])
  # A threshold accepts all pairs of equal score or none.
  last = np.flatnonzero(np.append(np.diff(scores) != 0, True))[::-1]
  thresholds, reached = scores[last], right[last] / (last + 1)
  may_be = thresholds > 0
  enough = np.flatnonzero((reached >= precision) & may_be)
  if not len(enough):
    most = reached[may_be].max(initial=0.0)
    raise ValueError(
      f"expected a threshold with precision={precision}, got at most"
      f" {most:.3f}; ask for less, or use another detector"
    )
  return float(thresholds[enough[0]])


def grouped_interval(
  hits: Sequence[float],
  counted: Sequence[float],
  groups: Sequence[Hashable],
  *,
  confidence: float = 0.95,
) -> intervals.Interval:
  """Returns a share and its interval, with groups as independent units.

  The share is the sum of `hits` over the sum of `counted`, such as correct pairs
  over found pairs; both sums vary between samples. The interval is Wilson's for
  an effective number of independent pairs: the number with the same variance as
  the groups, at most the sum of `counted`. If a group has several pairs,
  Student's quantile lowers this number; the fewer the groups, the more. If all
  pairs agree, or there is one group, it is the number of groups.

  >>> hits, counted, topics = [1, 1, 0], [1, 1, 1], ["a", "a", "b"]
  >>> f"{grouped_interval(hits, counted, topics):.2f}"
  '0.67 [0.00, 1.00]'

  Args:
    hits: numerator of each pair, at most its denominator.
    counted: denominator of each pair, >= 0.
    groups: group of each pair.
    confidence: confidence of the interval, in (0, 1).

  Returns:
    The share and its interval; nan if the denominators are all 0.

  Raises:
    ValueError: if numbers of pairs differ.
  """
  hits, counted = np.asarray(hits, float), np.asarray(counted, float)
  if not len(hits) == len(counted) == len(groups):
    raise ValueError(
      f"expected a group for each pair, got {len(hits)} hits, {len(counted)}"
      f" counted, {len(groups)} groups; check the pairs"
    )
  if not counted.sum():
    return intervals.Interval(mean=math.nan, low=math.nan, high=math.nan)
  names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
  group_ids = np.array([names[name] for name in groups])
  total, share = counted.sum(), hits.sum() / counted.sum()
  num_groups = np.count_nonzero(np.bincount(group_ids, counted))
  # First-order effect of each group on the share.
  effects = np.bincount(group_ids, hits - share * counted) / total
  effective = float(num_groups)
  if num_groups > 1 and 0 < share < 1:
    variance = float(effects @ effects) * num_groups / (num_groups - 1)
    effective = min(total, share * (1 - share) / max(variance, 1e-300))
    if num_groups < np.count_nonzero(counted):
      effective *= _compute_reduction(
        np.bincount(group_ids, counted), confidence
      )
  return intervals.wilson(share * effective, effective, confidence=confidence)


def _compute_reduction(sizes: np.ndarray, confidence: float) -> float:
  """Returns the factor by which few groups reduce the effective sample.

  It is the squared ratio of the normal to Student's quantile. The degrees of
  freedom belong to Kish's effective number of equal groups.
  """
  freedom = max(1.0, sizes.sum() ** 2 / (sizes @ sizes) - 1.0)
  tail = (1.0 - confidence) / 2
  return float((stats.norm.isf(tail) / stats.t.isf(tail, freedom)) ** 2)
