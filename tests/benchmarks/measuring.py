"""What benchmarks share: where, how and for how long they measure, and print."""

import argparse
import functools
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import repository

__all__ = [
  "finish",
  "for_tpu",
  "fresh",
  "in_own_process",
  "in_turns",
  "keep_to",
  "parser",
  "peak_mib",
  "say",
  "t5_loss",
  "timed",
]

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parser(doc: str) -> argparse.ArgumentParser:
  return argparse.ArgumentParser(description=doc.splitlines()[0])


say = functools.partial(print, file=sys.stderr, flush=True)
"""Shows progress; the document alone goes to the standard output."""


def finish(
  name: str, found: dict[str, Any], *, passed: bool | None = None
) -> int:
  """Prints the document; returns the exit code.

  Args:
    name: of the benchmark.
    found: what was measured.
    passed: whether it keeps to its bars; None: it has none.
  """
  cores = len(os.sched_getaffinity(0))
  result = {
    "benchmark": name,
    "commit": repository.commit(),
    "jax": importlib.metadata.version("jax"),
    "machine": f"{cores} cores, {platform.machine()}",
    **found,
  }
  if passed is not None:
    result["passed"] = passed
  print(json.dumps(result, indent=1))
  return 1 if passed is False else 0


def timed(run: Callable[..., Any], *arguments: Any) -> dict[str, float]:
  """Returns seconds of the clock and of the processors, until all is there."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = run(*arguments)
  if "jax" in sys.modules:
    sys.modules["jax"].block_until_ready(result)
  return {
    "wall_s": time.perf_counter() - wall,
    "cpu_s": time.process_time() - cpu,
  }


def in_turns(
  runs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, Any]:
  """Times two programs in turns, ours first.

  Returns:
    Medians of both, ours over theirs, and all times.
  """
  times: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
  for _ in range(repeats):
    for name, run in runs.items():
      times[name].append(timed(run))
  found: dict[str, Any] = {"runs": times}
  for kind, field in (("processor", "cpu_s"), ("wall", "wall_s")):
    medians = {
      name: statistics.median(each[field] for each in row)
      for name, row in times.items()
    }
    ours, theirs = medians.values()
    found |= {f"{kind}_s": medians, f"{kind}_ratio": ours / theirs}
  return found


def keep_to(cores: int) -> None:
  """Keeps this process to some cores; before any library counts them."""
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])


def peak_mib() -> float:
  """Peak resident memory of this process."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh(script: str, *flags: str) -> Any:
  """Runs a part of a script in a process of its own; returns what it printed."""
  done = subprocess.run(
    [sys.executable, script, *flags],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  return json.loads(done.stdout)


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function in a new process, which ends with it."""
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    return pool.submit(function, *arguments).result()


def for_tpu(topology: str) -> list[Any]:
  """Returns the devices of a slice that is not there; libtpu compiles for it."""
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing touches a chip
  import jax
  from jax.experimental import topologies

  jax.config.update("jax_platforms", "cpu")
  return topologies.get_topology_desc(
    platform="tpu", topology_name=topology, chip_config_name="megacore"
  ).devices


def t5_loss(config: Any) -> Callable[..., Any]:
  """Returns the cross-entropy of each example under a T5."""
  from synthq_jax.losses import seq2seq
  from synthq_jax.models import t5

  def loss_fn(params: Any, batch: Any) -> Any:
    logits = t5.Transformer(config).apply(
      {"params": params}, batch["inputs"], t5.shift_right(batch["targets"])
    )
    return seq2seq.cross_entropy(logits, batch["targets"])

  return loss_fn
