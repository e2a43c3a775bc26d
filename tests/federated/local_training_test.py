"""What a client's steps do with padding, epochs and keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax.federated import local_training

KEY = jax.random.key(2)
START = {"w": np.float32([1.0, -2.0, 0.5])}


def loss_fn(params, batch, key):
  noise = jax.random.normal(key, (3,))
  return (batch["x"] @ (params["w"] + 0.1 * noise) - batch["y"]) ** 2


def batches(steps=4, rows=3):
  rng = np.random.default_rng(4)
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
  made = local_training.local_training(loss_fn, optimizer, epochs=epochs)
  return jax.jit(made)


def by_hand(made, numbers):
  """Trains on rows that are no padding; `numbers` are those of steps' keys."""
  optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
  params = jax.tree.map(jnp.asarray, START)
  state = optimizer.init(params)
  for place, number in numbers:
    real = ~made["is_padding"][place]
    rows = {"x": made["x"][place][real], "y": made["y"][place][real]}
    key = jax.random.fold_in(KEY, number)
    grads = jax.grad(lambda p: jnp.mean(loss_fn(p, rows, key)))(params)  # noqa: B023
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params["w"]


def trained(made, epochs=1):
  return update(epochs)(START, made, KEY)["w"]


def test_each_batch_is_a_step_with_a_key_of_its_own():
  made = batches()
  expected = by_hand(made, [(0, 0), (1, 1), (2, 2), (3, 3)])
  np.testing.assert_allclose(trained(made), expected, rtol=1e-5)
  other = by_hand(made, [(0, 0), (1, 0), (2, 0), (3, 0)])
  assert np.abs(other - expected).max() > 1e-3


def test_rows_of_padding_do_not_count():
  made = with_padding(batches(), [[False, True, False]] * 4)
  made["x"][:, 1] = 1e6
  expected = by_hand(made, [(0, 0), (1, 1), (2, 2), (3, 3)])
  np.testing.assert_allclose(trained(made), expected, rtol=1e-5)


@pytest.mark.parametrize("empty", [[3], [1], [0, 2], [0, 1, 2, 3]])
def test_a_step_of_padding_changes_nothing_not_even_the_optimizer(empty):
  made = batches()
  made["is_padding"][empty] = True
  left = [place for place in range(4) if place not in empty]
  expected = by_hand(made, [(place, place) for place in left])
  np.testing.assert_allclose(trained(made), expected, rtol=1e-5)
  if not left:
    np.testing.assert_array_equal(trained(made), START["w"])


def test_padding_behind_the_data_changes_no_bit():
  made = batches()
  longer = {
    name: np.concatenate([rows, np.ones_like(rows)])
    for name, rows in made.items()
  }
  np.testing.assert_array_equal(trained(longer), trained(made))
  # Nor does it in a second epoch, whose keys go on where the first one's end.
  np.testing.assert_array_equal(trained(longer, 2), trained(made, 2))


def test_epochs_go_through_the_batches_again_with_new_keys():
  made = batches(steps=2)
  expected = by_hand(made, [(0, 0), (1, 1), (0, 2), (1, 3)])
  np.testing.assert_allclose(trained(made, 2), expected, rtol=1e-5)


def test_clients_side_by_side_wait_for_the_longest_and_change_no_more():
  made = batches()
  short = with_padding(made, [[False] * 3, *[[True] * 3] * 3])
  both = jax.tree.map(lambda *x: np.stack(x), made, short)
  together = jax.jit(jax.vmap(update(2), (None, 0, None)))(START, both, KEY)
  np.testing.assert_allclose(together["w"][0], trained(made, 2), rtol=1e-6)
  np.testing.assert_allclose(together["w"][1], trained(short, 2), rtol=1e-6)


@pytest.mark.parametrize("epochs", [0, -2])
def test_no_epochs_are_refused(epochs):
  with pytest.raises(ValueError, match=f"epochs >= 1, got epochs={epochs}"):
    local_training.local_training(loss_fn, optax.sgd(0.1), epochs=epochs)
