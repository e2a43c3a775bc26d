"""Every loss of the table, with every strategy, beside the oracle."""

import jax
import numpy as np
import pytest

from synthq_jax.optim import clipping
from tests.red_team import attack, losses

BOUND = 1 + 1e-4
SOUND = [name for name, case in losses.CASES.items() if not case.refused]
REFUSED = [name for name, case in losses.CASES.items() if case.refused]


# jax_privacy's strategy has no factors of its own: the command tries it on all.
TRIED = [(name, s) for name in SOUND for s in ("bookkeeping", "ghost")]
TRIED += [(name, "vmap") for name in SOUND[::3]]


@pytest.mark.parametrize(("name", "strategy"), TRIED)
def test_a_clipped_sum_is_the_oracles_and_no_example_exceeds_the_clip_norm(
  name, strategy
):
  case = losses.CASES[name]
  off, alone, moved = attack.table(case, strategy, losses.ROWS)
  assert alone <= BOUND
  assert moved <= BOUND
  assert off <= case.tolerance


@pytest.mark.parametrize("strategy", attack.STRATEGIES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_couple_examples_is_refused_by_name(name, strategy):
  case = losses.CASES[name]
  with pytest.raises(ValueError, match=case.refused):
    attack.table(case, strategy, losses.ROWS)


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
