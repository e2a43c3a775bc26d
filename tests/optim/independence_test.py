"""Losses that couple examples are refused, others pass."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import independence

PARAMS = {"w": jnp.array([[1.0, 0.5], [-0.5, 2.0]])}
BATCH = {"x": jnp.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.3]])}


def independent(params, batch):
  return jnp.sum(jnp.tanh(batch["x"] @ params["w"]) ** 2, axis=1)


def batch_norm(params, batch):
  x = batch["x"] @ params["w"]
  return jnp.sum((x - jnp.mean(x, axis=0, keepdims=True)) ** 2, axis=1)


def divided_by_the_batch(params, batch):
  return independent(params, batch) / batch["x"].shape[0]


def in_batch_negatives(params, batch):
  x = batch["x"] @ params["w"]
  return contrastive.softmax(x @ x.T, temperature=1.0)


def test_independent_losses_pass():
  optim.check_independence(independent, PARAMS, BATCH)


@pytest.mark.parametrize(
  "loss_fn",
  [batch_norm, divided_by_the_batch, in_batch_negatives],
  ids=lambda f: f.__name__,
)
def test_coupled_losses_are_refused(loss_fn):
  with pytest.raises(ValueError, match="expected independent losses"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


def statistics_carried_by_a_scan(params, batch):
  def layer(x, _):
    return x - jnp.mean(x @ params["w"], axis=0, keepdims=True), None

  return jnp.sum(
    jax.lax.scan(layer, batch["x"], None, length=2)[0] ** 2, axis=1
  )


def inside_a_checkpoint(params, batch):
  return jax.checkpoint(batch_norm)(params, batch)


def behind_a_reshape(params, batch):
  x = (batch["x"] @ params["w"]).reshape(-1)
  return independent(params, batch) / jnp.sum(x**2)


def behind_a_lookup(params, batch):
  x = batch["x"] @ params["w"]
  x = x[jnp.argsort(jnp.arange(len(x)) % 2)]
  return independent(params, batch) - jnp.mean(x)


def beside_the_first(params, batch):
  return independent(params, {"x": batch["x"] - batch["x"][:1]})


def in_the_direction_of_one(params, batch):
  return batch["x"] @ params["w"] @ batch["x"][1]


def inside_a_branch(params, batch):
  x = batch["x"] @ params["w"]
  centred = lambda x: x - jnp.mean(x, axis=0, keepdims=True)  # noqa: E731
  x = jax.lax.cond(params["w"][0, 0] > 0, centred, jnp.square, x)
  return jnp.sum(x**2, axis=1)


def in_the_choice_of_a_branch(params, batch):
  is_large = jnp.max(batch["x"]) > 1
  x = jax.lax.cond(is_large, jnp.tanh, jnp.sin, batch["x"])
  return independent(params, {"x": x})


def inside_a_loop(params, batch):
  x = jax.lax.while_loop(
    lambda x: jnp.max(x) < 9,
    lambda x: x + jnp.max(x, axis=0, keepdims=True),
    jax.lax.stop_gradient(batch["x"]),
  )
  return independent(params, {"x": x})


def carried_from_one_to_the_next(params, batch):
  def add(total, x):
    total = total + jnp.sum(x @ params["w"])
    return total, total

  return jax.lax.scan(add, 0.0, batch["x"])[1]


def negatives_by_roll(params, batch):
  x = batch["x"] @ params["w"]
  return jnp.sum(x * batch["x"], 1) - jnp.sum(x * jnp.roll(batch["x"], 1, 0), 1)


def mixed_up_with_the_last(params, batch):
  return independent(params, {"x": 0.7 * batch["x"] + 0.3 * batch["x"][::-1]})


def with_a_key(params, batch, key):
  x = batch_norm(params, batch)
  return x + jax.random.normal(key, (1,))


@pytest.mark.parametrize(
  "loss_fn",
  [
    batch_norm,
    in_batch_negatives,
    beside_the_first,
    in_the_direction_of_one,
    inside_a_branch,
    in_the_choice_of_a_branch,
    inside_a_loop,
    carried_from_one_to_the_next,
    statistics_carried_by_a_scan,
    inside_a_checkpoint,
    behind_a_reshape,
    behind_a_lookup,
    negatives_by_roll,
    mixed_up_with_the_last,
    with_a_key,
  ],
  ids=lambda f: f.__name__,
)
def test_coupled_losses_are_refused_with_and_without_jit(loss_fn):
  """The trace says it, whatever the values are."""
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  grad_fn = grad_fn if loss_fn is batch_norm else jax.jit(grad_fn)
  key = {"key": jax.random.key(0)} if loss_fn is with_a_key else {}
  with pytest.raises(ValueError, match="moves when another is beside it"):
    grad_fn(PARAMS, BATCH, **key)


LABELS = jnp.arange(3)


def of_one_size(params, batch):
  scores = batch["x"] @ params["w"] @ batch["x"].T
  return optax.softmax_cross_entropy_with_integer_labels(scores, LABELS)


def test_a_loss_that_closes_over_a_row_for_each_example_takes_none_alone():
  """Its trace shows nothing: it takes no batch of another size."""
  grad_fn = jax.jit(optim.clipped_grad(of_one_size, l2_clip_norm=1.0))
  with pytest.raises(ValueError, match=r"got shape=\(3,\) for a batch of one"):
    grad_fn(PARAMS, BATCH)


def _by_a_closure(params, batch):
  def loss_fn(params, example):
    scores = example["x"] @ params["w"] @ batch["x"].T
    return optax.softmax_cross_entropy_with_integer_labels(
      scores, example["id"]
    )

  return optim.clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch)[0]


def _by_an_argument(params, batch):
  def loss_fn(params, example, documents):
    scores = example["x"] @ params["w"] @ documents.T
    return optax.softmax_cross_entropy_with_integer_labels(
      scores, example["id"]
    )

  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  return grad_fn(params, batch, batch["x"])[0]


def _by_its_mask(params, batch):
  def loss_fn(params, example):
    number = jnp.sum(~batch["is_padding_example"])
    return independent(params, example) / number

  return optim.clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch)[0]


@pytest.mark.parametrize(
  ("step", "field"),
  [
    (_by_a_closure, "x"),
    (_by_an_argument, "x"),
    (_by_its_mask, "is_padding_example"),
  ],
)
def test_a_loss_that_reads_the_whole_batch_from_outside_is_refused(step, field):
  """One record moved the sum of 32 rows by 5.9 clip norms."""
  batch = BATCH | {
    "id": jnp.arange(3),
    "is_padding_example": jnp.array([False, False, True]),
  }
  with pytest.raises(ValueError, match=rf"batch\['{field}'\] of all examples"):
    jax.jit(step)(PARAMS, batch)
  # Public values of as many rows pass.
  public = jax.tree.map(jnp.array, batch)
  grad_fn = optim.clipped_grad(
    lambda params, example: independent(params, example) + public["x"].sum(),
    l2_clip_norm=1.0,
  )
  assert jnp.isfinite(jax.jit(grad_fn)(PARAMS, batch)[0]["w"]).all()


def of_a_table(params, batch):
  """In-batch softmax over a table of at most 64 examples."""
  scores = batch["x"] @ params["w"] @ batch["x"].T
  here = jnp.eye(64)[: len(scores), : len(scores)]
  return -(here * jax.nn.log_softmax(scores)).sum(axis=1)


def of_threes(params, batch):
  """A statistic of groups of three, and none of one example."""
  x = batch["x"] @ params["w"]
  if len(x) > 1:
    groups = x.reshape(-1, 3, x.shape[1])
    x = (groups - groups.mean(axis=(0, 1), keepdims=True)).reshape(x.shape)
  return jnp.sum(x**2, axis=1)


@pytest.mark.parametrize("loss_fn", [of_a_table, of_threes])
def test_a_loss_of_some_sizes_is_traced_for_one_that_it_takes(loss_fn):
  grad_fn = jax.jit(optim.clipped_grad(loss_fn, l2_clip_norm=1.0))
  with pytest.raises(ValueError, match="moves when another is beside it"):
    grad_fn(PARAMS, BATCH)


def in_pieces(params, batch):
  """Everything that keeps examples apart, in one loss."""
  x = batch["x"].reshape(-1, 1, 2).swapaxes(0, 1)[0]
  x = jnp.concatenate([x, jnp.flip(x, 1)], axis=1)[:, 1:3]
  table = jnp.stack([params["w"], -params["w"]])
  rows = table[(batch["x"][:, 0] > 1).astype(int)]  # a lookup for each example
  x = jnp.einsum("bd,bdk->bk", x, rows)
  x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, table)
  x = jax.nn.softmax(jnp.cumsum(x, axis=1), axis=1)
  x = jnp.where(jnp.argmax(x, axis=1)[:, None] == 0, x, jnp.sort(x, axis=1))
  x = x + jax.random.normal(jax.random.key(0), (1, 2))
  return jax.checkpoint(lambda x: jnp.sum(x**2, axis=1))(x)


def in_loops(params, batch):
  """Loops and branches over all examples that end when the last one is done."""
  x = batch["x"] @ params["w"]
  x = jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x), x)

  def large(x):
    x = jax.lax.stop_gradient(x)
    return jax.lax.while_loop(
      lambda x: jnp.any(x < 1e3), lambda x: jnp.where(x < 1e3, x * x + 1, x), x
    )

  def one(x):
    return jnp.sum(jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x) * large(x))

  x = jax.vmap(one)(x)[:, None] + x * large(x)
  return jax.lax.map(jnp.sum, x, batch_size=2)


def one_by_one(params, batch):
  """The examples in turn, each written to its own place."""
  x = batch["x"]

  def body(i, losses):
    return losses.at[i].set(jnp.sum(x[i] @ params["w"]) ** 2)

  losses = jax.lax.fori_loop(0, len(x), body, jnp.zeros(len(x)))
  losses += jax.lax.map(lambda x: jnp.sum(jnp.tanh(x @ params["w"])), x)
  return losses + jnp.stack([jnp.sum(row**2) for row in x])


def turned_and_back(params, batch):
  x = jnp.roll(jnp.roll(batch["x"], 1, axis=0) @ params["w"], -1, axis=0)
  return jnp.sum(x[::-1], axis=1)[::-1]


def with_axes_of_the_size_in_the_trace(params, batch):
  """A sum over an axis of parameters that the first size divides."""
  x = jnp.repeat(batch["x"] @ params["w"], independence._PRIMES[0], axis=1)
  return jnp.sum(jnp.tanh(x[:, ::2]), axis=1)


def a_diagonal_of_all_pairs(params, batch):
  return jnp.diagonal(jnp.tanh(batch["x"] @ params["w"]) @ batch["x"].T)


@pytest.mark.parametrize(
  "loss_fn",
  [
    independent,
    in_pieces,
    in_loops,
    one_by_one,
    turned_and_back,
    with_axes_of_the_size_in_the_trace,
    a_diagonal_of_all_pairs,
  ],
  ids=lambda f: f.__name__,
)
def test_losses_that_keep_examples_apart_pass_under_jit(loss_fn):
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  total, _ = jax.jit(grad_fn)(PARAMS, BATCH)
  each = np.asarray(jax.jit(jax.jacfwd(loss_fn))(PARAMS, BATCH)["w"])
  norms = np.sqrt((each**2).sum(axis=(1, 2), keepdims=True))
  expected = (each / np.maximum(norms, 1.0)).sum(axis=0)
  np.testing.assert_allclose(total["w"], expected, rtol=1e-4, atol=1e-5)


@jax.custom_batching.custom_vmap
def rescaled(x):
  return x


@rescaled.def_vmap
def _rescaled_together(axis_size, in_batched, x):
  return x / jnp.max(jnp.abs(x)), True


@jax.custom_vjp
def rescaled_backward(x):
  return x


rescaled_backward.defvjp(lambda x: (x, None), lambda _, g: (rescaled(g),))


def called_back(method):
  def double(x):
    return jax.pure_callback(
      lambda x: np.asarray(2 * x),
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      x,
      vmap_method=method,
    )

  return lambda p, b: jnp.sum((b["x"] + double(b["x"])) @ p["w"], axis=1)


@pytest.mark.parametrize(
  ("loss_fn", "name"),
  [
    (lambda p, b: jnp.sum(rescaled(b["x"]) @ p["w"], axis=1), "custom_vmap"),
    (
      lambda p, b: jnp.sum(rescaled_backward(b["x"] @ p["w"]), axis=1),
      "custom_vmap",
    ),
    (called_back("expand_dims"), "pure_callback"),
    (called_back("broadcast_all"), "pure_callback"),
  ],
  ids=["forward", "backward", "expanded", "broadcast"],
)
def test_what_is_handed_all_examples_at_once_is_refused(loss_fn, name):
  """A rule that shares a maximum moved the sum by 62 clip norms."""
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  for of in (grad_fn, jax.jit(grad_fn)):
    with pytest.raises(ValueError, match=f"{name}.*handed all examples"):
      of(PARAMS, BATCH)


def test_callbacks_one_by_one_and_keys_of_threefry_pass():
  optim.clipped_grad(called_back("sequential"), l2_clip_norm=1.0)(PARAMS, BATCH)

  def loss_fn(params, batch, key):
    return jnp.sum(batch["x"] @ params["w"], axis=1) * jax.random.uniform(key)

  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  grad_fn(PARAMS, BATCH, key=jax.random.key(0))
  with pytest.raises(ValueError, match="other than Threefry"):
    grad_fn(PARAMS, BATCH, key=jax.random.key(0, impl="rbg"))


def test_encoders_are_looked_at_too():
  def encode(params, x):
    x = rescaled(x @ params["w"])
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)

  fn = optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=contrastive.Softmax(temperature=1.0),
    l2_clip_norm=1.0,
    method=optim.Row(),
    max_batch_size=3,
  )
  with pytest.raises(ValueError, match="custom_vmap"):
    fn(PARAMS, {"queries": BATCH["x"], "documents": BATCH["x"]})


def test_a_loss_that_becomes_nan_alone_is_refused():
  def loss_fn(params, batch):
    x = batch["x"] @ params["w"]
    return jnp.sum(x, axis=1) / (batch["x"].shape[0] - 1.0) * 0.0 + x[:, 0]

  with pytest.raises(ValueError, match="expected independent losses"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


def test_a_batch_of_equal_examples_cannot_show_it():
  with pytest.raises(ValueError, match="2 different examples"):
    optim.check_independence(independent, PARAMS, {"x": jnp.ones((3, 2))})


def test_a_single_number_is_not_a_loss_per_example():
  with pytest.raises(ValueError, match=r"losses of shape \(3,\)"):
    optim.check_independence(
      lambda p, b: jnp.mean(independent(p, b)), PARAMS, BATCH
    )


@pytest.mark.parametrize("coupled", [False, True])
def test_half_precision_has_a_tolerance_of_its_own(coupled):
  def loss_fn(params, batch):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    # What is rounded differently in a batch of another size.
    x = x.astype(jnp.float32) * (1.0 + 1e-3 * batch["x"].shape[0])
    mean = jnp.mean(x, axis=0, keepdims=True) if coupled else 0.0
    return jnp.sum((x - mean) ** 2, axis=1)

  if not coupled:
    return optim.check_independence(loss_fn, PARAMS, BATCH)
  with pytest.raises(ValueError, match="relative 0.02"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


def test_the_message_holds_no_value_of_the_batch():
  with pytest.raises(ValueError) as error:
    optim.check_independence(batch_norm, PARAMS, BATCH)
  other = {"x": 3.0 * BATCH["x"]}
  with pytest.raises(ValueError) as another:
    optim.check_independence(batch_norm, PARAMS, other)
  assert str(error.value) == str(another.value)


def test_a_rule_of_another_package_may_couple_examples_and_is_refused():
  """With on_error="nan" one bad example takes all others out of the sum."""
  eqx = pytest.importorskip("equinox")

  def loss_of_one(w, x):
    large = jnp.any(jnp.abs(x) > 10)
    return jnp.sum(eqx.error_if(x, large, "outlier", on_error="nan") @ w)

  grad_fn = optim.clipped_grad(
    lambda w, b: jax.vmap(loss_of_one, in_axes=(None, 0))(w, b["x"]),
    l2_clip_norm=1.0,
  )
  with pytest.raises(ValueError, match="rule for jax.vmap is not JAX's own"):
    jax.jit(grad_fn)(PARAMS["w"], BATCH)


def test_weights_by_counts_over_the_batch_are_refused():
  """A scatter of all examples into counts of classes brings them together."""
  rng = np.random.default_rng(0)
  batch = {
    "x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32),
    "y": jnp.asarray([0, 1, 1, 1, 0, 1, 1, 1]),
  }
  params = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)

  def loss_fn(params, batch):
    logs = jax.nn.log_softmax(batch["x"] @ params)
    losses = -jnp.take_along_axis(logs, batch["y"][:, None], 1)[:, 0]
    return losses / jnp.bincount(batch["y"], length=2)[batch["y"]]

  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match="a loss of each example alone"):
    jax.jit(grad_fn)(params, batch)


def test_words_counted_in_each_example_alone_are_taken():
  """A scatter into a row of each example's own brings none together."""
  batch = {"ids": jnp.asarray([[0, 1, 1], [2, 2, 2], [0, 3, 1]])}
  params = jnp.arange(4.0)

  def loss_fn(params, batch):
    rows = jnp.arange(len(batch["ids"]))[:, None]
    counts = jnp.zeros((len(batch["ids"]), 4)).at[rows, batch["ids"]].add(1.0)
    return counts @ params

  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=100.0)
  _, aux = jax.jit(grad_fn)(params, batch)
  np.testing.assert_allclose(aux.losses, loss_fn(params, batch))


def frozen_in_a_scan(params, batch):
  def layer(x, kernel):
    return jnp.tanh(x @ jax.lax.stop_gradient(kernel)), None

  x, _ = jax.lax.scan(layer, batch["x"], params["frozen"])
  return jnp.sum(x @ params["w"], axis=1)


def messages(caplog):
  return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "vmap"])
def test_parameters_that_noise_alone_moves_are_logged_once(caplog, strategy):
  """stop_gradient freezes a kernel for Adam, and Adam with noise moves it."""
  frozen = f"frozen_{strategy}"  # logged once for a name
  params = {**PARAMS, frozen: jnp.ones((2, 2, 2)), "empty": jnp.ones((0, 2))}
  grad_fn = optim.clipped_grad(
    lambda p, b: frozen_in_a_scan({**p, "frozen": p[frozen]}, b),
    l2_clip_norm=1.0,
    strategy=strategy,
  )
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      jax.eval_shape(grad_fn, params, BATCH)
  (message,) = messages(caplog)
  assert f"1 of 3 parameters get no gradient from the loss, among them ['{frozen}']" in message  # fmt: skip


def test_parameters_that_some_example_or_tower_moves_are_not_logged(caplog):
  def gated(params, batch):  # no gradient for negative inputs
    return jnp.sum(jax.nn.relu(batch["x"] @ params["w"]), axis=1)

  def encode(name):
    def encoder(params, x):
      x = x @ params[name]
      return x / jnp.linalg.norm(x, axis=1, keepdims=True)

    return encoder

  fn = optim.contrastive_clipped_grad(
    encode("query"),
    encode("document"),
    loss=contrastive.Softmax(temperature=1.0),
    l2_clip_norm=1.0,
    method=optim.Row(),
    max_batch_size=3,
  )
  params = {"query": PARAMS["w"], "document": PARAMS["w"]}
  pairs = {"queries": BATCH["x"], "documents": BATCH["x"]}
  with caplog.at_level(logging.WARNING):
    jax.eval_shape(optim.clipped_grad(gated, l2_clip_norm=1.0), PARAMS, BATCH)
    jax.eval_shape(fn, params, pairs)
    assert not caplog.records
    jax.eval_shape(fn, {**params, "unused_by_both": jnp.ones(2)}, pairs)
  (message,) = messages(caplog)
  assert "1 of 3 parameters" in message and "['unused_by_both']" in message
