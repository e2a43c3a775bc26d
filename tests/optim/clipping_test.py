"""The interface of clipped gradients, for every strategy."""

import functools
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import clipping, strategies
from synthq_jax.privacy import sampling

Relation = dp_accounting.NeighboringRelation
STRATEGIES = sorted(strategies.STRATEGIES)
every = pytest.mark.parametrize("strategy", STRATEGIES)


def linear(params, batch):
  """The gradient of an example is its own x (and 2 x for the bias)."""
  inner = jnp.sum(batch["x"] * params["w"][None, :], axis=1)
  return inner + 2.0 * params["b"] * batch["x"][:, 0]


PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}


def gradient_norms(x):
  return np.sqrt(np.sum(x**2, axis=1) + 4.0 * x[:, 0] ** 2)


@every
def test_the_sum_is_that_of_gradients_clipped_one_by_one(strategy):
  x = np.array([[0.1, 0.2], [3.0, -4.0], [0.0, 9.0]], np.float32)
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=1.5, strategy=strategy)
  total, aux = grad_fn(PARAMS, {"x": jnp.asarray(x)})
  norms = gradient_norms(x)
  factors = np.minimum(1.0, 1.5 / norms)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-6)
  np.testing.assert_allclose(total["w"], factors @ x, rtol=1e-5)
  np.testing.assert_allclose(total["b"], factors @ (2 * x[:, 0]), rtol=1e-5)


@every
def test_no_example_contributes_more_than_the_clip_norm(strategy):
  grad_fn = jax.jit(
    clipping.clipped_grad(linear, l2_clip_norm=0.25, strategy=strategy)
  )
  for size in (1e-3, 1.0, 1e6, 1e15):
    x = jnp.array([[size, -size]], jnp.float32)
    total, _ = grad_fn(PARAMS, {"x": x})
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(total)))
    assert norm <= 0.25 * (1 + 1e-6)
    if size >= 1.0:
      assert norm >= 0.25 * (1 - 1e-6)


@every
def test_an_adversarial_neighbour_attains_the_sensitivity(strategy):
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=2.0, strategy=strategy)

  def distance(first, second):
    sums = [grad_fn(PARAMS, {"x": jnp.asarray(x)})[0] for x in (first, second)]
    differences = jax.tree.map(jnp.subtract, *sums)
    return np.sqrt(sum(np.sum(d**2) for d in jax.tree.leaves(differences)))

  rest = np.array([[0.3, 0.1], [-0.2, 0.4]], np.float32)
  far = np.array([[50.0, 0.0]], np.float32)
  removed = distance(np.concatenate([rest, far]), rest)
  replaced = distance(np.concatenate([rest, far]), np.concatenate([rest, -far]))
  np.testing.assert_allclose(
    removed, grad_fn.sensitivity(Relation.ADD_OR_REMOVE_ONE), rtol=1e-5
  )
  np.testing.assert_allclose(
    replaced, grad_fn.sensitivity(Relation.REPLACE_ONE), rtol=1e-5
  )


@every
def test_padding_examples_contribute_zero_whatever_they_hold(strategy):
  x = jnp.array([[0.1, 0.2], [np.nan, 5.0], [7.0, 7.0]], jnp.float32)
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=1.0, strategy=strategy)
  padding = jnp.array([False, True, True])
  total, aux = grad_fn(PARAMS, {"x": x}, is_padding_example=padding)
  alone, _ = grad_fn(PARAMS, {"x": x[:1]})
  np.testing.assert_array_equal(total["w"], alone["w"])
  np.testing.assert_array_equal(aux.norms[1:], [0.0, 0.0])
  np.testing.assert_array_equal(aux.losses[1:], [0.0, 0.0])


@every
def test_microbatches_of_padding_alone_take_no_time_and_change_nothing(
  strategy,
):
  """Batches have room for seven standard deviations more than they hold."""
  called = []

  def loss(params, batch):
    jax.debug.callback(lambda x: called.append(int(x)), batch["x"][0, 0])
    return linear(params, batch)

  x = np.arange(24, dtype=np.float32).reshape(12, 2)
  is_padding = np.array([0, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1], bool)
  found = []
  for loss_fn in (loss, linear):
    grad_fn = jax.jit(
      clipping.clipped_grad(
        loss_fn, l2_clip_norm=20.0, strategy=strategy, microbatch_size=4
      )
    )
    found.append(grad_fn(PARAMS, {"x": x}, is_padding_example=is_padding))
  jax.effects_barrier()
  assert called and not any(8 <= value < 16 for value in called)
  whole = clipping.clipped_grad(linear, l2_clip_norm=20.0, strategy=strategy)
  total, aux = whole(PARAMS, {"x": x[~is_padding]})
  for each, of_rows in found:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), each, total
    )
    np.testing.assert_allclose(of_rows.norms[~is_padding], aux.norms, rtol=1e-6)
    assert not np.any(of_rows.norms[is_padding])
    assert not np.any(of_rows.losses[is_padding])


@every
def test_microbatches_are_left_out_where_that_is_cheap_and_safe(strategy):
  """Not in a loop that is written out, nor on devices that wait for others."""

  def choices(grad_fn, *arguments, **named):
    return str(jax.make_jaxpr(grad_fn)(*arguments, **named)).count("cond[")

  def made(loss, **named):
    return clipping.clipped_grad(
      loss, l2_clip_norm=1.0, strategy=strategy, microbatch_size=2, **named
    )

  def convolved(params, batch):
    kernel = params["w"].reshape(1, 1, 3)
    return jnp.sum(
      jnp.tanh(
        jax.lax.conv_general_dilated(batch["x"][:, None], kernel, (1,), "SAME")
      ),
      (1, 2),
    )

  params, batch = {"w": jnp.ones(3)}, {"x": jnp.ones((8, 3))}
  flags = {"is_padding_example": jnp.arange(8) > 4}
  grad_fn = made(lambda p, b: b["x"] @ p["w"])
  own = choices(grad_fn, params, batch)  # ghost clipping has one
  assert choices(grad_fn, params, batch, **flags) == own + 1
  with_aux = made(lambda p, b: (b["x"] @ p["w"], b["x"]), has_aux=True)
  assert choices(with_aux, params, batch, **flags) == own
  other = made(convolved)
  own_of_other = choices(other, params, batch)
  assert choices(other, params, batch, **flags) == own_of_other
  rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  divided = jax.shard_map(
    lambda p, b, f: jax.lax.psum(grad_fn(p, b, is_padding_example=f)[0], "x"),
    mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)),
    in_specs=(whole, rows, rows),
    out_specs=whole,
    check_vma=False,
  )
  assert choices(divided, params, batch, *flags.values()) == own


@pytest.mark.parametrize("kind", ["examples", "pairs"])
def test_rows_along_explicit_axes_of_a_mesh_are_refused_in_one_line(kind):
  """`jax.make_mesh` makes such axes unless it is told otherwise."""
  types = jax.sharding.AxisType
  rows = jax.sharding.PartitionSpec("x")
  values = np.eye(8, dtype=np.float32)
  if kind == "pairs":
    batch, params = {"queries": values, "documents": values}, jnp.eye(8)
    grad_fn = optim.contrastive_clipped_grad(
      lambda p, x: x @ p,
      lambda p, x: x @ p,
      loss=contrastive.Softmax(temperature=1.0),
      l2_clip_norm=1.0,
      method=optim.Batch(),
      max_batch_size=8,
    )
  else:
    batch, params = {"x": values}, jnp.ones(8)
    grad_fn = clipping.clipped_grad(
      lambda p, b: b["x"] @ p, l2_clip_norm=1.0, strategy="vmap"
    )

  def run(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    divided = jax.device_put(batch, jax.sharding.NamedSharding(mesh, rows))
    return jax.jit(grad_fn)(params, divided)[0]

  with pytest.raises(ValueError, match=r"one along \['x'\]: make the mesh"):
    run(types.Explicit)
  expected, _ = grad_fn(params, batch)
  np.testing.assert_allclose(run(types.Auto), expected, atol=1e-6)


@every
def test_flags_of_padding_are_read_as_truth_whatever_their_type(strategy):
  """With 2 as a flag, one example would decide whether its neighbours count."""
  x = np.array([[3.0, 4.0]] * 8, np.float32)
  grad_fn = clipping.clipped_grad(
    linear, l2_clip_norm=1.0, strategy=strategy, microbatch_size=4
  )
  flags = np.array([0, 0, 0, 0, 2, 2, 2, 2])
  for first in (0, 2):
    flags[4] = first
    total, aux = grad_fn(PARAMS, {"x": x}, is_padding_example=flags)
    is_padding = {"is_padding_example": flags != 0}
    expected, _ = grad_fn(PARAMS, {"x": x}, **is_padding)
    jax.tree.map(np.testing.assert_array_equal, total, expected)
    assert not np.any(aux.norms[flags != 0])


def poisoned(params, batch):
  """Not finite in the loss, in the gradient or in neither, by `kind`."""
  inner = batch["x"] @ params["w"]
  bad_loss = jnp.where(batch["kind"] == 1, jnp.inf, 0.0)
  # The root of zero is finite, its derivative is not.
  bad_slope = jnp.sqrt(jnp.where(batch["kind"] == 2, inner * 0.0, 1.0))
  return inner + bad_loss + bad_slope


@every
def test_examples_that_are_not_finite_contribute_zero(strategy):
  params = {"w": jnp.array([1.0, 2.0])}
  x = jnp.array([[0.1, 0.2], [0.3, 0.1], [0.2, 0.2], [np.inf, 0.0]])
  batch = {"x": x, "kind": jnp.array([0, 1, 2, 0])}
  grad_fn = clipping.clipped_grad(poisoned, l2_clip_norm=1.0, strategy=strategy)
  total, aux = jax.jit(grad_fn)(params, batch)
  np.testing.assert_allclose(total["w"], [0.1, 0.2], rtol=1e-6)
  assert np.isnan(aux.norms).tolist() == [False, True, True, True]
  assert np.isfinite(aux.losses).tolist() == [True, False, True, False]


def test_factors_that_are_not_finite_contribute_zero(monkeypatch):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  test_examples_that_are_not_finite_contribute_zero("bookkeeping")


def test_a_microbatch_that_does_not_divide_the_batch_is_refused():
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=1.0, microbatch_size=2)
  with pytest.raises(ValueError, match="microbatch_size=2 for a batch of 3"):
    grad_fn(PARAMS, {"x": jnp.ones((3, 2))})


@every
def test_keys_follow_the_example_id_or_else_the_position(strategy):
  def loss_fn(params, batch, key):
    return params * batch["x"] * jax.random.uniform(key)

  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=9.0, strategy=strategy)
  key = jax.random.key(3)
  batch = {"x": jnp.ones(2), "example_id": jnp.array([7, 1])}
  _, aux = grad_fn(jnp.array(1.0), batch, key=key)
  expected = [jax.random.uniform(jax.random.fold_in(key, i)) for i in (7, 1)]
  np.testing.assert_array_equal(aux.losses, expected)
  _, aux = grad_fn(jnp.array(1.0), {"x": jnp.ones(2)}, key=key)
  expected = [jax.random.uniform(jax.random.fold_in(key, i)) for i in (0, 1)]
  np.testing.assert_array_equal(aux.losses, expected)


def test_sums_of_half_precision_parameters_are_float32():
  for strategy in STRATEGIES:
    grad_fn = clipping.clipped_grad(
      lambda p, b: p * b["x"], l2_clip_norm=1.0, strategy=strategy
    )
    total, aux = grad_fn(jnp.bfloat16(1.0), {"x": jnp.ones(3, jnp.bfloat16)})
    assert total.dtype == aux.losses.dtype == aux.norms.dtype == jnp.float32
    np.testing.assert_allclose(total, 3.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e-25, np.inf, np.nan])
def test_a_clip_norm_out_of_range_is_refused(clip):
  with pytest.raises(ValueError, match="l2_clip_norm"):
    clipping.clipped_grad(linear, l2_clip_norm=clip)


@pytest.mark.parametrize(
  "loss_fn",
  [
    contrastive.softmax,
    functools.partial(contrastive.softmax, temperature=1.0),
    lambda similarity: similarity,
  ],
  ids=["softmax", "partial", "one argument"],
)
def test_a_loss_of_similarities_is_refused_by_its_type(loss_fn):
  with pytest.raises(TypeError, match="of similarity.*batch_clipped_grad"):
    clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)


def test_losses_of_other_forms_are_not_refused():
  class Model:
    def loss(self, params, batch, key=None, *, scale=2.0):
      return scale * params * batch["x"]

    def __call__(self, *arguments):
      return self.loss(*arguments)

  partial = functools.partial(Model().loss, scale=2.0)
  for loss_fn in (Model().loss, Model(), partial, jax.jit(Model().loss)):
    grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=9.0)
    np.testing.assert_allclose(grad_fn(1.0, {"x": jnp.ones(3)})[0], 6.0)


def test_an_unknown_strategy_is_refused_by_naming_those_that_exist():
  with pytest.raises(ValueError, match="ghost, vmap, got .*'gost'"):
    clipping.clipped_grad(linear, l2_clip_norm=1.0, strategy="gost")


def test_fields_of_different_length_are_refused():
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match="one common leading axis"):
    grad_fn(PARAMS, {"x": jnp.ones((3, 2)), "y": jnp.ones(2)})
  with pytest.raises(ValueError, match="is_padding_example of shape"):
    grad_fn(
      PARAMS, {"x": jnp.ones((3, 2))}, is_padding_example=jnp.zeros(2, bool)
    )


SAMPLER = sampling.Poisson(
  num_examples=64, expected_batch_size=61, max_batch_size=125
)


@every
def test_nobody_has_to_remember_the_padding_of_a_sampler(strategy):
  """Padding that counted was one record 64 times: it moved the sum by 128."""

  def loss_fn(params, batch):  # with a gradient at rows of zeros, too
    return linear(params, batch) + 3.0 * params["b"]

  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0, strategy=strategy)
  call = jax.jit(grad_fn)
  drawn = SAMPLER.batch(3, 0)
  x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)

  def summed(record):
    batch = SAMPLER.take({"x": np.concatenate([record, x[1:]])}, drawn)
    return call(PARAMS, batch)

  far = np.array([[5e6, 0.0]], np.float32)
  (first, aux), (second, _) = summed(far), summed(-far)
  moved = jax.tree.map(jnp.subtract, first, second)
  moved = np.sqrt(sum(np.sum(d**2) for d in jax.tree.leaves(moved)))
  np.testing.assert_allclose(
    moved, grad_fn.sensitivity(Relation.REPLACE_ONE), rtol=1e-5
  )
  rows = drawn.indices[~drawn.is_padding]
  alone, _ = call(PARAMS, {"x": np.concatenate([far, x[1:]])[rows]})
  np.testing.assert_allclose(first["b"], alone["b"], rtol=1e-4)
  assert drawn.is_padding.sum() > 50
  assert not np.any(aux.norms[drawn.is_padding])


def test_padding_of_the_batch_and_of_the_caller_both_count():
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=9.0)
  batch = {
    "x": jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]),
    "is_padding_example": jnp.array([False, False, True]),
  }
  total, _ = grad_fn(PARAMS, batch)
  np.testing.assert_array_equal(total["w"], [1.0, 2.0])
  total, _ = grad_fn(
    PARAMS, batch, is_padding_example=jnp.array([True, False, False])
  )
  np.testing.assert_array_equal(total["w"], [0.0, 2.0])
  with pytest.raises(ValueError, match=r"of shape \(3,\), got shape=\(2,\)"):
    grad_fn(PARAMS, batch, is_padding_example=jnp.zeros(2, bool))


class Masked(NamedTuple):
  x: jax.Array
  is_padding_example: jax.Array


@pytest.mark.parametrize(
  "wrapped",
  [
    lambda batch: (batch, jnp.zeros(3)),
    lambda batch: {"pair": batch},
    lambda batch: Masked(**batch),
  ],
  ids=["tuple", "inner mapping", "named tuple"],
)
def test_a_mask_where_nobody_looks_is_refused(wrapped):
  """It went to the loss as one more field, and padding counted."""
  batch = {"x": jnp.ones((3, 2)), "is_padding_example": jnp.arange(3) > 1}

  def loss_fn(params, batch):
    leaves = jax.tree.leaves(batch)
    (x,) = (leaf for leaf in leaves if leaf.ndim == 2)
    return linear(params, {"x": x})

  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=9.0)
  with pytest.raises(ValueError, match="leave it out"):
    grad_fn(PARAMS, wrapped(batch))


@pytest.mark.parametrize(
  ("without_mask", "place"),
  [
    (lambda taken: taken["x"], np.asarray),
    (lambda taken: {"both": {"x": taken["x"]}, "y": taken["y"]}, jnp.asarray),
  ],
)
def test_rows_of_a_sampler_without_their_mask_are_refused(without_mask, place):
  """Rows of zeros counted as records, each with the gradient that zeros have."""

  def loss_fn(params, batch):
    x = next(a for a in jax.tree.leaves(batch) if a.ndim == 2)
    return linear(params, {"x": x}) + 3.0 * params["b"]

  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)
  records = {"x": place(np.ones((64, 2), np.float32)), "y": np.ones(64)}
  taken = SAMPLER.take(records, SAMPLER.batch(3, 0))
  with pytest.raises(ValueError, match="expected is_padding_example with rows"):
    grad_fn(PARAMS, without_mask(taken))
  mask = taken["is_padding_example"]
  total, _ = grad_fn(PARAMS, without_mask(taken), is_padding_example=mask)
  expected, _ = grad_fn(PARAMS, taken)
  np.testing.assert_array_equal(total["b"], expected["b"])
  whole = sampling.FixedOrder(num_examples=64, batch_size=16)
  full = whole.take(records, whole.batch(3, 0))  # has no padding to lose
  total, _ = grad_fn(PARAMS, without_mask(full))
  assert np.isfinite(total["b"])


def test_a_drawn_batch_in_place_of_its_records_is_refused():
  grad_fn = clipping.clipped_grad(linear, l2_clip_norm=1.0)
  drawn = SAMPLER.batch(3, 0)
  for batch in (drawn, {"x": drawn}, {"x": drawn.indices}):
    with pytest.raises(
      TypeError, match=r"pass sampler\.take\(records, drawn\)"
    ):
      grad_fn(PARAMS, batch)


def test_several_clip_norms_are_refused():
  grad_fn = optim.clipped_grad(
    lambda p, b: b @ p,
    l2_clip_norm=1.0,
    rescale_to_unit_norm=True,
    strategy="vmap",
  )
  batch = 10 * jnp.ones((4, 4))
  with pytest.raises(ValueError, match="expected one l2_clip_norm"):
    grad_fn(jnp.zeros(4), batch, l2_clip_norm=jnp.array([1e4, 1.0, 1.0, 1.0]))


def test_a_batch_without_rows_is_refused_in_words():
  grad_fn = optim.clipped_grad(linear, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match="at least one row, got none"):
    grad_fn(jnp.zeros(2), {"x": jnp.zeros((0, 2))})
