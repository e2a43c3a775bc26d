"""Two turns of one loop: what is summed is what was measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.optim import strategies

DIM, CLIP = 32, 1.0
STRATEGIES = sorted(strategies.STRATEGIES)


def length(tree):
  return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def dense(dtype):
  def loss_fn(params, batch):
    y = batch["x"].astype(dtype) @ params["w"].astype(dtype)
    return jnp.sum(y.astype(jnp.float32), axis=1)

  return loss_fn


def largest_move(loss_fn, strategy, size):
  """How far one of many records that all point one way moves their sum."""
  params = {"w": jnp.zeros((DIM, DIM))}
  batch = {"x": jnp.ones((size, DIM))}
  grad_fn = jax.jit(
    optim.clipped_grad(loss_fn, l2_clip_norm=CLIP, strategy=strategy)
  )
  moves = []
  for missing in range(4):  # the sum is a little below a power of two, and more
    whole, less = (
      grad_fn(params, batch, is_padding_example=np.arange(size) < without)[0]
      for without in (missing, missing + 1)
    )
    moves.append(length(jax.tree.map(jnp.subtract, whole, less)))
  return max(moves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_record_moves_the_sum_by_the_clip_norm_in_every_precision(
  strategy, dtype
):
  """In bfloat16 "ghost" moved by 4 clip norms at 1,024 rows, 16 at 4,096."""
  for size in (8, 512, 1024, 8192):
    moved = largest_move(dense(dtype), strategy, size)
    assert moved == pytest.approx(CLIP, rel=1e-3), size


@jax.custom_vjp
def normalised(x):
  """Itself; its gradient is brought to length 1000, whatever comes in."""
  return x


def _backward(_, cotangent):
  scale = jnp.linalg.norm(cotangent, axis=-1, keepdims=True)
  return (1000.0 * cotangent / jnp.maximum(scale, 1e-30),)


normalised.defvjp(lambda x: (x, None), _backward)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_derivative_that_is_not_linear_is_clipped_too(strategy):
  """A pass back from the weighted loss came out as long as from the loss."""

  def loss_fn(params, batch):
    return jnp.sum(normalised(batch["x"] @ params["w"]) ** 2, axis=1)

  params = {"w": jnp.ones((DIM, DIM))}
  x = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float32)
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=CLIP, strategy=strategy)
  for row in range(4):
    padding = np.arange(4) != row
    total, aux = grad_fn(params, {"x": x}, is_padding_example=padding)
    assert float(aux.norms[row]) > 1000.0
    assert length(total) == pytest.approx(CLIP, rel=1e-3)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_positions_that_cancel_in_half_precision_are_clipped(strategy):
  """Norm and sum see the same rounded factors, each position 1000 clip norms."""

  def loss_fn(params, batch):
    y = batch["x"].astype("bfloat16") @ params["w"].astype("bfloat16")
    y = jnp.tanh(y.astype(jnp.float32)) + y.astype(jnp.float32)
    return jnp.sum(y * batch["g"], axis=(1, 2))

  random = np.random.default_rng(1)
  x = np.repeat(random.normal(size=(8, 1, DIM)), 64, axis=1)
  sign = np.where(np.arange(64) % 2, 1.0, -1.0)[None, :, None]
  g = sign * random.normal(size=(8, 1, DIM)) * 30.0
  batch = {
    name: jnp.asarray(v, jnp.float32) for name, v in (("x", x), ("g", g))
  }
  batch["g"] *= 1 + 1e-2 * random.normal(size=(8, 64, 1))
  params = {"w": jnp.asarray(random.normal(size=(DIM, DIM)), jnp.float32)}
  grad_fn = jax.jit(
    optim.clipped_grad(loss_fn, l2_clip_norm=CLIP, strategy=strategy)
  )
  for row in range(8):
    padding = np.arange(8) != row
    total, _ = grad_fn(params, batch, is_padding_example=padding)
    assert length(total) <= CLIP * (1 + 1e-5)


def test_both_passes_are_one_program():
  grad_fn = optim.clipped_grad(
    dense("float32"), l2_clip_norm=CLIP, strategy="ghost"
  )
  jaxpr = jax.make_jaxpr(grad_fn)(
    {"w": jnp.zeros((DIM, DIM))}, {"x": jnp.ones((3, DIM))}
  )
  loops = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
  assert [loop.params["length"] for loop in loops] == [2]


def test_no_gradient_of_a_single_example_is_formed():
  grad_fn = optim.clipped_grad(
    dense("float32"), l2_clip_norm=CLIP, strategy="ghost"
  )
  jaxpr = jax.make_jaxpr(grad_fn)(
    {"w": jnp.zeros((DIM, DIM))}, {"x": jnp.ones((3, DIM))}
  )
  assert f"f32[3,{DIM},{DIM}]" not in str(jaxpr)
  assert f"f32[3,1,{DIM},{DIM}]" not in str(jaxpr)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inside", ["plain", "checkpoint", "scan"])
def test_a_parameter_that_is_scaled_before_its_use_is_clipped(strategy, inside):
  """Its norm was that of the parameter without the scale: 100 clip norms."""

  def apply(w, x):
    return x @ (-(w * 100.0) / 4.0).T

  def loss_fn(params, batch):
    x = batch["x"]
    if inside == "plain":
      x = apply(params["w"][0], x)
    elif inside == "checkpoint":
      x = jax.checkpoint(apply)(params["w"][0] * 2.0, x)
    else:
      step = lambda x, w: (1e-3 * apply(w * 0.5, x), None)  # noqa: E731
      x, _ = jax.lax.scan(step, x, 3.0 * params["w"])
    return jnp.sum(x, axis=1)

  params = {"w": jnp.ones((2, DIM, DIM)) / DIM}
  x = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=CLIP, strategy=strategy)
  of_one = jax.grad(lambda p, x: loss_fn(p, {"x": x[None]})[0])
  for row in range(3):
    padding = np.arange(3) != row
    total, aux = grad_fn(params, {"x": x}, is_padding_example=padding)
    norm = length(of_one(params, x[row]))
    assert float(aux.norms[row]) == pytest.approx(norm, rel=1e-4)
    assert length(total) == pytest.approx(min(norm, CLIP), rel=1e-4)


def test_thousands_of_microbatches_round_no_more_than_one():
  """One record, added first, moved all later partial sums: by two clip norms."""
  size, step, unit = 8192, 0.25, 2.0**-11
  rest = np.where(np.arange(size) % 2, -1.0, 1.0) * (step + unit / 2)
  rest += unit / 32
  rest[1:4096] = 1.0
  rest[4096:4098] = 0.5, 0.0  # up to here 4096 - 1/2, and the record
  grad_fn = jax.jit(
    optim.clipped_grad(
      lambda p, b: p * b["x"], l2_clip_norm=CLIP, microbatch_size=1
    )
  )
  sums = []
  for record in (1.0, 0.0):
    rest[0] = record
    x = jnp.asarray(rest, jnp.float32)
    total, _ = grad_fn(jnp.zeros(()), {"x": x})
    sums.append(float(total))
    exact = np.sum(np.asarray(x, np.float64))
    assert abs(sums[-1] - exact) <= np.spacing(np.float32(exact))
  assert abs(sums[0] - sums[1] - 1.0) <= 1e-3


def drifting_lookups(size, positions):
  """One record decides in which binade the sum lies that all others round to.

  The others first bring one row of the table to just below a power of two, then
  add to it, position by position, what rounds up on its far side alone.
  """
  values = np.zeros((size, positions))
  half = size // 2
  values[1 : half + 1, 0] = 0.9375
  level = 2.0 ** np.floor(np.log2(values.sum()))
  values[0, 0] = 1.0
  values[1, 0] += level - 0.5 - (values.sum() - 1.0)
  unit = np.spacing(np.float32(level))
  sign = np.where(np.arange(positions) % 2, -1.0, 1.0)
  values[half + 1 :] = sign * (0.25 + unit / 2) + unit / 32
  return values


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_lookups_of_thousands_of_records_do_not_round_alike(strategy):
  """Added position by position, one record moved the sum by 3 clip norms."""
  size, positions, rows = 1024, 64, 2048
  values = drifting_lookups(size, positions)

  def loss_fn(params, batch):
    return jnp.sum(params["e"][batch["ids"]][..., 0] * batch["x"], axis=1)

  params = {"e": jnp.zeros((rows, 16))}
  batch = {
    "ids": jnp.zeros((size, positions), int),
    "x": jnp.asarray(values, jnp.float32),
  }
  grad_fn = jax.jit(
    optim.clipped_grad(loss_fn, l2_clip_norm=1e3, strategy=strategy)
  )
  sums = [
    grad_fn(params, batch, is_padding_example=np.arange(size) < missing)[0]
    for missing in (0, 1)
  ]
  assert length(jax.tree.map(jnp.subtract, *sums)) == pytest.approx(1, rel=2e-3)
