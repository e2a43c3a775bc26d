"""Runs the loop of every training: steps, saved states, metrics and progress.

A step depends on the state and on its number alone: batches, keys and noise are
functions of seed and step. So a resumed run equals an uninterrupted one, metrics
included. SIGTERM and Ctrl-C wait for the end of the step and a saved state.

With several processes all of them run this loop, on arrays that their devices
share. They save and stop after the same step, whichever process got the signal.
Process 0 alone writes metrics and shows progress.
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
  """Settings for saving and reporting, which never change the result."""

  save_seconds: float = 60.0
  """Seconds between two saved states."""
  log_every: int = 20
  """Steps between two lines of metrics."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
  """The files of a training, and its description."""

  directory: str | os.PathLike
  """The folder for states of the unfinished training."""
  metrics_path: str | os.PathLike
  """The file of metrics: JSON lines of step and metrics, one every few steps."""
  description: str
  """The label of the progress bar, also used in messages."""

  @classmethod
  def below(cls, folder: pathlib.Path, description: str) -> "Files":
    """Makes the files of a training in its own folder.

    Args:
      folder: the folder, which gets `state` and `metrics.jsonl`.
      description: as in the class.
    """
    return cls(
      directory=folder / "state",
      metrics_path=folder / "metrics.jsonl",
      description=description,
    )


class Log:
  """Writes lines of metrics; first drops lines after the resumed step."""

  def __init__(self, path: str | os.PathLike, resumed_at: int):
    self._path = pathlib.Path(path)
    earlier = []
    if self._path.exists():
      lines = self._path.read_text(errors="replace").splitlines(keepends=True)
      earlier = [line for line in lines if _parse_step(line) <= resumed_at]
    self._hash = hashlib.sha256("".join(earlier).encode())
    artifacts.write_atomically(self._path, "".join(earlier))

  def sync(self) -> str:
    """Syncs all lines to disk, and returns their digest."""
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


def _parse_step(line: str) -> float:
  """Returns the step of a line of metrics; infinity for a damaged line."""
  try:
    return int(json.loads(line)["step"])
  except (ValueError, LookupError, TypeError):  # cut by a kill, or damaged
    return math.inf


class Votes:
  """Combines flags of all processes: a flag counts if any process raises it.

  A signal may reach one process alone, and clocks differ. So each process votes
  after each step, and all of them do what any of them voted for.

  The devices count the votes on a step after that step, and the processes read the
  result after the next step. So no process waits for votes. In one process, votes
  count at once.
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
      *flags: the votes, equally many in every call and process.

    Returns:
      The flags that count now, the same in all processes. With several processes
      these are the flags that any process raised in the call before.
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
    """Drops unread votes; call it in all processes."""
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
  """Trains up to step `steps`, from the newest saved state if there is one.

  Args:
    step_fn: (state, batch, step) -> (state, metrics), jitted by the caller;
      metrics are scalars.
    state: the state before step 0, a pytree of arrays.
    batch_fn: returns the batch of a step, from the number of the step alone.
    files: the files for states and metrics.
    steps: the total number of optimizer steps.
    examples_per_step: the number of examples of a step, for the displayed rate.
    settings: settings for saving and reporting.

  Returns:
    The state after the last step.

  Raises:
    Terminated, KeyboardInterrupt: after SIGTERM or Ctrl-C, in every process.
    ValueError: if the saved state cannot be read, or the lines of metrics before
      it have changed.
  """
  directory = files.directory
  find = functools.partial(checkpoints.latest_step, directory)
  first = distributed.decided("newest state", find) or 0
  if first:
    state = checkpoints.restore(directory, first, state)
  pending, digest = _read_pending(directory, first)
  log = Log(files.metrics_path, first) if distributed.is_main() else None
  if log is not None and digest not in (None, log.sync()):
    raise ValueError(
      f"{files.metrics_path}: expected the lines of the first {first} steps, got"
      f" others: restore it, or delete {directory}, and the training starts"
      " again from its beginning"
    )
  saved_at = time.monotonic()
  vote, stop = Votes(), None
  with (
    progress.shown(distributed.is_main()),
    progress.bar(files.description, steps, unit="step", initial=first) as bar,
    stopping.deferred() as get_request,
    checkpoints.Writer(directory) as writer,
  ):
    for step in range(first, steps):
      state, metrics = step_fn(state, batch_fn(step), step)
      pending.append(metrics)
      is_late = time.monotonic() - saved_at > settings.save_seconds
      is_late, *stops = vote(
        is_late and distributed.is_main(), *stopping.make_flags(get_request())
      )
      # Steps run asynchronously. Wait for the previous one, so that the bar is
      # right and no more than one batch waits in memory.
      jax.block_until_ready(pending[-2:-1])
      bar.update()
      done = step + 1
      if done % settings.log_every == 0 or done == steps:
        if log is not None:
          values = _compute_means(pending)
          log.write(done, values)
          _show(bar, values, examples_per_step)
        pending.clear()
      stop = stopping.make_exception(stops)
      if is_late or stop or done == steps:
        _save(writer, directory, done, state, pending, log)
        saved_at = time.monotonic()
        vote.forget()
      if stop:
        break
    writer.wait()
    # A signal may come too late for a vote. All is saved, and `distributed` tells
    # the other processes when this one leaves.
    stop = stop or get_request()
  if stop:
    raise stop
  return state


def _save(writer, directory, step, state, pending, log: Log | None) -> None:
  writer.wait()  # it removes the pending metrics of older states
  path = _get_pending_path(directory, step)
  if log is not None:
    content = {"metrics": _to_floats(pending), "log": log.sync()}
    text = json.dumps(artifacts.sealed(content))
    artifacts.write_atomically(path, text)

  def remove_older():
    for old in path.parent.glob(_get_pending_path(directory, "*").name):
      if old != path:
        artifacts.remove(old)

  writer.save(step, state, remove_older)


def _read_pending(directory, step: int) -> tuple[list[Any], str | None]:
  """Reads the metrics not yet logged at a saved step, and the log's digest."""
  if not step:
    return [], None
  content = artifacts.read_json(_get_pending_path(directory, step))
  return content["metrics"], content["log"]


def _get_pending_path(directory, step: int | str) -> pathlib.Path:
  return pathlib.Path(directory) / f"pending_{step}.json"


def _to_floats(metrics: list[Any]) -> list[dict[str, float]]:
  """Converts metrics to floats, which JSON keeps to the last bit."""
  return [
    {key: float(value) for key, value in values.items()}
    for values in jax.device_get(metrics)  # one transfer for all
  ]


def _compute_means(metrics: list[Any]) -> dict[str, float]:
  steps = _to_floats(metrics)
  return {
    key: round(math.fsum(values[key] for values in steps) / len(steps), 6)
    for key in steps[0]
  }


def _show(bar, values: Mapping[str, float], examples_per_step: int) -> None:
  rate = bar.format_dict["rate"]
  shown = {"loss": f"{values['loss']:.3f}"} if "loss" in values else {}
  if rate:
    shown["examples/s"] = f"{rate * examples_per_step:.0f}"
  bar.set_postfix(shown, refresh=False)
