"""No row moves the sum of several devices by more than the clip norm."""

import pytest

from tests.red_team import attack, devices


@pytest.mark.parametrize("way", devices.WAYS)
@pytest.mark.parametrize("strategy", attack.STRATEGIES)
@pytest.mark.parametrize(
  ("name", "count"),
  [("normalises_its_cotangent", 8), ("shared_by_remat_and_scan", 4)],
)
def test_a_row_of_one_device_moves_the_sum_by_at_most_the_clip_norm(
  name, count, strategy, way
):
  assert 0.99 <= devices.move(name, strategy, count, way) <= 1 + 1e-4
