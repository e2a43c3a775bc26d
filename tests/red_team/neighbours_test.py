"""Records that climb the gradient of what they move: never above the claim."""

import pytest

from tests.red_team import neighbours

ABOVE = 1 + 1e-3


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_the_worst_example_attains_the_clip_norm_in_every_strategy(change):
  worst = neighbours.of_examples("product_with_cotangents", change)
  assert 0.99 <= min(worst.values())
  assert max(worst.values()) <= ABOVE


def test_the_worst_pair_attains_the_claim_of_a_clipped_batch():
  assert 0.9 <= neighbours.of_pairs("batch", "removed") <= ABOVE


def test_the_worst_query_of_a_row_stays_below_its_claim():
  assert 0.9 <= neighbours.of_pairs("row batch query", "replaced") <= ABOVE
