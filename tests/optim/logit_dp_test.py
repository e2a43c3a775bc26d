"""The transform from a clipped contrastive sum to a private mean."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses

Relation = dp_accounting.NeighboringRelation
ENTRIES = 40_000


def encode(params, x):
  x = x * params["w"][None]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def make(method, clip=0.5):
  return optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=losses.Softmax(temperature=1.0),
    l2_clip_norm=clip,
    method=method,
    max_batch_size=8,
  )


def transform(fn, **changes):
  arguments = {
    "relation": Relation.ADD_OR_REMOVE_ONE,
    "unit": "pair",
    "noise_multiplier": 1.5,
    "denominator": 4.0,
    "key": jax.random.key(1),
  }
  return optim.logit_dp(fn, **arguments | changes)


def spread(tx):
  zero = {"w": jnp.zeros(ENTRIES)}
  mean, _ = tx.update(zero, tx.init(zero))
  return float(jnp.std(mean["w"]))


@pytest.mark.parametrize(
  ("method", "unit", "relation"),
  [
    (optim.Logit(), "pair", "ADD_OR_REMOVE_ONE"),
    (optim.Logit(), "query", "REPLACE_SPECIAL"),
    (optim.Row(), "query", "ADD_OR_REMOVE_ONE"),
    (optim.Row(negatives="public"), "pair", "ADD_OR_REMOVE_ONE"),
    (optim.Group(size=2), "pair", "ADD_OR_REMOVE_ONE"),
    (optim.Batch(), "pair", "ADD_OR_REMOVE_ONE"),
  ],
)
def test_noise_is_scaled_to_the_functions_own_sensitivity(
  method, unit, relation
):
  fn = make(method)
  expected = 1.5 * fn.sensitivity(relation, unit) / 4.0
  found = spread(transform(fn, unit=unit, relation=relation))
  error = 1 / np.sqrt(2 * ENTRIES)  # of a standard deviation, relative
  assert abs(found / expected - 1) < 5 * error
  assert abs(found / (1.03 * expected) - 1) > 5 * error


def test_the_accountant_alone_doubles_for_replaced_records():
  fn = make(optim.Logit())
  added = spread(transform(fn))
  replaced = spread(transform(fn, relation=Relation.REPLACE_ONE))
  assert added == replaced
  for method in (optim.Logit(), optim.Row(), optim.Row(negatives="public"),
                 optim.Group(size=2), optim.Batch()):  # fmt: skip
    one, two = (
      make(method).sensitivity(name, "pair")
      for name in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE")
    )
    assert two <= 2 * one
