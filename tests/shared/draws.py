"""Exact distributions of drawn tokens, and a test of draws against them."""

import numpy as np
from scipy import stats


def softmax(logits):
  weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return weights / weights.sum()


def truncated(weights, kept):
  result = np.zeros_like(weights)
  result[kept] = weights[kept]
  return result / result.sum()


def nucleus(logits, p):
  """The nucleus by sorting, in float64."""
  weights = softmax(logits)
  order = np.argsort(-weights)
  count = np.searchsorted(np.cumsum(weights[order]), p) + 1
  return truncated(weights, order[:count])


def p_value(tokens, expected):
  """Chi-square of the draws; 0 if a draw was impossible."""
  observed = np.bincount(tokens, minlength=len(expected))
  possible = expected > 0
  if observed[~possible].any():
    return 0.0
  return stats.chisquare(
    observed[possible], len(tokens) * expected[possible]
  ).pvalue
