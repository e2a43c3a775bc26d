"""Experiments with XManager: what is launched, and a real one."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import small_data

import xm

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = "--gin_file=gin_configs/recipes/demo_tiny.gin"


@pytest.fixture(name="xmanager")
def _xmanager():
  return pytest.importorskip(
    "xmanager",
    reason="XManager is not installed; pip install 'synthq_jax[test,launch]'",
  )


@pytest.fixture(name="mock")
def _mock(xmanager, monkeypatch):
  """An experiment that notes what is added to it."""
  del xmanager
  from xmanager import xm_local, xm_mock

  experiment = xm_mock.MockExperiment()
  monkeypatch.setattr(xm_local, "create_experiment", lambda title: experiment)
  return experiment


def _launched(experiment) -> list[list[str]]:
  """The arguments of every job, as a command gets them."""
  return [job.args.to_list(str) for job in experiment.launched_jobs]


def launched(tmp_path, *flags):
  """Runs an experiment of the tiny recipe on this machine, to its end."""
  return subprocess.run(
    [sys.executable, str(ROOT / "launch/xm.py"), TINY, *flags]
    + [f"--workdir={tmp_path / 'runs'}"],
    env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )


def test_a_local_experiment_really_fine_tunes(xmanager, tmp_path):
  del xmanager
  done = launched(
    tmp_path,
    "--executor=local",
    "--stage=finetune_dp",
    f"--gin.SOURCE={small_data.write_pairs(tmp_path / 'pairs.jsonl', 64)}",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--sweep=EPSILON=3",
  )
  assert done.returncode == 0, done.stdout + done.stderr
  path = tmp_path / "runs/epsilon-3/finetune_dp/eps3/result.json"
  statement = json.loads(path.read_text())["result"]["statement"]
  assert statement["epsilon"] == pytest.approx(3, abs=0.01)


def test_a_unit_that_fails_is_named_and_the_others_run(xmanager, tmp_path):
  del xmanager
  done = launched(
    tmp_path,
    "--stage=prepare_data",
    f"--gin.SOURCE=jsonl:{tmp_path}/missing.jsonl",
    "--sweep=EPSILON=3,8",
  )
  assert done.returncode == 1
  last = done.stderr.splitlines()[-1]
  assert last == "xm: 2 of 2 failed: epsilon-3, epsilon-8; see above"
  assert "missing.jsonl" in done.stdout + done.stderr
  assert "Traceback" not in done.stderr


def test_a_sweep_adds_one_job_for_each_point(mock, tmp_path):
  flags = [
    TINY, "--stage=finetune_dp", "--sweep=EPSILON=3,8",
    "--sweep=CLIP_NORM=0.1,1", f"--workdir={tmp_path}", "--gin.SEED=5",
  ]  # fmt: skip
  assert xm.main(flags) == 0
  assert mock.work_unit_count == 4
  assert [job.name for job in mock.launched_jobs] == [
    "epsilon-3-clip-norm-0p1",
    "epsilon-3-clip-norm-1",
    "epsilon-8-clip-norm-0p1",
    "epsilon-8-clip-norm-1",
  ]
  assert _launched(mock)[2] == [
    "-m",
    "synthq_jax.cli.main",
    "finetune_dp",
    "--quiet",
    TINY,
    "--gin.SEED=5",
    "--gin.EPSILON=8",
    "--gin.CLIP_NORM=0.1",
    f"--gin.prepare_data.Config.shared_in='{tmp_path}/private/prepared'",
    f"--workdir={tmp_path}/epsilon-8-clip-norm-0p1",
  ]
  from xmanager import xm_local

  assert all(isinstance(j.executor, xm_local.Local) for j in mock.launched_jobs)


def test_the_tpu_route_really_runs_its_jobs(xmanager, cloud):
  """XManager runs tpu_vm.py for each point, and that the fake gcloud."""
  del xmanager
  done = subprocess.run(
    cloud.command(
      "--executor=tpu_vm", "--sweep=EPSILON=3,8", "--confirm_cost", script="xm"
    ),
    env={**cloud.environment, "HOME": str(cloud.folder)},
    cwd=cloud.folder,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  made = [c["argv"][4] for c in cloud.calls if c["kind"] == "create"]
  assert made == ["demo-tiny-epsilon-3", "demo-tiny-epsilon-8"]
  assert cloud.kinds.count("run") == 2
  assert not cloud.costs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_experiment_told_to_stop_deletes_its_slice(xmanager, cloud, number):
  del xmanager
  cloud.answers(run=["hang"])
  experiment = cloud.start(
    "--executor=tpu_vm", script="xm", HOME=str(cloud.folder)
  )
  _wait(lambda: "run" in cloud.kinds)
  os.killpg(experiment.pid, number)
  experiment.communicate(timeout=60)
  assert experiment.returncode == 128 + number
  _wait(lambda: not cloud.costs)


def _wait(is_so) -> None:
  for _ in range(600):
    if is_so():
      return
    time.sleep(0.05)
  raise AssertionError("waited for 30 seconds")


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--executor=tpu_vm"], "give --confirm_cost"),
    (["--executor=tpu_vm", "--bucket="], "expected --bucket=NAME"),
    (["--executor=slurm"], "invalid choice"),
    (["--max_parallel=0"], "expected 1 or more"),
    (["--gin.SECRET_SEED=3"], "can undo the noise"),
    (["--sweep=EPSILOM=3"], "EPSILOM"),
    (["--executor=local"], "--accelerator is of slices"),
    (["--workdir=gs://b/runs"], "`synthq run --workdir=gs://...` writes into"),
    (["--executor=tpu_vm", "--workdir=x"], "--workdir is of --executor=local"),
  ],
)
def test_what_is_wrong_is_said_in_one_line(
  cloud, flags, words, monkeypatch, capsys
):
  monkeypatch.chdir(cloud.folder)
  for name in ("PATH", "FAKE_GCLOUD"):
    monkeypatch.setenv(name, cloud.environment[name])
  assert xm.main([*cloud.flags, *flags]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line
  assert cloud.kinds == []


def test_without_xmanager_the_extra_is_named(monkeypatch, capsys, tmp_path):
  for name in ("xmanager", "absl"):
    monkeypatch.setitem(sys.modules, name, None)
  assert xm.main([TINY, f"--workdir={tmp_path}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "pip install '.[launch]' in the checkout" in line


def test_a_dry_run_here_prints_commands_that_a_shell_understands(tmp_path):
  done = subprocess.run(
    [
      sys.executable, str(ROOT / "launch/xm.py"), TINY, "--dry_run",
      "--gin.TRAINED='.*'", f"--workdir={tmp_path}",
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )  # fmt: skip
  command = done.stdout.splitlines()[1]
  assert "--gin.TRAINED='.*'" in shlex.split(command)
