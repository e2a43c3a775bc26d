"""How the processes of a run find each other: flags, environment, checks.

Everything here happens before JAX starts, so that a wrong combination costs no
allocation of a slice.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MODES", "Settings", "from_flags"]

MODES = {
  "none": "one process",
  "auto": "whatever cluster JAX detects",
  "tpu": "a TPU slice: the same command on every worker",
  "slurm": "inside srun: one process for each task",
  "gpu": "GPU machines: the three values below, or a cluster JAX detects",
  "local": "processes of one machine: launch/processes.py sets the values",
}
"""Ways to start, by the value of --distributed."""

_VALUES = ("coordinator_address", "num_processes", "process_id")
_SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
_HINTS = {
  "auto": "run it inside a cluster, or give --distributed=local or none",
  "tpu": "run it on every worker of a TPU slice",
  "slurm": "run it through srun",
  "gpu": "give --coordinator_address, --num_processes and --process_id",
  "local": "start it with launch/processes.py",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How the processes of a run find each other; nothing changes a result."""

  mode: str = "none"
  """One of `MODES`."""
  coordinator_address: str | None = None
  """HOST:PORT of process 0."""
  num_processes: int | None = None
  """In all."""
  process_id: int | None = None
  """Of this one, from 0; process 0 writes results."""
  cpu_devices: int | None = None
  """Virtual devices of this process, where JAX runs on CPUs; None: JAX's
  own choice."""
  gpus: tuple[int, ...] = ()
  """Of those that this process sees, which ones are its own, where Slurm gave it
  some; (): JAX's own choice."""

  def __post_init__(self):
    if self.mode not in MODES:
      raise ValueError(
        f"expected --distributed={'|'.join(MODES)}, got {self.mode!r}"
      )
    given = [name for name in _VALUES if getattr(self, name) is not None]
    missing = [name for name in _VALUES if name not in given]
    takes = self.mode in ("gpu", "local")
    if given and not takes:
      raise ValueError(
        f"--distributed={self.mode} takes no --{given[0]}, which JAX finds by"
        " itself or does not need: leave it out, or give --distributed=local"
        " or gpu"
      )
    if takes and missing and (given or self.mode == "local"):
      raise ValueError(
        f"--distributed={self.mode} needs --{missing[0]}, got none:"
        f" {_HINTS[self.mode]}"
      )
    if given:
      self._check_values()
    if self.cpu_devices is not None and self.cpu_devices < 1:
      raise ValueError(
        f"expected --cpu_devices of 1 or more, got {self.cpu_devices}"
      )

  def _check_values(self) -> None:
    if not re.fullmatch(r".+:[0-9]{1,5}", self.coordinator_address):
      raise ValueError(
        "expected --coordinator_address=HOST:PORT, got"
        f" {self.coordinator_address!r}"
      )
    if not 0 <= self.process_id < self.num_processes:
      raise ValueError(
        "expected --process_id from 0 to --num_processes - 1, got"
        f" --process_id={self.process_id} --num_processes={self.num_processes}"
      )

  def arguments(self) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize`."""
    if self.mode == "slurm":
      own = {"local_device_ids": list(self.gpus)} if self.gpus else {}
      return {"cluster_detection_method": "slurm", **own}
    if self.coordinator_address is None:
      return {}
    values = {name: getattr(self, name) for name in _VALUES}
    return {**values, "cluster_detection_method": "deactivate"}

  def hint(self) -> str:
    """Returns what to do where the processes do not find each other."""
    return _HINTS[self.mode]

  def check_backend(self, backend: str) -> None:
    """Refuses to train on CPUs where an accelerator was asked for.

    Args:
      backend: what JAX found.

    Raises:
      ValueError: if it is another.
    """
    if self.mode in ("tpu", "gpu") and backend != self.mode:
      raise ValueError(
        f"--distributed={self.mode}: expected {self.mode.upper()}s, got"
        f" JAX's backend {backend!r}: install the extra for them"
        " (synthq_jax[tpu] or [cuda]), and leave JAX_PLATFORMS unset"
      )


def from_flags(
  options: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> Settings:
  """Reads flags; launch/processes.py gives its children defaults for them.

  >>> flags = argparse.Namespace(distributed=None)
  >>> from_flags(flags, {}).mode
  'none'
  >>> from_flags(flags, {
  ...   "SYNTHQ_DISTRIBUTED": "local", "SYNTHQ_PROCESS_ID": "1",
  ...   "SYNTHQ_NUM_PROCESSES": "2", "SYNTHQ_COORDINATOR_ADDRESS": "host:7777",
  ... }).process_id
  1

  Args:
    options: with the attributes distributed, coordinator_address,
      num_processes, process_id and cpu_devices; None where not given.
    environment: variables; SYNTHQ_DISTRIBUTED and so on, which count for
      --distributed=local alone.

  Returns:
    The settings.

  Raises:
    ValueError: naming the flags that do not go together.
  """
  mode = options.distributed or environment.get("SYNTHQ_DISTRIBUTED", "none")
  values = {
    name: getattr(options, name, None) for name in (*_VALUES, "cpu_devices")
  }
  if mode == "local":
    for name in values:
      text = environment.get(f"SYNTHQ_{name.upper()}")
      if values[name] is None and text:
        values[name] = text if name == _VALUES[0] else _integer(name, text)
  if mode == "slurm":
    missing = [name for name in _SLURM if name not in environment]
    if missing:
      raise ValueError(
        f"--distributed=slurm needs {missing[0]} in the environment, got none:"
        f" {_HINTS[mode]}"
      )
    values["gpus"] = _slurm_gpus(environment)
  return Settings(mode=mode, **values)


def _slurm_gpus(environment: Mapping[str, str]) -> tuple[int, ...]:
  """Returns the share of a node's GPUs that is this task's.

  JAX takes one for each task, whatever the node has, and counts them from the
  task's number even where Slurm shows a task its own alone.

  Raises:
    ValueError: if the tasks of a node cannot have equal shares.
  """
  on_node = environment.get("SLURM_GPUS_ON_NODE", "")
  if not on_node.isdigit() or not int(on_node):
    return ()
  visible = environment.get("CUDA_VISIBLE_DEVICES", "")
  seen = len(visible.split(",")) if visible else int(on_node)
  if seen < int(on_node):  # --gpus-per-task, or bound otherwise
    return tuple(range(seen))
  tasks: list[int] = []
  text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
  for part in text.split(","):  # "2(x3),1": 2 on three nodes, 1 on the last
    number, times = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part).groups("1")
    tasks += [int(number)] * int(times)
  here = tasks[int(environment.get("SLURM_NODEID", 0)) % len(tasks)]
  if seen % here:
    raise ValueError(
      f"--distributed=slurm: expected GPUs that {here} tasks of a node can share,"
      f" got {seen}: set --ntasks-per-node to a divisor, or --gpus-per-task"
    )
  share, first = (
    seen // here,
    int(environment["SLURM_LOCALID"]) * (seen // here),
  )
  return tuple(range(first, first + share))


def _integer(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError:
    raise ValueError(
      f"expected an integer in SYNTHQ_{name.upper()}, got {text!r}"
    ) from None
