"""Book-keeping and ghost clipping: which factors are kept.

Every way to use a parameter is in the table of `tests/red_team/losses.py`.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.losses import seq2seq
from synthq_jax.optim import clipping, strategies
from synthq_jax.optim.bookkeeping import plans
from tests.red_team import losses as table

BATCH = 4


FORMED = {
  "tied_through_a_scan": set(),
  "joined_before_their_use": {"e", "u"},  # also along a summed axis
  "shared_in_nested_scans": set(),
  "own_slices_of_a_scan": set(),
  "slices_and_constant_of_a_scan": {"w"},  # transposed first
  "stacked_and_shared_in_scans": set(),
  "half_precision_in_rematerialised_scan": set(),
  "tied_around_a_rematerialised_scan": set(),
  "scan_in_remat": set(),
  "lookups_in_a_scan": {"k"},  # concatenated with itself first
  "shared_by_remat_and_scan": set(),
  "scans_of_one_iteration": {"s"},  # of which a slice is taken first
  "parameter_in_the_carry": {"w"},
  "slices_that_are_returned": {"s"},
}
"""Parameters whose gradient is formed though factors would do if they could."""


@pytest.mark.parametrize("name", FORMED)
def test_bodies_of_scans_and_remat_keep_their_factors(name):
  case = table.CASES[name]
  batch = case.batch(table.ROWS)
  plan = plans.make(case.loss, case.params, (batch,), keep_ratio=0.0)
  paths = sorted(case.params)
  assert {paths[index] for index in plan.formed} == FORMED[name]


def plain(params, batch):
  return jnp.sum(batch["x"] @ params["w"], axis=1)


def ghost_program():
  grad_fn = clipping.clipped_grad(plain, l2_clip_norm=1.0, strategy="ghost")
  params, batch = {"w": jnp.zeros((32, 32))}, {"x": jnp.ones((3, 32))}
  return jax.make_jaxpr(grad_fn)(params, batch)


def test_both_passes_of_ghost_clipping_are_one_program():
  loops = [e for e in ghost_program().eqns if e.primitive.name == "scan"]
  assert [loop.params["length"] for loop in loops] == [2]


def test_ghost_clipping_forms_no_gradient_of_a_single_example():
  program = str(ghost_program())
  assert "f32[3,32]" in program
  assert "f32[3,32,32]" not in program
  assert "f32[3,1,32,32]" not in program


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_parameters_in_double_precision_are_clipped(strategy):
  """A weight that is used twice keeps its factors, which are float64 then."""

  def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["w"]
    return jnp.sum(hidden**2, axis=(1, 2))

  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=(32, 32))}
  batch = {"x": rng.normal(size=(3, 2, 32))}
  with jax.enable_x64(True):
    got, expected = (
      jax.jit(clipping.clipped_grad(loss_fn, l2_clip_norm=1.0, strategy=name))(
        params, batch
      )
      for name in (strategy, "vmap")
    )
  assert got[0]["w"].dtype == got[1].norms.dtype == jnp.float32
  np.testing.assert_allclose(got[0]["w"], expected[0]["w"], atol=1e-5)
  np.testing.assert_allclose(got[1].norms, expected[1].norms, rtol=1e-4)


def test_ghost_clipping_keeps_remat_and_bookkeeping_does_too():
  case = table.CASES["tied_around_a_rematerialised_scan"]

  def count(strategy):
    grad_fn = clipping.clipped_grad(
      case.loss, l2_clip_norm=1.0, strategy=strategy
    )
    jaxpr = jax.make_jaxpr(grad_fn)(case.params, case.batch(table.ROWS))
    return str(jaxpr).count("differentiated=True")

  assert count("ghost") >= 2
  assert count("bookkeeping") >= 1


def test_no_array_of_all_examples_gradients_of_a_large_table_is_formed():
  rows, dim = 5000, 8

  def loss_fn(p, b):
    x = p["e"][b["ids"]]
    return seq2seq.cross_entropy(x @ p["e"].T, b["ids"])

  params = {"e": jnp.zeros((rows, dim))}
  batch = {"ids": jnp.ones((BATCH, 3), int)}
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)
  jaxpr = str(jax.make_jaxpr(grad_fn)(params, batch))
  assert f"f32[{BATCH},3,{rows}]" in jaxpr.replace(f"{BATCH},1,", f"{BATCH},")
  assert f"f32[{BATCH},{rows},{dim}]" not in jaxpr
  assert f"f32[{BATCH},1,{rows},{dim}]" not in jaxpr


def test_a_large_parameter_used_in_an_odd_way_is_logged_once(caplog):
  def loss_fn(p, b):
    return jnp.sum(jnp.sin(p["odd"])) * b["x"]

  params = {"odd": jnp.zeros(plans.LARGE)}
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      jax.eval_shape(grad_fn, params, {"x": jnp.ones(2)})
  (record,) = caplog.records
  assert "['odd']" in record.getMessage() and "'sin'" in record.getMessage()


def test_a_loss_averaged_over_the_batch_is_refused():
  grad_fn = clipping.clipped_grad(
    lambda p, b: jnp.mean(p * b["x"]), l2_clip_norm=1.0
  )
  with pytest.raises(ValueError, match="do not average"):
    grad_fn(jnp.array(1.0), {"x": jnp.ones(2)})


@pytest.mark.parametrize(("rows", "is_formed"), [(8, True), (5000, False)])
def test_a_small_table_that_is_looked_up_often_is_formed(rows, is_formed):
  """Or else a position bias is a product of all pairs of pairs of positions."""

  def loss_fn(p, b):
    return jnp.sum(p["rel"][b["ids"]] ** 2, axis=(1, 2))

  params = {"rel": jnp.zeros((rows, 8))}
  batch = {"ids": jnp.zeros((BATCH, 50), int)}
  plan = plans.make(
    loss_fn, params, (batch,), keep_ratio=strategies.KEEP_RATIOS["ghost"]
  )
  assert (plan.formed == (0,)) == is_formed
