"""Private training against a NumPy oracle: sums, divisor, noise, resuming."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from jax.experimental.compilation_cache import compilation_cache

from synthq_jax import optim
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop

STEPS = 6
NUM, DIM = 24, 3
SAMPLER = sampling.Poisson(
  num_examples=NUM, expected_batch_size=4, max_batch_size=14
)
SEED = (5, 6)
RATE = 0.1
NO_CLIP = 1e6


class Stop(Exception):
  """Stands for the process being killed."""


class Stopping:
  """A sampler whose process is killed when it should draw a batch."""

  expected_batch_size = SAMPLER.expected_batch_size

  def __init__(self, stop_at):
    self.stop_at = stop_at

  def batch(self, seed, step):
    if step == self.stop_at:
      raise Stop
    return SAMPLER.batch(seed, step)


def loss_fn(params, batch):
  error = batch["x"] @ params["w"] - batch["y"]
  return 0.5 * error**2


def make_records():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(NUM, DIM)).astype(np.float32)
  y = rng.normal(size=NUM).astype(np.float32)
  y[0] = 100.0  # the row that padding reads: a huge gradient if it counted
  return {"x": x, "y": y}


RECORDS = make_records()
SETTINGS = loop.Settings(log_every=1)
START = {"w": np.array([0.5, -1.0, 2.0], np.float32)}


def run(root, *, clip=NO_CLIP, **changes):
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=clip)
  return train(root, grad_fn, **changes)


def train(root, grad_fn, params=START, records=RECORDS, **changes):
  defaults = {
    "name": "dp_adam",
    "learning_rate": RATE,
    "steps": STEPS,
    "sampler": SAMPLER,
    "noise_multiplier": 0.0,
    "batch_seed": SEED,
    "noise_key": jax.random.key(3),
    "grad_fn": grad_fn,
    "params": params,
    "records": records,
    "settings": SETTINGS,
  } | changes

  def of(kind, **made):
    names = {field.name for field in dataclasses.fields(kind)} - set(made)
    return kind(**{x: defaults[x] for x in names & set(defaults)}, **made)

  optimizer = of(dp_step.Optimizer)
  return dp_step.train(
    of(dp_step.Training),
    of(dp_step.Mechanism, optimizer=optimizer),
    loop.Files.below(root, "test"),
    defaults["settings"],
  )


@pytest.fixture(name="plain", scope="module")
def _plain(tmp_path_factory):
  """Parameters and folder of a training without noise and clipping."""
  root = tmp_path_factory.mktemp("plain")
  return run(root), root


def schedule(step):
  """A tenth of six steps is no warm-up: from the peak down to zero."""
  return RATE * (1 - step / STEPS)


def rows_of(step):
  drawn = SAMPLER.batch(SEED, step)
  return drawn.indices[~drawn.is_padding]


def gradients(w, rows, clip=NO_CLIP):
  """Clipped gradients [row, dim] of the squared error."""
  x, y = RECORDS["x"][rows].astype(float), RECORDS["y"][rows]
  grads = (x @ w - y)[:, None] * x
  norms = np.linalg.norm(grads, axis=1, keepdims=True)
  return grads * np.minimum(1, clip / norms)


def adam_oracle(divisor, rows_of=rows_of, clip=NO_CLIP, eps=1e-8):
  """Adam on sum / divisor(step), the divisor a function of the rows."""
  w = START["w"].astype(float)
  m, v = np.zeros(DIM), np.zeros(DIM)
  for step in range(STEPS):
    rows = rows_of(step)
    mean = gradients(w, rows, clip).sum(0) / divisor(rows)
    m = 0.9 * m + 0.1 * mean
    v = 0.999 * v + 0.001 * mean**2
    scaled = (m / (1 - 0.9 ** (step + 1))) / (
      np.sqrt(v / (1 - 0.999 ** (step + 1))) + eps
    )
    w = w - schedule(step) * scaled
  return w


def distance(params, w):
  return np.abs(params["w"] - w).max()


def test_without_noise_and_clipping_it_is_adam_on_the_public_mean(plain):
  params, _ = plain
  public = adam_oracle(lambda rows: SAMPLER.expected_batch_size)
  assert distance(params, public) < 1e-5
  realised = adam_oracle(len)
  assert distance(params, realised) > 2e-3


def test_rows_that_fill_up_the_devices_are_padding():
  for step in range(STEPS):
    batch, is_padding = dp_step.draw(RECORDS, SAMPLER, SEED, step, 8)
    assert len(is_padding) == len(batch["x"]) == 16 > SAMPLER.max_batch_size
    np.testing.assert_array_equal(
      batch["y"][~is_padding], RECORDS["y"][rows_of(step)]
    )


def test_only_records_that_a_step_draws_are_made(tmp_path):
  made = []

  def make(numbers):
    made.append(numbers)
    return {name: values[numbers] for name, values in RECORDS.items()}

  steps = {"steps": 2, "noise_multiplier": 1.0}
  params = run(tmp_path / "few", records=dp_step.Drawn(NUM, make), **steps)
  [numbers] = made
  drawn = {0, *rows_of(0), *rows_of(1)}  # padding holds the first record
  assert set(numbers) == drawn and len(numbers) < NUM
  np.testing.assert_array_equal(
    params["w"], run(tmp_path / "all", **steps)["w"]
  )


def test_gradients_are_clipped_to_the_norm_of_the_function(tmp_path):
  params = run(tmp_path, clip=0.3)
  assert distance(params, adam_oracle(lambda rows: 4, clip=0.3)) < 1e-5
  assert distance(params, adam_oracle(lambda rows: 4, clip=0.6)) > 1e-2


def test_a_given_denominator_replaces_the_expected_batch_size(tmp_path):
  # So large that Adam's epsilon shows the size of the mean.
  params = run(tmp_path, denominator=1e8)
  assert distance(params, adam_oracle(lambda rows: 1e8)) < 1e-5
  assert distance(params, adam_oracle(lambda rows: 2e8)) > 1e-2


def test_metrics_are_means_over_the_records_of_a_batch(plain):
  _, root = plain
  text = (root / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
  rows = rows_of(0)
  error = RECORDS["x"][rows] @ START["w"] - RECORDS["y"][rows]
  norms = np.linalg.norm(gradients(START["w"], rows), axis=1)
  assert lines[0]["loss"] == pytest.approx(np.mean(0.5 * error**2), rel=1e-5)
  assert lines[0]["norm"] == pytest.approx(norms.mean(), rel=1e-5)


def test_a_batch_of_padding_alone_is_a_step_of_noise(tmp_path):
  class Empty(Stopping):
    def batch(self, seed, step):
      nothing = np.full(len(SAMPLER.batch(seed, step).indices), -1)
      return sampling.Batch(nothing, nothing < 0)

  still = run(tmp_path / "a", sampler=Empty(None))
  np.testing.assert_array_equal(still["w"], START["w"])
  noisy = run(tmp_path / "b", sampler=Empty(None), noise_multiplier=1.0)
  assert np.isfinite(noisy["w"]).all()
  assert distance(noisy, START["w"]) > 1e-3
  first = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0]
  line = json.loads(first)
  assert line["loss"] == 0.0 and line["norm"] == 0.0


@pytest.mark.parametrize("name", dp_step.OPTIMIZERS)
def test_a_resumed_training_draws_the_same_noise(tmp_path, name):
  noisy = {
    "clip": 1.0,
    "noise_multiplier": 1.0,
    "name": name,
    "settings": dataclasses.replace(SETTINGS, save_seconds=-1.0),
  }
  whole = run(tmp_path / "whole", **noisy)
  for stop_at in (2, 5):
    with pytest.raises(Stop):
      run(tmp_path / "cut", sampler=Stopping(stop_at), **noisy)
  resumed = run(tmp_path / "cut", **noisy)
  assert resumed["w"].tobytes() == whole["w"].tobytes()


def test_another_noise_key_or_batch_seed_trains_something_else(tmp_path):
  noisy = {"clip": 1.0, "noise_multiplier": 1.0}
  first = run(tmp_path / "a", **noisy)
  key = run(tmp_path / "b", noise_key=jax.random.key(4), **noisy)
  seed = run(tmp_path / "c", batch_seed=(5, 7), **noisy)
  assert distance(first, key["w"]) > 1e-3
  assert distance(first, seed["w"]) > 1e-3


def test_the_noise_is_multiplier_times_sensitivity_over_the_denominator(
  tmp_path, monkeypatch
):
  # Plain SGD in Adam's place: one step from zero is -rate * noise / divisor.
  def dp_sgd(learning_rate, **arguments):
    return optax.chain(optim.privatize(**arguments), optax.sgd(learning_rate))

  monkeypatch.setattr(optim, "dp_adam", dp_sgd)
  grad_fn = optim.clipped_grad(
    lambda params, batch: 0.0 * batch["y"] * params["w"][0], l2_clip_norm=0.5
  )
  params = train(
    tmp_path,
    grad_fn,
    {"w": jnp.zeros(20_000)},
    {"y": RECORDS["y"]},
    noise_multiplier=3.0,
    steps=1,
  )

  def accepted(std):
    statistic = np.sum((params["w"].astype(float) / std) ** 2)
    low, high = scipy.stats.chi2.interval(1 - 1e-6, 20_000)
    return low <= statistic <= high

  right = RATE * 3.0 * 0.5 / SAMPLER.expected_batch_size
  assert accepted(right)
  assert not accepted(1.1 * right) and not accepted(right / 1.1)


def test_the_rate_warms_up_in_a_tenth_of_the_steps_and_falls_to_zero(
  monkeypatch,
):
  rates = []

  def recorded(learning_rate, **arguments):
    del arguments
    rates.extend(float(learning_rate(step)) for step in range(21))
    return optax.identity()

  monkeypatch.setattr(optim, "dp_adafactor", recorded)
  dp_step.Optimizer(
    name="dp_adafactor", learning_rate=0.4, steps=20, denominator=1.0
  ).build(l2_sensitivity=1.0, noise_multiplier=0.0)(jax.random.key(0))
  falling = [0.4 * (18 - k) / 18 for k in range(1, 19)]
  np.testing.assert_allclose(rates, [0.2, 0.4, 0.4, *falling], atol=1e-7)


def test_a_loss_that_couples_records_is_refused_before_the_first_step(tmp_path):
  def coupled(params, batch):
    losses = loss_fn(params, batch)
    return losses - jnp.mean(losses)

  grad_fn = optim.clipped_grad(coupled, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match="independent losses"):
    train(tmp_path, grad_fn)
  assert not (tmp_path / "metrics.jsonl").exists()


def test_the_check_finds_records_that_differ_wherever_they_are():
  records = {"x": np.zeros((9, 2)), "y": np.zeros(9)}
  records["y"][7] = 3.0
  found = dp_step._find_different_records(records)
  assert found["x"].shape == (2, 2)
  np.testing.assert_array_equal(found["y"], [0.0, 3.0])


@pytest.mark.parametrize("value", [0.0, 2.0])
@pytest.mark.parametrize("number", [1, 4])
def test_records_that_are_all_equal_are_checked_beside_a_blank_one(
  value, number
):
  """A run that ended here would tell that its records are equal, or one."""
  records = {"x": np.full((number, 2), value), "is": np.zeros(number, bool)}
  found = dp_step._find_different_records(records)
  assert (found["x"][0] == value).all() and not found["is"][0]
  assert (found["x"][1] == (value == 0.0)).all()


def test_public_arrays_are_arguments_and_not_constants_of_the_step(tmp_path):
  public = {"offset": np.arange(DIM, dtype=np.float32)}

  def make(given):
    def shifted(params, batch):
      return loss_fn({"w": params["w"] + given["offset"]}, batch)

    return optim.clipped_grad(shifted, l2_clip_norm=1.0)

  ours = train(tmp_path / "a", make, public=public)
  closed_over = train(tmp_path / "b", make(public))
  np.testing.assert_allclose(ours["w"], closed_over["w"], rtol=1e-6)
  assert np.abs(ours["w"] - run(tmp_path / "c", clip=1.0)["w"]).max() > 1e-3
  step = dp_step.step(make, optax.sgd(1.0))
  state = dp_step.State(START, optax.sgd(1.0).init(START))
  batch = {name: values[:4] for name, values in RECORDS.items()}
  trace = jax.make_jaxpr(step)(state, batch, np.zeros(4, bool), None, public)
  held = [np.shape(c) for c in trace.consts if np.size(c) > 1]
  assert held == []


def test_dropout_gets_another_key_in_every_step(tmp_path):
  seen = []

  def noisy(params, batch, key=None):
    losses = loss_fn(params, batch)
    if key is not None:
      jax.debug.callback(lambda k: seen.append(int(k)), jax.random.bits(key))
    return losses

  grad_fn = optim.clipped_grad(noisy, l2_clip_norm=1.0, strategy="vmap")
  train(tmp_path / "a", grad_fn, dropout_key=jax.random.key(2))
  first, seen[:] = set(seen), []
  assert len(first) >= STEPS * SAMPLER.max_batch_size * 0.9
  train(tmp_path / "b", grad_fn, dropout_key=jax.random.key(2))
  assert set(seen) == first


@pytest.fixture
def kept_programs(tmp_path):
  """The folder of a persistent compilation cache that keeps every program."""
  names = {
    "jax_compilation_cache_dir": str(tmp_path / "compiled"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  jax.clear_caches()
  yield tmp_path / "compiled"
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def kept_steps(folder):
  return {path.name for path in folder.glob("jit_numbered-*-cache")}


def test_programs_that_are_kept_hold_no_secret(tmp_path, kept_programs):
  """One program serves all keys, raw and typed, so that none stands in it."""

  def loss_of_key(params, batch, key=None):
    kept = 1.0 if key is None else jax.random.bernoulli(key)
    return loss_fn(params, batch) * kept

  grad_fn = optim.clipped_grad(loss_of_key, l2_clip_norm=1.0)
  ends = []
  for secret in (1, 3):
    end = train(
      tmp_path / f"run{secret}",
      grad_fn,
      noise_multiplier=1.0,
      noise_key=jax.random.PRNGKey(secret),
      dropout_key=jax.random.key(secret + 10),
      settings=SETTINGS,
    )
    ends.append(end["w"])
    jax.clear_caches()
    if secret == 1:
      kept = kept_steps(kept_programs)
  assert len(kept) == 1
  assert kept_steps(kept_programs) == kept
  assert np.abs(ends[0] - ends[1]).min() > 1e-3


@pytest.mark.parametrize("other", [jax.random.key, jax.random.PRNGKey])
def test_one_key_for_noise_and_dropout_is_refused(other):
  mechanism = functools.partial(
    dp_step.Mechanism,
    sampler=None,
    noise_multiplier=1.0,
    optimizer=None,
    batch_seed=(0,),
    noise_key=jax.random.key(4),
  )
  with pytest.raises(ValueError, match="noise_key of its own"):
    mechanism(dropout_key=other(4))
  mechanism(dropout_key=jax.random.split(jax.random.key(4))[0])
