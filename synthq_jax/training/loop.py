"""One loop for every training: resumes from its own folder, shows progress.

What a step does depends on the state and on its number alone (batches, keys
and noise are functions of seed and step), so a resumed run equals an
uninterrupted one, metrics included. SIGTERM and Ctrl-C wait for the end of the
step and a saved state.

With several processes all of them run this loop, on arrays that their devices
share. They save and stop after the same step, whichever of them was told to;
process 0 alone writes metrics and shows progress.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.storage import artifacts, stores
from synthq_jax.training import checkpoints, distributed, progress, stopping

__all__ = ["Files", "Log", "Settings", "Votes", "train"]

_AXIS = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a loop saves and reports; nothing here changes the result."""

  save_seconds: float = 60.0
  """Seconds between two saved states."""
  log_every: int = 20
  """Steps between two lines of metrics."""
  progress: bool = True
  """Whether a progress bar is shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
  """Where a training keeps what it writes, and what it is called."""

  directory: str | os.PathLike
  """For the states of unfinished training."""
  metrics_path: str | os.PathLike
  """JSON lines of step and metrics, one every few steps."""
  description: str
  """Stands before the progress bar, and in messages."""

  @classmethod
  def below(cls, folder: pathlib.Path, description: str) -> "Files":
    """Returns the files of a training that has a folder of its own.

    Args:
      folder: gets `state` and `metrics.jsonl`.
      description: as in the class.
    """
    return cls(
      directory=folder / "state",
      metrics_path=folder / "metrics.jsonl",
      description=description,
    )


class Log:
  """Metrics: one line every few steps, cut back to the resumed step."""

  def __init__(self, path: str | os.PathLike, resumed_at: int):
    self._path = pathlib.Path(path)
    kept = []
    if self._path.exists():
      lines = self._path.read_text(errors="replace").splitlines(keepends=True)
      kept = [line for line in lines if _step_of(line) <= resumed_at]
    self._hash = hashlib.sha256("".join(kept).encode())
    artifacts.write_atomically(self._path, "".join(kept))

  def durable(self) -> str:
    """Returns the digest of all lines so far, once they are on disk."""
    with open(self._path, "ab") as stream:
      os.fsync(stream.fileno())
    stores.push(self._path)
    return self._hash.hexdigest()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends the values of a step."""
    line = json.dumps({"step": step, **values}) + "\n"
    self._hash.update(line.encode())
    with open(self._path, "a") as stream:
      stream.write(line)


def _step_of(line: str) -> float:
  """Returns the step of a line of metrics; of one that is none, infinity."""
  try:
    return int(json.loads(line)["step"])
  except (ValueError, LookupError, TypeError):  # cut by a kill, or damaged
    return math.inf


class Votes:
  """Flags that count as soon as one process raises them.

  A signal may reach one process alone, and clocks differ. So each process votes
  after each step, and whatever any of them wanted all of them do.

  The votes on a step are counted by the devices behind that step, and read
  after the next one: nobody waits for them. In one process they count at once.
  """

  def __init__(self):
    self._last: jax.Array | None = None
    self._count = None
    if distributed.count() > 1:
      mesh = jax.sharding.Mesh(np.array(distributed.devices()), (_AXIS,))
      spec = jax.sharding.PartitionSpec
      self._each = jax.sharding.NamedSharding(mesh, spec(_AXIS))
      self._count = jax.jit(
        lambda flags: jnp.max(flags, axis=0),
        out_shardings=jax.sharding.NamedSharding(mesh, spec()),
      )

  def __call__(self, *flags: bool) -> tuple[bool, ...]:
    """Casts the flags of this process after a step.

    Args:
      *flags: as many in every call and process.

    Returns:
      The flags that count now, the same in all processes: those that any of
      them raised in the call before.
    """
    if self._count is None:
      return flags
    last, own = self._last, np.array(flags, np.int32)
    rows = np.tile(own, (jax.local_device_count(), 1))
    self._last = self._count(
      jax.make_array_from_process_local_data(self._each, rows)
    )
    if last is None:
      return (False,) * len(flags)
    return tuple(bool(flag) for flag in np.asarray(last))

  def forget(self) -> None:
    """Drops votes that were cast and are not read, in all processes."""
    self._last = None


def train(
  step_fn: Callable[[Any, Mapping[str, Any], int], tuple[Any, Any]],
  state: Any,
  batch_fn: Callable[[int], Mapping[str, Any]],
  files: Files,
  *,
  steps: int,
  examples_per_step: int,
  settings: Settings,
) -> Any:
  """Runs `steps` steps, from the newest saved state if there is one.

  Args:
    step_fn: (state, batch, step) -> (state, metrics), jitted by the caller;
      metrics are scalars.
    state: the state before step 0, a pytree of arrays.
    batch_fn: the batch of a step, a function of the step alone.
    files: where states and metrics go.
    steps: optimizer steps in all.
    examples_per_step: for the rate that the bar shows.
    settings: saving and reporting.

  Returns:
    The state after the last step.

  Raises:
    Terminated, KeyboardInterrupt: after SIGTERM or Ctrl-C, in every process.
    ValueError: if the saved state cannot be read.
  """
  directory = files.directory
  find = functools.partial(checkpoints.latest_step, directory)
  first = distributed.decided("newest state", find) or 0
  if first:
    state = checkpoints.restore(directory, first, state)
  pending, digest = _read_pending(directory, first)
  log = Log(files.metrics_path, first) if distributed.is_main() else None
  if log is not None and digest not in (None, log.durable()):
    raise ValueError(
      f"{files.metrics_path}: expected the lines of the first {first} steps, got"
      f" others: restore it, or delete {directory}, and the training starts"
      " again from its beginning"
    )
  saved_at = time.monotonic()
  agreed, stop = Votes(), None
  with (
    progress.bar(
      files.description,
      steps,
      settings.progress and distributed.is_main(),
      unit="step",
      initial=first,
    ) as bar,
    stopping.deferred() as asked,
    checkpoints.Writer(directory) as writer,
  ):
    for step in range(first, steps):
      state, metrics = step_fn(state, batch_fn(step), step)
      pending.append(metrics)
      is_late = time.monotonic() - saved_at > settings.save_seconds
      is_late, *stops = agreed(
        is_late and distributed.is_main(), *stopping.flags(asked())
      )
      # Steps run ahead of this loop: wait for the one before, so that the bar
      # tells the truth and no more than one batch waits in memory.
      jax.block_until_ready(pending[-2:-1])
      bar.update()
      done = step + 1
      if done % settings.log_every == 0 or done == steps:
        if log is not None:
          values = _means(pending)
          log.write(done, values)
          _show(bar, values, examples_per_step)
        pending.clear()
      stop = stopping.wanted(stops)
      if is_late or stop or done == steps:
        _save(writer, directory, done, state, pending, log)
        saved_at = time.monotonic()
        agreed.forget()
      if stop:
        break
    writer.wait()
    # One that came too late to be agreed on: all is saved, and the others hear
    # of it from `distributed` when this process leaves.
    stop = stop or asked()
  if stop:
    raise stop
  return state


def _save(writer, directory, step, state, pending, log: Log | None) -> None:
  writer.wait()  # which forgets the metrics of older states
  path = _pending_path(directory, step)
  if log is not None:
    content = {"metrics": _numbers(pending), "log": log.durable()}
    text = json.dumps(artifacts.sealed(content))
    artifacts.write_atomically(path, text)

  def forget_older():
    for old in path.parent.glob(_pending_path(directory, "*").name):
      if old != path:
        artifacts.remove(old)

  writer.save(step, state, forget_older)


def _read_pending(directory, step: int) -> tuple[list[Any], str | None]:
  """Returns metrics that no line has yet, and the digest of the lines."""
  if not step:
    return [], None
  content = artifacts.read_json(_pending_path(directory, step))
  return content["metrics"], content["log"]


def _pending_path(directory, step: int | str) -> pathlib.Path:
  return pathlib.Path(directory) / f"pending_{step}.json"


def _numbers(metrics: list[Any]) -> list[dict[str, float]]:
  """Waits for the device once; JSON keeps these numbers to the last bit."""
  return [
    {key: float(value) for key, value in one.items()}
    for one in jax.device_get(metrics)
  ]


def _means(metrics: list[Any]) -> dict[str, float]:
  numbers = _numbers(metrics)
  return {
    key: round(math.fsum(one[key] for one in numbers) / len(numbers), 6)
    for key in numbers[0]
  }


def _show(bar, values: Mapping[str, float], examples_per_step: int) -> None:
  rate = bar.format_dict["rate"]
  shown = {"loss": f"{values['loss']:.3f}"} if "loss" in values else {}
  if rate:
    shown["examples/s"] = f"{rate * examples_per_step:.0f}"
  bar.set_postfix(shown, refresh=False)
