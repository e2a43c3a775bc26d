"""Per-example clipping of layers that users bring: Linen, NNX, plain JAX."""

import jax
import jax.numpy as jnp
import jax_privacy_oracle as oracle
import numpy as np
import pytest
from flax import linen, nnx

from synthq_jax.optim import strategies
from synthq_jax.optim.bookkeeping import plans

BATCH, LENGTH, DIM = 4, 6, 8
STRATEGIES = ["bookkeeping", "ghost", "vmap"]


def compare(loss_fn, params, batch):
  # A key's bias has no gradient but for rounding.
  oracle.compare(loss_fn, params, batch, 0.2, STRATEGIES, nothing=1e-6)


@pytest.fixture(autouse=True)
def _factors(monkeypatch):
  """Book-keeping keeps factors wherever it can."""
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)


def batch():
  rng = np.random.default_rng(0)
  return {
    "x": jnp.asarray(rng.normal(size=(BATCH, LENGTH, DIM)), jnp.float32),
    "ids": jnp.asarray(rng.integers(0, 11, (BATCH, LENGTH))),
  }


def shaken(params):
  """Parameters none of which is zero or one."""
  leaves, structure = jax.tree.flatten(params)
  rng = np.random.default_rng(1)
  moved = [x + 0.3 * rng.normal(size=x.shape).astype("f4") for x in leaves]
  return jax.tree.unflatten(structure, moved)


def square(x):
  return jnp.sum(jnp.tanh(x) ** 2, axis=tuple(range(1, x.ndim)))


class Mixture(linen.Module):
  """Every layer of Linen that a text model has."""

  @linen.compact
  def __call__(self, batch):
    x = linen.Embed(11, DIM)(batch["ids"]) + batch["x"]
    x = linen.LayerNorm()(linen.Dense(DIM)(x))
    x = x + linen.MultiHeadDotProductAttention(num_heads=2)(x, x)
    x = linen.RMSNorm()(x)
    x = x + linen.DenseGeneral(DIM, axis=(-2, -1))(
      linen.DenseGeneral((2, 5))(x)
    )
    x = linen.Einsum((2, DIM, 3), "abc,dce->abde")(x)
    return linen.Conv(3, kernel_size=(2, 2))(x)


class Tied(linen.Module):
  """Logits through the embedding, layers stacked by scan and recomputed."""

  @linen.compact
  def __call__(self, batch):
    embed = linen.Embed(11, DIM)
    block = linen.remat(Block, prevent_cse=False)
    layers = linen.scan(
      block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )
    x, _ = layers()(embed(batch["ids"]), None)
    return embed.attend(x)


class Block(linen.Module):
  """One layer of a stack."""

  @linen.compact
  def __call__(self, x, _):
    x = linen.RMSNorm()(x)
    return x + linen.Dense(DIM)(jnp.tanh(linen.Dense(2 * DIM)(x))), None


def test_kernels_of_scanned_and_recomputed_layers_stay_in_factors():
  model, data = Tied(), batch()
  params = model.init(jax.random.key(0), data)["params"]
  loss = lambda p, b: square(model.apply({"params": p}, b))  # noqa: E731
  plan = plans.make(loss, params, (data,), keep_ratio=0.0)
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  formed = {
    jax.tree_util.keystr(paths[i][0]).split("'")[-2] for i in plan.formed
  }
  assert formed == {"scale", "bias"}


class Stack(nnx.Module):
  """Every layer of NNX that a text model has."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(11, DIM, rngs=rngs)
    self.norm = nnx.LayerNorm(DIM, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      num_heads=2, in_features=DIM, decode=False, rngs=rngs
    )
    self.scale = nnx.RMSNorm(DIM, rngs=rngs)
    self.wide = nnx.LinearGeneral(DIM, (2, 5), rngs=rngs)
    self.einsum = nnx.Einsum("abcd,cde->abe", (2, 5, DIM), (DIM,), rngs=rngs)
    self.conv = nnx.Conv(DIM, 3, kernel_size=(3,), rngs=rngs)
    self.dense = nnx.Linear(3, DIM, rngs=rngs)

  def __call__(self, batch):
    x = self.norm(self.embed(batch["ids"]) + batch["x"])
    x = self.scale(x + self.attention(x))
    x = x + self.einsum(self.wide(x))
    return self.embed.attend(self.dense(self.conv(x)))


def linen_problem(model):
  params = shaken(model.init(jax.random.key(0), batch())["params"])
  return lambda p, b: square(model.apply({"params": p}, b)), params


def nnx_problem():
  graph, params, rest = nnx.split(Stack(nnx.Rngs(0)), nnx.Param, ...)
  loss = lambda p, b: square(nnx.merge(graph, p, rest)(b))  # noqa: E731
  return loss, shaken(params)


PROBLEMS = {
  "linen": lambda: linen_problem(Mixture()),
  "linen, scanned and tied": lambda: linen_problem(Tied()),
  "nnx": nnx_problem,
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_layers_agree_with_jax_privacy(problem):
  compare(*PROBLEMS[problem](), batch())


def test_low_rank_additions_to_frozen_weights_agree():
  """LoRA: the frozen weight is no parameter, so it costs nothing."""
  frozen, params = low_rank()

  def loss(p, b):
    x = jnp.tanh(b["x"] @ frozen + 0.5 * (b["x"] @ p["a"]) @ p["b"])
    return square(x @ frozen)

  compare(loss, params, batch())
  plan = plans.make(loss, params, (batch(),), keep_ratio=0.0)
  assert plan.formed == () and len(plan.sites) == 2


def low_rank():
  rng = np.random.default_rng(2)
  shapes = ((DIM, DIM), (DIM, 2), (2, DIM))
  frozen, *factors = [
    jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes
  ]
  return frozen, dict(zip("ab", factors, strict=True))
