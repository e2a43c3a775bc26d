"""Launches experiments with XManager: a recipe, a sweep, an executor.

  python launch/xm.py --executor=local --gin_file=gin_configs/recipes/demo.gin \
    --sweep=EPSILON=3,8,16

`local` runs synthq on this machine, without Docker; on a worker of a TPU slice it is
one process of the slice's, so the same command runs on every worker. Units of a sweep
share the data that the first of them prepares. `tpu_vm` runs launch/tpu_vm.py
here, once for each point of the sweep, and that drives gcloud. XManager's own ways
to Google Cloud are not taken: its Vertex AI knows TPU v2 and v3 alone, and takes
neither a project nor a zone. `--dry_run` prints every command and needs no
XManager; else, in the checkout: pip install '.[launch]'.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import shlex
import signal
import sys
import threading
from collections.abc import Sequence

import sweeps
import tpu_steps
import tpu_vm
import tpu_worker

__all__ = ["Unit", "main", "units"]

_TPU_VM = pathlib.Path(tpu_vm.__file__).resolve()
_WORKDIR = "runs"
_HERE = {"--gin_file", "--stage", "--sweep", "--point", "--source"}
"""Flags of `tpu_vm.add_job_flags` that describe a run and not a slice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
  """One work unit: a command of this machine."""

  name: str
  args: tuple[str, ...]  # of Python
  first: bool = False  # the others begin when it has ended


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: the arguments; None: the process's own. Those that begin with --xm_ go
      to XManager.

  Returns:
    The exit code: 0; 1 if a work unit failed; 2 for what the user can mend; 130
    after Ctrl-C, 143 after SIGTERM.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  own = [flag for flag in argv if not flag.startswith("--xm_")]
  try:
    flags, bindings = tpu_vm.split(own)
    options = _parser().parse_args(flags)
    todo = units(options, bindings, own)
    if options.dry_run:
      print(_script(options, bindings, todo), end="")
      return 0
    if options.executor == "tpu_vm":
      tpu_vm.check_cost(options, tpu_vm.jobs(options, bindings))
    failed = _launch(options, todo, [f for f in argv if f not in own])
  except ValueError as error:
    return _stop(str(error), 2)
  except KeyboardInterrupt:
    return _stop("interrupted; the same command goes on where it stopped", 130)
  except asyncio.CancelledError:
    return _stop("told to stop; the same command goes on where it stopped", 143)
  if failed:
    names = ", ".join(failed)
    return _stop(f"{len(failed)} of {len(todo)} failed: {names}; see above", 1)
  return 0


def _stop(message: str, code: int) -> int:
  print(f"xm: {message}", file=sys.stderr)
  return code


def _parser() -> argparse.ArgumentParser:
  parser = tpu_vm.Parser(
    prog="xm.py",
    description=__doc__.partition("\n")[0],
    epilog="--gin.NAME=value goes to synthq, --xm_NAME=value to XManager.",
    allow_abbrev=False,
  )
  _add_own_flags(parser)
  tpu_vm.add_job_flags(parser)
  return parser


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags that tpu_vm.py does not have."""
  flag = parser.add_argument
  flag("--executor", choices=("local", "tpu_vm"), default="local")
  flag("--title", default="synthq", help="of the experiment")
  flag("--workdir", default=_WORKDIR, help="local: the folder of all units")
  words = "work units at the same time"
  flag("--max_parallel", type=tpu_vm.at_least(1), default=1, help=words)


def _passed_on(flags: Sequence[str]) -> list[str]:
  """The flags that are for tpu_vm.py."""
  parser = tpu_vm.Parser(allow_abbrev=False, add_help=False)
  _add_own_flags(parser)
  return [f for f in parser.parse_known_args(flags)[1] if f != "--dry_run"]


# What is to run.


def units(
  options: argparse.Namespace, bindings: Sequence[str], argv: Sequence[str]
) -> list[Unit]:
  """Returns one work unit for each point of the sweep.

  Args:
    options: the parsed flags.
    bindings: NAME=value for gin.
    argv: the command line, which tpu_vm.py gets with one point each.

  Returns:
    The units.

  Raises:
    ValueError: with one line, if something is missing or wrong.
  """
  if options.executor == "local":
    local = _local_units(options, bindings, tpu_worker.find())
    _check_local(options, argv)
    return local
  if options.workdir != _WORKDIR:
    raise ValueError(
      "--workdir is of --executor=local; on a slice it is in the bucket, under"
      " --name"
    )
  if options.gke_image:
    raise ValueError("--gke_image is for launch/tpu_vm.py --dry_run alone")
  if options.attach and options.max_parallel > 1:
    raise ValueError(
      f"--attach={options.attach} is one slice, on which units run one after the"
      " other: leave --max_parallel out"
    )
  jobs = tpu_vm.jobs(options, bindings)
  points = tpu_vm.points(options, bindings)
  passed = _passed_on(argv)
  return [
    Unit(
      name=job.name,
      args=(
        str(_TPU_VM),
        *passed,
        *((f"--point={point.name}",) if point.name else ()),
      ),
    )
    for job, point in zip(jobs, points, strict=True)
  ]


def _synthq(
  stage: str, point: sweeps.Point, workdir: str, cluster: tuple[str, ...] = ()
) -> tuple[str, ...]:
  """The arguments of Python that run a stage."""
  return (
    "-m",
    "synthq_jax.cli.main",
    stage,
    *cluster,
    "--quiet",
    f"--gin_file={point.gin_file}",
    *(f"--gin.{binding}" for binding in point.bindings),
    f"--workdir={workdir}",
  )


def _check_local(options: argparse.Namespace, argv: Sequence[str]) -> None:
  """Refuses what would be paid for, and folders that are none."""
  if "://" in options.workdir:
    raise ValueError(
      f"expected --workdir of a folder for --executor=local, got"
      f" {options.workdir}: `synthq run --workdir=gs://...` writes into a store"
    )
  own = _passed_on(tpu_vm.split(argv)[0])
  names = (flag.partition("=")[0] for flag in own if flag.startswith("--"))
  if refused := [name for name in names if name not in _HERE]:
    raise ValueError(
      f"{refused[0]} is of slices, and --executor=local runs here: leave it out, or"
      " give --executor=tpu_vm"
    )


def _local_units(
  options: argparse.Namespace,
  bindings: Sequence[str],
  worker: tpu_worker.Worker | None,
) -> list[Unit]:
  """Returns the units, on a slice each with one process on every worker."""
  base = pathlib.Path(options.workdir).absolute()
  points = tpu_vm.points(options, bindings)
  cluster = _cluster(options, worker)
  shared = tpu_vm.shared_data(options, points, f"{base}/private/prepared")
  points = [tpu_vm.with_bindings(point, shared) for point in points]
  local = [
    Unit(
      name=point.name or "unit",
      args=_synthq(options.stage, point, str(base / point.name), cluster),
    )
    for point in points
  ]
  if shared and options.max_parallel > 1:  # else all would prepare at once
    prepare = dataclasses.replace(
      local[0],
      name="prepare-data",
      args=_synthq(
        "prepare_data", points[0], str(base / points[0].name), cluster
      ),
      first=True,
    )
    local.insert(0, prepare)
  return local


def _cluster(
  options: argparse.Namespace, worker: tpu_worker.Worker | None
) -> tuple[str, ...]:
  """Returns the flags of synthq on a worker of a slice; nothing elsewhere.

  Without it one process of a slice of four would train alone, or wait forever.
  """
  if worker is None:
    return ()
  where = worker.slice or "this slice"
  if options.stage in tpu_steps.ONE_PROCESS:
    if worker.hosts > 1:
      raise ValueError(
        f"--stage={options.stage} works in one process, got a worker of {where}"
        f" with {worker.hosts} hosts: run it on a machine of its own"
      )
    return ()
  if options.max_parallel > 1:
    raise ValueError(
      f"{where} runs units one after the other: leave --max_parallel out"
    )
  if worker.hosts > 1:
    print(
      f"xm: a worker of {where}, {worker.hosts} hosts: the same command has to run"
      " on each (gcloud compute tpus tpu-vm ssh --worker=all), with one --workdir"
      " that all of them see",
      file=sys.stderr,
    )
  return ("--distributed=tpu",)


def _script(
  options: argparse.Namespace, bindings: Sequence[str], todo: Sequence[Unit]
) -> str:
  """Returns the text of --dry_run: the units, and the steps of tpu_vm.py in each."""
  lines = []
  for unit in todo:
    lines.append(f"# {options.executor}: {unit.name}")
    lines.append(shlex.join([sys.executable, *unit.args]))
  text = "\n".join(lines) + "\n"
  if options.executor == "tpu_vm":
    scripts = map(tpu_steps.script, tpu_vm.jobs(options, bindings))
    text += "\n" + "\n".join(scripts)
  return text


# XManager.


def _launch(
  options: argparse.Namespace, todo: Sequence[Unit], xm_flags: Sequence[str]
) -> list[str]:
  """Runs an experiment, and returns the names of units that failed."""
  try:
    from absl import flags
    from xmanager import xm, xm_local
  except ImportError as error:
    raise ValueError(
      f"XManager cannot be imported ({error}): pip install '.[launch]' in the"
      " checkout, or --dry_run, or launch/tpu_vm.py"
    ) from error
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["xm.py", *xm_flags])

  failed: list[str] = []

  async def experiment() -> None:
    if threading.current_thread() is threading.main_thread():
      stop = asyncio.current_task().cancel
      for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with xm_local.create_experiment(options.title) as running:
      binary = xm.binary(xm_local.Local.Spec(), path=sys.executable)
      (executable,) = running.package([binary])
      failed.extend(await _run(running, executable, todo, options.max_parallel))

  try:
    asyncio.run(experiment())
  except RuntimeError:
    # On leaving, XManager raises again for units that have been counted.
    if not failed:
      raise
  return failed


async def _run(experiment, executable, todo: Sequence[Unit], limit: int):
  """Adds units, a few at a time, and waits for them."""
  from xmanager import xm, xm_local

  free = asyncio.Semaphore(limit)

  async def run(unit: Unit) -> str | None:
    async with free:
      job = xm.Job(
        executable=executable,
        executor=xm_local.Local(),
        args=list(unit.args),
        name=unit.name,
      )
      work_unit = await experiment.add(job)
      try:
        await work_unit.wait_until_complete()
      except xm.ExperimentUnitError:
        return unit.name
      except asyncio.CancelledError:
        _terminate(work_unit)
        raise
    return None

  done = [await run(unit) for unit in todo if unit.first]
  done += await asyncio.gather(*[run(unit) for unit in todo if not unit.first])
  failed = [name for name in done if name]
  if failed:  # which XManager would show again, with tracebacks
    logging.getLogger("absl").setLevel(logging.CRITICAL)
  return failed


def _terminate(work_unit) -> None:
  """Sends SIGTERM to what a unit runs here.

  XManager does so at its own exit alone, which it puts off until every unit has
  ended, and then tells the shell around a command instead of the command. It has
  no public way either: `stop` knows no local jobs.
  """
  for handle in getattr(work_unit, "_local_execution_handles", ()):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(handle.process.pid, signal.SIGTERM)  # each has its own session


if __name__ == "__main__":
  sys.exit(main())
