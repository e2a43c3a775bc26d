"""The driver, end to end, against a gcloud that only notes what it is told."""

import os
import signal
import tarfile
import time

import pytest

import tpu_driver
import tpu_vm

CHECKS = ["account", "bucket", "list"]
SET_UP = ["create", "copy", "install", "mount"]


def _wait_for(cloud, kind: str) -> None:
  for _ in range(400):
    if kind in cloud.kinds:
      return
    time.sleep(0.05)
  raise AssertionError(f"{kind} was not called, but {cloud.kinds}")


DOWN = {"fail": "ERROR: cannot reach tpu.googleapis.com"}
GONE = {"fail": "ERROR: NOT_FOUND: node"}
FULL = {"fail": "ERROR: no more capacity in the zone"}
TAKEN = {"fail": "ERROR: ALREADY_EXISTS: the resource already exists"}
LOST = {"run": [255, 0], "state": ["PREEMPTED"]}

# What gcloud answers, flags, the exit code, what the driver calls after the
# checks (or how often), and what it says.
ENDS = {
  "143 goes on": (
    {"run": [143, 143, 0]}, "", 0,
    [*SET_UP, "run", *["state", "mount", "run"] * 2, "delete", "results"],
    "restart 2",
  ),
  "a slice that was taken away is made anew": (
    LOST, "--spot", 0,
    [*SET_UP, "run", "state", "delete", *SET_UP, "run", "delete", "results"],
    "",
  ),
  "a slice that is not found is made anew": (
    {"run": [255, 0], "state": [GONE]}, "", 0, {"state": 1, "create": 2}, "",
  ),
  "an install that a preemption broke is repeated": (
    {"install": [1, 0], "state": ["PREEMPTED"]}, "--spot", 0, {"create": 2},
    "",
  ),
  "restarts are limited": (
    {"run": [143]}, "--max_restarts=3", 1, {"run": 4}, "after 3 restarts",
  ),
  "a worker without its mount gets it back before synthq runs": (
    {"run": [255, 134, 0], "mount": [0, 255, 1, 0]}, "", 0,
    [
      *SET_UP, "run", *["state", "mount"] * 3, "run", "state", "mount", "run",
      "delete", "results",
    ],
    "",
  ),
  "a connection lost in the set-up repeats the set-up": (
    {"install": [255, 0]}, "", 0,
    [
      "create", "copy", "install", "state", "copy", "install", "mount", "run",
      "delete", "results",
    ],
    "",
  ),
  "a set-up that fails in passing is tried again": (
    {"copy": [1, 0], "install": [100, 1, 0], "mount": [1, 0]}, "", 0,
    {"create": 1, "copy": 4, "install": 3, "mount": 2, "run": 1},
    "the slice is set up again",
  ),
  "a set-up that fails and fails ends the job": (
    {"install": [100]}, "", 1, {"install": 4, "create": 1},
    "install failed with exit code 100, tried 4 times",
  ),
  "a launcher without a network waits and keeps the slice": (
    {"run": [255, 0], "state": [DOWN, DOWN, DOWN, "READY"]}, "", 0,
    [*SET_UP, "run", *["state"] * 4, "mount", "run", "delete", "results"],
    "no answer (ERROR: cannot reach tpu",
  ),
  "a queue that does not answer is asked again": (
    {"queue": ["PROVISIONING", DOWN, DOWN, "ACTIVE"]}, "--queued", 0,
    {"create": 1}, "",
  ),
  "a request that fails in the queue is deleted": (
    {"queue": ["WAITING_FOR_RESOURCES", "FAILED"]}, "--queued", 1,
    {"delete": 1}, "",
  ),
  "after a preemption a zone without capacity is asked again": (
    LOST | {"create": [0, FULL, FULL, 0]}, "--spot", 0, {"create": 4},
    "restart 3",
  ),
  "creates after a preemption count as restarts": (
    LOST | {"create": [0, 1]}, "--spot --max_restarts=3", 1, {"create": 4},
    "create failed with exit code 1 after 3",
  ),
  # It came after the first delete had found nothing.
  "an orphan of a create that failed is deleted": (
    LOST | {"create": [0, 1, TAKEN, 0], "delete": [0, GONE, 0]}, "--spot", 0,
    {"delete": 4}, "",
  ),
  "several hosts that lost one of them start again": (
    {"run": [134, 1, 0]}, "", 0, {"run": 3, "create": 1}, "",
  ),
  # 143, and 1 with three restarts.
  "a bug is tried a few times on several hosts": (
    {"run": [143, 1]}, "", 1, {"run": 5}, "run failed with exit code 1",
  ),
  "a passing failure of the system is tried again": (
    {"run": [75, 75, 0]}, "--accelerator=v4-8", 0, {"run": 3}, "",
  ),
  "a failure that does not pass ends the job": (
    {"run": [75]}, "--max_restarts=1", 1, {"run": 2},
    "exit code 75 after 1 restarts",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_job_ends_with_its_slice_deleted(cloud, name):
  answers, flags, code, calls, said = ENDS[name]
  cloud.answers(**answers)
  done = cloud.run("--confirm_cost", *flags.split())
  assert done.returncode == code, done.stderr
  assert said in done.stderr
  if isinstance(calls, list):
    assert cloud.kinds == [*CHECKS, *calls]
  else:
    assert {kind: cloud.kinds.count(kind) for kind in calls} == calls
  assert not cloud.costs


def test_somebody_who_took_the_name_after_a_preemption_keeps_it(cloud):
  cloud.answers(**LOST | {"create": [0, TAKEN]})
  assert cloud.run("--confirm_cost", "--spot").returncode == 2
  assert cloud.kinds[-2:] == ["delete", "create"]


def test_what_is_committed_is_packed(cloud):
  done = cloud.run("--confirm_cost")
  assert done.returncode == 0, done.stderr
  archive = cloud.folder / "runs/demo-tiny/demo-tiny.tar.gz"
  with tarfile.open(archive) as packed:
    listed = packed.getnames()
  assert "pyproject.toml" in listed
  assert "gin_configs/recipes/demo_tiny.gin" in listed
  (copy,) = [call["argv"] for call in cloud.calls if call["kind"] == "copy"]
  assert str(archive) in copy


def test_a_lost_connection_sends_the_same_command_again(cloud):
  cloud.answers(run=[255, 0])
  assert cloud.run("--confirm_cost").returncode == 0
  assert cloud.kinds.count("create") == 1
  (first, second) = [c["argv"] for c in cloud.calls if c["kind"] == "run"]
  assert first == second
  assert 'exec 9>"$HOME/synthq.lock"\nflock 9\n' in " ".join(first)


def test_a_mistake_of_the_user_is_not_tried_again(cloud):
  for code in (2, 3):
    cloud.answers(run=[code])
    (cloud.folder / "calls.jsonl").write_text("")
    done = cloud.run("--confirm_cost")
    assert done.returncode == code
    assert cloud.kinds.count("run") == 1
    assert cloud.kinds[-1] == "delete"
    assert not cloud.costs


def test_any_failure_deletes_the_slice(cloud):
  for kind in ("create", "copy", "install", "mount", "run"):
    cloud.answers(**{kind: [1]})
    (cloud.folder / "calls.jsonl").write_text("")
    done = cloud.run("--confirm_cost", "--accelerator=v4-8")
    assert done.returncode == 1
    assert f"{kind} failed with exit code 1" in done.stderr.splitlines()[-1]
    assert cloud.kinds[-1] == "delete"
    assert not cloud.costs


def test_a_network_that_stays_away_ends_the_job_with_a_delete(
  cloud, monkeypatch, capsys
):
  _waits(cloud, monkeypatch)
  monkeypatch.setattr(tpu_driver, "_QUESTIONS", 3)
  cloud.answers(run=[255], state=[{"fail": "the network is down"}])
  assert tpu_vm.main([*cloud.flags, "--confirm_cost"]) == 1
  assert cloud.kinds[-5:] == ["run", *["state"] * 3, "delete"]
  last = capsys.readouterr().err.splitlines()[-1]
  assert last == "tpu_vm: no answer to 3 questions (the network is down)"
  assert not cloud.costs


def test_a_slice_that_somebody_else_made_is_not_deleted(cloud):
  (cloud.folder / "vm").touch()
  for keep in ([], ["--keep"]):
    said = "ERROR: ALREADY_EXISTS: the resource already exists"
    cloud.answers(create=[{"fail": said}])
    (cloud.folder / "calls.jsonl").write_text("")
    done = cloud.run("--confirm_cost", *keep)
    assert done.returncode == 2
    assert cloud.kinds == [*CHECKS, "create"]
    assert cloud.costs, "theirs"
    last = done.stderr.splitlines()[-1]
    assert "was not made here" in last
    assert "costs money until" not in done.stderr


def test_a_restart_waits_longer_after_each_create_that_failed(
  cloud, monkeypatch
):
  waits = _waits(cloud, monkeypatch)
  cloud.answers(run=[255, 0], state=["PREEMPTED"], create=[0, 1, 1, 1, 0])
  assert tpu_vm.main([*cloud.flags, "--poll_seconds=1", "--confirm_cost"]) == 0
  assert waits == [1, 1, 2, 4]


def test_a_delete_waits_longer_after_each_try(cloud, monkeypatch):
  waits = _waits(cloud, monkeypatch)
  cloud.answers(delete=[{"fail": "the network is down"}])
  assert tpu_vm.main([*cloud.flags, "--poll_seconds=1", "--confirm_cost"]) == 1
  assert waits == [1, 2, 4, 8]


def _waits(cloud, monkeypatch) -> list[float]:
  """Where the seconds go that the driver would sleep, here in this process."""
  waits: list[float] = []
  monkeypatch.setattr(tpu_driver.time, "sleep", waits.append)
  for name in ("PATH", "FAKE_GCLOUD"):
    monkeypatch.setenv(name, cloud.environment[name])
  return waits


@pytest.mark.parametrize("share", [[], ["--bucket=", "--nfs=10.0.0.2:/share"]])
def test_private_results_are_for_this_user_alone(cloud, share):
  """The stand-in writes what it is told to copy with the umask it is given."""
  done = cloud.run("--confirm_cost", "--with_private", *share)
  folder = cloud.folder / "runs/demo-tiny"
  assert folder.stat().st_mode & 0o777 == 0o700
  private = folder / "private/secret_seed"
  assert private.stat().st_mode & 0o077 == 0, done.stderr
  assert done.returncode == 0, done.stderr
  assert not list(folder.glob("*.results.tar.gz"))


def test_ctrl_c_deletes_the_slice_and_a_second_one_does_not_stop_that(cloud):
  cloud.answers(run=["hang"], delete=["slow"])
  launcher = cloud.start()
  _wait_for(cloud, "run")
  os.killpg(launcher.pid, signal.SIGINT)
  _wait_for(cloud, "delete")
  os.killpg(launcher.pid, signal.SIGINT)
  errors = launcher.communicate(timeout=60)[1]
  assert launcher.returncode == 130, errors
  assert cloud.kinds.count("delete") == 1, "it was not even disturbed"
  assert not cloud.costs
  assert "the same command goes on" in errors.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_told_to_stop_deletes_the_slice(cloud, number):
  cloud.answers(run=["hang"])
  launcher = cloud.start()
  _wait_for(cloud, "run")
  launcher.send_signal(number)
  errors = launcher.communicate(timeout=60)[1]
  assert launcher.returncode == 143, errors
  assert cloud.kinds[-1] == "delete"
  assert not cloud.costs


def test_ctrl_c_while_a_lost_slice_is_deleted_makes_no_other(cloud):
  cloud.answers(run=[255], state=["PREEMPTED"], delete=["slow"])
  launcher = cloud.start("--spot")
  _wait_for(cloud, "delete")
  os.killpg(launcher.pid, signal.SIGINT)
  errors = launcher.communicate(timeout=60)[1]
  assert launcher.returncode == 130, errors
  assert cloud.kinds.count("create") == 1
  assert not cloud.costs


def test_a_slice_that_cannot_be_deleted_is_named_loudly(cloud):
  cloud.answers(delete=[{"fail": "ERROR: the network is down"}])
  done = cloud.run("--confirm_cost")
  assert done.returncode == 1
  assert cloud.kinds.count("delete") == 5
  last = done.stderr.splitlines()[-1]
  assert "NOT DELETED, it still costs money" in last
  assert "gcloud compute tpus tpu-vm delete demo-tiny" in last


def test_a_slice_that_is_kept_is_not_deleted(cloud):
  done = cloud.run("--confirm_cost", "--keep")
  assert done.returncode == 0
  assert "delete" not in cloud.kinds
  assert cloud.costs
  assert "costs money until: gcloud" in done.stderr


def test_a_queued_slice_is_waited_for_and_deleted_with_its_request(cloud):
  cloud.answers(queue=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
  done = cloud.run("--confirm_cost", "--queued")
  assert done.returncode == 0, done.stderr
  assert cloud.kinds.count("queue") == 3
  (delete,) = [c["argv"] for c in cloud.calls if c["kind"] == "delete"]
  assert "queued-resources" in delete
  assert "--force" in delete


def test_a_sweep_makes_and_deletes_one_slice_after_the_other(cloud):
  done = cloud.run("--confirm_cost", "--sweep=EPSILON=3,8")
  assert done.returncode == 0, done.stderr
  both = [k for k in cloud.kinds if k in ("create", "delete")]
  assert both == ["create", "delete"] * 2
  assert "2 private trainings" in done.stderr
  made = [c["argv"][4] for c in cloud.calls if c["kind"] == "create"]
  assert made == ["demo-tiny-epsilon-3", "demo-tiny-epsilon-8"]


# A slice that exists: of a reservation, or of the team.

ATTACHED = ["account", "bucket", "slice", "copy", "install", "mount", "run"]


def test_a_slice_that_exists_is_used_and_left(cloud):
  done = cloud.run("--attach=ours")
  assert done.returncode == 0, done.stderr
  assert cloud.kinds == [*ATTACHED, "results"]
  on_slice = [c["argv"] for c in cloud.calls if c["kind"] in ATTACHED[3:]]
  assert all("ours" in argv or "ours:demo-tiny.tar.gz" in argv
             for argv in on_slice)  # fmt: skip
  (run,) = [c["argv"] for c in cloud.calls if c["kind"] == "run"]
  assert "--workdir=/mnt/synthq/demo-tiny" in " ".join(run)
  assert "--distributed=tpu" in " ".join(run)


@pytest.mark.parametrize(
  ("answer", "words"),
  [
    (GONE, "--attach=ours is no slice in us-central2-b"),
    ("CREATING\tv4-16", "--attach=ours is CREATING: wait until READY"),
    ("READY\tv4-32", "is v4-32, got --accelerator=v4-16"),
    ("READY\tv5p-16", "is v5p-16, got --accelerator=v4-16"),
  ],
)
def test_a_slice_that_is_not_what_was_said_is_refused(cloud, answer, words):
  cloud.answers(slice=[answer])
  done = cloud.run("--attach=ours")
  assert done.returncode == 2
  assert words in done.stderr.splitlines()[-1]
  assert cloud.kinds == ATTACHED[:3]


def test_a_slice_that_exists_is_not_made_anew_when_it_is_taken_away(cloud):
  cloud.answers(run=[255], state=["PREEMPTED"])
  done = cloud.run("--attach=ours")
  assert done.returncode == 1
  assert "not this launcher's to make anew" in done.stderr.splitlines()[-1]
  assert {"create", "delete"}.isdisjoint(cloud.kinds)


def test_a_job_on_a_slice_that_exists_goes_on_after_it_saved(cloud):
  cloud.answers(run=[143, 0])
  done = cloud.run("--attach=ours")
  assert done.returncode == 0, done.stderr
  assert cloud.kinds == [*ATTACHED, "state", "mount", "run", "results"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_job_and_leaves_the_slice(cloud, number):
  cloud.answers(run=["hang"])
  launcher = cloud.start("--attach=ours")
  _wait_for(cloud, "run")
  os.killpg(launcher.pid, number)
  launcher.communicate(timeout=60)
  assert launcher.returncode == 128 + number
  assert cloud.kinds == [*ATTACHED, "stop"]


def test_units_of_a_sweep_follow_each_other_on_one_slice(cloud):
  done = cloud.run("--attach=ours", "--sweep=EPSILON=3,8")
  assert done.returncode == 0, done.stderr
  runs = [" ".join(c["argv"]) for c in cloud.calls if c["kind"] == "run"]
  assert len(runs) == 2
  assert all("/mnt/synthq/private/prepared" in one for one in runs)
  assert {"create", "delete"}.isdisjoint(cloud.kinds)
