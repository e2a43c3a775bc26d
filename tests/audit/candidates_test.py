"""Candidates: products that hold the secret, and their exact likelihoods."""

import dataclasses

import jax
import numpy as np
import pytest
import random_t5
from scipy import stats

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import candidates as candidates_lib
from synthq_jax.models import t5, t5_config

MODEL = dataclasses.replace(
  t5_config.get("tiny"), num_encoder_layers=1, num_decoder_layers=1
)
DIGITS = np.arange(20, 30)
APPLY = jax.jit(t5.Transformer(MODEL).apply)


def canary(secret, kind="own_query"):
  return canaries_lib.Canary(
    kind=kind,
    document="d",
    query="q",
    secret=tuple(secret),
    spelled="",
    repetitions=1,
    inserted=True,
  )


@pytest.mark.parametrize(
  ("num", "shape"), [(100, (10, 10)), (1000, (100, 10)), (7, (7, 1))]
)
def test_candidates_are_a_product_and_all_different(num, shape):
  one = canary([23, 21, 29])
  drawn = candidates_lib.draw(one, DIGITS, num, np.random.default_rng(0))
  assert (len(drawn.heads), len(drawn.lasts)) == shape
  secrets = drawn.secrets
  assert len({tuple(row) for row in secrets.tolist()}) == num
  assert tuple(secrets[0]) == one.secret
  assert np.isin(secrets, DIGITS).all()


def test_the_rank_of_a_random_secret_is_uniform_under_any_fixed_model():
  """The claim that makes ranks a test; candidates near the secret break it."""
  rng = np.random.default_rng(1)
  liking = rng.normal(size=(10, 10, 10)) + 3 * rng.normal(size=10)
  ranks, biased = [], []
  for _ in range(3000):
    secret = rng.choice(DIGITS, 3)
    drawn = candidates_lib.draw(canary(secret), DIGITS, 20, rng)
    values = liking[tuple((drawn.secrets - 20).T)]
    ranks.append(np.sum(values > values[0]))
    values = liking[tuple((np.sort(drawn.secrets) - 20).T)]
    biased.append(np.sum(values > liking[tuple(secret - 20)]))
  assert stats.chisquare(np.bincount(ranks, minlength=20)).pvalue > 1e-4
  assert (
    stats.chisquare(np.bincount(biased, minlength=21)[:20] + 1e-9).pvalue < 1e-4
  )


@pytest.fixture(name="params", scope="module")
def _params():
  return random_t5.params(MODEL)


def oracle(params, source, targets, begin, end):
  """Sums log-probabilities of the targets from `begin` to `end`, one by one."""
  total = []
  for target in targets:
    shifted = np.concatenate([[0], target[:-1]])[None]
    logits = APPLY({"params": params}, source[None], shifted)
    logs = np.asarray(jax.nn.log_softmax(logits))[0]
    total.append(sum(logs[t, target[t]] for t in range(begin, end)))
  return np.array(total)


def test_secrets_in_queries_get_their_likelihood_given_what_stands_before(
  params,
):
  records = {
    "inputs": np.array([[5, 6, 7, 1, 0], [9, 1, 0, 0, 0]]),
    "targets": np.array([[11, 12, 23, 21, 29, 1, 0], [24, 24, 20, 1, 0, 0, 0]]),
  }
  made = [canary([23, 21, 29]), canary([24, 24, 20], "digits_query")]
  rng = np.random.default_rng(0)
  drawn = [candidates_lib.draw(one, DIGITS, 12, rng) for one in made]
  found = candidates_lib.likelihoods(params, MODEL, made, records, drawn)
  for row, begin in enumerate((2, 0)):
    targets = candidates_lib.with_secrets(
      records["targets"][row], 3, drawn[row].secrets
    )
    expected = oracle(params, records["inputs"][row], targets, begin, begin + 3)
    np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


def test_secrets_in_documents_get_the_likelihood_of_the_query(params):
  records = {
    "inputs": np.array([[5, 23, 21, 1, 0]]),
    "targets": np.array([[11, 12, 1, 0]]),
  }
  one = canary([23, 21], "own_document")
  drawn = candidates_lib.draw(one, DIGITS, 6, np.random.default_rng(0))
  found = candidates_lib.likelihoods(
    params, MODEL, [one], records, [drawn], batch_size=4
  )
  sources = candidates_lib.with_secrets(records["inputs"][0], 2, drawn.secrets)
  expected = [
    oracle(params, source, records["targets"], 0, 3)[0] for source in sources
  ]
  np.testing.assert_allclose(found[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("num", "message"),
  [(1, "num_candidates=1"), (101, "at most 10 candidates in groups of 1 ")],
)
def test_too_few_or_too_many_candidates_are_refused(num, message):
  with pytest.raises(ValueError, match=message):
    candidates_lib.draw(canary([20, 21]), DIGITS, num, np.random.default_rng(0))
