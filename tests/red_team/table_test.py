"""Every loss of the table, with every strategy, beside the oracle."""

import pytest

from synthq_jax.optim import bookkeeping
from tests.red_team import attack, losses

BOUND = 1 + 1e-4
SOUND = [name for name, case in losses.CASES.items() if not case.refused]
REFUSED = [name for name, case in losses.CASES.items() if case.refused]


@pytest.mark.parametrize("strategy", attack.STRATEGIES)
@pytest.mark.parametrize("name", SOUND)
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
