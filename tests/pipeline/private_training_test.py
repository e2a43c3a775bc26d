"""Private training draws and noises what its statement says it does."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from synthq_jax import optim
from synthq_jax.pipeline import private_training, workspace
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop

NUM, MEAN, STEPS = 30, 6, 400
CLIP, RATE = 0.5, 0.1
SIZE = 20_000


class Seen:
  """A clipped gradient that is always zero, and notes who is in a batch."""

  l2_clip_norm = CLIP

  def __init__(self):
    self.steps = []

  def sensitivity(self, relation):
    del relation
    return CLIP

  def __call__(self, params, batch, *, is_padding_example):
    def note(records, is_padding):
      self.steps.append(np.asarray(records)[~np.asarray(is_padding)])

    jax.debug.callback(note, batch["record"], is_padding_example, ordered=True)
    zeros = jnp.zeros(is_padding_example.shape)
    aux = types.SimpleNamespace(losses=zeros, norms=zeros)
    return jax.tree.map(jnp.zeros_like, params), aux


def train(root, *, steps, size=1):
  """Returns the trained parameters, the one release, and who was drawn."""
  seen = Seen()
  settings = private_training.Settings(
    epsilon=8.0,
    delta=None,
    batch_size=MEAN,
    multiple_of=8,
    steps=steps,
    optimizer="dp_adam",
    learning_rate=RATE,
    mechanism="nothing",
  )
  params, statement = private_training.train(
    settings,
    workspace.Workspace(root, secret_seed=7),
    "stage/name",
    "digest",
    grad_fn=seen,
    params={"w": np.zeros(size, np.float32)},
    records={"record": np.arange(NUM, dtype=np.int32)},
    prepared=types.SimpleNamespace(source="beir:folder"),
    metrics_path=root / "metrics.jsonl",
    loop_settings=loop.Settings(log_every=steps, progress=False),
  )
  jax.effects_barrier()
  (release,) = statement.ledger
  assert release.steps == steps and statement.epsilon <= 8.0
  found = np.zeros((steps, NUM), bool)
  for step, records in enumerate(seen.steps):
    found[step, records] = True
  return params, release, found


def z_of_rate(found, probability):
  scale = np.sqrt(found.size * probability * (1 - probability))
  return (found.sum() - found.size * probability) / scale


def deviations(release, found):
  """How far draws are from independent coins, in standard deviations."""
  assert release.sampling == "poisson"
  sampler = release.sampler()
  assert (sampler.num_examples, len(found)) == (NUM, release.steps)
  q = sampler.probability
  spread = NUM * q * (1 - q)
  sizes = np.sum((found.sum(1) - NUM * q) ** 2) / spread
  counts = np.sum((found.sum(0) - STEPS * q) ** 2) / (STEPS * q * (1 - q))
  return {
    "the rate": z_of_rate(found, q),
    "batch sizes": (sizes - STEPS) / np.sqrt(2 * STEPS),
    "each record's count": (counts - NUM) / np.sqrt(2 * NUM),
    "repeats in the next step": z_of_rate(found[1:] & found[:-1], q * q),
  }


def test_batches_are_the_poisson_samples_of_the_statement(tmp_path):
  _, release, found = train(tmp_path, steps=STEPS)
  assert all(abs(z) < 4.5 for z in deviations(release, found).values())


class Shuffled(sampling.FixedOrder):
  """Batches of one size, each drawn from all records."""

  def batch(self, seed, step):
    return super().batch(seed, step * self.steps_per_epoch)


@pytest.mark.parametrize(
  ("kind", "seen_in"),
  [
    (sampling.FixedOrder, {"batch sizes", "repeats in the next step"}),
    (Shuffled, {"batch sizes"}),
  ],
)
def test_batches_of_one_size_are_caught(tmp_path, monkeypatch, kind, seen_in):
  right = dp_step.train

  def wrong(*arguments, sampler, **named):
    del sampler
    fixed = kind(num_examples=NUM, batch_size=MEAN)
    return right(*arguments, sampler=fixed, **named)

  monkeypatch.setattr(dp_step, "train", wrong)
  _, release, found = train(tmp_path, steps=STEPS)
  far = deviations(release, found)
  assert seen_in <= {name for name, z in far.items() if abs(z) > 10}


def test_the_noise_is_that_of_the_statement(tmp_path, monkeypatch):
  # Plain SGD in Adam's place: one step from zero is -rate * noise / divisor.
  def dp_sgd(learning_rate, **arguments):
    return optax.chain(optim.privatize(**arguments), optax.sgd(learning_rate))

  monkeypatch.setattr(optim, "dp_adam", dp_sgd)
  params, release, _ = train(tmp_path, steps=1, size=SIZE)
  assert release.l2_sensitivity == release.l2_clip_norm == CLIP

  def accepted(std):
    statistic = np.sum((params["w"].astype(float) / std) ** 2)
    low, high = scipy.stats.chi2.interval(1 - 1e-6, SIZE)
    return low <= statistic <= high

  right = RATE * release.noise_multiplier * CLIP / release.expected_batch_size
  assert accepted(right)
  assert not accepted(1.1 * right) and not accepted(right / 1.1)
