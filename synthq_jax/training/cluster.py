"""Reads and checks the flags by which the processes of a run find each other.

All checks but `check_backend` happen before JAX starts, so a wrong combination
costs no allocation of a slice.
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
"""Descriptions of the start modes, by the value of --distributed."""

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
  """Settings by which processes find each other; they never change a result."""

  mode: str = "none"
  """The start mode, one of `MODES`."""
  coordinator_address: str | None = None
  """HOST:PORT of process 0."""
  num_processes: int | None = None
  """The number of processes of the run."""
  process_id: int | None = None
  """The number of this process, from 0; process 0 writes results."""
  cpu_devices: int | None = None
  """The number of virtual devices of this process if JAX runs on CPUs; None: the
  choice of JAX."""
  gpus: tuple[int, ...] = ()
  """This process's own GPUs, as indices into the GPUs that it sees, under Slurm;
  (): the choice of JAX."""

  def __post_init__(self):
    if self.mode not in MODES:
      raise ValueError(
        f"expected --distributed={'|'.join(MODES)}, got {self.mode!r}"
      )
    present = [name for name in _VALUES if getattr(self, name) is not None]
    missing = [name for name in _VALUES if name not in present]
    takes = self.mode in ("gpu", "local")
    if present and not takes:
      raise ValueError(
        f"--distributed={self.mode} takes no --{present[0]}, which JAX finds by"
        " itself or does not need: leave it out, or give --distributed=local"
        " or gpu"
      )
    if takes and missing and (present or self.mode == "local"):
      raise ValueError(
        f"--distributed={self.mode} needs --{missing[0]}, got none:"
        f" {_HINTS[self.mode]}"
      )
    if present:
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
    """Returns advice for processes that do not find each other."""
    return _HINTS[self.mode]

  def check_backend(self, backend: str) -> None:
    """Refuses another backend than the TPU or GPU that the mode asks for.

    Args:
      backend: the name of JAX's default backend.

    Raises:
      ValueError: if the mode is "tpu" or "gpu" and the backend is another.
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
  """Makes settings from flags, and in mode "local" from the environment, too.

  launch/processes.py sets the environment variables of its children.

  >>> flags = argparse.Namespace(distributed=None)
  >>> from_flags(flags, {}).mode
  'none'
  >>> from_flags(flags, {
  ...   "SYNTHQ_DISTRIBUTED": "local", "SYNTHQ_PROCESS_ID": "1",
  ...   "SYNTHQ_NUM_PROCESSES": "2", "SYNTHQ_COORDINATOR_ADDRESS": "host:7777",
  ... }).process_id
  1

  Args:
    options: flags, with the attributes distributed, coordinator_address,
      num_processes, process_id and cpu_devices; None if not set.
    environment: environment variables. SYNTHQ_DISTRIBUTED is the default mode.
      Other SYNTHQ variables are read in mode "local" alone, SLURM variables in
      mode "slurm" alone.

  Raises:
    ValueError: naming the flag that is missing, wrong or does not fit the mode.
  """
  mode = options.distributed or environment.get("SYNTHQ_DISTRIBUTED", "none")
  values = {
    name: getattr(options, name, None) for name in (*_VALUES, "cpu_devices")
  }
  if mode == "local":
    for name in values:
      text = environment.get(f"SYNTHQ_{name.upper()}")
      if values[name] is None and text:
        is_address = name == _VALUES[0]
        values[name] = text if is_address else _parse_integer(name, text)
  if mode == "slurm":
    missing = [name for name in _SLURM if name not in environment]
    if missing:
      raise ValueError(
        f"--distributed=slurm needs {missing[0]} in the environment, got none:"
        f" {_HINTS[mode]}"
      )
    values["gpus"] = _parse_slurm_gpus(environment)
  return Settings(mode=mode, **values)


def _parse_slurm_gpus(environment: Mapping[str, str]) -> tuple[int, ...]:
  """Returns this task's GPUs, an equal share of those of its node.

  JAX takes one GPU for each task, whatever the node has. It indexes them by the
  task's number, even if Slurm shows each task its own GPUs alone.

  Raises:
    ValueError: if the tasks of a node cannot have equal shares.
  """
  on_node = environment.get("SLURM_GPUS_ON_NODE", "")
  if not on_node.isdigit() or not int(on_node):
    return ()
  visible = environment.get("CUDA_VISIBLE_DEVICES", "")
  seen = len(visible.split(",")) if visible else int(on_node)
  if seen < int(on_node):  # Slurm shows the task its own alone: --gpus-per-task
    return tuple(range(seen))
  tasks: list[int] = []
  text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
  for part in text.split(","):  # "2(x3),1": 2 on three nodes, 1 on the last
    number, times = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part).groups("1")
    tasks += [int(number)] * int(times)
  node_tasks = tasks[int(environment.get("SLURM_NODEID", 0)) % len(tasks)]
  if seen % node_tasks:
    raise ValueError(
      f"--distributed=slurm: expected GPUs that {node_tasks} tasks of a node can"
      f" share, got {seen}: set --ntasks-per-node to a divisor, or --gpus-per-task"
    )
  share, first = (
    seen // node_tasks,
    int(environment["SLURM_LOCALID"]) * (seen // node_tasks),
  )
  return tuple(range(first, first + share))


def _parse_integer(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError:
    raise ValueError(
      f"expected an integer in SYNTHQ_{name.upper()}, got {text!r}"
    ) from None
