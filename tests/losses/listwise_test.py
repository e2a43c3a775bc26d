"""Cross-entropy of a query's relevant documents among its candidates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.losses import listwise

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(6, 9)).astype(np.float32)
IS_CANDIDATE = RNG.random((6, 9)) < 0.7
IS_CANDIDATE[0] = False
RELEVANT = (RNG.random((6, 9)) < 0.3) & IS_CANDIDATE
RELEVANT[1] = False


def by_hand(row):
  there = np.flatnonzero(IS_CANDIDATE[row])
  wanted = np.flatnonzero(RELEVANT[row])
  if not len(wanted):
    return 0.0
  exact = SCORES[row].astype(np.float64)
  total = np.log(np.exp(exact[there]).sum())
  return np.mean([total - exact[one] for one in wanted])


def test_it_is_the_mean_of_minus_log_softmax_over_the_relevant():
  found = listwise.cross_entropy(SCORES, RELEVANT, IS_CANDIDATE)
  expected = [by_hand(row) for row in range(6)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found[0] == found[1] == 0.0 and RELEVANT.any(axis=1).sum() > 2


@pytest.mark.parametrize("value", [0.0, 1e30, -np.inf, np.nan])
def test_padding_has_no_part_in_it_whatever_stands_there(value):
  scores = np.where(IS_CANDIDATE, SCORES, value)

  def total(scores):
    return listwise.cross_entropy(scores, RELEVANT, IS_CANDIDATE).sum()

  assert total(scores) == total(SCORES)
  slopes = jax.grad(total)(jnp.asarray(scores))
  assert np.isfinite(slopes).all() and not np.any(slopes[~IS_CANDIDATE])
  np.testing.assert_allclose(slopes.sum(axis=1), 0, atol=1e-6)


def test_a_query_has_the_loss_that_it_has_alone():
  together = listwise.cross_entropy(SCORES, RELEVANT, IS_CANDIDATE)
  for row in range(6):
    part = slice(row, row + 1)
    alone = listwise.cross_entropy(
      SCORES[part], RELEVANT[part], IS_CANDIDATE[part]
    )
    assert alone[0] == together[row]
