"""Runs `synthq` on a slice of Cloud TPU: makes it, uses it, deletes it.

  python launch/tpu_vm.py --accelerator=v4-32 --zone=us-central2-b \
    --project=PROJECT --bucket=BUCKET --private_in_bucket \
    --gin_file=gin_configs/recipes/demo.gin --dry_run

`--dry_run` prints every command and runs none. What costs money needs
`--confirm_cost`. Needs Python and gcloud, and neither JAX nor synthq_jax here.
docs/tutorials/tpu_slice.md leads from a laptop to a slice.
"""

import argparse
import dataclasses
import difflib
import math
import pathlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import estimates
import gin_text
import gke
import sweeps
import tpu_driver
import tpu_steps
import tpu_types

__all__ = [
  "Parser",
  "UsageError",
  "add_job_flags",
  "at_least",
  "check_cost",
  "jobs",
  "main",
  "points",
  "shared_data",
  "split",
  "with_bindings",
]

ROOT = pathlib.Path(__file__).resolve().parents[1]
_GIN = "--gin."
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?")
_SHARED = "prepare_data.Config.shared_in"
_SLICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_AXES = ("MESH_DATA", "MESH_FSDP", "MESH_TENSOR")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}")
_STAGES = (
  "run", "prepare_data", "prepare_test_set", "finetune_dp",
  "static_encoder", "generate", "filter_queries",
  "query_leakage", "direct_dp", "train_retriever",
  "encode_documents", "learn_map", "learn_adapter", "fuse", "learn_to_rank",
  "evaluate", "audit", "compare_queries", "release_scores", "report",
  "study",
)  # fmt: skip
# What a source or a checkpoint needs beside run and tpu, by what names it.
_EXTRAS = {
  "gs://": "gcs",
  "ir_datasets:": "ir-datasets",
  ".parquet": "parquet",
  ".arrow": "parquet",
  "hf:": "parquet",
}
# What gcloud does, and a Job for Kubernetes does not.
_OF_GCLOUD = (
  "attach", "reserved", "queued", "network", "subnetwork", "internal_ips",
  "runtime_version", "keep", "with_private", "extras",
)  # fmt: skip


# What is said when a slice is made.
_OF_CREATE = (
  "spot", "reserved", "queued", "network", "subnetwork", "runtime_version",
  "service_account", "labels", "keep",
)  # fmt: skip


class UsageError(ValueError):
  """A mistake that the user can mend; its text is one line."""


class Parser(argparse.ArgumentParser):
  """Prints the error in one line."""

  def error(self, message: str) -> NoReturn:
    """Raises instead of printing the usage."""
    raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: the arguments; None: the process's own.

  Returns:
    The exit code: 0; 2 for what the user can mend; 130 after Ctrl-C, 143 after
    SIGTERM; otherwise what the job failed with.
  """
  for number in (signal.SIGTERM, signal.SIGHUP):  # a terminal that closes
    if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
      signal.signal(number, _terminate)
  try:
    flags, bindings = split(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(flags)
    todo = jobs(options, bindings)
    if options.dry_run:
      text = gke.manifest if options.gke_image else tpu_steps.script
      print("\n".join(map(text, todo)), end="")
      return 0
    check_cost(options, todo)
    for job in todo:
      tpu_driver.drive(
        job,
        max_restarts=options.max_restarts,
        poll_seconds=options.poll_seconds,
      )
    return 0
  except tpu_driver.LaunchError as error:
    return _stop(str(error), error.code)
  except KeyboardInterrupt:
    return _stop("interrupted; the same command goes on where it stopped", 130)
  except _Terminated:
    return _stop("told to stop; the same command goes on where it stopped", 143)
  except ValueError as error:
    return _stop(str(error), 2)


class _Terminated(BaseException):  # noqa: N818
  """SIGTERM or SIGHUP came; no Exception, so that nothing handles it."""


def _terminate(number, frame) -> NoReturn:
  del number, frame
  raise _Terminated


def _stop(message: str, code: int) -> int:
  print(f"tpu_vm: {message}", file=sys.stderr)
  return code


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Parts the flags of a launcher from gin's bindings.

  >>> split(["--zone=z", "--gin.EPSILON=3"])
  (['--zone=z'], ['EPSILON=3'])
  """
  flags = [flag for flag in argv if not flag.startswith(_GIN)]
  gin = [f.removeprefix(_GIN) for f in argv if f.startswith(_GIN)]
  return flags, gin


def _parser() -> argparse.ArgumentParser:
  parser = Parser(
    prog="tpu_vm.py",
    description=__doc__.partition("\n")[0],
    epilog="--gin.NAME=value goes to synthq.",
    allow_abbrev=False,
  )
  add_job_flags(parser)
  return parser


def at_least(least: int) -> Callable[[str], int]:
  """Returns the type of flags that are whole numbers from `least` on."""

  def number(text: str) -> int:
    if int(text) < least:
      raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
    return int(text)

  return number


def add_job_flags(parser: argparse.ArgumentParser) -> None:
  """Adds what describes jobs on TPUs, for this launcher and for xm.py."""
  flag = parser.add_argument
  flag("--gin_file", help="a recipe inside the checkout")
  flag("--stage", default="run", choices=_STAGES)
  words = "NAME=a,b,c, papers_grid or papers_table; several: their product"
  flag("--sweep", action="append", default=[], help=words)
  flag("--point", help="only this one of the sweep's points")
  flag("--name", help="of slice and working directory; default: the recipe's")
  words = "a slice that exists: nothing is made or deleted"
  flag("--attach", metavar="SLICE", default="", help=words)
  flag("--accelerator", help="v4-8, v4-32, v5litepod-16, v5p-4x4x12, ...")
  flag("--zone", help="for example us-central2-b")
  flag("--project", help="who pays")
  flag("--bucket", help="shared file system: a bucket, mounted with gcsfuse")
  words = "agree that private/ lies in that bucket, under its access rules"
  flag("--private_in_bucket", action="store_true", help=words)
  flag("--nfs", help="shared file system instead: HOST:/EXPORT")
  flag("--runtime_version", default="", help="image; default: the kind's")
  flag("--spot", action="store_true", help="cheaper, may be taken away")
  flag("--reserved", action="store_true", help="of your reservation")
  flag("--queued", action="store_true", help="wait for capacity")
  words = "that the hosts act as; default: Compute Engine's own"
  flag("--service_account", default="", help=words)
  flag("--network", default="", help="of the hosts; default: default")
  flag("--subnetwork", default="", help="of that network")
  words = "hosts without addresses of the internet; run this in their network"
  flag("--internal_ips", action="store_true", help=words)
  words = "of the slice, on the bill: KEY=VALUE,KEY=VALUE"
  flag("--labels", default="", help=words)
  words = "of the package beside run and tpu, as images,bert; gcs, parquet and"
  words += " ir-datasets follow from SOURCE"
  flag("--extras", default="", help=words)
  words = "with --dry_run: print a Job for Kubernetes that runs this image"
  flag("--gke_image", default="", help=words)
  flag("--source", default=str(ROOT), help="the checkout whose HEAD runs")
  flag("--allow_dirty", action="store_true", help="leave changes behind")
  flag("--results", default="runs", help="local folder for results")
  words = "copy private/ here, too: real queries and the secret of the noise"
  flag("--with_private", action="store_true", help=words)
  flag("--keep", action="store_true", help="do not delete the slice")
  flag("--max_restarts", type=at_least(0), default=20)
  words = "between questions for the state, and before a restart"
  flag("--poll_seconds", type=at_least(0), default=30, help=words)
  flag("--dry_run", action="store_true", help="print, run nothing")
  words = "go on, and pay for the slice"
  flag("--confirm_cost", action="store_true", help=words)


def jobs(
  options: argparse.Namespace, bindings: Sequence[str]
) -> list[tpu_steps.Job]:
  """Makes the jobs, and checks all that can be known without a network.

  Args:
    options: flags of `add_job_flags`.
    bindings: NAME=value for gin.

  Returns:
    One job for each point of the sweeps.

  Raises:
    ValueError: with one line, if something is missing or wrong.
  """
  _check_flags(options)
  source = pathlib.Path(options.source).resolve()
  grid = points(options, bindings)
  folder = f"{tpu_steps.MOUNT}/private/prepared"
  shared = shared_data(options, grid, folder)
  complete = [
    _job(options, source, with_bindings(point, shared)) for point in grid
  ]
  return [
    dataclasses.replace(job, notes=_notes(job, _values(job, source)))
    for job in complete
  ]


def points(
  options: argparse.Namespace, bindings: Sequence[str]
) -> Sequence[sweeps.Point]:
  """Returns the points to run: all of the sweeps, or the one of --point.

  Args:
    options: flags of `add_job_flags`.
    bindings: NAME=value for gin.

  Returns:
    Complete points.

  Raises:
    ValueError: with one line, if something is missing or wrong.
  """
  grid = sweeps.points(
    options.sweep,
    gin_file=options.gin_file,
    bindings=bindings,
    root=pathlib.Path(options.source).resolve(),
  )
  for point in grid:
    _check_secret(point.bindings)
  return _chosen(options, grid)


def shared_data(
  options: argparse.Namespace, grid: Sequence[sweeps.Point], folder: str
) -> tuple[str, ...]:
  """Returns the binding by which the units of a sweep share prepared data.

  Args:
    options: flags of `add_job_flags`.
    grid: the points.
    folder: which all of them see and nobody else reads: it holds real queries.

  Returns:
    Nothing where there is no sweep, or the user has said where to share.
  """
  bound = [b for point in grid for b in point.bindings if _SHARED in b]
  is_sweep = bool(options.sweep)
  if not is_sweep or bound or options.stage in tpu_steps.ONE_PROCESS:
    return ()
  return (f"{_SHARED}={folder!r}",)


def with_bindings(point: sweeps.Point, more: Sequence[str]) -> sweeps.Point:
  """Returns a point with more bindings."""
  return dataclasses.replace(point, bindings=(*point.bindings, *more))


def _chosen(
  options: argparse.Namespace, grid: Sequence[sweeps.Point]
) -> Sequence[sweeps.Point]:
  """All points, or the one that --point names."""
  if options.point is None:
    return grid
  names = [point.name for point in grid]
  if options.point not in names:
    close = difflib.get_close_matches(options.point, names, 1) or names[:1]
    raise UsageError(
      f"no point of the sweep is called {options.point!r}; did you mean"
      f" {close[0]}?"
    )
  return [grid[names.index(options.point)]]


def _job(
  options: argparse.Namespace, source: pathlib.Path, point: sweeps.Point
) -> tpu_steps.Job:
  path = gin_text.find(point.gin_file, source)
  if not path.is_relative_to(source):
    raise UsageError(
      f"--gin_file={point.gin_file} lies outside {source.name}, and would not"
      " reach the slice: commit it below gin_configs"
    )
  default = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
  name = options.name or sweeps.short(default, 20)
  if not _NAME.fullmatch(name):
    raise UsageError(
      "expected --name of at most 20 lower-case letters, digits and hyphens,"
      f" beginning with a letter, got {name!r}"
    )
  return tpu_steps.Job(
    name=f"{name}-{point.name}".strip("-"),
    attach=options.attach,
    accelerator=options.accelerator,
    zone=options.zone,
    project=options.project,
    gin_files=(str(path.relative_to(source)),),
    bindings=point.bindings,
    stage=options.stage,
    bucket=(options.bucket or "").removeprefix("gs://").rstrip("/"),
    nfs=options.nfs or "",
    runtime=options.runtime_version,
    spot=options.spot,
    reserved=options.reserved,
    queued=options.queued,
    service_account=options.service_account,
    network=options.network,
    subnetwork=options.subnetwork,
    internal_ips=options.internal_ips,
    labels=options.labels,
    extras=_extras(options, point.bindings),
    gke_image=options.gke_image,
    max_restarts=options.max_restarts,
    source=source,
    results=pathlib.Path(options.results),
    with_private=options.with_private,
    keep=options.keep,
    allow_dirty=options.allow_dirty,
  )


def _extras(
  options: argparse.Namespace, bindings: Sequence[str]
) -> tuple[str, ...]:
  """The extras of the package that a job installs."""
  asked = [name for name in options.extras.split(",") if name]
  if wrong := [name for name in asked if not re.fullmatch(r"[a-z-]+", name)]:
    raise UsageError(f"expected --extras=gcs,parquet, got {wrong[0]!r}")
  if any("s3://" in name for name in bindings):
    raise UsageError(
      "a slice has no s3fs, got s3://: copy it to a gs:// bucket"
    )
  needed = {e for sign, e in _EXTRAS.items() if sign in " ".join(bindings)}
  return tuple(sorted({*asked, *needed}))


# Checks without a network.


def _check_flags(options: argparse.Namespace) -> None:
  needed = ("accelerator", "zone", "project")
  for name in needed[:1] if options.gke_image else needed:
    if not getattr(options, name):
      raise UsageError(f"expected --{name}, got none; see --help")
  _check_place(options)
  hosts = tpu_types.describe(options.accelerator).hosts
  if options.stage in tpu_steps.ONE_PROCESS and hosts > 1:
    raise UsageError(
      f"--stage={options.stage} works in one process, got {options.accelerator}"
      f" with {hosts} hosts: give a type with one, such as v4-8"
    )
  bucket = (options.bucket or "").removeprefix("gs://").rstrip("/")
  if bool(bucket) == bool(options.nfs):
    got = "both" if bucket else "neither"
    raise UsageError(
      "expected --bucket=NAME or --nfs=HOST:/EXPORT, the file system that all"
      f" workers share, got {got}"
    )
  if bucket and not _BUCKET.fullmatch(bucket):
    raise UsageError(f"expected --bucket=NAME of a bucket, got {bucket!r}")
  if bucket and not options.private_in_bucket:
    raise UsageError(
      f"private/ (queries, ledger, the secret of the noise) would lie in"
      f" gs://{bucket}, and whoever may read it could undo the privacy: agree"
      " with --private_in_bucket, or give --nfs=HOST:/EXPORT"
    )
  if options.nfs and not re.fullmatch(r"[\w.-]+:/[\w./-]*", options.nfs):
    raise UsageError(f"expected --nfs=HOST:/EXPORT, got {options.nfs!r}")


def _check_place(options: argparse.Namespace) -> None:
  """Refuses flags of gcloud, or of Kubernetes, that do not go together."""
  if options.spot and options.reserved:
    raise UsageError("--spot and --reserved exclude each other: keep one")
  if options.attach and not _SLICE.fullmatch(options.attach):
    raise UsageError(f"expected --attach=SLICE, got {options.attach!r}")
  making = [name for name in _OF_CREATE if getattr(options, name)]
  if options.attach and making:
    raise UsageError(
      f"--{making[0]} is of a new slice, and --attach={options.attach} makes"
      " none: leave it out"
    )
  labels = filter(None, options.labels.split(","))
  if wrong := [label for label in labels if not _LABEL.fullmatch(label)]:
    raise UsageError(
      "expected --labels=KEY=VALUE,... of lower-case letters, digits, _ and -,"
      f" got {wrong[0]!r}"
    )
  if options.gke_image and not options.dry_run:
    raise UsageError(
      "--gke_image prints a Job and runs nothing: give --dry_run, and pipe it"
      " to `kubectl apply -f -`"
    )
  unused = [name for name in _OF_GCLOUD if getattr(options, name)]
  if options.gke_image and unused:
    raise UsageError(
      f"--{unused[0]} is of gcloud, and would be lost in a Job for Kubernetes: set"
      " it where the node pool is made, or in the image, and leave it out"
    )
  if options.gke_image and not tpu_types.describe(options.accelerator).gke:
    raise UsageError(
      f"--gke_image knows TPU v4 and later, got {options.accelerator}"
    )


def _check_secret(bindings: Sequence[str]) -> None:
  """Refuses a fixed secret: command lines stand in logs and process lists."""
  for binding in bindings:
    if re.match(r"(?i)\S*secret_seed\s*=", binding):
      raise UsageError(
        f"--gin.{binding.partition('=')[0]} would stand in logs, and whoever"
        " has it can undo the noise: leave it out, and the working directory"
        " draws its own"
      )


def _values(job: tpu_steps.Job, source: pathlib.Path) -> dict[str, str]:
  """The macros of a job as text."""
  values: dict[str, str] = {}
  for path in job.gin_files:
    values |= gin_text.macros(source / path, source)
  for binding in job.bindings:
    name, _, value = binding.partition("=")
    values[name.strip()] = value.strip()
  return values


def _numbers(values: dict[str, str]) -> dict[str, int]:
  digits = {n: v for n, v in values.items() if re.fullmatch(r"-?\d+", v)}
  return {name: int(value) for name, value in digits.items()}


def _mesh(
  job: tpu_steps.Job, values: dict[str, str]
) -> tuple[int, int, int] | None:
  """Returns the mesh, where it is known; refuses one that idles devices."""
  numbers, devices = _numbers(values), job.slice.devices
  ways, mesh = devices, None
  if all(axis in numbers for axis in _AXES):
    data, *rest = (numbers[axis] for axis in _AXES)
    others = math.prod(rest)
    if data == -1 and others > 0:  # as many as there are devices for
      data = devices // others
    if min(data, *rest) < 1 or data * others != devices:
      shape = " x ".join(f"{axis}={numbers[axis]}" for axis in _AXES)
      raise UsageError(
        f"{job.accelerator} has {devices} devices, got a mesh of {shape}: set"
        " MESH_DATA=-1, or numbers with that product"
      )
    ways, mesh = data * rest[0], (data, *rest)
  batch = numbers.get("BATCH_SIZE", ways)
  if batch < ways:
    raise UsageError(
      f"BATCH_SIZE={batch} is less than the {ways} parts that"
      f" {job.accelerator} divides a batch into: make one of them smaller"
    )
  return mesh


def _notes(job: tpu_steps.Job, values: dict[str, str]) -> tuple[str, ...]:
  """Describes the needs of a private step; refuses one that is known not to fit."""
  mesh, numbers = _mesh(job, values), _numbers(values)
  if mesh is None or not {"BATCH_SIZE", "MICROBATCH_SIZE"} <= numbers.keys():
    return ()
  step = estimates.Step(
    model=values.get("MODEL", "").strip("'\""),
    way=values.get("STRATEGY", "").strip("'\""),
    remat=values.get("REMAT") == "True",
    mesh=mesh,
    microbatch=numbers["MICROBATCH_SIZE"],
    rows=numbers["BATCH_SIZE"],
  )
  if job.slice.generation == "v4" and (why := estimates.refusal(step)):
    raise UsageError(why)
  chip = estimates.CHIPS.get(job.slice.generation)
  least = chip and estimates.of_step(step, chip)
  if not least:
    return ()
  hours = least * numbers.get("TRAIN_STEPS", 0) / 3600
  return (
    f"estimated, not measured: a private step takes {least:.2f} s or more",
    f"a private training {hours:.1f} h or more, {hours * job.slice.chips:.0f}"
    " chip hours",
  )


def check_cost(
  options: argparse.Namespace, todo: Sequence[tpu_steps.Job]
) -> None:
  """Refuses to spend without consent, or without gcloud.

  Args:
    options: with `confirm_cost`.
    todo: the jobs.

  Raises:
    UsageError: with one line that says what would be spent.
  """
  job = todo[0]
  if not options.confirm_cost and not options.attach:
    times = f", {len(todo)} times" if len(todo) > 1 else ""
    raise UsageError(
      f"this creates {tpu_steps.words(job)} in {job.zone}{times}, paid for by"
      f" {job.project} until deleted: give --confirm_cost to go on, or"
      " --dry_run to see every command"
    )
  for tool in ("gcloud", "git"):
    if shutil.which(tool) is None:
      raise UsageError(f"expected {tool} on the PATH, got none; install it")
  if len(todo) > 1:
    print(
      f"tpu_vm: {len(todo)} private trainings: choosing among them by private"
      " results costs the sum of their epsilons (docs/privacy.md)",
      file=sys.stderr,
    )


if __name__ == "__main__":
  sys.exit(main())
