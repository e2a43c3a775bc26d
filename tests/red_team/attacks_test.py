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

_DRIFTS = re.compile(
  r"drift: (summand|product), block (512 of 512|4096 of 4096)|"
  r"drift: lookup, block 8192 of 8192|drift: lookup, of 128 of 1024|"
  r"drift: summand, by 1 of (256|8192)"
)
_ASCENTS = {"batch": "ascent: removed", "row batch query": "ascent: replaced"}
_DEVICES = re.compile(r"8 devices.*: normalises|4 devices.*: shared")


def tried():
  """Yields attacks, how far they get at least, and which belong to the sweep.

  One that gets nowhere would show nothing.
  """
  some = [*losses.CASES][::3]  # where no factors are kept, all are alike
  for one in attacks.of_table():
    every = one.strategy in ("bookkeeping, factors", "ghost")
    formed = one.strategy in ("bookkeeping", "vmap")
    if every or formed and (one.refused or one.name in some):
      quick = "ghost" if one.name in some else "bookkeeping, factors"
      yield one, 0.0, not one.refused and one.strategy != quick
  for one in attacks.of_sweep():
    if one.batch in (1, 1024):
      yield one, 0.99, False
  for one in attacks.of_drift():
    if _DRIFTS.fullmatch(f"{one.name} of {one.batch}"):
      yield one, 0.99, one.batch >= 8192
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
@pytest.mark.parametrize(
  "name", ["straight_through", "sums_along_and_sorts", "bfloat16_of_float32"]
)
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
