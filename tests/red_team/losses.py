"""Losses that an adversary would write, with parameters and batches for them.

Each is a function of one example: whatever it does inside, its clipped sum has to
be that of the oracle, and no example may add more than the clip norm. Sizes are
such that book-keeping and ghost clipping keep factors where they can.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, LENGTH, DIM, VOCAB = 4, 2, 16, 24
CASES: dict[str, "Case"] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
  """One loss of the table."""

  loss: Callable[..., jax.Array]
  params: Any
  batch: Callable[[int], Any]
  """From a number of rows to a batch."""
  tolerance: float = 1e-4
  """Of each example's part of the sum, in clip norms."""
  half: bool = False
  """Whether it computes in half precision: so does its oracle."""
  keyed: bool = False
  refused: str = ""
  """What the refusal says, if the loss is one that has to be refused."""
  zeros: tuple[int, ...] = ()
  """Examples that may add nothing, where the oracle finds a gradient."""


def normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, V, U = (normal(seed, DIM, DIM) / 4 for seed in range(3))
B = normal(3, DIM)
E = normal(4, VOCAB, DIM)
S = normal(5, 3, DIM, DIM) / 4
K = normal(6, 3, 3, 2, 4)


def rows(count: int) -> dict[str, np.ndarray]:
  """Examples whose gradients are far below and far above any clip norm."""
  size = 10.0 ** (np.arange(count) % 4 - 1.5)
  random = np.random.default_rng(7)
  x = random.normal(size=(count, LENGTH, DIM)) * size[:, None, None]
  return {
    "x": x.astype(np.float32),
    "g": normal(8, count, LENGTH, DIM),
    "ids": random.integers(0, VOCAB, size=(count, 6)).astype(np.int32),
  }


def case(params: Any, batch: Any = rows, **options: Any) -> Any:
  """Enters a loss into the table under its name."""

  def enter(loss: Any) -> Any:
    name = loss.__name__.strip("_")
    assert name not in CASES, name
    CASES[name] = Case(loss=loss, params=params, batch=batch, **options)
    return loss

  return enter


def total(y: jax.Array) -> jax.Array:
  """Sums values of an example, float32 at least, with slopes from 1 to 3."""
  y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
  bent = jnp.sqrt(1 + jnp.minimum(jnp.abs(y), 1e9) ** 2)
  return jnp.sum(2 * y + bent, axis=tuple(range(1, y.ndim)))


# Products and what surrounds them.


@case({"w": W})
def dense(p, b):
  return total(b["x"] @ p["w"])


@case({"w": W, "v": V, "b": B})
def layers(p, b):
  h = jax.nn.relu(b["x"] @ p["w"] + p["b"][None, None])
  return total(h @ p["v"])


@case({"w": W})
def product_with_cotangents(p, b):
  return jnp.sum((b["x"] @ p["w"]) * b["g"], axis=(1, 2))


@case({"w": W})
def scaled_by_a_constant(p, b):
  return total(b["x"] @ (p["w"] * 100.0))


@case({"w": W})
def divided_by_a_constant(p, b):
  return total(b["x"] @ -(p["w"].T / 0.01))


@case({"w": W})
def scaled_twice_around_a_cast(p, b):
  w = ((p["w"] * 3.0).astype(jnp.bfloat16) * 7.0).astype(b["x"].dtype)
  return jnp.sum((b["x"] @ w) * b["g"], axis=(1, 2))


CASES["scaled_twice_around_a_cast"] = dataclasses.replace(
  CASES["scaled_twice_around_a_cast"], half=True, tolerance=3e-2
)


@case({"e": E})
def scaled_lookup(p, b):
  return total((p["e"] * 50.0)[b["ids"]])


@case({"w": W})
def scaled_in_remat(p, b):
  return total(jax.checkpoint(lambda w, x: x @ (w * 30.0))(p["w"], b["x"]))


@case({"w": W})
def scaled_before_remat(p, b):
  return total(jax.checkpoint(lambda w, x: x @ w)(p["w"] * 30.0, b["x"]))


@case({"s": S})
def scaled_before_a_scan(p, b):
  step = lambda x, w: (x @ w, None)  # noqa: E731
  return total(jax.lax.scan(step, b["x"], p["s"] * 5.0)[0])


@case({"s": S})
def scaled_in_a_scan(p, b):
  step = lambda x, w: (x @ (w * -5.0), None)  # noqa: E731
  return total(jax.lax.scan(step, b["x"], p["s"], reverse=True)[0])


@case({"w": W})
def scaled_by_data(p, b):
  of_one = lambda x: x @ (p["w"] * x[0, 0])  # noqa: E731
  return total(jax.vmap(of_one)(b["x"]))


@case({"w": W})
def tied_and_transposed(p, b):
  return total(jnp.tanh(b["x"] @ p["w"]) @ p["w"].T)


@case({"w": W})
def tied_with_another_scale(p, b):
  return total(jnp.tanh(b["x"] @ p["w"]) @ (20.0 * p["w"]))


@case({"w": W})
def reshaped_and_transposed(p, b):
  w = p["w"].reshape(4, 4, DIM).transpose(1, 0, 2)
  x = b["x"].reshape(len(b["x"]), LENGTH, 4, 4)
  return total(jnp.einsum("blij,jic->blc", x, w))


@case({"w": W, "v": V})
def stacked_parameters(p, b):
  w = jnp.stack([p["w"], p["v"]])
  return total(jnp.einsum("bld,kde->bkle", b["x"], w))


@case({"w": W, "v": V})
def concatenated_parameters(p, b):
  return total(b["x"] @ jnp.concatenate([p["w"], p["v"]], axis=1))


@case({"s": S})
def slice_of_a_parameter(p, b):
  return total(b["x"] @ p["s"][1])


@case({"w": W})
def product_with_itself(p, b):
  return total(b["x"] @ (p["w"] @ p["w"].T))


@case({"w": W})
def weight_norm(p, b):
  w = p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)
  return total(b["x"] @ w)


@case({"w": W, "a": normal(9, DIM, 2), "z": normal(10, 2, DIM)})
def lora(p, b):
  w = jax.lax.stop_gradient(p["w"])
  return total(b["x"] @ w + (b["x"] @ p["a"]) @ p["z"] * 16.0)


@case({"s": S})
def batched_product_on_the_right(p, b):
  return total(jnp.einsum("bld,gde->bgle", b["x"], p["s"]))


@case({"s": S})
def batched_product_on_the_left(p, b):
  x = jnp.stack([b["x"], 2 * b["x"], b["g"]], axis=1)
  return total(jnp.einsum("gde,bgle->bgld", p["s"], x))


@case({"s": S})
def contracted_over_different_axes(p, b):
  first = jnp.einsum("bld,gde->blge", b["x"], p["s"])
  second = jnp.einsum("blg,gde->blde", b["x"][..., :3], p["s"])
  return total(first) + total(second)


@case({"w": W})
def repeated_axes(p, b):
  return total(jnp.einsum("ii,bli->bl", p["w"], b["x"]))


@case({"b": B, "one": np.float32(0.5)})
def scalar_and_bias(p, b):
  return p["one"] * jnp.sum(b["x"], axis=(1, 2)) + jnp.sum(
    p["b"][None, None] * b["g"], axis=(1, 2)
  )


@case({"w": W, "unused": V, "empty": np.zeros((0, 4), np.float32)})
def unused_and_empty(p, b):
  return total(b["x"] @ p["w"]) + jnp.sum(p["empty"])


@case((W, [None, {"v": V}], (B,)))
def tuples_and_none(p, b):
  w, (_, rest), (bias,) = p
  return total((b["x"] @ w + bias[None, None]) @ rest["v"])


# Lookups.


def far_ids(count: int) -> dict[str, np.ndarray]:
  ids = np.random.default_rng(11).integers(-40, 40, size=(count, 6))
  return rows(count) | {"ids": ids.astype(np.int32)}


@case({"e": E}, far_ids)
def lookup_that_drops(p, b):
  found = p["e"].at[b["ids"]].get(mode="fill", fill_value=0.0)
  return total(found * (1 + b["x"][:, :1, :1]))


@case({"e": E}, far_ids)
def lookup_that_clips(p, b):
  return total(jnp.take(p["e"], b["ids"], axis=0, mode="clip"))


@case({"e": E}, far_ids)
def lookup_beyond_its_table(p, b):
  """Plain indices: JAX reads the last row and drops its gradient."""
  return total(p["e"][b["ids"]] * (1 + b["x"][:, :1, :1]))


@case({"e": E}, far_ids)
def lookup_that_wraps(p, b):
  return total(jnp.take(p["e"], b["ids"], axis=0, mode="wrap"))


@case({"e": E})
def lookup_of_columns(p, b):
  found = jnp.take(p["e"], b["ids"] % DIM, axis=1)  # [vocab, batch, 6]
  return total(jnp.moveaxis(found, 1, 0))


@case({"e": E}, lambda n: rows(n) | {"ids": np.full((n, 6), 3, np.int32)})
def one_id_many_times(p, b):
  return total(p["e"][b["ids"]] * (1 + b["x"][:, :1, :1]))


@case({"e": E})
def two_lookups(p, b):
  first, second = p["e"][b["ids"][:, :3]], p["e"][b["ids"][:, 2:]]
  return total(first * (1 + b["x"][:, :1, :1])) + total(jnp.tanh(second))


@case({"e": E})
def one_hot(p, b):
  hot = jax.nn.one_hot(b["ids"], VOCAB, dtype=p["e"].dtype)
  return total(hot @ p["e"])


@case({"e": E})
def embedding_tied_with_the_output(p, b):
  h = jnp.tanh(p["e"][b["ids"]]) @ p["e"].T
  return jnp.sum(jax.nn.logsumexp(9.0 * h, axis=2), axis=1)


@case({"s": S})
def experts_by_lookup(p, b):
  return total(jnp.einsum("bld,blde->ble", b["x"], p["s"][b["ids"][:, :2] % 3]))


@case({"e": E})
def segment_sum(p, b):
  of_one = lambda x, i: jax.ops.segment_sum(x, i % 4, 4)  # noqa: E731
  return total(jax.vmap(of_one)(p["e"][b["ids"]], b["ids"]))


# Loops and parts.


@case({"w": W})
def tied_through_a_scan(p, b):
  step = lambda x, _: (jnp.tanh(x @ p["w"]), None)  # noqa: E731
  return total(jax.lax.scan(step, b["x"], length=4)[0])


@case({"w": W, "v": V, "u": U, "e": E})
def joined_before_their_use(p, b):
  """As the gates of an LSTM; one of the parameters is used in another way, too."""

  def step(h, x):
    gates = jnp.concatenate([p["w"], p["v"]], axis=1).astype(jnp.float32)
    y = jnp.tanh((x + h) @ gates)
    return y[..., :DIM] * y[..., DIM:], None

  h, _ = jax.lax.scan(step, b["x"][:, 0], jnp.swapaxes(b["x"], 0, 1))
  rows = jnp.concatenate([p["e"], p["u"]])  # along the axis that stays
  h = jnp.tanh(jnp.einsum("bd,vd->bv", h, rows))
  summed = jnp.concatenate([p["u"], p["e"]])  # along the axis that goes
  return total(b["x"] @ p["v"]) + total(h @ summed)


@case({"w": W})
def shared_in_nested_scans(p, b):
  inner = lambda x, _: (jnp.tanh(x @ p["w"]), None)  # noqa: E731
  outer = lambda x, _: (jax.lax.scan(inner, x, length=2)[0], None)  # noqa: E731
  return total(jax.lax.scan(outer, b["x"], length=2)[0])


@case({"s": S, "e": normal(12, 3, VOCAB, DIM)})
def own_slices_of_a_scan(p, b):
  def step(x, each):
    w, e = each
    return jnp.tanh(x @ w + e[b["ids"][:, :LENGTH]]), None

  return total(jax.lax.scan(step, b["x"], (p["s"], p["e"]), reverse=True)[0])


@case({"w": W})
def slices_and_constant_of_a_scan(p, b):
  def step(x, row):
    return jnp.tanh(x @ p["w"]) + row[None, None], None

  return total(jax.lax.scan(step, b["x"], p["w"].T)[0])


@case({"w": W, "v": V})
def shared_by_remat_and_scan(p, b):
  part = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
  step = lambda x, _: (part(p["w"], x), None)  # noqa: E731
  y = jax.lax.scan(step, part(p["w"], b["x"]), length=2)[0]
  return total(y @ p["v"])


@case({"s": S, "w": W})
def stacked_and_shared_in_scans(p, b):
  inner = lambda x, w: (jnp.tanh(x @ w + x @ p["w"]), None)  # noqa: E731
  outer = lambda x, _: (jax.lax.scan(inner, x, p["s"])[0], None)  # noqa: E731
  return total(jax.lax.scan(outer, b["x"], length=2)[0])


@case({"s": S, "w": W})
def scan_in_remat(p, b):
  @jax.checkpoint
  def layers(p, x):
    step = lambda x, w: (jnp.tanh(x @ w @ p["w"]), None)  # noqa: E731
    return jax.lax.scan(step, x, p["s"])[0]

  return total(layers(p, b["x"]))


@case({"s": S, "e": E})
def tied_around_a_rematerialised_scan(p, b):
  @jax.checkpoint
  def layer(x, w):
    return jnp.tanh(jax.checkpoint(jnp.dot)(x, w)) + x, None

  x = b["x"] + p["e"][b["ids"][:, :LENGTH]]
  return total(jax.lax.scan(layer, x, p["s"])[0] @ p["e"].T)


@case({"s": S, "e": E, "k": normal(17, 1, 2, 8, DIM)})
def lookups_in_a_scan(p, b):
  ids = b["ids"][:, :LENGTH]

  def step(x, each):
    table, head = each
    y = jnp.einsum("bld,hdk->blhk", x[..., :8], head)
    x = jnp.tanh(x + table[ids % DIM] + p["e"][ids])
    return x, jnp.sum(y**2, axis=(1, 2, 3))

  heads = jnp.concatenate([p["k"]] * len(p["s"]))
  x, sums = jax.lax.scan(step, b["x"], (p["s"], heads), reverse=True)
  return total(x) + jnp.sum(sums, axis=0)


@case({"s": S, "w": W})
def parameter_in_the_carry(p, b):
  def step(carry, w):
    x, kept = carry
    return (jnp.tanh(x @ w @ kept), 0.5 * kept), None

  (x, kept), _ = jax.lax.scan(step, (b["x"], p["w"]), p["s"])
  return total(x @ kept)


@case({"s": S})
def slices_that_are_returned(p, b):
  x, slices = jax.lax.scan(lambda x, w: (x @ w, w), b["x"], p["s"])
  return total(x @ slices[0])


@case({"s": S, "w": W})
def scans_of_one_iteration(p, b):
  step = lambda x, w: (x @ w, None)  # noqa: E731
  x, _ = jax.lax.scan(step, b["x"], p["s"][:1])
  return total(jax.lax.scan(step, x, p["w"][None])[0])


@case({"w": W, "v": V})
def remat_with_a_policy(p, b):
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  part = functools.partial(jax.checkpoint, policy=policy)
  return total(part(lambda x: jnp.tanh(x @ p["w"]) @ p["v"])(b["x"]))


@case({"w": W})
def parameter_in_a_loop(p, b):
  body = lambda _, x: jnp.tanh(x @ p["w"])  # noqa: E731
  return total(jax.lax.fori_loop(0, 3, body, b["x"]))


@case({"w": W, "v": V})
def parameter_in_branches(p, b):
  def of_one(x):
    branches = [lambda x: x @ p["w"], lambda x: jnp.tanh(x @ p["v"])]
    y = jax.lax.switch((x[0, 0] > 0).astype(jnp.int32), branches, x)
    return jax.lax.cond(x[0, 1] > 0, lambda: y @ p["w"], lambda: y)

  return total(jax.vmap(of_one)(b["x"]))


@case({"w": W})
def jit_inside(p, b):
  return total(jax.jit(jax.jit(lambda w, x: x @ w))(p["w"], b["x"]))


@case({"w": W})
def vmap_inside(p, b):
  return total(jax.vmap(jax.vmap(lambda x: p["w"] @ x))(b["x"]))


@case({"w": W})
def slope_of_a_slope(p, b):
  slope = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"]))))(b["x"])
  return total(slope)


@case({"w": W, "v": V}, zeros=tuple(range(ROWS)))
def branch_that_is_not_finite(p, b):
  """Mapped over, both branches are taken back: 0 times inf may be nan."""

  def of_one(x):
    y = x @ p["w"]
    return jax.lax.cond(
      x[0, 0] > 0, lambda: jnp.sqrt(jnp.abs(y) * 0.0), lambda: y @ p["v"]
    )

  return total(jax.vmap(of_one)(b["x"]))


# Derivatives of their own.


@jax.custom_jvp
def cube(x):
  return x**3


cube.defjvps(lambda t, _, x: 3 * x**2 * t)


@jax.custom_vjp
def doubled(w, x):
  return x @ w


doubled.defvjp(
  lambda w, x: (x @ w, (w, x)),
  lambda s, t: (2 * jnp.einsum("bld,ble->de", s[1], t), t @ s[0].T),
)


@jax.custom_vjp
def normalised(x):
  return x


normalised.defvjp(
  lambda x: (x, None),
  lambda _, t: (t * 1e4 / jnp.sqrt(1e-30 + jnp.sum(t**2)),),
)


@jax.custom_vjp
def own_normalised(w, x):
  return x @ w


def _own_back(saved, t):
  w, x = saved
  slope = jnp.einsum("bld,ble->de", x, t)
  return 1e4 * slope / (1e-30 + jnp.linalg.norm(slope)), t @ w.T


own_normalised.defvjp(lambda w, x: (x @ w, (w, x)), _own_back)


@case({"w": W})
def custom_jvp(p, b):
  return total(cube(jnp.tanh(b["x"] @ p["w"])))


@case({"w": W})
def custom_jvp_of_a_parameter(p, b):
  return total(b["x"] @ cube(p["w"]))


@case({"w": W})
def custom_vjp(p, b):
  return total(doubled(p["w"], b["x"]))


@case({"w": W, "v": V})
def normalises_its_cotangent(p, b):
  return total(normalised(b["x"] @ p["w"]) @ p["v"])


@case({"w": W})
def normalises_its_own_gradient(p, b):
  return total(own_normalised(p["w"], b["x"]))


@case({"w": W, "v": V})
def stops_partly(p, b):
  h = b["x"] @ p["w"]
  return total((h + jax.lax.stop_gradient(h)) @ jax.lax.stop_gradient(p["v"]))


@case({"w": W})
def straight_through(p, b):
  h = b["x"] @ p["w"]
  return total((h + jax.lax.stop_gradient(jnp.round(h) - h)) * b["g"])


# Layers.


@case({"w": W, "scale": B, "bias": B})
def layer_norm(p, b):
  h = b["x"] @ p["w"]
  h = (h - h.mean(2, keepdims=True)) / jnp.sqrt(h.var(2, keepdims=True) + 1e-5)
  return total((h * p["scale"][None, None] + p["bias"][None, None]) * b["g"])


@case({"w": W, "scale": B})
def rms_norm(p, b):
  h = b["x"] * jax.lax.rsqrt(jnp.mean(b["x"] ** 2, axis=2, keepdims=True))
  return total((h * p["scale"][None, None]) @ p["w"])


@case({"w": W, "v": V, "u": U})
def attention(p, b):
  x = b["x"] / 10
  q, k, v = (x @ p[name] for name in ("w", "v", "u"))
  logits = jnp.einsum("bld,bmd->blm", q, k)
  mask = jnp.tri(LENGTH, dtype=bool)[None]
  weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=2)
  return total(jnp.einsum("blm,bmd->bld", weights, v))


@case({"e": E})
def cross_entropy_of_large_logits(p, b):
  logits = 100.0 * b["x"] @ p["e"].T
  labels = b["ids"][:, :LENGTH, None]
  found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=2)
  return -jnp.sum(found, axis=(1, 2))


CASES["cross_entropy_of_large_logits"] = dataclasses.replace(
  CASES["cross_entropy_of_large_logits"], tolerance=3e-3
)


def images(count: int) -> dict[str, np.ndarray]:
  size = 10.0 ** (np.arange(count) % 3 - 1.0)
  return {
    "x": normal(13, count, 5, 5, 2) * size[:, None, None, None].astype("f")
  }


def convolve(x, k, **options):
  return jax.lax.conv_general_dilated(
    x, k, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    **{"window_strides": (1, 1), **options},
  )  # fmt: skip


@case({"k": K}, images)
def convolution(p, b):
  return total(convolve(b["x"], p["k"]))


@case({"k": normal(14, 3, 3, 1, 4)}, images)
def grouped_convolution(p, b):
  return total(convolve(b["x"], p["k"], feature_group_count=2))


@case({"k": K}, images)
def strided_and_dilated_convolution(p, b):
  y = convolve(b["x"], p["k"], window_strides=(2, 2))
  return total(y) + total(convolve(b["x"], p["k"], rhs_dilation=(2, 1)))


@case({"k": K}, images)
def transposed_convolution_and_pool(p, b):
  y = jax.lax.conv_transpose(b["x"], p["k"], (2, 2), "SAME")
  window = (1, 2, 2, 1)
  return total(
    jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "SAME")
  )


@case({"w": W})
def sums_along_and_sorts(p, b):
  h = jnp.cumsum(b["x"] @ p["w"], axis=1)
  scanned = jax.lax.associative_scan(jnp.multiply, jnp.tanh(h), axis=2)
  y = total(scanned) + total(jnp.abs(jnp.fft.fft(h, axis=2)))
  y += total(jnp.sort(h, axis=2)[:, :, ::2])
  return y + total(jax.lax.top_k(h, 3)[0])


@case({"w": W})
def solves(p, b):
  matrix = jnp.eye(DIM)[None] * 9 + p["w"][None]
  return total(jnp.linalg.solve(matrix, jnp.swapaxes(b["x"], 1, 2)))


# Numbers at the edges.


@case({"w": W})
def root_of_zero(p, b):
  kept = (b["x"][:, 0, 0] > 0).astype(p["w"].dtype)
  return jnp.sqrt(jnp.sum((b["x"] @ p["w"]) ** 2, axis=(1, 2)) * kept)


@case({"w": W})
def norm_of_zero(p, b):
  h = b["x"] @ p["w"]
  return jnp.linalg.norm((h - h).reshape(len(h), -1), axis=1) + total(h)


@case({"w": W}, tolerance=1e-3)
def division_by_little(p, b):
  return total((b["x"] @ p["w"]) / (1e-6 + b["x"][:, :, :1] ** 2))


@case({"w": W})
def loss_of_minus_infinity(p, b):
  h = total(b["x"] @ p["w"])
  return jnp.where(b["x"][:, 0, 0] > 0, h, h - jnp.inf)


def unsound(count: int) -> dict[str, np.ndarray]:
  batch = rows(count)
  batch["x"][0, 0, 0] = np.nan
  batch["x"][1, 0, 0] = np.inf
  batch["x"][-1] *= 1e25
  return batch


@case({"w": W, "b": B}, unsound)
def examples_that_are_not_finite(p, b):
  return total(b["x"] @ p["w"]) + total(p["b"][None, None] * b["g"])


def cancelling(count: int) -> dict[str, np.ndarray]:
  """Positions of about +1000 and -1000 clip norms; a little is left."""
  x = np.repeat(normal(15, count, 1, 48), 32, axis=1)
  g = np.repeat(normal(16, count, 1, 48), 32, axis=1)
  g *= np.where(np.arange(32) % 2, -1, 1)[None, :, None]
  sizes = np.linalg.norm(x[:, 0], axis=1) * np.linalg.norm(g[:, 0], axis=1)
  g *= (1000 / sizes)[:, None, None]
  g[:, -1] *= 1 + 10.0 ** -(np.arange(count) % 4)[:, None]
  return {"x": x, "g": g.astype(np.float32)}


@case({"w": np.zeros((48, 48), np.float32)}, cancelling, tolerance=0.5)
def positions_that_cancel(p, b):
  return jnp.sum((b["x"] @ p["w"]) * b["g"], axis=(1, 2))


def tiny_and_huge(count: int) -> dict[str, np.ndarray]:
  factor = 10.0 ** np.array([-20, -18, 17, -10])[np.arange(count) % 4]
  other = 10.0 ** np.array([17, 18, -17, 12])[np.arange(count) % 4]
  ones = np.ones((count, LENGTH, DIM))
  return {
    "x": (ones * factor[:, None, None]).astype(np.float32),
    "g": (ones * other[:, None, None]).astype(np.float32),
  }


@case({"w": np.zeros((DIM, DIM), np.float32)}, tiny_and_huge, tolerance=0.05)
def tiny_times_huge(p, b):
  return jnp.sum((b["x"] @ p["w"]) * b["g"], axis=(1, 2))


# Half precision.


def in_half(dtype, params_dtype=jnp.float32):
  def loss(p, b):
    w, v, e = (p[name].astype(dtype) for name in ("w", "v", "e"))
    h = (
      jnp.tanh(b["x"].astype(dtype) @ w) @ v + p["b"].astype(dtype)[None, None]
    )
    return total(h) + total(e[b["ids"]])

  name = f"{jnp.dtype(dtype).name}_of_{jnp.dtype(params_dtype).name}"
  loss.__name__ = name
  params = {
    name: jnp.asarray(value, params_dtype)
    for name, value in {"w": W, "v": V, "e": E, "b": B}.items()
  }
  case(params, half=True, tolerance=3e-2)(loss)


in_half(jnp.bfloat16)
in_half(jnp.float16)
in_half(jnp.bfloat16, jnp.bfloat16)
in_half(jnp.float16, jnp.float16)
in_half(jnp.float32, jnp.bfloat16)


@case({"w": W.astype(jnp.bfloat16), "b": B}, half=True, tolerance=3e-2)
def loss_in_bfloat16(p, b):
  y = b["x"].astype(jnp.bfloat16) @ p["w"] + p["b"][None, None]
  return total(y).astype(jnp.bfloat16)


@case({"s": S}, half=True, tolerance=3e-2)
def half_precision_in_rematerialised_scan(p, b):
  part = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None))
  x = b["x"].astype(jnp.bfloat16)
  return total(jax.lax.scan(part, x, p["s"])[0])


# Randomness and calls.


@case({"w": W}, keyed=True)
def dropout(p, b, key):
  bits = jax.random.bits(key, b["x"].shape, "uint32")
  return total(jnp.where(bits & 1, b["x"], 0.0) @ p["w"])


def _sine(x):
  return np.sin(x)


def call_back(p, b, method):
  shape = jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype)
  x = jax.pure_callback(_sine, shape, b["x"], vmap_method=method)
  return total(x @ p["w"])


@case({"w": W})
def callback_one_by_one(p, b):
  return call_back(p, b, "sequential")


@case({"w": W}, refused="vmap_method='expand_dims'")
def callback_at_once(p, b):
  return call_back(p, b, "expand_dims")


@jax.custom_batching.custom_vmap
def largest(x):
  return x / jnp.max(jnp.abs(x))


@largest.def_vmap
def _largest_of_all(size, mapped, x):
  del size
  return x / jnp.max(jnp.abs(x)), mapped[0]


@case({"w": W}, refused="when another is beside it")
def custom_vmap(p, b):
  return total(largest(b["x"]) @ p["w"])


@case({"w": W}, refused="a rule of its own for jax.vmap")
def custom_vmap_of_a_cotangent(p, b):
  @jax.custom_vjp
  def hidden(x):
    return x

  hidden.defvjp(lambda x: (x, None), lambda _, t: (largest(t),))
  return total(jax.checkpoint(hidden)(b["x"] @ p["w"]))


@case({"w": W}, refused="other than Threefry")
def bits_of_another_generator(p, b):
  key = jax.random.key(0, impl="rbg")
  return total((b["x"] * jax.random.normal(key, (1, 1, DIM))) @ p["w"])


@case({"w": W}, refused="random bits")
def bits_without_a_key(p, b):
  @jax.checkpoint
  def part(w, x):
    bits = jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (DIM,))
    return jnp.tanh(x @ w) * (bits > 0.9)[None, None]

  return total(part(p["w"], b["x"]))
