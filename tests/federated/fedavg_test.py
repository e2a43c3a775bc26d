"""What a client's steps do with padding, and the mean of clients."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax.federated import fedavg

START = {"w": np.float32([1.0, -2.0, 0.5])}


def loss_fn(params, batch):
  return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batches(steps=4, rows=3, seed=4):
  rng = np.random.default_rng(seed)
  return {
    "x": rng.normal(size=(steps, rows, 3)).astype(np.float32),
    "y": rng.normal(size=(steps, rows)).astype(np.float32),
    "is_padding": np.zeros((steps, rows), bool),
  }


def with_padding(made, is_padding):
  return {**made, "is_padding": np.asarray(is_padding)}


@functools.cache
def update(epochs=1):
  # Momentum and a count of steps: state that an empty step could spoil.
  optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
  made = fedavg.local_training(loss_fn, optimizer, epochs=epochs)
  return jax.jit(made)


def by_hand(made, places):
  """Trains on rows that are no padding."""
  optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
  params = jax.tree.map(jnp.asarray, START)
  state = optimizer.init(params)
  for place in places:
    real = ~made["is_padding"][place]
    rows = {"x": made["x"][place][real], "y": made["y"][place][real]}
    grads = jax.grad(lambda p: jnp.mean(loss_fn(p, rows)))(params)  # noqa: B023
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params["w"]


def trained(made, epochs=1):
  return update(epochs)(START, made)["w"]


def test_each_batch_is_a_step_and_epochs_go_through_them_again():
  made = batches()
  np.testing.assert_allclose(trained(made), by_hand(made, range(4)), rtol=1e-5)
  np.testing.assert_allclose(
    trained(made, 2), by_hand(made, [0, 1, 2, 3] * 2), rtol=1e-5
  )


def test_rows_of_padding_do_not_count():
  made = with_padding(batches(), [[False, True, False]] * 4)
  made["x"][:, 1] = 1e6
  np.testing.assert_allclose(trained(made), by_hand(made, range(4)), rtol=1e-5)


@pytest.mark.parametrize("empty", [[3], [1], [0, 2], [0, 1, 2, 3]])
def test_a_step_of_padding_changes_nothing_not_even_the_optimizer(empty):
  made = batches()
  made["is_padding"][empty] = True
  left = [place for place in range(4) if place not in empty]
  np.testing.assert_allclose(trained(made), by_hand(made, left), rtol=1e-5)
  if not left:
    np.testing.assert_array_equal(trained(made), START["w"])


def test_clients_side_by_side_wait_for_the_longest_and_change_no_more():
  made = batches()
  short = with_padding(made, [[False] * 3, *[[True] * 3] * 3])
  both = jax.tree.map(lambda *x: np.stack(x), made, short)
  together = jax.jit(jax.vmap(update(2), (None, 0)))(START, both)
  np.testing.assert_allclose(together["w"][0], trained(made, 2), rtol=1e-6)
  np.testing.assert_allclose(together["w"][1], trained(short, 2), rtol=1e-6)


def test_the_mean_is_weighted_as_numpy_weighs():
  clients = [batches(seed=seed) for seed in range(5)]
  weights = [1.0, 0.5, 4.0, 3.0, 2.0]
  models = [update()(START, one) for one in clients]
  found = fedavg.mean(zip(models, weights, strict=True))
  expected = np.average([x["w"] for x in models], axis=0, weights=weights)
  np.testing.assert_allclose(found["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_mean_of_many_does_not_stand_still_in_half_precision(kind):
  """500 ones and 500 threes had the mean 1.03 in bfloat16, 1.975 in float16."""
  values = [1.0] * 500 + [3.0] * 500
  found = fedavg.mean(({"w": jnp.full(2, v, kind)}, 1) for v in values)["w"]
  assert found.dtype == kind
  np.testing.assert_allclose(np.asarray(found, float), 2.0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bool", "int32"])
def test_parameters_that_a_mean_would_truncate_are_refused(kind):
  with pytest.raises(ValueError, match=f"real numbers, got an array of {kind}"):
    fedavg.mean([({"count": jnp.array([1], kind)}, 1.0)])


def test_equal_clients_are_one_of_them_to_the_bit():
  model = update()(START, batches())
  for weights in ([7.0], [3.0, 0.7, 11.0]):
    found = fedavg.mean((model, weight) for weight in weights)
    np.testing.assert_array_equal(found["w"], model["w"])


def test_a_client_is_trained_when_its_turn_comes():
  """The mean and one model at a time, however many clients there are."""
  kept = []

  def models():
    for seed in range(9):
      gc.collect()
      kept.append(sum(one() is not None for one in seen))
      model = update()(START, batches(seed=seed))
      seen.append(weakref.ref(model["w"]))
      yield model, 1.0
      del model

  seen = []
  fedavg.mean(models())
  assert max(kept) <= 1


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan])
def test_weights_that_are_none_are_refused(weight):
  with pytest.raises(ValueError, match="weight"):
    fedavg.mean([(START, 1.0), (START, weight)])
  with pytest.raises(ValueError, match="expected clients, got none"):
    fedavg.mean([])


@pytest.mark.parametrize(
  "other", [{"w": np.ones(3)}, {"w": np.ones(())}, {"v": np.ones((3, 1))}]
)
def test_models_of_other_shapes_are_not_broadcast(other):
  """A client with one class gave [3, 1], and the mean with [3] was [3, 3]."""
  for array in (np.asarray, jnp.asarray):
    models = [
      ({"w": array(np.ones((3, 1)))}, 1),
      (jax.tree.map(array, other), 1),
    ]
    with pytest.raises(ValueError, match="expected parameters of one shape"):
      fedavg.mean(models)


def test_batches_that_cannot_be_padded_are_refused_in_one_line():
  """These were KeyError and NumPy's "index can't contain negative values"."""
  rows = {"x": np.ones((3, 2, 3)), "y": np.ones((3, 2))}
  update = fedavg.local_training(loss_fn, optax.sgd(0.1))
  for call in (lambda: fedavg.padded(rows, 4), lambda: update(START, rows)):
    with pytest.raises(ValueError, match='expected an array "is_padding"'):
      call()
  with pytest.raises(ValueError, match="at most steps=2 batches .* got 3"):
    fedavg.padded(rows | {"is_padding": np.zeros((3, 2), bool)}, 2)


@pytest.mark.parametrize("kind", [int, np.uint8, np.float32])
def test_padding_that_is_no_bool_is_refused(kind):
  """Of integers, ~ is never 0: rows of padding counted like real ones."""
  made = batches()
  made["is_padding"] = made["is_padding"].astype(kind)
  with pytest.raises(ValueError, match=r"bool \[step, batch\], got .*\[4, 3\]"):
    update()(START, made)
  with pytest.raises(ValueError, match=r"bool \[step, batch\]"):
    fedavg.padded(made, 5)
  optimizer = optax.sgd(0.1)
  with pytest.raises(ValueError, match=r"bool \[batch\], got .*\[3\]"):
    fedavg.step(loss_fn, optimizer)(
      START,
      optimizer.init(START),
      {name: rows[0] for name, rows in made.items()},
    )


@pytest.mark.parametrize(
  "shaped",
  [lambda losses: losses[:, None], lambda losses: losses.mean()],
  ids=["column", "mean"],
)
def test_losses_of_another_shape_are_not_broadcast(shaped):
  """A column of losses was added up as often as there are rows."""
  train = fedavg.local_training(
    lambda params, batch: shaped(loss_fn(params, batch)), optax.sgd(0.1)
  )
  with pytest.raises(ValueError, match=r"loss of each row, \(3,\), got"):
    train(START, batches())


def test_arrays_with_other_steps_than_padding_are_refused():
  """JAX reads the last step again for one that is not there."""
  made = batches()
  made["y"] = made["y"][:2]
  with pytest.raises(ValueError, match="expected 4 steps in 'y'"):
    update()(START, made)
  with pytest.raises(ValueError, match="expected 4 steps in 'y'"):
    fedavg.padded(made, 5)


def test_losses_in_half_precision_are_added_up_in_float32():
  """1,500 losses of 100 are 150,000: more than float16 has."""

  def halves(params, batch):
    return (batch["x"] * params["w"]).astype(jnp.float16)

  step = fedavg.step(halves, optax.sgd(0.0))
  params = {"w": jnp.float32(1.0)}
  batch = {
    "x": jnp.full(1500, 100.0),
    "is_padding": jnp.zeros(1500, bool),
  }
  _, _, loss = step(params, optax.sgd(0.0).init(params), batch)
  assert loss == pytest.approx(100.0)
