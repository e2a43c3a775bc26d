"""A whole step of T5X's trainer on neighbouring data, with dropout; needs T5X.

Batches hold all records, so that nothing but the clipped sum can hide one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("t5x", reason="T5X is not installed: docs/t5x.md")

import tiny_model  # noqa: E402

from synthq_jax.backends.t5x import batches, dp_trainer  # noqa: E402
from synthq_jax.privacy import sampling  # noqa: E402

SIZE, CLIP = 64, 0.1
SETTINGS = dataclasses.replace(
  tiny_model.SETTINGS,
  num_examples=SIZE,
  expected_batch_size=SIZE,
  max_batch_size=SIZE,
  l2_clip_norm=CLIP,
  epsilon=math.inf,
  delta=None,
)


@pytest.fixture(autouse=True)
def _t5x_promotes_ranks():
  with jax.numpy_rank_promotion("allow"):
    yield


def some_records():
  """64 records of the task's features: its own 40, and 24 with other letters."""
  records = tiny_model.make_records()
  more = {name: x[:24] + (x[:24] > 4) for name, x in records.items()}
  return {
    name: np.concatenate([x, more[name].astype(x.dtype)])
    for name, x in records.items()
  }


def make_sum(monkeypatch, folder, name="model", **options):
  """A function of records and their order to the clipped sum of a step."""
  monkeypatch.setattr(
    dp_trainer.trainer_lib, "apply_grads", lambda state, gradient, *_: gradient
  )
  trainer = tiny_model.make_trainer(
    # Of .5, one secret in 256 drops all 8 features of a record, which adds nothing.
    tiny_model.make_model(dropout=0.25),
    tiny_model.make_release(folder, SETTINGS, name),
    **options,
  )
  step = jax.jit(trainer._private_step)

  def clipped_sum(records, seed=0, number=0):
    count = len(next(iter(records.values())))
    places = np.full(SIZE, -1)
    places[:count] = np.random.default_rng(seed).permutation(count)
    drawn = sampling.Batch(places, places < 0)
    batch = sampling.take(batches.with_ids(records), drawn)
    state = trainer.train_state.replace_step(jnp.asarray(number))
    mean = step(state, batch)
    leaves = [SIZE * np.ravel(x) for x in jax.tree.leaves(mean)]
    return np.concatenate(leaves).astype(np.float64)

  return clipped_sum


def check_neighbours(clipped_sum):
  """One record less or another one, and other places in the batch."""
  records = some_records()
  whole = clipped_sum(records)
  assert np.linalg.norm(whole) > 2 * CLIP
  assert np.linalg.norm(whole - clipped_sum(records, seed=1)) <= 1e-4 * CLIP
  for row in (0, SIZE // 2, SIZE - 1):
    less = {k: np.delete(x, row, axis=0) for k, x in records.items()}
    moved = np.linalg.norm(whole - clipped_sum(less, seed=1))
    assert 0.999 * CLIP <= moved <= 1.0001 * CLIP
    other = {k: x.copy() for k, x in records.items()}
    for values in other.values():
      values[row] = values[row] + (values[row] > 4)
    moved = np.linalg.norm(whole - clipped_sum(other, seed=1))
    assert 0 < moved <= 2 * 1.0001 * CLIP


@pytest.mark.parametrize(
  ("strategy", "parts"),
  [("vmap", None), ("bookkeeping", None), ("ghost", None), ("ghost", 4)],
)
def test_a_record_moves_a_step_with_dropout_by_the_clip_norm_at_most(
  monkeypatch, tmp_path, strategy, parts
):
  check_neighbours(
    make_sum(monkeypatch, tmp_path, strategy=strategy, num_microbatches=parts)
  )


def test_masks_follow_from_secret_and_step_and_not_from_random_seed(
  monkeypatch, tmp_path
):
  def seeded(name, seed):
    rng = jax.random.PRNGKey(seed)
    return make_sum(monkeypatch, tmp_path, name, rng=rng)

  records, one = some_records(), seeded("one", 0)
  first = one(records)
  np.testing.assert_array_equal(first, seeded("one", 1)(records))
  assert np.linalg.norm(first - one(records, number=1)) > CLIP
  assert np.linalg.norm(first - seeded("other", 0)(records)) > CLIP
