"""How processes find each other: what goes together, and what is refused."""

import argparse

import pytest

from synthq_jax.cli import main
from synthq_jax.training import cluster

FLAGS = (
  "distributed",
  "coordinator_address",
  "num_processes",
  "process_id",
  "cpu_devices",
)
THREE = {
  "coordinator_address": "host:7777",
  "num_processes": 4,
  "process_id": 3,
}
VARIABLES = {
  "SYNTHQ_COORDINATOR_ADDRESS": "host:7777",
  "SYNTHQ_NUM_PROCESSES": "4",
  "SYNTHQ_PROCESS_ID": "3",
  "SYNTHQ_CPU_DEVICES": "2",
}
SLURM = {name: "1" for name in cluster._SLURM}


def read(environment=(), **flags):
  given = {**dict.fromkeys(FLAGS), **flags}
  return cluster.from_flags(argparse.Namespace(**given), dict(environment))


@pytest.mark.parametrize(
  ("mode", "flags", "environment", "arguments"),
  [
    ("auto", {}, {}, {}),
    ("tpu", {}, {}, {}),
    ("slurm", {}, SLURM, {"cluster_detection_method": "slurm"}),
    ("gpu", {}, {}, {}),
    ("gpu", THREE, {}, {**THREE, "cluster_detection_method": "deactivate"}),
    ("local", THREE, {}, {**THREE, "cluster_detection_method": "deactivate"}),
    (
      "local",
      {},
      VARIABLES,
      {**THREE, "cluster_detection_method": "deactivate"},
    ),
  ],
)
def test_jax_is_told_what_each_way_to_start_needs(
  mode, flags, environment, arguments
):
  assert read(environment, distributed=mode, **flags).arguments() == arguments


@pytest.mark.parametrize(
  ("variables", "gpus"),
  [
    ({}, ()),  # no GPUs: JAX's own choice
    ({"SLURM_GPUS_ON_NODE": "4"}, (0, 1, 2, 3)),  # one task has the node
    (
      {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
      (1,),
    ),
    (
      {"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x2),4"},
      (4, 5, 6, 7),
    ),
    (
      {
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),4",
        "SLURM_NODEID": "2",
      },
      (2, 3),
    ),
    (  # --gpus-per-task=2: it sees its own alone
      {
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "CUDA_VISIBLE_DEVICES": "2,3",
      },
      (0, 1),
    ),
  ],
)
def test_a_task_of_slurm_has_its_share_of_the_nodes_gpus(variables, gpus):
  """JAX's own choice is one GPU a task: the others would be paid for and idle."""
  local = "1" if "SLURM_STEP_TASKS_PER_NODE" in variables else "0"
  environment = {**SLURM, "SLURM_LOCALID": local, **variables}
  found = read(environment, distributed="slurm")
  assert found.gpus == gpus
  told = found.arguments().get("local_device_ids", [])
  assert told == list(gpus)


def test_gpus_that_tasks_cannot_share_are_refused():
  odd = {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "3"}
  with pytest.raises(ValueError, match="3 tasks of a node can share, got 4"):
    read({**SLURM, **odd}, distributed="slurm")


def test_flags_win_over_the_environment_which_counts_for_local_alone():
  environment = {**VARIABLES, "SYNTHQ_DISTRIBUTED": "local"}
  assert read(environment, process_id=0).process_id == 0
  assert read(environment).cpu_devices == 2
  for mode in ("none", "tpu", "gpu", "auto"):
    found = read(environment, distributed=mode)
    assert found == cluster.Settings(mode=mode)
  assert read({}) == cluster.Settings(mode="none")
  assert read({}, cpu_devices=3) == cluster.Settings(cpu_devices=3)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ({"distributed": "tpus"}, "expected --distributed=none.auto.tpu"),
    (THREE, "--distributed=none takes no --coordinator_address"),
    ({"distributed": "tpu", "process_id": 0}, "tpu takes no --process_id"),
    ({"distributed": "auto", **THREE}, "auto takes no --coordinator_address"),
    ({"distributed": "slurm"}, "needs SLURM_JOB_ID .* run it through srun"),
    ({"distributed": "local"}, "needs --coord.* start it with launch/proc"),
    ({"distributed": "gpu", "num_processes": 2}, "gpu needs --coordinator_add"),
    (
      {"distributed": "gpu", **THREE, "process_id": 4},
      "from 0 to --num_processes - 1, got --process_id=4",
    ),
    (
      {"distributed": "local", **THREE, "coordinator_address": "host"},
      "expected --coordinator_address=HOST:PORT, got 'host'",
    ),
    ({"cpu_devices": 0}, "--cpu_devices of 1 or more, got 0"),
  ],
)
def test_what_does_not_go_together_is_refused_before_jax_starts(flags, words):
  with pytest.raises(ValueError, match=words) as refused:
    read(**flags)
  assert "\n" not in str(refused.value)


def test_a_variable_that_is_no_number_is_named():
  environment = {**VARIABLES, "SYNTHQ_NUM_PROCESSES": "two"}
  with pytest.raises(ValueError, match="integer in SYNTHQ_NUM_PROCESSES, got"):
    read(environment, distributed="local")


@pytest.mark.parametrize("mode", ["tpu", "gpu"])
def test_cpus_are_refused_where_accelerators_were_asked_for(mode):
  cluster.Settings(mode=mode).check_backend(mode)
  cluster.Settings(mode="slurm").check_backend("cpu")
  with pytest.raises(ValueError, match=f"expected {mode.upper()}s, got .*cpu"):
    cluster.Settings(mode=mode).check_backend("cpu")


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ("run --distributed=pod", "invalid choice: 'pod'"),
    ("run --distributed=local --process_id=x", "invalid int value: 'x'"),
    ("run --process_id=1", "takes no --process_id"),
    ("study --distributed=tpu", "synthq study works in one process"),
  ],
)
def test_the_command_line_refuses_in_one_line(tmp_path, capsys, flags, words):
  code = main.main([*flags.split(), f"--workdir={tmp_path / 'run'}"])
  said = capsys.readouterr().err
  assert code == 2 and words in said and said.count("\n") == 1
  assert not (tmp_path / "run").exists()
