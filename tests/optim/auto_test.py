"""The choice of a strategy: counts, memory, and what is said about it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.optim import auto, strategies
from synthq_jax.optim.bookkeeping import jaxprs

BATCH, LENGTH, ROWS, COLUMNS = 8, 16, 96, 64


def loss_fn(params, batch):
  return jnp.sum(jnp.tanh(batch["x"] @ params["w"]) ** 2, axis=(1, 2))


PARAMS = {"w": jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)}
X = {"x": jax.ShapeDtypeStruct((BATCH, LENGTH, ROWS), jnp.float32)}
FORWARD = 2 * LENGTH * ROWS * COLUMNS


def test_costs_are_those_of_the_products(monkeypatch):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  costs = auto.choose(loss_fn, PARAMS, X, backend="tpu").costs
  gram = 2 * LENGTH**2 * (ROWS + COLUMNS)
  assert costs["vmap"].flops == BATCH * 3 * FORWARD
  assert costs["bookkeeping"].flops == BATCH * (3 * FORWARD + gram)
  assert costs["ghost"].flops == BATCH * (5 * FORWARD + gram)
  assert costs["vmap"].extra_bytes == BATCH * 4 * ROWS * COLUMNS
  factors = LENGTH * (ROWS + COLUMNS)
  assert costs["bookkeeping"].extra_bytes == BATCH * 4 * factors
  assert costs["ghost"].extra_bytes == 0


def test_products_inside_other_functions_count():
  def repeated(w, x):
    body = jax.checkpoint(lambda x, w: (jax.jit(jnp.dot)(x, w), None))
    x, _ = jax.lax.scan(body, x, jnp.stack([w] * 5))
    return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

  shapes = [jax.ShapeDtypeStruct((7, 7), jnp.float32)] * 2
  jaxpr = jax.make_jaxpr(repeated)(*shapes)
  counted = jaxprs.count_products(jaxpr.jaxpr)
  assert counted.flops == (5 + 2) * 2 * 7**3
  assert counted.traffic_bytes == (5 + 2) * 2 * 4 * 7**2


def test_a_convolution_counts():
  def convolved(kernel, x):
    return jax.lax.conv(x, kernel, (2, 2), "SAME")

  shapes = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((32, 8, 3, 3), (1, 8, 16, 16))
  ]
  counted = jaxprs.count_products(jax.make_jaxpr(convolved)(*shapes).jaxpr)
  assert counted.flops == 2 * (8 * 3 * 3) * (32 * 8 * 8)
  assert counted.traffic_bytes == 2 * 4 * (32 * 8 * 8)


def test_a_weight_used_in_every_turn_of_a_loop_is_not_formed_there():
  """Its gradient would be written for each example in each turn."""

  def recurrent(params, batch):
    def turn(h, x):
      joined = jnp.concatenate([params["w"], params["v"]], axis=1)
      return jnp.tanh((h + x) @ joined), None

    xs = jnp.swapaxes(batch["x"], 0, 1)
    h, _ = jax.lax.scan(turn, jnp.zeros_like(xs[0]), xs)
    return jnp.sum(h, axis=1)

  half = jax.ShapeDtypeStruct((ROWS, ROWS // 2), jnp.float32)
  long = {"x": jax.ShapeDtypeStruct((BATCH, 256, ROWS), jnp.float32)}
  found = auto.choose(recurrent, {"w": half, "v": half}, long, backend="cpu")
  factors = BATCH * 2 * 256 * (ROWS + ROWS // 2) * 4
  costs = auto.choose(
    recurrent,
    {"w": half, "v": half},
    long,
    backend="cpu",
    microbatch_size=BATCH,
  ).costs
  assert costs["bookkeeping"].extra_bytes == factors
  assert costs["vmap"].traffic_bytes > 10 * costs["bookkeeping"].traffic_bytes
  assert found.strategy == "bookkeeping"


def test_a_cpu_takes_few_examples_with_much_work_at_once():
  few = {"x": jax.ShapeDtypeStruct((64, 512, 1024), jnp.float32)}
  wide = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
  found = auto.choose(loss_fn, wide, few, backend="cpu")
  assert found.microbatch_size < 64
  many = {"x": jax.ShapeDtypeStruct((64, 1, 1024), jnp.float32)}
  found = auto.choose(loss_fn, wide, many, backend="cpu")
  assert found.microbatch_size == 64
  fixed = auto.choose(loss_fn, wide, few, backend="cpu", microbatch_size=32)
  assert fixed.microbatch_size == 32
  assert fixed.costs["vmap"].extra_bytes == 32 * 4 * 1024 * 4096
  assert auto.choose(loss_fn, wide, few, backend="tpu").microbatch_size == 64


def test_a_full_device_gets_ghost():
  for memory, expected in ((1e12, "bookkeeping"), (1.0, "ghost")):
    found = auto.choose(loss_fn, PARAMS, X, backend="cpu", memory_bytes=memory)
    assert found.strategy == expected


def test_a_tpu_gets_vmap_while_its_memory_allows():
  """Short of memory traffic, the fewest FLOPs win."""
  params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
  long = {"x": jax.ShapeDtypeStruct((BATCH, 2048, 512), jnp.float32)}
  found = auto.choose(loss_fn, params, long, backend="tpu", memory_bytes=1e12)
  costs = found.costs
  assert costs["vmap"].flops <= costs["bookkeeping"].flops
  assert found.strategy in ("vmap", "bookkeeping")
  assert "not measured" in found.reason
  wide = {"w": jax.ShapeDtypeStruct((8192, 8192), jnp.float32)}
  short = {"x": jax.ShapeDtypeStruct((64, 8, 8192), jnp.float32)}
  found = auto.choose(loss_fn, wide, short, backend="tpu")
  assert found.strategy == "bookkeeping"  # 16 GiB of gradients otherwise


@pytest.mark.parametrize("microbatch", [None, 2])
def test_auto_says_what_it_chose_and_agrees(caplog, microbatch):
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)}
  batch = {"x": jnp.asarray(rng.normal(size=(4, 3, 6)), jnp.float32)}
  results = []
  auto._log_once.cache_clear()
  with caplog.at_level(logging.INFO, logger="synthq_jax.optim.auto"):
    for strategy in ("auto", "vmap"):
      grad_fn = optim.clipped_grad(
        loss_fn,
        l2_clip_norm=0.1,
        strategy=strategy,
        microbatch_size=microbatch,
      )
      results.append(grad_fn(params, batch)[0]["w"])
  np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
  (record,) = caplog.records
  size = microbatch or 4
  assert f"on cpu for {size} of 4 examples at once" in record.getMessage()


def convolved(params, batch):
  x = jax.lax.conv(batch["x"], params["kernel"], (1, 1), "SAME")
  return jnp.sum(jnp.tanh(x) ** 2, axis=(1, 2, 3))


IMAGES = {"x": jax.ShapeDtypeStruct((64, 2, 6, 6), jnp.float32)}
KERNEL = {"kernel": jax.ShapeDtypeStruct((3, 2, 3, 3), jnp.float32)}


def test_a_convolution_on_cpus_is_in_no_loop():
  params, batch = jax.tree.map(
    lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape)),
    (KERNEL, IMAGES),
  )
  sums = {}
  for together in (64, 16, 1):
    grad_fn = optim.clipped_grad(
      convolved, l2_clip_norm=0.5, strategy="vmap", microbatch_size=together
    )
    traced = jax.make_jaxpr(grad_fn)(params, batch)
    loops = [
      each.params.get("unroll")
      for each in jaxprs.get_equations(traced.jaxpr)
      if each.primitive.name in ("scan", "while")
      and "conv_general_dilated"
      in set().union(*map(jaxprs.get_primitives, jaxprs.get_inner(each)))
    ]
    # 64 turns are too many to write out.
    assert loops == {64: [], 16: [4], 1: [1]}[together]
    sums[together] = grad_fn(params, batch)[0]["kernel"]
  np.testing.assert_allclose(sums[16], sums[64], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sums[1], sums[64], rtol=1e-5, atol=1e-6)


def test_a_convolution_that_only_cuts_patches_may_be_in_a_loop():
  """Twenty times as slow there, it still is a tenth of the layers' work."""

  def patches(params, batch):
    x = jax.lax.conv(batch["x"], params["kernel"], (4, 4), "VALID")
    for _ in range(8):
      x = jnp.einsum("bchw,cd->bdhw", x, params["layer"])
    return jnp.sum(x**2, axis=(1, 2, 3))

  def turns(width):
    params = {
      "kernel": jax.ShapeDtypeStruct((width, 3, 4, 4), jnp.float32),
      "layer": jax.ShapeDtypeStruct((width, width), jnp.float32),
    }
    one = {"x": jax.ShapeDtypeStruct((1, 3, 32, 32), jnp.float32)}
    return jaxprs.convolves_in_loops(patches, params, one, turns=4)

  # Shares 48 / (48 + 8 * width).
  assert turns(1024)
  assert not turns(2048)


def test_auto_takes_no_more_microbatches_than_are_written_out():
  many = {"x": jax.ShapeDtypeStruct((4096, 2, 6, 6), jnp.float32)}
  chosen = auto.choose(convolved, KERNEL, many, backend="cpu")
  assert 4096 // chosen.microbatch_size <= jaxprs.MAX_UNROLLED


def test_auto_writes_out_no_more_than_is_compiled_in_seconds():
  def deep(params, batch):
    x = batch["x"]
    for _ in range(200):
      x = jnp.tanh(jnp.sin(x))
    return convolved(params, batch | {"x": x})

  many = {"x": jax.ShapeDtypeStruct((256, 2, 6, 6), jnp.float32)}
  plan = jax.make_jaxpr(deep)(KERNEL, many)
  turns = 256 // auto.choose(deep, KERNEL, many, backend="cpu").microbatch_size
  assert turns * len(plan.jaxpr.eqns) <= jaxprs.MAX_EQUATIONS
