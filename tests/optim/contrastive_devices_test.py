"""Contrastive gradients by all devices of a mesh: the sums and claims of one.

Each device encodes a share of a batch, gathers the vectors of all others and
clips rows, similarities or groups of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.optim.contrastive import group
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import sharded_grad
from tests.optim import contrastive_neighbours_test as neighbours
from tests.optim import contrastive_test as plain

SIZE = 13  # no multiple of the devices
PADDING = np.isin(np.arange(SIZE), (2, 7, 10, 11, 12))
SOFTMAX = plain.LOSSES["softmax"]
HARD = losses.Softmax(temperature=0.5, hard_negatives=1)
BOTH = plain.LOSSES["two directions"]
METHODS = {
  "example": (optim.Row(gradients="all"), SOFTMAX, None),
  "row of the batch": (optim.Row(gradients="pair"), HARD, None),
  "text, in microbatches": (optim.Row(gradients="query"), SOFTMAX, 1),
  "row": (optim.Row(negatives="public", gradients="pair"), SOFTMAX, None),
  "whole row": (optim.Row(negatives="public", gradients="all"), SOFTMAX, 1),
  "logit": (optim.Logit(), HARD, None),
  "logit by shifts": (optim.Logit(memory_bytes=0), BOTH, None),
  "logit, in microbatches": (optim.Logit(), SOFTMAX, 1),
  "logit, bound": (optim.Logit(norms="bound"), SOFTMAX, None),
  "group": (optim.Group(size=3, groups=5), SOFTMAX, None),
  "batch": (optim.Batch(), SOFTMAX, None),
}


SHAPE = mesh_lib.Shape(data=4, fsdp=2)


def on_mesh(fn, shape=SHAPE):
  """The gradient by all devices, compiled."""
  mesh = mesh_lib.make(shape)
  sharded = sharded_grad.ShardedGrad(grad_fn=fn, mesh=mesh)
  return jax.jit(lambda p, b, m: sharded(p, b, is_padding_example=m))


def make(name, **more):
  method, loss, microbatch = METHODS[name]
  return plain.make(
    method, loss, size=SIZE, clip=0.5, microbatch_size=microbatch, **more
  )


def make_batch(loss=SOFTMAX, size=SIZE, method=None):
  hard = getattr(loss, "hard_negatives", 0)
  batch = plain.make_batch(size, hard=hard)
  if getattr(method, "negatives", "batch") == "public":
    batch["public_negatives"] = plain.make_batch(5, seed=3)["documents"]
  batch["document_ids"] = np.arange(size) // 2  # pairs of duplicates
  if hard:
    batch["negative_ids"] = 1000 + np.arange(size)[:, None]
  return batch | {"example_id": 7 * np.arange(size, dtype=np.int32)}


@pytest.mark.parametrize("name", METHODS)
def test_all_devices_together_make_the_sum_of_one(name):
  method, loss, _ = METHODS[name]
  fn, batch = make(name), make_batch(loss, method=method)
  one, one_aux = jax.jit(
    lambda p, b, m: fn(p, b, is_padding_example=m)
  )(plain.PARAMS, batch, PADDING)  # fmt: skip
  many, aux = on_mesh(fn)(plain.PARAMS, batch, PADDING)
  plain.assert_close(many, one, 1e-6)
  assert np.linalg.norm(plain.flat(one)) > 0.4
  np.testing.assert_allclose(aux.losses, one_aux.losses, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(aux.norms, one_aux.norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["row of the batch", "batch"])
def test_rows_that_fill_all_devices_meet_in_the_loss(name):
  fn = dataclasses.replace(make(name), max_batch_size=16)
  batch, mask = make_batch(METHODS[name][1], 16), np.zeros(16, bool)
  one, _ = jax.jit(lambda p, b, m: fn(p, b, is_padding_example=m))(
    plain.PARAMS, batch, mask
  )
  many, _ = on_mesh(fn)(plain.PARAMS, batch, mask)
  plain.assert_close(many, one, 1e-6)


@pytest.mark.parametrize("name", ["row", "row of the batch", "logit"])
def test_microbatches_that_do_not_divide_a_devices_rows_change_nothing(name):
  """Seven rows of a device, in threes."""
  method, loss, _ = METHODS[name]
  fn = plain.make(method, loss, size=SIZE, clip=0.5, microbatch_size=3)
  batch = make_batch(loss, method=method)
  one, _ = jax.jit(lambda p, b, m: make(name)(p, b, is_padding_example=m))(
    plain.PARAMS, batch, PADDING
  )
  many, aux = on_mesh(fn, mesh_lib.Shape(data=2))(plain.PARAMS, batch, PADDING)
  plain.assert_close(many, one, 1e-6)
  assert aux.norms.shape == (SIZE,)


def test_separate_towers_and_layers_in_parts_make_the_sum_of_one():
  """The partitioner divides layers along `tensor`, inside of each device's share."""
  fn = make("logit", encoders=plain.SEPARATE)
  params, batch = plain.both_towers(plain.PARAMS), make_batch(HARD)
  one, _ = jax.jit(lambda p, b, m: fn(p, b, is_padding_example=m))(
    params, batch, PADDING
  )
  shape = mesh_lib.Shape(data=2, fsdp=2, tensor=2)
  plain.assert_close(on_mesh(fn, shape)(params, batch, PADDING)[0], one, 1e-6)


@pytest.mark.parametrize("name", ["example", "row", "logit", "batch"])
def test_padding_that_fills_up_devices_moves_nothing(name):
  """Sixteen rows give each device two, eleven leave some with one or padding."""
  method, loss, _ = METHODS[name]
  fn = dataclasses.replace(make(name), max_batch_size=16)
  whole = make_batch(loss, 16, method)
  real, rows = np.arange(16) < 5, ("queries", "documents", "negatives")
  for key in rows:
    if key in whole:
      whole[key] = whole[key].at[5:].set(jnp.nan)
  less = {k: v[:5] if k != "public_negatives" else v for k, v in whole.items()}
  total, aux = on_mesh(fn)(plain.PARAMS, whole, ~real)
  fewer, _ = on_mesh(fn)(plain.PARAMS, less, np.zeros(5, bool))
  plain.assert_close(total, fewer, 1e-6)
  if len(aux.losses) == 16:
    np.testing.assert_array_equal(aux.losses[5:], 0)
    np.testing.assert_array_equal(aux.norms[5:], 0)
  nobody, _ = on_mesh(fn)(plain.PARAMS, whole, np.ones(16, bool))
  assert not np.any(plain.flat(nobody))


@dataclasses.dataclass(frozen=True)
class Divided:
  """A gradient that eight devices make, where tests ask for one of one device."""

  fn: optim.ContrastiveGrad
  loss = property(lambda self: self.fn.loss)
  sensitivity = property(lambda self: self.fn.sensitivity)

  def __call__(self, params, batch, *, is_padding_example):
    sharded = sharded_grad.ShardedGrad(
      grad_fn=self.fn, mesh=mesh_lib.make(mesh_lib.Shape())
    )
    return sharded(params, batch, is_padding_example=is_padding_example)


def attacked(method, loss, **more):
  fn = neighbours.make(method, loss)
  neighbours.check(Divided(fn), **more)


@pytest.mark.parametrize("norms", ["exact", "bound"])
def test_a_neighbour_moves_pairs_on_devices_up_to_the_bound_and_not_beyond(
  norms,
):
  method = optim.Logit(norms=norms)
  least = 0.99 if norms == "exact" else 0.7
  attacked(method, losses.Softmax(temperature=0.5), least=least)


def test_a_neighbour_moves_rows_on_devices_up_to_the_bound_and_not_beyond():
  public = np.array([[0.1, neighbours.SPEED], [np.pi, -neighbours.SPEED]])
  attacked(
    optim.Row(negatives="public", gradients="pair"),
    neighbours.SHARP,
    extra={"public_negatives": public},
  )


def test_a_neighbour_turns_around_the_rows_of_all_devices():
  """Eleven clip norms, of which each device adds one or two."""
  attacked(
    optim.Row(gradients="all"),
    neighbours.SHARP,
    units=["pair"],
    adversary=neighbours.turned(),
  )


def test_a_neighbour_turns_around_a_batch_or_two_groups_on_devices():
  attacked(optim.Batch(), neighbours.SHARP)
  ids = np.arange(100, dtype=np.int32)
  (first, second), _ = group.assign(ids, np.zeros(100, bool), 2, 8)
  extra = {"example_id": np.concatenate([second[:3], first[:3]])}
  extra["other_id"] = second[3:4]
  method = optim.Group(size=4, groups=2)
  attacked(method, neighbours.SHARP, units=["pair"], extra=extra)


def test_a_batch_that_is_divided_already_is_refused():
  """A device would take its own documents for all there are."""
  fn = make("row of the batch").divide_among(("d",))
  mesh = Mesh(np.array(jax.devices()), ("d",))
  batch = plain.make_batch(8, hard=1)

  def on_device(params, batch):
    return jax.lax.psum(fn(params, batch)[0], "d")

  with pytest.raises(ValueError, match="the whole batch on every device"):
    jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(
      plain.PARAMS, batch
    )


def test_other_axes_than_those_it_was_given_are_refused():
  fn = make("row of the batch").divide_among(("d",))
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "e"))
  batch = plain.make_batch(8, hard=1)
  with pytest.raises(ValueError, match="clips each example by itself"):
    jax.shard_map(
      lambda p, b: fn(p, b)[0], mesh=mesh, in_specs=(P(), P()), out_specs=P(),
    )(plain.PARAMS, batch)  # fmt: skip
