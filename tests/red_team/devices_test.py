"""No row moves the sum of several devices by more than the clip norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from synthq_jax.optim import clipping
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
