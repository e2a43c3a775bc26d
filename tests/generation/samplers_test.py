import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthq_jax.generation import decoding

_DRAWS = 20_000
_LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -np.inf, 0.0, 0.9, -3.0], np.float32)


def _draws(sampler, logits=_LOGITS, seed=0):
  keys = jax.random.split(jax.random.key(seed), _DRAWS)
  rows = jnp.broadcast_to(jnp.asarray(logits), (_DRAWS, len(logits)))
  return np.asarray(jax.jit(sampler.sample)(rows, keys))


def _top(logits, k):
  weights = draws.softmax(logits)
  return draws.truncated(weights, np.argsort(-weights)[:k])


@pytest.mark.parametrize(
  ("sampler", "right", "wrong"),
  [
    (decoding.Nucleus(p), draws.nucleus(_LOGITS, p), draws.nucleus(_LOGITS, q))
    for p, q in ((0.5, 0.8), (0.8, 0.95), (1.0, 0.8))
  ]
  + [
    (  # the temperature comes before the cut
      decoding.Nucleus(0.8, temperature=2.0),
      draws.nucleus(_LOGITS / 2, 0.8),
      draws.nucleus(_LOGITS, 0.8),
    ),
    (
      decoding.Nucleus(1.0, temperature=0.7),
      draws.softmax(_LOGITS / 0.7),
      draws.softmax(_LOGITS),
    ),
    (decoding.Nucleus(1e-6), _top(_LOGITS, 1), _top(_LOGITS, 2)),
  ],
)
def test_draws_follow_the_exact_distribution_and_no_other(
  sampler, right, wrong
):
  tokens = _draws(sampler)
  assert draws.p_value(tokens, right) > 1e-3 or right.max() == 1
  assert (right[tokens] > 0).all()
  assert draws.p_value(tokens, wrong) < 1e-9


def _kept(sampler, logits):
  """Returns which tokens of each row are inside the cut: [row, vocab]."""
  rows, vocab = logits.shape
  each = jnp.repeat(jnp.asarray(logits), vocab, axis=0)
  table = decoding._make_table(each, sampler.temperature)
  above = decoding._select_above(table, jnp.asarray(logits).reshape(-1))
  return np.asarray(sampler._make_cut(table)(above)).reshape(rows, vocab)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_the_nucleus_equals_a_sorted_one_on_many_random_rows(scale):
  logits = np.random.default_rng(1).normal(size=(40, 300)) * scale
  logits = logits.astype(np.float32)
  kept = _kept(decoding.Nucleus(0.8), logits)
  expected = np.stack([draws.nucleus(row, 0.8) > 0 for row in logits])
  # Rounding of a sum in float32 may move the cut by one token, rarely.
  differing = (kept != expected).sum(axis=1)
  assert differing.max() <= 1
  assert np.mean(differing == 0) > 0.95


def test_cuts_keep_all_tokens_that_tie_with_the_last():
  ties = np.log(np.array([[0.4, 0.2, 0.2, 0.2, 1e-30]], np.float32))
  expected = [[True, True, True, True, False]]
  assert _kept(decoding.Nucleus(0.5), ties).tolist() == expected
  tokens = _draws(decoding.Nucleus(0.5), ties[0])
  assert draws.p_value(tokens, np.array([0.4, 0.2, 0.2, 0.2, 0])) > 1e-3


_VOCAB = 32_128  # of T5; a row has 251 blocks


def _wide_logits():
  logits = np.random.default_rng(4).normal(size=_VOCAB) * 3
  logits[::5] = -np.inf
  return logits.astype(jnp.bfloat16)  # many ties


def _wide_draws(sampler, logits, rows=200, calls=10):
  draw = jax.jit(sampler.sample)
  many = jnp.broadcast_to(jnp.asarray(logits), (rows, _VOCAB))
  keys = jax.random.split(jax.random.key(1), (calls, rows))
  return np.concatenate([np.asarray(draw(many, k)) for k in keys])


def _binned_p_value(tokens, expected):
  """Chi-square over some 50 groups of tokens, the frequent ones alone."""
  order = np.argsort(-expected, kind="stable")
  before = np.cumsum(expected[order]) - expected[order]
  group = np.empty(len(expected), int)
  group[order] = np.minimum(before * 50, 49)
  if (expected[tokens] == 0).any():
    return 0.0
  shares = np.bincount(group, expected, 50)
  observed = np.bincount(group[tokens], minlength=50)
  there = shares > 0
  return stats.chisquare(observed[there], len(tokens) * shares[there]).pvalue


def _with_ties(logits, least):
  """The softmax of the logits that are at least `least`."""
  weights = draws.softmax(logits.astype(np.float64))
  return draws.truncated(weights, logits >= least)


@pytest.mark.parametrize(
  ("sampler", "wrong"),
  [
    (decoding.Nucleus(0.8), decoding.Nucleus(0.6)),
    (decoding.Nucleus(1.0, 0.8), decoding.Nucleus(1.0, 1.1)),
  ],
)
def test_samplers_are_exact_on_the_vocabulary_of_t5_in_bfloat16(sampler, wrong):
  logits = _wide_logits()
  ranked = np.sort(logits.astype(np.float64))[::-1]

  def expected(sampler):
    if sampler.p == 1:
      return draws.softmax(logits.astype(np.float64) / sampler.temperature)
    last = np.searchsorted(np.cumsum(draws.softmax(ranked)), sampler.p)
    return _with_ties(logits, ranked[last])

  tokens = _wide_draws(sampler, logits)
  assert _binned_p_value(tokens, expected(sampler)) > 1e-3
  assert _binned_p_value(tokens, expected(wrong)) < 1e-6


def test_a_few_possible_tokens_among_many_impossible_are_all_drawn():
  logits = np.full(_VOCAB, -np.inf, np.float32)
  places = [0, 127, 128, _VOCAB - 1]  # the edges of blocks
  logits[places] = [0.0, 1.0, 0.5, -0.5]
  expected = draws.softmax(logits)
  tokens = _wide_draws(decoding.Nucleus(1.0), logits, calls=2)
  assert draws.p_value(tokens, expected) > 1e-3


@pytest.mark.parametrize(
  "sampler",
  [
    decoding.Greedy(),
    decoding.Nucleus(0.3, temperature=2.0),
    decoding.Nucleus(1.0),
  ],
)
def test_a_row_draws_the_same_alone_in_bfloat16_or_float32(sampler):
  logits = np.random.default_rng(6).normal(size=(24, 1000))
  logits = jnp.asarray(logits, jnp.bfloat16)
  keys = jax.random.split(jax.random.key(6), 24)
  draw = jax.jit(sampler.sample)
  together = draw(logits, keys)
  np.testing.assert_array_equal(
    draw(logits.astype(jnp.float32), keys), together
  )
  one = [draw(logits[i : i + 1], keys[i : i + 1])[0] for i in range(24)]
  np.testing.assert_array_equal(one, together)


def test_greedy_takes_the_first_of_equal_logits():
  logits = _wide_logits().reshape(4, -1)
  logits[:, [300, 4000]] = 100.0
  keys = jax.random.split(jax.random.key(0), 4)
  tokens = decoding.Greedy().sample(jnp.asarray(logits), keys)
  assert tokens.tolist() == [300] * 4


def test_a_draw_never_has_weight_zero_however_the_sums_round():
  weights = np.zeros((4000, 513), np.float32)
  weights[:, 1::7] = np.random.default_rng(2).random((4000, 74)) ** 8
  for uniform in (0.0, 0.5, 1 - 2.0**-24, 1.0):
    share = jnp.full(4000, uniform, jnp.float32)
    tokens = np.asarray(decoding._invert(jnp.asarray(weights), share))
    assert (weights[np.arange(4000), tokens] > 0).all()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: decoding.Nucleus(0.0), "p=0.0"),
    (lambda: decoding.Nucleus(1.1), "p=1.1"),
    (lambda: decoding.Nucleus(0.8, temperature=0.0), "temperature=0.0"),
  ],
)
def test_impossible_samplers_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_row_without_finite_logits_ends_and_leaves_others_alone(bad):
  sampler = decoding.Nucleus(0.8)
  logits = np.random.default_rng(0).normal(size=(3, 200)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 3)
  draw = jax.jit(sampler.sample)
  expected = draw(jnp.asarray(logits), keys)
  logits[1, :] = bad if bad == -np.inf else logits[1, :]
  logits[1, 7] = bad
  got = draw(jnp.asarray(logits), keys)
  assert got[1] == 0
  np.testing.assert_array_equal(got[jnp.array([0, 2])], expected[::2])
