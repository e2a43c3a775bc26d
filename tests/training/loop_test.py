import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.training import checkpoints, loop, stopping

STEPS = 8


class Stop(Exception):
  """Stands for the process being killed."""


class Clock:
  """Gives a second to every batch."""

  now = 100.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(loop, "time", clock)
  return clock


@jax.jit
def step_fn(state, batch, step):
  key = jax.random.fold_in(jax.random.key(0), step)
  noise = jax.random.normal(key, state["w"].shape)
  w = state["w"] * 0.9 + noise + jnp.sum(batch)
  state = {"w": w, "count": state["count"] + 1}
  return state, {"loss": jnp.mean(w), "batch": batch[0]}


def run(root, clock, *, stop_at=None, told=None, steps=STEPS, **settings):
  """Trains for `steps`; an exception, or a signal, stops it in a batch."""

  def batch_fn(step):
    if step == stop_at and told is None:
      raise Stop
    if step == stop_at:
      os.kill(os.getpid(), told)
    clock.now += 1.0
    return np.array([step, 0.5], np.float32)

  settings = {"save_seconds": 2.5, "log_every": 1} | settings
  return loop.train(
    step_fn,
    {"w": jnp.ones(5), "count": jnp.int32(0)},
    batch_fn,
    loop.Files(
      directory=root / "state",
      metrics_path=root / "log" / "metrics.jsonl",
      description="test",
    ),
    steps=steps,
    examples_per_step=4,
    settings=loop.Settings(**settings),
  )


def lines(root):
  path = root / "log" / "metrics.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()]


def equal(a, b):
  return all(
    np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(
  tmp_path, clock
):
  whole = run(tmp_path / "whole", clock)
  for stop in (1, 4, 7):  # before any state is saved, and behind two of them
    with pytest.raises(Stop):
      run(tmp_path / "cut", clock, stop_at=stop)
  resumed = run(tmp_path / "cut", clock)
  assert equal(resumed, whole)
  assert resumed["count"] == STEPS
  assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
  assert not equal(run(tmp_path / "less", clock, steps=STEPS - 1), whole)


def test_metrics_are_cut_back_to_the_saved_state(tmp_path, clock):
  with pytest.raises(Stop):
    run(tmp_path, clock, stop_at=5)
  assert checkpoints.latest_step(tmp_path / "state") == 3
  assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
  path = tmp_path / "log" / "metrics.jsonl"
  with open(path, "a") as stream:
    stream.write('{"step": 6, "lo')  # killed while it wrote
  with pytest.raises(Stop):
    run(tmp_path, clock, stop_at=3)
  assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_state_is_saved_when_its_time_has_come_and_at_the_end(
  tmp_path, clock, monkeypatch
):
  saved = []
  monkeypatch.setattr(
    checkpoints.Writer,
    "save",
    lambda self, step, state, then: saved.append(step),
  )
  run(tmp_path, clock)
  assert saved == [3, 6, 8]
  saved.clear()
  run(tmp_path, clock, save_seconds=100.0)
  assert saved == [8]


def test_a_finished_training_takes_no_step(tmp_path, clock):
  done = run(tmp_path, clock)
  assert equal(run(tmp_path, clock, stop_at=0), done)
  assert len(lines(tmp_path)) == STEPS


def test_lines_are_means_over_the_steps_since_the_last_one(tmp_path, clock):
  run(tmp_path, clock, log_every=3)
  found = [(line["step"], line["batch"]) for line in lines(tmp_path)]
  # batches hold their step: the means of 0, 1, 2, of 3, 4, 5 and of 6, 7
  assert found == [(3, 1.0), (6, 4.0), (8, 6.5)]


def test_an_old_log_of_another_training_is_started_over(tmp_path, clock):
  path = tmp_path / "log" / "metrics.jsonl"
  path.parent.mkdir(parents=True)
  path.write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": 9.0}\n')
  run(tmp_path, clock)
  assert [line["step"] for line in lines(tmp_path)] == list(range(1, 9))
  assert 9.0 not in [line["loss"] for line in lines(tmp_path)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_step_and_saves(tmp_path, clock, number):
  """Stopped between two lines of metrics, the lines are the same in the end."""
  settings = {"log_every": 3, "save_seconds": 1e9}
  expected = run(tmp_path / "whole", clock, **settings)

  with pytest.raises((stopping.Terminated, KeyboardInterrupt)):
    run(tmp_path / "cut", clock, stop_at=4, told=number, **settings)
  assert checkpoints.latest_step(tmp_path / "cut" / "state") == 5
  again = run(tmp_path / "cut", clock, **settings)
  assert equal(again, expected)
  assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
