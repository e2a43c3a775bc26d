"""A job on a TPU slice as a list of commands, before any of them runs.

Every step is one command of this machine, so that `--dry_run` shows the whole
truth: what is printed is what `tpu_driver` runs.
"""

import dataclasses
import pathlib
import shlex

import tpu_types

__all__ = [
  "GCSFUSE",
  "MOUNT",
  "ONE_PROCESS",
  "Job",
  "Step",
  "delete_step",
  "script",
  "steps",
  "stop_step",
  "synthq_flags",
  "words",
]

MOUNT = "/mnt/synthq"
"""Folder in which all workers see the shared file system."""

ONE_PROCESS = ("study",)
"""The stages of synthq that refuse --distributed."""

_CODE = "$HOME/synthq_jax"
_VENV = "$HOME/synthq_venv"
# One process at a time on each worker: a command that is sent again after a lost
# connection waits for the one that is still running, and then goes on from it.
_LOCK = "$HOME/synthq.lock"
GCSFUSE = (
  "implicit-dirs",
  "metadata-cache-ttl-secs=0",
  "metadata-cache-negative-ttl-secs=0",
  "dir-mode=700",
  "file-mode=600",
)
"""Options of gcsfuse: what one worker writes, every other must see at once.

A mount is needed since all hosts share a working directory; of one process it may
be a URL (`--workdir=gs://...`), which no launcher here uses yet.
"""

# A new host may still be installing its own updates.
_APT = "sudo apt-get -o DPkg::Lock::Timeout=300"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One run of `synthq` on one slice."""

  name: str  # of the working directory, the local results and a new slice
  attach: str = ""  # a slice that exists; empty: one is made and deleted
  accelerator: str  # e.g. "v4-32"
  zone: str
  project: str
  gin_files: tuple[str, ...]  # inside the checkout
  bindings: tuple[str, ...] = ()  # NAME=value
  stage: str = "run"
  bucket: str = ""  # without gs://; the shared file system, or
  nfs: str = ""  # HOST:/EXPORT
  runtime: str = ""  # image of the hosts; the kind's own if empty
  spot: bool = False  # cheaper, and taken away at any time
  reserved: bool = False  # of the project's reservation
  queued: bool = False  # waits for capacity
  service_account: str = ""  # that the hosts act as
  network: str = ""  # of the hosts
  subnetwork: str = ""
  internal_ips: bool = False  # no addresses of the internet
  labels: str = ""  # KEY=VALUE,KEY=VALUE
  notes: tuple[str, ...] = ()  # what is known of its private step
  extras: tuple[str, ...] = ()  # of the package, beside run and tpu
  gke_image: str = ""  # container of a Job for Kubernetes
  max_restarts: int = 20  # of that Job
  source: pathlib.Path  # the checkout whose HEAD is copied
  results: pathlib.Path = pathlib.Path("runs")  # here
  with_private: bool = False  # copy private/ to this machine, too
  keep: bool = False  # do not delete the slice
  allow_dirty: bool = False  # leave uncommitted changes behind

  @property
  def node(self) -> str:
    """The name of the slice."""
    return self.attach or self.name

  @property
  def workdir(self) -> str:
    """The working directory as the workers see it."""
    return f"{MOUNT}/{self.name}"

  @property
  def slice(self) -> tpu_types.Slice:
    """Chips and hosts of the accelerator type."""
    return tpu_types.describe(self.accelerator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """One command, and what the driver makes of it."""

  phase: str  # "check", "create", "copy", ... in the order they come
  argv: tuple[str, ...]
  costs: bool = False  # money flows from here until the slice is deleted
  expect: str = ""  # how a check reads the output: see `tpu_driver`
  private: bool = False  # runs with umask 077: it writes for this user alone


def steps(job: Job) -> list[Step]:
  """Returns all commands of a job in their order.

  Args:
    job: the job.

  Returns:
    Checks (which change nothing), then pack, create, copy, install, mount, run,
    state, results, delete. Results in a bucket are copied when the slice is gone.
    On a slice that exists there is no create, wait or delete.
  """
  stays = job.keep or job.attach
  results, delete = _results(job), [] if stays else [delete_step(job)]
  # Chips need not wait for a download from a bucket.
  ending = [*delete, *results] if job.bucket else [*results, *delete]
  creation = [] if job.attach else _create(job)
  body = [*_pack(job), *creation, *_set_up(job), _run(job), _state(job)]
  return [*_checks(job), *body, *ending]


def script(job: Job) -> str:
  """Returns the steps as a shell script with a heading for each phase.

  Args:
    job: the job.

  Returns:
    Lines of text; what costs money is marked.
  """
  lines = [f"# {job.name}: {words(job)}", *(f"# {n}" for n in job.notes)]
  phase = ""
  for step in steps(job):
    if step.phase != phase:
      phase = step.phase
      lines += ["", f"# {phase}: {_HEADINGS[phase]}"]
    if step.costs:
      lines.append(f"# costs money from here until it is deleted: {words(job)}")
    # In a shell of its own: what comes after it is not private.
    written = _written(step.argv)
    lines.append(f"(umask 077; {written})" if step.private else written)
  return "\n".join(lines) + "\n"


def _written(argv: tuple[str, ...]) -> str:
  """A command for the shell, one flag a line where there are several."""
  flags = [i for i, word in enumerate(argv) if word.startswith("--")]
  quoted = [shlex.quote(word) for word in argv]
  first = flags[0] if len(flags) > 1 else len(argv)
  return " \\\n  ".join([" ".join(quoted[:first]), *quoted[first:]])


_HEADINGS = {
  "check": "nothing is changed",
  "pack": "what is committed, and nothing else",
  "create": "again after every preemption, with all up to run",
  "wait": "until it says ACTIVE",
  "copy": "the code to every worker",
  "install": "on every worker; copy, install and mount are tried 4 times",
  "mount": "one file system for all workers",
  "run": "on every worker; with mount again after 75, 143 or a lost connection",
  "state": "asked after a failure: READY means that the slice is still there",
  "results": "to this machine",
  "delete": "always, after failures and Ctrl-C, too",
}


def words(job: Job) -> str:
  """Names the chips that are paid for, e.g. "16 chips (v4-32, 4 hosts, spot)"."""
  kind = ", spot" if job.spot else ", reserved" if job.reserved else ""
  kind = f", on {job.attach}, which exists" if job.attach else kind
  hosts = "1 host" if job.slice.hosts == 1 else f"{job.slice.hosts} hosts"
  chips = "1 chip" if job.slice.chips == 1 else f"{job.slice.chips} chips"
  return f"{chips} ({job.accelerator}, {hosts}{kind})"


def _gcloud(job: Job, *words: str) -> tuple[str, ...]:
  """A command on TPUs, at the job's place."""
  flags = (f"--zone={job.zone}", f"--project={job.project}", "--quiet")
  return ("gcloud", "compute", "tpus", *words, *flags)


def _inside(job: Job) -> tuple[str, ...]:
  """Returns the flags of ssh and scp for the network."""
  return ("--internal-ip",) if job.internal_ips else ()


def _ssh(job: Job, command: str, worker: str = "all") -> tuple[str, ...]:
  where = (job.node, f"--worker={worker}", *_inside(job))
  return _gcloud(job, "tpu-vm", "ssh", *where, f"--command={command}")


def _checks(job: Job) -> list[Step]:
  """Returns the checks before anything is paid for."""
  account = ("gcloud", "auth", "list", "--filter=status:ACTIVE")
  names = "--format=value(name.basename())"
  checks = [
    Step(
      phase="check",
      argv=(*account, "--format=value(account)"),
      expect="account",
    )
  ]
  if job.bucket:
    layout = "--format=value(hierarchicalNamespace.enabled)"
    describe = ("gcloud", "storage", "buckets", "describe")
    argv = (*describe, f"gs://{job.bucket}", "--raw", layout)
    checks.append(Step(phase="check", argv=argv, expect="bucket"))
  kinds = ("tpu-vm", "queued-resources") if job.queued else ("tpu-vm",)
  if job.attach:
    kinds, asked = (), "--format=value(state,acceleratorType.basename())"
    argv = _gcloud(job, "tpu-vm", "describe", job.attach, asked)
    checks.append(Step(phase="check", argv=argv, expect="there"))
  for kind in kinds:
    argv = _gcloud(job, kind, "list", names)
    checks.append(Step(phase="check", argv=argv, expect="free"))
  files = (*job.gin_files, "pyproject.toml")
  git = ("git", "-C", str(job.source))
  tracked = (*git, "ls-files", "--error-unmatch", *files)
  checks.append(Step(phase="check", argv=tracked, expect="tracked"))
  if not job.allow_dirty:
    changed = (*git, "status", "--porcelain", "--untracked-files=no")
    checks.append(Step(phase="check", argv=changed, expect="clean"))
  return checks


def _archive(job: Job) -> str:
  """The file that carries the code."""
  return f"{job.name}.tar.gz"


def _pack(job: Job) -> list[Step]:
  pack = ("git", "-C", str(job.source), "archive", "--format=tar.gz")
  packed = Step(
    phase="pack",
    argv=(*pack, f"--output={_local_archive(job)}", "HEAD"),
  )
  mode = ("-m", "700") if job.with_private else ()
  argv = ("mkdir", "-p", *mode, str(job.results / job.name))
  return [Step(phase="pack", argv=argv), packed]


def _create(job: Job) -> list[Step]:
  image = job.runtime or job.slice.runtime
  kind, wished = job.slice.flags, _wished(job)
  if not job.queued:
    argv = _gcloud(
      job, "tpu-vm", "create", job.name, *kind, f"--version={image}", *wished
    )
    return [Step(phase="create", argv=argv, costs=True)]
  create = _gcloud(
    job, "queued-resources", "create", job.name, f"--node-id={job.name}",
    *kind, f"--runtime-version={image}", *wished,
  )  # fmt: skip
  state = "--format=value(state.state)"
  wait = _gcloud(job, "queued-resources", "describe", job.name, state)
  return [
    Step(phase="create", argv=create, costs=True),
    Step(phase="wait", argv=wait, expect="active"),
  ]


def _wished(job: Job) -> tuple[str, ...]:
  """The flags of both ways to make a slice, where they are asked for."""
  switches = ("spot", "reserved", "internal_ips")
  values = ("service_account", "network", "subnetwork", "labels")
  return (
    *(_flag(name) for name in switches if getattr(job, name)),
    *(f"{_flag(n)}={getattr(job, n)}" for n in values if getattr(job, n)),
  )


def _flag(name: str) -> str:
  return f"--{name.replace('_', '-')}"


def _local_archive(job: Job) -> str:
  return str((job.results / job.name / _archive(job)).absolute())


def _set_up(job: Job) -> list[Step]:
  copy = _gcloud(
    job, "tpu-vm", "scp", _local_archive(job), f"{job.node}:{_archive(job)}",
    "--worker=all", *_inside(job),
  )  # fmt: skip
  # The image's own Python is older than 3.11; uv brings one.
  install = _lines(
    "set -e",
    f'rm -rf "{_CODE}"',
    f'mkdir "{_CODE}"',
    f'tar -xzf "$HOME/{_archive(job)}" -C "{_CODE}"',
    "PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv",
    f'python3 -m uv venv --quiet --clear --python 3.11 "{_VENV}"',
    f'python3 -m uv pip install --quiet --python "{_VENV}/bin/python" \\',
    f'  "{_CODE}[{",".join(("run", "tpu", *job.extras))}]"',
  )
  return [
    Step(phase="copy", argv=copy),
    Step(phase="install", argv=_ssh(job, install)),
    Step(phase="mount", argv=_ssh(job, _mount(job))),
  ]


def _mount(job: Job) -> str:
  """Mounts the bucket or the export, unless it is mounted."""
  # What is mounted and no longer answers would be in the way of a new mount.
  broken = f"sudo umount --lazy {MOUNT} 2>/dev/null || true"
  ready = (f"mountpoint -q {MOUNT} && exit 0", "set -e", broken)
  if job.attach:  # where somebody else may have mounted something else
    source = shlex.quote(job.nfs or job.bucket)
    ready = (
      f"if mountpoint -q {MOUNT}; then",
      f'  test "$(findmnt -n -o SOURCE {MOUNT})" = {source} && exit 0',
      f"  echo {MOUNT} holds another file system: unmount it first >&2",
      "  exit 1",
      "fi",
      *ready[1:],
    )
  folder = f"sudo mkdir -p {MOUNT}"
  update = f"{_APT} update --quiet"
  install = f"{_APT} install --quiet --yes"
  if job.nfs:
    export = shlex.quote(job.nfs)
    mount = f"sudo mount -t nfs {export} {MOUNT}"
    # A new export belongs to root.
    own = f'test -w {MOUNT} || sudo chown "$(id -u)" {MOUNT}'
    return _lines(*ready, folder, update, f"{install} nfs-common", mount, own)
  host = "https://packages.cloud.google.com/apt"
  key = "/usr/share/keyrings/cloud.google.asc"
  release = "gcsfuse-$(lsb_release -c -s) main"
  return _lines(
    *ready,
    folder,
    f'sudo chown "$(id -u)" {MOUNT}',
    "if ! command -v gcsfuse >/dev/null; then",
    f"  curl -fsSL {host}/doc/apt-key.gpg | sudo tee {key} >/dev/null",
    f'  echo "deb [signed-by={key}] {host} {release}" |',
    "    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null",
    f"  {update}",
    f"  {install} gcsfuse",
    "fi",
    "gcsfuse \\",
    *(f"  --{option} \\" for option in GCSFUSE),
    f"  {job.bucket} {MOUNT}",
  )


def _lines(*commands: str) -> str:
  return "\n".join(commands)


def synthq_flags(job: Job) -> list[str]:
  """Returns the flags of `synthq STAGE` on every worker."""
  # `tpu_vm` refuses these stages on several hosts.
  cluster = () if job.stage in ONE_PROCESS else ("--distributed=tpu",)
  return [
    *cluster,
    "--quiet",
    *(f"--gin_file={path}" for path in job.gin_files),
    *(f"--gin.{binding}" for binding in job.bindings),
    f"--workdir={job.workdir}",
  ]


def _run(job: Job) -> Step:
  command = _lines(
    "set -e",
    "umask 077",
    f'cd "{_CODE}"',
    f'exec 9>"{_LOCK}"',
    "flock 9",
    # On the disk of a worker that lost its mount, synthq would begin a run of its
    # own, with another secret and an empty ledger. 255: mounted, and tried again.
    f"mountpoint -q {MOUNT} || exit 255",
    # So that `stop_step` finds it; the lock stays with the process.
    *((f'echo $$ >"{_pid(job)}"',) if job.attach else ()),
    f'{"exec " * bool(job.attach)}"{_VENV}/bin/synthq" {job.stage} \\',
    "  " + " \\\n  ".join(map(shlex.quote, synthq_flags(job))),
  )
  return Step(phase="run", argv=_ssh(job, command))


def _pid(job: Job) -> str:
  """The file of a worker that holds the number of the job's process."""
  return f"$HOME/{job.name}.pid"


def stop_step(job: Job) -> Step:
  """Returns the step that tells a job to save its state, on a slice that stays.

  It tells the process of this job alone, and only while that holds the lock.
  """
  command = _lines(
    f'pid="$(cat "{_pid(job)}")" || exit 0',
    f'fuser "{_LOCK}" 2>/dev/null | grep -qw "$pid" || exit 0',
    'kill -TERM "$pid"',
  )
  return Step(phase="stop", argv=_ssh(job, command))


def _state(job: Job) -> Step:
  state = "--format=value(state)"
  argv = _gcloud(job, "tpu-vm", "describe", job.node, state)
  return Step(phase="state", argv=argv)


def _results(job: Job) -> list[Step]:
  """Copies what the run made; private/ only if it was asked for."""
  here = str((job.results / job.name).absolute())
  if job.bucket:
    skip = () if job.with_private else ("--exclude=(^|.*/)private/.*",)
    sync = ("gcloud", "storage", "rsync", "--recursive", *skip)
    argv = (*sync, f"gs://{job.bucket}/{job.name}", here)
    return [Step(phase="results", argv=argv, private=job.with_private)]
  skip = "" if job.with_private else " --exclude=./private"
  remote = f"{job.name}.results.tar.gz"
  pack = _lines(
    "umask 077",
    f'rm -f "$HOME/{remote}"',  # whose mode would stay
    f'tar -czf "$HOME/{remote}"{skip} -C {job.workdir} .',
  )
  copy = _gcloud(
    job, "tpu-vm", "scp", f"{job.node}:{remote}", here, "--worker=0",
    *_inside(job),
  )  # fmt: skip
  archive = f"{here}/{remote}"
  # For root, too, what the umask takes away stays away.
  unpack = ("tar", "-xzf", archive, "--no-same-permissions", "-C", here)
  commands = [
    _ssh(job, pack, worker="0"), copy, unpack, ("rm", "-f", archive)
  ]  # fmt: skip
  if job.keep or job.attach:  # else it goes with the slice
    commands.append(_ssh(job, f'rm -f "$HOME/{remote}"', worker="0"))
  return [
    Step(phase="results", argv=argv, private=job.with_private)
    for argv in commands
  ]


def delete_step(job: Job) -> Step:
  """Returns the step that ends the costs."""
  kind, force = (
    ("queued-resources", ("--force",)) if job.queued else ("tpu-vm", ())
  )
  argv = _gcloud(job, kind, "delete", job.name, *force)
  return Step(phase="delete", argv=argv)
