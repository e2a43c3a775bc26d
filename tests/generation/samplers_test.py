import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthq_jax.generation import samplers

_DRAWS = 20_000
_LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -np.inf, 0.0, 0.9, -3.0], np.float32)


def _draws(sampler, logits=_LOGITS, seed=0):
  keys = jax.random.split(jax.random.key(seed), _DRAWS)
  rows = jnp.broadcast_to(jnp.asarray(logits), (_DRAWS, len(logits)))
  return np.asarray(jax.jit(sampler.sample)(rows, keys))


def _softmax(logits):
  weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return weights / weights.sum()


def _truncated(weights, kept):
  result = np.zeros_like(weights)
  result[kept] = weights[kept]
  return result / result.sum()


def _nucleus(logits, p):
  """The nucleus by sorting, in float64."""
  weights = _softmax(logits)
  order = np.argsort(-weights)
  count = np.searchsorted(np.cumsum(weights[order]), p) + 1
  return _truncated(weights, order[:count])


def _p_value(tokens, expected):
  """Chi-square of the draws; 0 if a draw was impossible."""
  observed = np.bincount(tokens, minlength=len(expected))
  possible = expected > 0
  if observed[~possible].any():
    return 0.0
  return stats.chisquare(
    observed[possible], len(tokens) * expected[possible]
  ).pvalue


@pytest.mark.parametrize("p", [0.5, 0.8, 0.95, 1.0])
def test_nucleus_draws_from_the_exact_truncated_distribution(p):
  assert _p_value(_draws(samplers.Nucleus(p)), _nucleus(_LOGITS, p)) > 1e-3


@pytest.mark.parametrize("wrong", [0.6, 0.95])
def test_the_chi_square_rejects_another_nucleus(wrong):
  tokens = _draws(samplers.Nucleus(0.8))
  assert _p_value(tokens, _nucleus(_LOGITS, wrong)) < 1e-9


def test_nucleus_applies_the_temperature_before_the_cut():
  tokens = _draws(samplers.Nucleus(0.8, temperature=2.0))
  assert _p_value(tokens, _nucleus(_LOGITS / 2, 0.8)) > 1e-3
  assert _p_value(tokens, _nucleus(_LOGITS, 0.8)) < 1e-9


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_the_nucleus_equals_a_sorted_one_on_many_random_rows(scale):
  logits = np.random.default_rng(1).normal(size=(200, 300)) * scale
  weights = jax.nn.softmax(jnp.asarray(logits, jnp.float32))
  kept = np.asarray(samplers._nucleus(weights, 0.8)) > 0
  descending = -np.sort(-np.asarray(weights, np.float64), axis=1)
  count = np.sum(np.cumsum(descending, axis=1) < 0.8, axis=1) + 1
  # Rounding of a sum in float32 may move the cut by one token, rarely.
  assert np.abs(kept.sum(axis=1) - count).max() <= 1
  assert np.mean(kept.sum(axis=1) == count) > 0.98


def test_nucleus_keeps_all_tokens_that_tie_with_the_last():
  weights = jnp.array([[0.4, 0.2, 0.2, 0.2]])
  kept = samplers._nucleus(weights, 0.5) > 0
  assert kept.tolist() == [[True, True, True, True]]


def test_a_tiny_nucleus_is_greedy():
  tokens = _draws(samplers.Nucleus(1e-6))
  assert set(tokens.tolist()) == {0}


def test_temperature_draws_from_the_exact_distribution():
  tokens = _draws(samplers.Temperature(0.7))
  assert _p_value(tokens, _softmax(_LOGITS / 0.7)) > 1e-3
  assert _p_value(tokens, _softmax(_LOGITS)) < 1e-9


def test_top_k_draws_from_the_exact_distribution():
  tokens = _draws(samplers.TopK(3, temperature=1.5))
  weights = _softmax(_LOGITS / 1.5)
  order = np.argsort(-weights)
  assert _p_value(tokens, _truncated(weights, order[:3])) > 1e-3
  assert _p_value(tokens, _truncated(weights, order[:4])) < 1e-9


def test_top_k_beyond_the_vocabulary_is_the_whole_distribution():
  tokens = _draws(samplers.TopK(1000))
  assert _p_value(tokens, _softmax(_LOGITS)) > 1e-3


def test_greedy_takes_the_largest_logit():
  keys = jax.random.split(jax.random.key(0), 2)
  logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
  assert samplers.Greedy().sample(logits, keys).tolist() == [1, 0]


def test_a_draw_never_has_weight_zero_however_the_sums_round():
  weights = np.zeros((4000, 513), np.float32)
  weights[:, 1::7] = np.random.default_rng(2).random((4000, 74)) ** 8
  keys = jax.random.split(jax.random.key(3), 4000)
  tokens = np.asarray(samplers._draw(jnp.asarray(weights), keys))
  assert (weights[np.arange(4000), tokens] > 0).all()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: samplers.Nucleus(0.0), "p=0.0"),
    (lambda: samplers.Nucleus(1.1), "p=1.1"),
    (lambda: samplers.Nucleus(0.8, temperature=0.0), "temperature=0.0"),
    (lambda: samplers.Temperature(-1.0), "temperature=-1.0"),
    (lambda: samplers.TopK(0), "k=0"),
  ],
)
def test_impossible_samplers_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
