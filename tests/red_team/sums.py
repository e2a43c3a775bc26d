"""Sums over many examples, where rounding may move with one of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.optim import clipping

DIM = 16
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
SIZES = (1, 64, 512, 1024, 4096, 8192)


def product(dtype: Any) -> Callable[..., jax.Array]:
  """A product, a lookup and a bias that are computed in some precision."""

  def loss(p: Any, b: Any) -> jax.Array:
    x = b["x"].astype(dtype)
    y = x @ p["w"].astype(dtype) + p["b"].astype(dtype)[None]
    y += p["e"].astype(dtype)[b["ids"]]
    return jnp.sum((y * b["g"].astype(dtype)).astype(jnp.float32), axis=1)

  return loss


PARAMS = {
  "w": np.full((DIM, DIM), 0.1, np.float32),
  "b": np.zeros(DIM, np.float32),
  "e": np.zeros((64, DIM), np.float32),
}


def aligned(size: int, seed: int) -> dict[str, np.ndarray]:
  """Examples with one direction, clipped (seed 0) or of many lengths."""
  random = np.random.default_rng(seed)
  scale = np.ones(size) if seed == 0 else random.uniform(0.0, 0.12, size)
  ones = np.ones((size, DIM), np.float32)
  g = (ones * scale[:, None]).astype(np.float32)
  return {"x": ones, "g": g, "ids": np.zeros(size, np.int32)}


def one_summand(p: Any, b: Any) -> jax.Array:
  """The gradient of an example is its own number, in a formed gradient."""
  return p["b"][0] * b["x"][:, 0] + 0.0 * jnp.sum(p["b"])


def one_product(p: Any, b: Any) -> jax.Array:
  """The same in a matrix, kept in factors."""
  x = b["x"][:, :1] * jnp.eye(1, 64)
  return jnp.sum((x @ p["w"]) * jnp.eye(1, 16), axis=1)


def one_lookup(p: Any, b: Any) -> jax.Array:
  """The same in a table: every position looks up its first row."""
  found = p["e"][jnp.zeros(b["x"].shape, jnp.int32), :]
  return jnp.sum(found[:, :, 0] * b["x"], axis=1)


DRIFTS = {
  "summand": (one_summand, {"b": np.zeros(8, np.float32)}),
  "product": (one_product, {"w": np.zeros((64, 16), np.float32)}),
  "lookup": (one_lookup, {"e": np.zeros((2048, 64), np.float32)}),
}


def drifting(
  size: int, positions: int, block: int, together: int = 1
) -> np.ndarray:
  """Numbers whose running sum drifts on one side of a power of two only.

  The first example decides on which side of `half` the sum lies. There, or not,
  units in the last place are twice as large, and each of the pairs that follow
  rounds up by one of them.

  Args:
    size: of the batch.
    positions: numbers of each example; the pairs fill all of them.
    block: examples that are meant to share one running sum.
    together: examples that it adds at once; the first of them has the numbers.
  """
  half = block // 2
  unit = 2.0 ** (np.floor(np.log2(half)) - 23)
  x = np.zeros((size, positions))
  x[0, 0] = 1.0
  x[1 : half + 1, 0] = (half - 0.5) / half
  rows = np.arange(half + together, block, together)
  pairs = x[rows].reshape(-1)
  count = len(pairs) // 2
  pairs[: 2 * count : 2] = 0.25 + unit * (1 / 2 + 1 / 32)
  pairs[1 : 2 * count : 2] = -(0.25 + unit * (1 / 2 - 1 / 32))
  x[rows] = pairs.reshape(-1, positions)
  return x.astype(np.float32)


def moves(
  loss: Any,
  params: Any,
  batches: list[Any],
  masks: list[tuple[np.ndarray, np.ndarray]],
  strategy: str,
  **options: Any,
) -> float:
  """Returns how far the sums of two masks are apart, in clip norms, at most."""
  grad_fn = clipping.clipped_grad(
    loss, l2_clip_norm=1.0, strategy=strategy, **options
  )
  of = jax.jit(lambda p, b, m: grad_fn(p, b, is_padding_example=m)[0])
  worst = 0.0
  for batch in batches:
    for before, after in masks:
      ends = [of(params, batch, mask) for mask in (before, after)]
      ends = [
        jax.tree.map(lambda x: np.asarray(x, np.float64), e) for e in ends
      ]
      moved = jax.tree.map(np.subtract, *ends)
      squares = sum(np.sum(x**2) for x in jax.tree.leaves(moved))
      worst = max(worst, float(np.sqrt(squares)))
  return worst


def removals(size: int, rounds: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
  """Pairs of masks that differ in one example, some with others away."""
  random = np.random.default_rng(size)
  found = []
  for index in {0, size // 2, size - 1}:
    after = np.arange(size) == index
    found.append((np.zeros(size, bool), after))
  for away in range(1, min(rounds, size - 1)):
    before = np.zeros(size, bool)
    before[random.choice(size, away, replace=False)] = True
    after = before.copy()
    after[np.flatnonzero(~before)[0]] = True
    found.append((before, after))
  return found


def sweep(strategy: str, dtype: Any, size: int) -> float:
  """How far one of many aligned examples moves the sum."""
  batches = [aligned(size, seed) for seed in (0, 1)]
  return moves(product(dtype), PARAMS, batches, removals(size), strategy)


def drift(
  name: str,
  strategy: str,
  size: int,
  *,
  positions: int = 1,
  block: int | None = None,
  microbatch_size: int | None = None,
) -> float:
  """How far the first example moves a sum that rounds against it."""
  loss, params = DRIFTS[name]
  together = microbatch_size or 1
  batch = {"x": drifting(size, positions, block or size, together)}
  first = np.arange(size) == 0
  masks = [(np.zeros(size, bool), first)]
  return moves(
    loss, params, [batch], masks, strategy, microbatch_size=microbatch_size
  )
