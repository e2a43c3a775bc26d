"""What is formed for each example, and what stays in factors."""

import jax
import jax.numpy as jnp
import pytest

from synthq_jax import optim
from synthq_jax.optim import strategies
from synthq_jax.optim.bookkeeping import plans


def is_formed(positions, rows, columns, dtype, strategy):
  """Plans for one dense layer; nothing is computed."""

  def loss_fn(params, batch):
    out = batch.astype(dtype) @ params["kernel"].astype(dtype)
    return jnp.sum(jnp.square(out.astype(jnp.float32)), axis=(1, 2))

  plan = plans.make(
    loss_fn,
    {"kernel": jax.ShapeDtypeStruct((rows, columns), jnp.float32)},
    (jax.ShapeDtypeStruct((2, positions, rows), jnp.float32),),
    **strategies.get_plan_options(strategy),
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
  positions, rows, columns, dtype, formed, monkeypatch
):
  shape = positions, rows, columns, dtype
  assert is_formed(*shape, "bookkeeping") == formed
  # Ghost clipping is there to save memory: it would keep it for all layers.
  assert not is_formed(*shape, "ghost")
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  assert not is_formed(*shape, "bookkeeping")


@pytest.mark.parametrize(("recomputed", "formed"), [(False, 1), (True, 0)])
def test_recomputed_parts_form_nothing_that_is_larger(recomputed, formed):
  """Whoever computes again wants the memory."""

  def layer(x, kernel):
    return x @ kernel.astype(x.dtype), None

  def loss_fn(params, batch):
    step = jax.checkpoint(layer) if recomputed else layer
    x, _ = jax.lax.scan(step, batch.astype(jnp.bfloat16), params)
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2))

  plan = plans.make(
    loss_fn,
    jax.ShapeDtypeStruct((3, 1024, 1024), jnp.float32),
    (jax.ShapeDtypeStruct((2, 384, 1024), jnp.float32),),
    **strategies.get_plan_options("bookkeeping"),
  )
  assert len(plan.formed) == formed


def test_recomputed_parts_keep_no_gradient_of_single_examples():
  """In half precision, long texts and recomputed layers in a loop, too."""
  layers, batch, positions, size = 4, 4, 384, 1024

  def loss_fn(params, batch):
    @jax.checkpoint
    def layer(x, kernel):
      return jnp.tanh(x @ kernel.astype(x.dtype)), None

    x, _ = jax.lax.scan(layer, batch.astype(jnp.bfloat16), params)
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2))

  def temporaries(strategy):
    grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0, strategy=strategy)
    x = jax.ShapeDtypeStruct((batch, positions, size), jnp.float32)
    params = jax.ShapeDtypeStruct((layers, size, size), jnp.float32)
    made = jax.jit(lambda *a: grad_fn(*a)[0]).lower(params, x).compile()
    return made.memory_analysis().temp_size_in_bytes

  formed = 2 * layers * batch * size**2  # in half precision
  vmap = temporaries("vmap")
  assert temporaries("bookkeeping") < vmap - formed
  assert temporaries("ghost") < vmap - 1.5 * formed
