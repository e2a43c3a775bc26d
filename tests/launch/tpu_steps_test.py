"""The commands of a job, as --dry_run prints them."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tarfile

import pytest

import tpu_steps
from synthq_jax.cli import flags as flags_lib

GOLDEN = pathlib.Path(__file__).with_name("tpu_vm_dry_run.txt")


def _job(**changes) -> tpu_steps.Job:
  settings = {
    "name": "demo",
    "accelerator": "v4-8",
    "zone": "us-central2-b",
    "project": "my-project",
    "gin_files": ("gin_configs/recipes/demo.gin",),
    "bucket": "my-bucket",
    "source": pathlib.Path("/checkout"),
    "results": pathlib.Path("/results"),
  }
  return tpu_steps.Job(**{**settings, **changes})


def _phases(job: tpu_steps.Job) -> list[str]:
  return [step.phase for step in tpu_steps.steps(job)]


def _text(job: tpu_steps.Job, phase: str) -> str:
  steps = [s for s in tpu_steps.steps(job) if s.phase == phase]
  return "\n".join(" ".join(step.argv) for step in steps)


def _remote(job: tpu_steps.Job, phase: str) -> str:
  """What the first step of a phase tells the workers."""
  step = next(s for s in tpu_steps.steps(job) if s.phase == phase)
  (flag,) = [w for w in step.argv if w.startswith("--command=")]
  return flag.removeprefix("--command=")


def _shell(command: str, home: pathlib.Path, path: str, *, check=True):
  """Runs what a worker, or who reads a dry run, would."""
  return subprocess.run(
    ["/bin/sh", "-c", command],
    env={"HOME": str(home), "PATH": path},
    capture_output=True,
    text=True,
    check=check,
  )


def test_a_dry_run_prints_what_it_always_printed(cloud):
  done = cloud.run(
    "--dry_run",
    "--accelerator=v4-32",
    "--gin_file=gin_configs/recipes/paper_t5_base.gin",
    "--gin.SOURCE=msmarco:/mnt/synthq/msmarco",
    "--gin.CHECKPOINT=/mnt/synthq/t5_base",
    "--gin.VOCABULARY=/mnt/synthq/t5.model",
    "--gin.EPSILONS=(3.0,)",
    "--queued",
    "--spot",
  )
  assert done.returncode == 0, done.stderr
  printed = done.stdout.replace(str(cloud.checkout), "/checkout")
  printed = printed.replace(str(cloud.folder / "runs"), "/results")
  # What is known of the step grows with the table in docs/data.
  known = re.compile("(?m)^# (estimated, |a private training ).*\n")
  assert known.sub("", printed) == GOLDEN.read_text()


def test_what_is_printed_is_what_runs(tmp_path):
  """A shell reads back the very words that the driver would run."""
  job = _job(bindings=("TRAINED='.*'", 'X="a b"', "Y=$HOME;`id`"))
  # Each command becomes an echo of its words.
  tool = tmp_path / "show"
  tool.write_text('#!/bin/sh\nprintf "%s\\0" "$0" "$@" "END"\n')
  tool.chmod(0o755)
  for name in ("gcloud", "git", "mkdir", "tar", "rm"):
    (tmp_path / name).symlink_to(tool)
  printed = _shell(tpu_steps.script(job), tmp_path, str(tmp_path)).stdout
  read = [words.split("\0")[:-1] for words in printed.split("END\0")[:-1]]
  read = [[pathlib.Path(words[0]).name, *words[1:]] for words in read]
  assert read == [list(step.argv) for step in tpu_steps.steps(job)]


def test_the_remote_command_keeps_every_binding_whole():
  bindings = ("TRAINED='.*'", "SOURCE=beir:/mnt/synthq/my data")
  command = _remote(_job(bindings=bindings), "run")
  words = shlex.split(command.replace("\\\n", " "))
  for binding in bindings:
    assert f"--gin.{binding}" in words
  assert "--distributed=tpu" in words
  assert "--workdir=/mnt/synthq/demo" in words


def test_synthq_understands_what_the_workers_are_told():
  command = _remote(_job(bindings=("EPSILON=3",)), "run")
  words = shlex.split(command.replace("\\\n", " "))
  first = next(i for i, word in enumerate(words) if word.endswith("bin/synthq"))
  flags = [w for w in words[first + 1 :] if not w.startswith("--gin.")]
  options = flags_lib.parser().parse_args(flags)
  assert options.distributed == "tpu"
  assert options.stage == "run"
  assert options.gin_file == ["gin_configs/recipes/demo.gin"]
  assert options.workdir == "/mnt/synthq/demo"


WISHES = {
  "spot": (True, "--spot"),
  "reserved": (True, "--reserved"),
  "internal_ips": (True, "--internal-ips"),
  "service_account": ("a@p.iam", "--service-account=a@p.iam"),
  "network": ("n", "--network=n"),
  "subnetwork": ("s", "--subnetwork=s"),
  "labels": ("a=b,c=d", "--labels=a=b,c=d"),
}


@pytest.mark.parametrize("queued", [False, True])
def test_what_is_wished_for_reaches_gcloud(queued):
  plain = _text(_job(queued=queued), "create").split()
  for field, (value, flag) in WISHES.items():
    wished = _text(_job(queued=queued, **{field: value}), "create").split()
    assert set(wished) - set(plain) == {flag}, field
    assert flag not in plain


def test_hosts_without_addresses_are_reached_inside_of_their_network():
  job = _job(internal_ips=True, bucket="", nfs="h:/e")
  reached = [s for s in tpu_steps.steps(job) if {"ssh", "scp"} & set(s.argv)]
  assert len(reached) == 6
  for step in reached:
    assert "--internal-ip" in step.argv, step.phase


def test_a_slice_of_any_shape_is_asked_for_by_its_topology():
  words = _text(_job(accelerator="v5p-4x4x12"), "create").split()
  assert {"--type=v5p", "--topology=4x4x12"} <= set(words)
  assert not [word for word in words if word.startswith("--accelerator-type")]


def test_apt_waits_for_whoever_holds_its_lock():
  for job in (_job(), _job(bucket="", nfs="h:/e")):
    lines = _remote(job, "mount").splitlines()
    calls = [line for line in lines if "apt-get" in line]
    assert calls
    for line in calls:
      assert "-o DPkg::Lock::Timeout=" in line


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_a_worker_without_its_mount_does_not_start_synthq(tmp_path):
  """Its own disk has no ledger, and the secret would be another."""
  _stubs(tmp_path, is_mounted=False)
  run = _remote(_job(), "run")
  done = _shell(run, tmp_path, _path(tmp_path), check=False)
  assert done.returncode == 255, "which the driver tries again"
  assert not (tmp_path / "log").exists()


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_a_mount_that_went_while_a_command_waited_is_noticed(tmp_path):
  _stubs(tmp_path, is_mounted=True)
  argv = ["/bin/sh", "-c", _remote(_job(), "run")]
  environment = {"HOME": str(tmp_path), "PATH": _path(tmp_path)}
  first = subprocess.Popen(argv, env=environment)
  while not (tmp_path / "log").exists():
    assert first.poll() is None
  second = subprocess.Popen(argv, env=environment)
  (tmp_path / "bin/mountpoint").write_text("#!/bin/sh\nexit 1\n")
  assert (first.wait(timeout=60), second.wait(timeout=60)) == (143, 255)
  assert (tmp_path / "log").read_text().split() == ["start", "end"]


def test_studies_start_without_a_cluster():
  command = _remote(_job(stage="study"), "run")
  words = shlex.split(command.replace("\\\n", " "))
  start = words.index("study")
  flags = [w for w in words[start:] if not w.startswith("--gin.")]
  assert (
    flags_lib.processes(flags_lib.parser().parse_args(flags)).mode == "none"
  )


def test_a_mount_that_no_longer_answers_makes_way(tmp_path):
  """And one that does is left alone."""
  mounted = ["umount", "mkdir", "mount", "chown"]  # a new export is root's
  for is_mounted, done in ((False, mounted), (True, [])):
    folder = tmp_path / str(is_mounted)
    folder.mkdir()
    _stubs(folder, is_mounted=is_mounted)
    sudo = folder / "bin/sudo"
    sudo.write_text('#!/bin/sh\necho "$1" >> "$HOME/log"\nexec true\n')
    sudo.chmod(0o755)
    mount = _remote(_job(bucket="", nfs="h:/e"), "mount")
    _shell(mount, folder, _path(folder))
    log = folder / "log"
    called = log.read_text().split() if log.exists() else []
    assert [word for word in called if word != "apt-get"] == done


def _path(folder: pathlib.Path) -> str:
  return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def _stubs(folder: pathlib.Path, *, is_mounted: bool) -> None:
  """Makes a worker's home: a synthq that writes a log, and a mountpoint."""
  (folder / "synthq_jax").mkdir()
  texts = {
    "synthq_venv/bin/synthq": 'echo start >> "$HOME/log"\nsleep 0.5\n'
    'echo end >> "$HOME/log"\nexit 143\n',
    "bin/mountpoint": f"exit {0 if is_mounted else 1}\n",
  }
  for name, text in texts.items():
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_on_a_worker_one_command_waits_for_the_other(tmp_path):
  """And its exit code is that of synthq."""
  _stubs(tmp_path, is_mounted=True)
  both = [
    subprocess.Popen(
      ["/bin/sh", "-c", _remote(_job(), "run")],
      env={"HOME": str(tmp_path), "PATH": _path(tmp_path)},
    )
    for _ in range(2)
  ]
  assert [process.wait(timeout=60) for process in both] == [143, 143]
  assert (tmp_path / "log").read_text().split() == ["start", "end"] * 2


def test_only_what_makes_the_slice_costs_money():
  for queued in (False, True):
    steps = tpu_steps.steps(_job(queued=queued))
    assert [s.phase for s in steps if s.costs] == ["create"]
  assert "# costs money" in tpu_steps.script(_job())


def test_without_a_bucket_results_come_from_the_slice_before_it_goes():
  job = _job(bucket="", nfs="10.0.0.2:/share")
  assert _phases(job)[-6:] == ["state", *["results"] * 4, "delete"]
  assert "mount -t nfs 10.0.0.2:/share /mnt/synthq" in _text(job, "mount")
  assert "gcsfuse" not in _text(job, "mount")


@pytest.mark.parametrize("share", [{}, {"bucket": "", "nfs": "h:/e"}])
def test_private_results_stay_where_they_are_unless_asked_for(share):
  plain = _text(_job(**share), "results")
  asked = _text(_job(**share, with_private=True), "results")
  assert "--exclude=" in plain and "private" in plain
  assert "private" not in asked


def test_the_pattern_that_keeps_private_files_back_matches_them():
  (flag,) = [
    word
    for word in _text(_job(), "results").split()
    if word.startswith("--exclude=")
  ]
  pattern = re.compile(flag.removeprefix("--exclude="))
  for private in ("private/ledger.jsonl", "private/a/b", "gs://b/d/private/x"):
    assert pattern.match(private), private
  for public in ("report/report.html", "private_but_not/x", "config.gin"):
    assert not pattern.match(public), public


@pytest.mark.parametrize("private", [False, True])
def test_the_archive_on_the_slice_is_for_its_user_alone(tmp_path, private):
  (tmp_path / "work").mkdir()
  archive = tmp_path / "demo.results.tar.gz"
  archive.touch(0o644)  # of an earlier try
  job = _job(bucket="", nfs="h:/e", with_private=private, keep=True)
  work = str(tmp_path / "work")
  command = _remote(job, "results").replace("/mnt/synthq/demo", work)
  _shell(command, tmp_path, "/bin:/usr/bin")
  assert archive.stat().st_mode & 0o777 == 0o600
  # A slice that is kept would keep it.
  (flag,) = [w for w in tpu_steps.steps(job)[-1].argv if "--command" in w]
  clean = flag.removeprefix("--command=")
  _shell(clean, tmp_path, "/bin:/usr/bin")
  assert not archive.exists()


def test_what_is_printed_makes_private_results_for_this_user_alone(tmp_path):
  """The shell that reads the printed commands sets the umask of the driver."""
  job = _job(with_private=True)
  tool = tmp_path / "gcloud"
  tool.write_text('#!/bin/sh\ncase "$*" in *rsync*) umask;; esac\n')
  tool.chmod(0o755)
  for name in ("git", "mkdir"):
    (tmp_path / name).symlink_to("/bin/true")
  script = "umask 022\n" + tpu_steps.script(job) + "umask"
  printed = _shell(script, tmp_path, str(tmp_path)).stdout
  assert printed.split() == ["0077", "0022"]


def test_tar_keeps_private_files_back(tmp_path):
  work = tmp_path / "work"
  for name in ("private/secret_seed", "report/report.html"):
    (work / name).parent.mkdir(parents=True)
    (work / name).write_text("x")
  job = _job(bucket="", nfs="h:/e")
  command = _remote(job, "results").replace("/mnt/synthq/demo", str(work))
  _shell(command, tmp_path, "/bin:/usr/bin")
  with tarfile.open(tmp_path / "demo.results.tar.gz") as archive:
    listed = " ".join(archive.getnames())
  assert "report.html" in listed
  assert "secret" not in listed


def test_remote_commands_are_shell():
  for job in (_job(), _job(bucket="", nfs="h:/e")):
    for step in tpu_steps.steps(job):
      for word in step.argv:
        if word.startswith("--command="):
          command = word.removeprefix("--command=")
          subprocess.run(["/bin/sh", "-n", "-c", command], check=True)


# On a slice that exists.


def test_on_a_slice_that_exists_nothing_is_made_and_nothing_deleted():
  for share in ({}, {"bucket": "", "nfs": "h:/e"}):
    job = _job(attach="ours", **share)
    phases = set(_phases(job))
    assert phases == {"check", "pack", "copy", "install", "mount", "run",
                      "state", "results"}  # fmt: skip
    script = tpu_steps.script(job)
    assert not re.search(r"(?m)^gcloud .* (create|delete) ", script)
    assert "costs money" not in script
    steps = [*tpu_steps.steps(job), tpu_steps.stop_step(job)]
    for step in steps:
      for word in step.argv:
        if word.startswith("--command="):
          command = word.removeprefix("--command=")
          subprocess.run(["/bin/sh", "-n", "-c", command], check=True)
      if "tpu-vm" in step.argv:
        assert any(w.startswith("ours") for w in step.argv), step


@pytest.mark.parametrize(
  ("source", "code"), [("my-bucket", 0), ("other-bucket", 1)]
)
def test_somebody_elses_mount_is_not_written_to(tmp_path, source, code):
  """private/ would lie in their bucket, under their access rules."""
  _stubs(tmp_path, is_mounted=True)
  found = tmp_path / "bin/findmnt"
  found.write_text(f"#!/bin/sh\necho {source}\n")
  found.chmod(0o755)
  mount = _remote(_job(attach="ours"), "mount")
  done = _shell(mount, tmp_path, _path(tmp_path), check=False)
  assert done.returncode == code
  assert ("holds another file system" in done.stderr) == bool(code)


@pytest.mark.skipif(
  not (shutil.which("flock") and shutil.which("fuser")),
  reason="flock or fuser is not installed",
)
@pytest.mark.parametrize("name", ["demo", "other"])
def test_a_job_is_told_to_stop_and_others_are_not(tmp_path, name):
  _stubs(tmp_path, is_mounted=True)
  synthq = tmp_path / "synthq_venv/bin/synthq"
  synthq.write_text(
    "#!/bin/sh\ntrap 'echo saved >> \"$HOME/log\"; exit 143' TERM\n"
    'echo start >> "$HOME/log"\n'
    "for i in 1 2 3 4 5 6 7 8; do sleep 0.25; done\n"
  )
  job = _job(attach="ours")
  running = subprocess.Popen(
    ["/bin/sh", "-c", _remote(job, "run")],
    env={"HOME": str(tmp_path), "PATH": _path(tmp_path)},
  )
  while not (tmp_path / "log").exists():
    assert running.poll() is None
  other = _job(attach="ours", name=name)
  (flag,) = [
    w for w in tpu_steps.stop_step(other).argv if w.startswith("--command=")
  ]
  _shell(flag.removeprefix("--command="), tmp_path, _path(tmp_path))
  is_own = name == "demo"
  assert running.wait(timeout=60) == (143 if is_own else 0)
  assert ("saved" in (tmp_path / "log").read_text()) == is_own
