"""Per-example clipping on several devices, beside one device, layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import strategies
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import sharded_grad

ROWS, LENGTH, DIM = 16, 5, 8
STRATEGIES = sorted(strategies.STRATEGIES)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def total(x):
  return jnp.sum(jnp.tanh(x) ** 2, axis=tuple(range(1, x.ndim)))


def dense(p, b):
  return total(jnp.tanh(b["x"] @ p["w"]) @ p["v"] + p["c"][None, None, :])


def attention(p, b):
  q, k, v = (b["x"] @ p[name] for name in ("w", "v", "u"))
  weights = jax.nn.softmax(jnp.einsum("bld,bmd->blm", q, k), axis=2)
  return total(jnp.einsum("blm,bmd->bld", weights, v))


def convolution(p, b):
  image = b["x"].reshape(len(b["x"]), LENGTH, DIM // 2, 2)
  return total(
    jax.lax.conv_general_dilated(
      image, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
  )


def scan(p, b):
  step = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
  return total(jax.lax.scan(step, b["x"], p["s"])[0])


LAYERS = {"dense": dense, "attention": attention, "convolution": convolution,
          "scan": scan}  # fmt: skip
WAYS = pytest.mark.parametrize(
  ("name", "strategy"),
  [
    *(("dense", strategy) for strategy in STRATEGIES),
    ("attention", "bookkeeping"),
    ("convolution", "ghost"),
    ("convolution", "vmap"),
    ("scan", "bookkeeping"),
    ("scan", "ghost"),
  ],
)
PARAMS = {
  "w": normal(0, DIM, DIM), "v": normal(1, DIM, DIM), "u": normal(2, DIM, DIM),
  "c": normal(3, DIM), "k": normal(4, 3, 3, 2, 4), "s": normal(5, 3, DIM, DIM),
}  # fmt: skip
BATCH = {"x": 3.0 * normal(6, ROWS, LENGTH, DIM)}
PADDING = np.arange(ROWS) % 5 == 2


@functools.cache
def make(layer, strategy, **options):
  return optim.clipped_grad(
    layer, l2_clip_norm=1.0, strategy=strategy, **options
  )


@functools.cache
def on_one_device(grad_fn):
  return jax.jit(grad_fn)(PARAMS, BATCH, is_padding_example=PADDING)


def assert_same(many, one):
  (total, aux), (expected, expected_aux) = many, one
  for a, b in zip(*map(jax.tree.leaves, (total, expected)), strict=True):
    assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1.0)
  np.testing.assert_allclose(aux.norms, expected_aux.norms, rtol=1e-5)


@WAYS
def test_the_documented_way_gives_the_sum_of_one_device(name, strategy):
  grad_fn = make(LAYERS[name], strategy)
  mesh = mesh_lib.make(mesh_lib.Shape(), jax.devices())
  many = jax.jit(sharded_grad.ShardedGrad(grad_fn=grad_fn, mesh=mesh))
  got = many(PARAMS, BATCH, is_padding_example=jnp.asarray(PADDING))
  assert_same(got, on_one_device(grad_fn))


def in_shard_map(grad_fn, **options):
  """As people write it themselves, and JAX checks it by default."""
  mesh = Mesh(np.array(jax.devices()), ("rows",))

  def of_device(params, batch, padding):
    total, aux = grad_fn(params, batch, is_padding_example=padding)
    return jax.lax.psum(total, "rows"), aux

  return jax.jit(
    jax.shard_map(
      of_device,
      mesh=mesh,
      in_specs=(P(), P("rows"), P("rows")),
      out_specs=(P(), P("rows")),
      **options,
    )
  )(PARAMS, BATCH, PADDING)


@WAYS
def test_inside_shard_map_each_example_is_clipped_before_the_sum(
  name, strategy
):
  """ "vmap" clipped the sum over devices: one row moved it by eight clip norms."""
  grad_fn = make(LAYERS[name], strategy)
  assert_same(in_shard_map(grad_fn), on_one_device(grad_fn))


def test_microbatches_and_no_check_of_varying_values_change_nothing():
  for strategy in STRATEGIES:
    grad_fn = make(dense, strategy, microbatch_size=1)
    one = on_one_device(grad_fn)
    assert_same(in_shard_map(grad_fn), one)
    assert_same(in_shard_map(grad_fn, check_vma=False), one)


def test_one_key_inside_shard_map_asks_for_the_names_of_examples():
  """By place, rows of two devices shared a key: a record moved others' masks."""

  def masked(p, b, key):
    return total(b["x"] @ p["w"]) * jax.random.uniform(key)

  grad_fn = optim.clipped_grad(masked, l2_clip_norm=10.0)
  ids = {**BATCH, "example_id": jnp.arange(len(BATCH["x"]))}

  def norms(params, batch, key):
    return grad_fn(params, batch, key=key)[1].norms

  sharded = jax.jit(
    jax.shard_map(
      norms,
      mesh=Mesh(np.array(jax.devices()), ("rows",)),
      in_specs=(P(), P("rows"), P()),
      out_specs=P("rows"),
    )
  )
  key = jax.random.key(3)
  found = sharded(PARAMS, ids, key)
  np.testing.assert_allclose(found, norms(PARAMS, BATCH, key), rtol=1e-5)
  with pytest.raises(
    ValueError, match="example_id in the batch, inside of shard"
  ):
    sharded(PARAMS, BATCH, key)


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.all_gather])
def test_a_loss_that_asks_other_devices_for_their_examples_is_refused(
  collective,
):
  """As batch statistics over all devices: 14 clip norms, where 2 is claimed."""

  def coupled(p, b):
    others = collective(b["x"], "rows").reshape(-1, *b["x"].shape)
    return total((b["x"] - jnp.mean(others, axis=0)) @ p["w"])

  for options in ({}, {"check_vma": False}):
    with pytest.raises(ValueError, match="examples of several devices"):
      in_shard_map(make(coupled, "vmap"), **options)


def divided():
  mesh = Mesh(np.array(jax.devices()), ("rows",))
  return jax.device_put(BATCH, NamedSharding(mesh, P("rows")))


def test_a_convolution_of_a_batch_that_jit_divides_is_refused():
  """XLA's partitioner loses the examples of all devices but the first."""
  grad_fn = make(convolution, "vmap")
  with pytest.raises(ValueError, match="take training.sharded_grad"):
    grad_fn(PARAMS, divided())
  with pytest.raises(jax.errors.JaxRuntimeError, match="take training.sharded"):
    jax.jit(grad_fn)(PARAMS, divided())


@pytest.mark.parametrize(
  ("name", "strategy"),
  [
    *(("dense", strategy) for strategy in STRATEGIES),
    ("attention", "bookkeeping"),
    ("scan", "ghost"),
  ],
)
def test_what_the_partitioner_may_divide_gives_the_sum_of_one_device(
  name, strategy
):
  grad_fn = make(LAYERS[name], strategy)
  got = jax.jit(grad_fn)(PARAMS, divided(), is_padding_example=PADDING)
  assert_same(got, on_one_device(grad_fn))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_partitioner_may_divide_microbatches(strategy):
  grad_fn = make(dense, strategy, microbatch_size=4)
  got = jax.jit(grad_fn)(PARAMS, divided(), is_padding_example=PADDING)
  assert_same(got, on_one_device(make(dense, strategy)))


def test_a_device_that_has_padding_alone_is_not_waited_for():
  """Devices that divide a kernel hand parts around, in which all take part."""
  names = [f"encoder/layers_0/attention/{n}/kernel" for n in ("query", "key")]

  def turned(x):
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], -1)

  def loss(params, batch):
    q, k = (turned(batch["x"] @ params[name]) for name in names)
    return jnp.mean(jnp.einsum("bsd,btd->bst", q, k) ** 2, (1, 2))

  rng = np.random.default_rng(0)
  params = {name: 0.3 * rng.normal(size=(8, 16)) for name in names}
  params = jax.tree.map(np.float32, params)
  batch = {"x": rng.normal(size=(8, 5, 8)).astype(np.float32)}
  flags = np.arange(8) >= 3
  mesh = mesh_lib.make(mesh_lib.Shape(data=2, tensor=2), jax.devices()[:4])
  grad_fn = optim.clipped_grad(
    loss, l2_clip_norm=0.5, strategy="bookkeeping", microbatch_size=2
  )
  step = sharded_grad.ShardedGrad(grad_fn=grad_fn, mesh=mesh)
  rows = mesh_lib.batch_sharding(mesh)
  found, _ = jax.jit(lambda p, b, f: step(p, b, is_padding_example=f))(
    mesh_lib.place(params, mesh_lib.shardings(params, params, mesh)),
    jax.device_put(batch, rows),
    jax.device_put(flags, rows),
  )
  expected, _ = grad_fn(params, batch, is_padding_example=flags)
  for name in names:
    np.testing.assert_allclose(found[name], expected[name], atol=1e-6)


class OfWholeBatches:
  """A clipped gradient of somebody's own, which does not say that it is of each
  example alone."""

  def sensitivity(self, relation):
    return 2.0

  def __call__(self, params, batch, *, is_padding_example):
    of_batch = lambda p: jnp.sum(batch["queries"] @ p["w"])  # noqa: E731
    return jax.grad(of_batch)(params), jnp.zeros(len(batch["queries"]))


def test_batches_of_pairs_are_not_divided_among_devices():
  """One record less moves all others to other devices: 7 C where 2 C is said."""
  sharded = sharded_grad.ShardedGrad(
    grad_fn=OfWholeBatches(), mesh=mesh_lib.make(mesh_lib.Shape(data=4))
  )
  batch = {"queries": BATCH["x"][:, 0], "documents": BATCH["x"][:, 1]}
  with pytest.raises(ValueError, match="clips each example by itself"):
    sharded({"w": PARAMS["w"]}, batch, is_padding_example=np.zeros(ROWS, bool))


@pytest.mark.parametrize("how", ["shard_map", "unchecked shard_map", "pmap"])
@pytest.mark.parametrize("method", ["Logit", "a batch's"])
def test_ones_own_division_of_a_batch_of_pairs_is_refused(method, how):
  """It was taken: 8 clip norms for one record, where 2 are said."""
  grad_fn = optim.batch_clipped_grad(
    lambda p, batch, is_real: jnp.sum(jnp.where(is_real, p * batch["x"], 0)),
    l2_clip_norm=1.0,
  )
  batch = {"x": np.ones(4, np.float32)}
  if method != "a batch's":
    grad_fn = optim.contrastive_clipped_grad(
      *[lambda p, x: jnp.stack([jnp.cos(p * x), jnp.sin(p * x)], axis=1)] * 2,
      l2_clip_norm=1.0,
      method=getattr(optim, method)(),
      max_batch_size=4,
      loss=contrastive.Softmax(temperature=1.0),
    )
    batch = {"queries": batch["x"], "documents": batch["x"]}

  def on_device(params, batch):
    return jax.lax.psum(grad_fn(params, batch)[0], "d")

  if how == "pmap":
    run = jax.pmap(on_device, "d", in_axes=(None, 0))
    batch = {name: x[:, None] for name, x in batch.items()}
  else:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    run = jax.shard_map(
      on_device, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(),
      check_vma=how == "shard_map",
    )  # fmt: skip
  with pytest.raises(ValueError, match="that clips each example by itself"):
    run(jnp.float32(1.0), batch)


@pytest.mark.parametrize("divided", ["mask", "results"])
def test_a_convolution_is_refused_whatever_divides_it(divided):
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
  rows, all_ = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
  grad_fn = make(convolution, "vmap")
  params = jax.device_put({"k": PARAMS["k"]}, all_)
  batch = jax.device_put(BATCH, all_)
  if divided == "mask":
    padding = jax.device_put(np.zeros(ROWS, bool), rows)
    call = jax.jit(lambda p, b, m: grad_fn(p, b, is_padding_example=m))
    arguments = (params, batch, padding)
  else:
    call = jax.jit(
      lambda p, b: (lambda total, aux: (total, aux.norms))(*grad_fn(p, b)),
      out_shardings=(all_, rows),
    )
    arguments = (params, batch)
  with pytest.raises(jax.errors.JaxRuntimeError, match="divided among several"):
    jax.block_until_ready(call(*arguments))
