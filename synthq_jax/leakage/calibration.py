"""How far a detector of near-duplicates can be trusted: from labelled pairs.

Labels are of pairs that somebody chose, such as those above some cosine: a
recall is among these alone. Several pairs are often of one topic, and then fewer
independent ones than they seem: intervals draw whole groups.
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
  above: float = -math.inf,
) -> float:
  """Returns the lowest threshold with a wanted precision.

  Precision is that of the pairs which score at least the threshold. It need not
  rise with the threshold; the lowest is taken because it finds most. It was
  chosen by looking at the labels, so that on other pairs the precision is lower
  on average: quote its interval, better on pairs kept apart.

  >>> scores = np.array([0.9, 0.8, 0.7, 0.6])
  >>> threshold(scores, np.array([True, True, False, False]), precision=0.6)
  0.7

  Args:
    scores: of labelled pairs.
    labels: which of them are near-duplicates.
    precision: the wanted one, in (0, 1].
    above: the threshold has to be above it.

  Returns:
    A score that occurs.

  Raises:
    ValueError: if no threshold reaches it, there is no pair, labels are missing,
      or a score is not finite.
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
  # Pairs of equal score are found together.
  last = np.flatnonzero(np.append(np.diff(scores) != 0, True))[::-1]
  thresholds, reached = scores[last], right[last] / (last + 1)
  may_be = thresholds > above
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
  """Returns a share and its interval, whole groups being drawn.

  The share is the sum of `hits` over the sum of `counted`, such as right pairs
  over found ones; both sums vary from draw to draw. The interval is Wilson's for
  as many independent pairs as would vary as much as the groups do, at most as
  there are, and fewer by Student's quantile where groups are few; where all pairs
  agree, or there is one group, for as many as there are groups.

  >>> hits, counted, topics = [1, 1, 0], [1, 1, 1], ["a", "a", "b"]
  >>> f"{grouped_interval(hits, counted, topics):.2f}"
  '0.67 [0.00, 1.00]'

  Args:
    hits: what a pair adds above the line, at most what it adds below.
    counted: what it adds below the line, >= 0.
    groups: which belong together, one per pair.
    confidence: of the interval, in (0, 1).

  Returns:
    The share and its interval; nan where nothing counts.

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
  names = {name: place for place, name in enumerate(dict.fromkeys(groups))}
  places = np.array([names[name] for name in groups])
  total, share = counted.sum(), hits.sum() / counted.sum()
  number = np.count_nonzero(np.bincount(places, counted))
  # The linear part of the share: what each group moves it by.
  moved = np.bincount(places, hits - share * counted) / total
  effective = float(number)
  if number > 1 and 0 < share < 1:
    variance = float(moved @ moved) * number / (number - 1)
    effective = min(total, share * (1 - share) / max(variance, 1e-300))
    if number < np.count_nonzero(counted):
      effective *= _few(np.bincount(places, counted), confidence)
  return intervals.wilson(share * effective, effective, confidence=confidence)


def _few(sizes: np.ndarray, confidence: float) -> float:
  """Returns the share of a sample that a variance from few groups leaves.

  Student's quantile for the normal one, with as many degrees of freedom as
  groups of equal size would have (Kish).
  """
  freedom = max(1.0, sizes.sum() ** 2 / (sizes @ sizes) - 1.0)
  tail = (1.0 - confidence) / 2
  return float((stats.norm.isf(tail) / stats.t.isf(tail, freedom)) ** 2)
