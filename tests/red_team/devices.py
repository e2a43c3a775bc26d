"""Neighbours on several devices: the row of one of them moves the whole sum."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from synthq_jax.optim import clipping
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import sharded_grad
from tests.red_team import losses, oracle

ROWS = 16
WAYS = ("ShardedGrad", "shard_map")


def move(name: str, strategy: str, count: int, way: str) -> float:
  """Returns the largest move in clip norms: a row removed, or half of replaced.

  Args:
    name: of a loss of the table.
    strategy: of clipping.
    count: devices.
    way: "ShardedGrad", or "shard_map" as people write it.
  """
  case = losses.CASES[name]
  grad_fn = clipping.clipped_grad(
    case.loss, l2_clip_norm=1.0, strategy=strategy
  )
  devices = jax.devices()[:count]
  batch = case.batch(ROWS)

  if way == "ShardedGrad":
    mesh = mesh_lib.make(mesh_lib.Shape(), devices)
    many = sharded_grad.ShardedGrad(grad_fn=grad_fn, mesh=mesh)
    of = jax.jit(lambda p, b, m: many(p, b, is_padding_example=m)[0])
  else:

    def on_device(params: Any, batch: Any, mask: Any) -> Any:
      total, _ = grad_fn(params, batch, is_padding_example=mask)
      return jax.lax.psum(total, "rows")

    rows = P("rows")
    of = jax.jit(
      jax.shard_map(
        on_device,
        mesh=Mesh(np.array(devices), ("rows",)),
        in_specs=(P(), rows, rows),
        out_specs=P(),
      )
    )

  def total(batch: Any, mask: Any) -> np.ndarray:
    return oracle.flat(of(case.params, batch, mask))

  nobody = np.zeros(ROWS, bool)
  whole, worst = total(batch, nobody), 0.0
  for row in (0, ROWS // 2 + 1, ROWS - 1):
    without = total(batch, np.arange(ROWS) == row)
    worst = max(worst, float(np.linalg.norm(whole - without)))
    other = jax.tree.map(np.array, batch)
    for x in jax.tree.leaves(other):
      if x.dtype == np.float32:
        x[row] *= -1e3
    replaced = total(other, nobody)
    worst = max(worst, float(np.linalg.norm(whole - replaced)) / 2)
  return worst
