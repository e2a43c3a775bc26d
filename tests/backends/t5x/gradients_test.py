"""The private step's gradient with a model of three lines: no T5X is needed."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning

from synthq_jax.backends.t5x import batches, gradients
from synthq_jax.privacy import sampling

CLIP, DENOMINATOR = 0.5, 8.0
RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


class Linear:
  """A loss summed over the batch, with what T5X's models do to it."""

  def __init__(self, dropout=0.0):
    self.dropout = dropout

  def loss_fn(self, params, batch, dropout_rng):
    x = batch["x"]
    if self.dropout:
      x = x * jax.random.bernoulli(dropout_rng, 1 - self.dropout, x.shape)
    errors = x @ params["w"] - batch["y"]
    assert set(batch) == {"x", "y"}, "the model sees fields of ours"
    return 0.5 * jnp.sum(errors**2), {"loss": jnp.sum(errors)}


def a_batch(real, size=8, seed=0):
  rng = np.random.default_rng(seed)
  is_padding = np.arange(size) >= real
  return {
    "x": rng.normal(size=(size, 5)).astype(np.float32),
    "y": rng.normal(size=size).astype(np.float32),
    batches.EXAMPLE_ID: np.arange(size, dtype=np.int32) + 10,
    sampling.IS_PADDING: is_padding,
  }


PARAMS = {"w": jnp.linspace(-1.0, 1.0, 5)}


def clipped_sum(batch):
  """In NumPy: one gradient after the other."""
  total = np.zeros(5)
  for x, y, padded in zip(
    batch["x"], batch["y"], batch[sampling.IS_PADDING], strict=True
  ):
    gradient = (x @ np.asarray(PARAMS["w"]) - y) * x
    scale = min(1.0, CLIP / np.linalg.norm(gradient))
    total += 0.0 if padded else scale * gradient
  return total


def private_mean(batch, noise_multiplier=0.0, step=0, key=0, dropout=None):
  features, is_padding = gradients.split(batch)
  grad_fn = gradients.clipped_grad(Linear(dropout or 0.0), l2_clip_norm=CLIP)
  total, _ = grad_fn(
    PARAMS, features, key=jax.random.key(0), is_padding_example=is_padding
  )
  return gradients.private_mean(
    total,
    step,
    l2_sensitivity=grad_fn.sensitivity(RELATION),
    noise_multiplier=noise_multiplier,
    denominator=DENOMINATOR,
    key=jax.random.key(key),
  )["w"]


def test_the_mean_is_the_clipped_sum_over_a_public_number():
  for real in (0, 1, 5, 8):
    batch = a_batch(real)
    np.testing.assert_allclose(
      private_mean(batch),
      clipped_sum(batch) / DENOMINATOR,
      rtol=1e-5,
      atol=1e-6,
    )


def test_noise_follows_from_key_and_step_alone():
  batch, other = a_batch(5), a_batch(7, seed=3)

  def noise(batch, **how):
    return np.asarray(private_mean(batch, 2.0, **how) - private_mean(batch))

  np.testing.assert_allclose(
    noise(batch, step=4), noise(other, step=4), atol=1e-5
  )
  for change in ({"step": 5}, {"step": 4, "key": 1}):
    assert np.abs(noise(batch, **change) - noise(batch, step=4)).min() > 1e-4


def test_dropout_has_a_key_for_each_example_wherever_it_stands():
  batch = a_batch(8)
  turned = {name: values[::-1].copy() for name, values in batch.items()}
  there, back = (
    private_mean(batch, dropout=0.5),
    private_mean(turned, dropout=0.5),
  )
  np.testing.assert_allclose(there, back, rtol=1e-5, atol=1e-6)
  named = batch | {batches.EXAMPLE_ID: batch[batches.EXAMPLE_ID] + 100}
  assert np.abs(private_mean(named, dropout=0.5) - there).max() > 1e-3
  plain = private_mean(batch)
  assert np.abs(plain - there).max() > 1e-3


def some_records(count=64, seed=0):
  rng = np.random.default_rng(seed)
  return {
    "x": rng.normal(size=(count, 5)).astype(np.float32),
    "y": rng.normal(size=count).astype(np.float32),
  }


def whole_step(records, order, strategy):
  """The clipped sum of all records in a batch of 64, with dropout."""
  count = len(records["x"])
  places = np.full(64, -1)
  places[:count] = order[order < count]
  drawn = sampling.Batch(places, places < 0)
  batch = sampling.take(batches.with_ids(records), drawn)
  features, is_padding = gradients.split(batch)
  grad_fn = gradients.clipped_grad(
    Linear(0.5), l2_clip_norm=CLIP, strategy=strategy
  )
  key = jax.random.key(3)
  total, _ = jax.jit(grad_fn)(
    PARAMS, features, key=key, is_padding_example=is_padding
  )
  return np.asarray(total["w"], np.float64)


def check_neighbours(strategy):
  """One record less or another one, wherever it stands in the data."""
  records, other = some_records(), some_records(1, seed=1)
  orders = [np.random.default_rng(seed).permutation(64) for seed in range(2)]
  whole = whole_step(records, orders[0], strategy)
  for row in (0, 31, 63):
    less = {k: np.delete(x, row, axis=0) for k, x in records.items()}
    moved = np.linalg.norm(whole - whole_step(less, orders[1], strategy))
    assert moved <= CLIP * 1.0001
    replaced = {k: x.copy() for k, x in records.items()}
    for name, values in replaced.items():
      values[row] = other[name][0]
    moved = np.linalg.norm(whole - whole_step(replaced, orders[1], strategy))
    assert 0 < moved <= 2 * CLIP * 1.0001


@pytest.mark.parametrize("strategy", ["vmap", "bookkeeping", "ghost"])
def test_with_dropout_too_a_record_moves_the_sum_by_the_clip_norm(strategy):
  check_neighbours(strategy)


def test_masks_by_place_in_the_data_are_caught(monkeypatch):
  def planted(records):
    count = len(next(iter(records.values())))
    return {**records, batches.EXAMPLE_ID: np.arange(count, dtype=np.int32)}

  monkeypatch.setattr(batches, "with_ids", planted)
  with pytest.raises(AssertionError):
    check_neighbours("vmap")


def test_one_example_is_not_spread_over_the_devices_of_the_batch():
  seen = []

  class Watching(Linear):
    def loss_fn(self, params, batch, dropout_rng):
      seen.append(dict(partitioning.get_axis_rules()))
      return super().loss_fn(params, batch, dropout_rng)

  grad_fn = gradients.clipped_grad(Watching(), l2_clip_norm=CLIP)
  features, _ = gradients.split(a_batch(8))
  with partitioning.axis_rules([("batch", "data"), ("embed", "model")]):
    grad_fn(PARAMS, features)
    assert dict(partitioning.get_axis_rules())["batch"] == "data"
  assert seen and all(rules == {"embed": "model"} for rules in seen)


def test_batches_of_another_dataset_are_refused():
  with pytest.raises(ValueError, match="get_dataset_fn"):
    gradients.split({"x": np.ones((2, 5))})


def test_packed_batches_are_refused():
  batch = a_batch(3) | {"encoder_segment_ids": np.ones((8, 4))}
  with pytest.raises(ValueError, match="pack = False"):
    gradients.split(batch)
