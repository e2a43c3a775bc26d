"""Contrastive training on a mesh: batches, noise and parameters of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop
from synthq_jax.training import mesh as mesh_lib

NUM, STEPS, WIDTH = 40, 4, 6
SAMPLER = sampling.Poisson(
  num_examples=NUM, expected_batch_size=10, max_batch_size=21
)
METHODS = {
  "example": optim.Row(gradients="all"),
  "row": optim.Row(negatives="public", gradients="pair"),
  "logit": optim.Logit(),
  "batch": optim.Batch(),
}
SHAPES = [mesh_lib.Shape(), mesh_lib.Shape(data=2, fsdp=4)]


class Records:
  """An array that remembers which rows were read of it."""

  def __init__(self, values):
    self.values, self.read = values, []
    self.shape, self.dtype = values.shape, values.dtype

  def __len__(self):
    return len(self.values)

  def __getitem__(self, rows):
    self.read.append(np.array(rows))
    return self.values[rows]


def encode(params, x):
  vectors = jnp.tanh(x @ params["mlp/wi/kernel"]) @ params["projection/kernel"]
  return vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)


def draw(seed, *size):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)


START = {
  "mlp/wi/kernel": draw(0, WIDTH, 8), "projection/kernel": draw(1, 8, 4)
}  # fmt: skip


def train(folder, method, shape, *, encode=encode, optimizer="dp_adafactor"):
  """Returns the trained parameters, and the rows that each step has read."""
  records = {
    "queries": Records(draw(2, NUM, WIDTH)),
    "documents": draw(3, NUM, WIDTH),
    "document_ids": np.arange(NUM),
  }
  public, drawn = draw(4, 30, WIDTH), []

  def negatives(step):
    drawn.append(step)
    rows = np.random.default_rng(step).choice(30, 5, replace=False)
    is_read = getattr(method, "negatives", "batch") == "public"
    return {"public_negatives": public[rows]} if is_read else {}

  grad_fn = optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=contrastive.Softmax(temperature=0.5),
    l2_clip_norm=0.2,
    method=method,
    max_batch_size=SAMPLER.max_batch_size,
  )
  training = dp_step.Training(
    grad_fn=lambda public: dataclasses.replace(grad_fn, unit="pair"),
    params=START,
    records=records,
    public={"frozen": np.ones(3, np.float32)},
    extra_fn=negatives,
    mesh=None if shape is None else mesh_lib.make(shape),
  )
  mechanism = dp_step.Mechanism(
    sampler=SAMPLER,
    noise_multiplier=0.3,
    optimizer=dp_step.Optimizer(
      name=optimizer, learning_rate=0.05, steps=STEPS, denominator=10.0
    ),
    batch_seed=(5, 6),
    noise_key=jax.random.key(3),
  )
  settings = loop.Settings()
  trained = dp_step.train(
    training, mechanism, loop.Files.below(folder, "test"), settings
  )
  assert drawn == list(range(STEPS))
  return trained, records["queries"].read


@pytest.mark.parametrize("name", METHODS)
def test_a_mesh_trains_what_one_device_does_on_the_same_batches(tmp_path, name):
  expected, read = train(tmp_path / "one", METHODS[name], None)
  assert len(read) == STEPS and all(len(rows) == 21 for rows in read)
  for number, shape in enumerate(SHAPES):
    found, all_read = train(tmp_path / str(number), METHODS[name], shape)
    steps = np.array(all_read).reshape(STEPS, -1, 21)
    assert steps.shape[1] >= 1  # every device holds the same whole batch
    np.testing.assert_array_equal(
      steps, np.broadcast_to(np.array(read)[:, None], steps.shape)
    )
    for path, leaf in found.items():
      error = np.abs(leaf - expected[path]).max()
      assert error <= 1e-6 * np.abs(expected[path]).max(), (name, shape, path)


def test_noise_is_added_once_whatever_the_number_of_devices(tmp_path):
  """Where gradients are 0, what is trained is the noise: the same to the bit."""

  def constant(params, x):
    return encode(jax.tree.map(jax.lax.stop_gradient, params), x)

  more = {"encode": constant, "optimizer": "dp_adam"}
  expected, _ = train(tmp_path / "one", METHODS["row"], None, **more)
  for number, shape in enumerate(SHAPES):
    found, _ = train(tmp_path / str(number), METHODS["row"], shape, **more)
    for path, leaf in found.items():
      np.testing.assert_array_equal(leaf, expected[path])
      assert np.abs(leaf - START[path]).min() > 1e-3


def test_fields_that_are_no_rows_are_refused_where_rows_are_divided(tmp_path):
  training = dp_step.Training(
    grad_fn=optim.clipped_grad(
      lambda p, b: jnp.sum(b["x"] @ p["w"], axis=1), l2_clip_norm=1.0
    ),
    params={"w": np.ones((2, 2), np.float32)},
    records={"x": np.ones((NUM, 2), np.float32)},
    extra_fn=lambda step: {"pool": np.ones(3)},
    mesh=mesh_lib.make(mesh_lib.Shape()),
  )
  mechanism = dp_step.Mechanism(
    sampler=SAMPLER,
    noise_multiplier=1.0,
    optimizer=dp_step.Optimizer(name="dp_adam", learning_rate=0.1, steps=1),
    batch_seed=(1, 2),
    noise_key=jax.random.key(0),
  )
  with pytest.raises(ValueError, match="these fields are no rows"):
    dp_step.train(
      training, mechanism, loop.Files.below(tmp_path, "x"), loop.Settings()
    )
