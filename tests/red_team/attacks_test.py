"""Attacks of the red team that take little time, and what they found before."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from synthq_jax.optim import clipping
from tests.red_team import attack, attacks, losses, neighbours

_ONE_WAY = (
  "layers", "product_with_cotangents", "lora", "unused_and_empty",
  "tuples_and_none", "lookup_that_clips", "lookup_that_wraps", "one_hot",
  "jit_inside", "vmap_inside", "slope_of_a_slope", "custom_jvp",
  "stops_partly", "straight_through", "layer_norm", "rms_norm", "attention",
  "cross_entropy_of_large_logits", "grouped_convolution",
  "strided_and_dilated_convolution", "transposed_convolution_and_pool",
  "sums_along_and_sorts", "solves",
  "root_of_zero", "norm_of_zero", "division_by_little",
  "loss_of_minus_infinity", "branch_that_is_not_finite",
  "float16_of_float32", "bfloat16_of_bfloat16", "float16_of_float16",
  "float32_of_bfloat16", "loss_in_bfloat16", "callback_one_by_one",
  # All their gradients are formed.
  "slices_and_constant_of_a_scan", "scaled_by_data", "slices_that_are_returned",
  "stacked_parameters", "normalises_its_own_gradient", "slice_of_a_parameter",
  "parameter_in_branches", "product_with_itself", "weight_norm",
  "contracted_over_different_axes", "custom_vjp", "repeated_axes",
  "custom_jvp_of_a_parameter", "scalar_and_bias", "convolution",
)  # fmt: skip
"""Their parameters are used as another loss's: one way that keeps factors is
enough, by turns."""
_FORMED = (
  "dense", "tied_and_transposed", "scaled_lookup", "convolution",
  "tied_through_a_scan", "parameter_in_the_carry", "custom_vjp",
  "branch_that_is_not_finite", "examples_that_are_not_finite",
  "positions_that_cancel", "bfloat16_of_float32", "dropout",
)  # fmt: skip
"""Where no factors are kept, all are alike."""
_DRIFTS = re.compile(
  r"drift: (summand|product), block 4096 of 4096|"
  r"drift: lookup, block 8192 of 8192|drift: lookup, of 128 of 1024|"
  r"drift: summand, by 1 of 8192"
)
_ASCENTS = {"batch": "ascent: removed", "row batch query": "ascent: replaced"}
_DEVICES = re.compile(
  r"8 devices, shard_map: normalises|4 devices, ShardedGrad: shared"
)


def tried():
  """Yields attacks, how far they get at least, and which belong to the sweep.

  One that gets nowhere would show nothing.
  """
  some = [*losses.CASES][::3]
  for one in attacks.of_table():
    ways = ["ghost", "bookkeeping, factors"]
    if one.refused:
      ways = attack.STRATEGIES
    elif one.name in _ONE_WAY:
      ways = [ways[_ONE_WAY.index(one.name) % 2]]
    if one.name in _FORMED:
      ways = [*ways, "vmap", "bookkeeping, formed"]
    if one.strategy in ways:
      quick = "ghost" if one.name in some else "bookkeeping, factors"
      is_only = len(ways) == 1 or one.refused
      yield one, 0.0, not is_only and one.strategy != quick
  for one in attacks.of_sweep():
    # A sum in bfloat16 moved by 2 clip norms at 512 examples.
    is_half = one.dtype == "bfloat16"
    wanted = one.batch == 512 and (one.strategy != "vmap" or is_half)
    if wanted or one.batch == 1 and is_half:
      yield one, 0.99, False
  for one in attacks.of_drift():
    if _DRIFTS.fullmatch(f"{one.name} of {one.batch}"):
      yield one, 0.99, False
  for one in attacks.of_ascent():
    if _ASCENTS.get(one.strategy) == one.name:
      yield one, 0.9, False
  for one in attacks.of_devices():
    if _DEVICES.match(one.name):
      yield one, 0.99, False


@pytest.mark.parametrize(
  ("one", "least"),
  [
    pytest.param(
      one,
      least,
      id=f"{one.name}, {one.strategy}, {one.dtype}, {one.batch}",
      marks=[pytest.mark.slow] if is_slow else [],
    )
    for one, least, is_slow in tried()
  ],
)
def test_no_record_moves_a_clipped_sum_by_more_than_is_claimed(one, least):
  moved, verdict = attacks.judge(one)
  assert verdict == ("refused" if one.refused else "holds"), moved
  assert one.refused or float(moved) >= least


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_the_worst_example_attains_the_clip_norm_in_every_strategy(change):
  worst = neighbours.of_examples("product_with_cotangents", change)
  assert 0.99 <= min(worst.values())
  assert max(worst.values()) <= attacks.CLIMBED


@pytest.mark.parametrize("strategy", attack.STRATEGIES)
@pytest.mark.parametrize("name", ["straight_through", "bfloat16_of_float32"])
def test_the_others_and_its_place_change_no_bit_of_an_example(name, strategy):
  """A bit would do: these losses jump."""
  case = losses.CASES[name]
  batch = case.batch(13)
  others = jax.tree.map(lambda x: np.concatenate([x[:1], x[:0:-1]]), batch)
  grad_fn = clipping.clipped_grad(
    case.loss, l2_clip_norm=1.0, strategy=strategy
  )
  of = jax.jit(lambda batch: grad_fn(case.params, batch)[1])
  aux = of(batch)
  for place in (1, 5, 12):
    moved = of(jax.tree.map(lambda x, by=place: np.roll(x, by, 0), batch))
    jax.tree.map(
      lambda x, y, by=place: np.testing.assert_array_equal(x, np.roll(y, -by)),
      aux,
      moved,
    )
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x[0], y[0]), aux, of(others)
  )


def test_a_clip_norm_whose_squares_leave_the_range_of_float32_is_refused():
  """At 1e-25 squares were 0: no strategy clipped, and 1,732 clip norms came."""
  with pytest.raises(ValueError, match="l2_clip_norm"):
    clipping.clipped_grad(losses.CASES["dense"].loss, l2_clip_norm=1e-25)


def test_a_loss_that_asks_the_other_devices_is_refused():
  """Synchronised statistics: a row moved the rows beside it by 14 clip norms."""

  def coupled(p, b):
    return jnp.sum(p * b["x"], axis=1) * jax.lax.pmean(b["x"][:, 0], "rows")

  grad_fn = clipping.clipped_grad(coupled, l2_clip_norm=1.0, strategy="vmap")
  total = jax.shard_map(
    lambda p, b: jax.lax.psum(grad_fn(p, b)[0], "rows"),
    mesh=Mesh(np.array(jax.devices()), ("rows",)),
    in_specs=(P(), P("rows")),
    out_specs=P(),
  )
  with pytest.raises(ValueError, match="expected a loss of each example alone"):
    jax.jit(total)(jnp.zeros((1, 3)), {"x": jnp.ones((8, 3))})
