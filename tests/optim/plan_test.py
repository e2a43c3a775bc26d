"""What is formed for each example, and what stays in factors."""

import jax
import jax.numpy as jnp
import pytest

from synthq_jax.optim import strategies
from synthq_jax.optim.bookkeeping import plans


def is_formed(positions, rows, columns, dtype, keep_ratio):
  """Plans for one dense layer; nothing is computed."""

  def loss_fn(params, batch):
    out = batch.astype(dtype) @ params["kernel"].astype(dtype)
    return jnp.sum(jnp.square(out.astype(jnp.float32)), axis=(1, 2))

  plan = plans.make(
    loss_fn,
    {"kernel": jax.ShapeDtypeStruct((rows, columns), jnp.float32)},
    (jax.ShapeDtypeStruct((2, positions, rows), jnp.float32),),
    keep_ratio=keep_ratio,
  )
  return bool(plan.formed)


@pytest.mark.parametrize(
  ("positions", "rows", "columns", "dtype", "formed"),
  [
    # T5 1.1 Large and XL, encoder: of less than twice, and of 2.7 and 3.8
    # times their factors' bytes.
    (384, 1024, 1024, jnp.bfloat16, True),
    (384, 2048, 2048, jnp.bfloat16, True),
    (384, 2048, 5120, jnp.bfloat16, True),
    (384, 2048, 2048, jnp.float32, False),
    # Decoder: 128 positions save a third of the work for the same memory.
    (128, 512, 1024, jnp.bfloat16, False),
    (128, 768, 768, jnp.bfloat16, False),
    (128, 2048, 5120, jnp.bfloat16, False),
  ],
)
def test_half_precision_forms_what_saves_much_work(
  positions, rows, columns, dtype, formed
):
  found = is_formed(
    positions, rows, columns, dtype, strategies.KEEP_RATIOS["bookkeeping"]
  )
  assert found == formed
  assert not is_formed(positions, rows, columns, dtype, keep_ratio=0.0)
