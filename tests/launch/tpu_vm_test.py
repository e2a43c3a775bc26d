"""What the launcher of TPU VMs refuses, before anything is paid for."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest

import tpu_vm
from synthq_jax import stages


@pytest.fixture(autouse=True)
def _signals():
  """The launcher takes two of them, and these tests call it without a process."""
  before = {
    one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)
  }
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def _refused(cloud, *flags: str) -> str:
  """The one line of a refusal; nothing may have been created."""
  out, error = io.StringIO(), io.StringIO()
  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(error),
  ):
    patch.chdir(cloud.folder)
    for name, value in cloud.environment.items():
      patch.setenv(name, value)
    try:
      code = tpu_vm.main([*cloud.flags, *flags])
    except SystemExit as ended:  # of argparse
      code = ended.code
  assert code == 2, error.getvalue()
  assert out.getvalue() == ""
  assert "create" not in cloud.kinds
  (line,) = error.getvalue().splitlines()
  return line


# Found out without any call.
@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--accelerator=v5e-16"], "did you mean v5litepod-16?"),
    (["--accelerator=v4-33"], "did you mean v4-32?"),
    (["--accelerator=tpu"], "got 'tpu'"),
    (["--gin.SOURCE=beir:s3://b/x"], "a slice has no s3fs"),
    (["--extras=gcs;rm"], "expected --extras=gcs,parquet"),
    (["--dry_run", "--gke_image=i", "--reserved"], "--reserved is of gcloud"),
    (["--dry_run", "--gke_image=i", "--with_private"], "--with_private is of"),
    (["--accelerator=v4-4x4x6"], "multiples of 4, in rising order"),
    (["--accelerator=v4-12x4x4"], "multiples of 4, in rising order"),
    (["--accelerator=v4-0x4x4"], "multiples of 4, in rising order"),
    (["--accelerator=v5p-16x16x28"], "at most 6144 chips, got 7168"),
    (["--accelerator=v6e-4x4x4"], "only v4, v5p come in shapes"),
    (["--spot", "--reserved"], "exclude each other"),
    (["--labels=Team=a"], "got 'Team=a'"),
    (["--gke_image=i"], "give --dry_run"),
    (["--gke_image=i", "--dry_run", "--accelerator=v3-8"], "TPU v4 and later"),
    (["--zone="], "expected --zone"),
    (["--project="], "expected --project"),
    (["--bucket="], "expected --bucket=NAME or --nfs=HOST:/EXPORT"),
    (["--nfs=10.0.0.2:/share"], "got both"),
    (["--bucket=My Bucket"], "got 'My Bucket'"),
    (["--gin_file=recipes/demo_tinny.gin"], "demo_tinny.gin"),
    (["--gin.EPSILOM=3"], "did you mean EPSILON?"),
    (["--gin.EPSILON"], "expected --gin.NAME=value"),
    (["--sweep=EPSILOM=3,8"], "changes EPSILOM"),
    (["--sweep=paper_grid"], "papers_grid, papers_table"),
    (["--sweep=EPSILON=3,8", "--gin.EPSILON=1"], "keep one"),
    (["--sweep=EPSILON=3,8", "--point=epsilon-9"], "epsilon-"),
    (["--name=My_Job"], "got 'My_Job'"),
    (["--attach=My_Slice"], "expected --attach=SLICE, got 'My_Slice'"),
    (["--attach=ours", "--spot"], "--spot is of a new slice"),
    (["--attach=ours", "--queued"], "--queued is of a new slice"),
    (["--attach=ours", "--keep"], "--keep is of a new slice"),
    (["--attach=o", "--dry_run", "--gke_image=i"], "--attach is of gcloud"),
    (["--gin.SECRET_SEED=7"], "can undo the noise"),
    (["--sweep=SECRET_SEED=7,8"], "can undo the noise"),
    (["--gin.plan.RunConfig.secret_seed=7"], "can undo the noise"),
    (["--gin.BATCH_SIZE=4"], "less than the 8 parts"),
    (["--stage=retrain"], "invalid choice"),
    (["--stage=study"], "got v4-16 with 2 hosts"),
    (["--stage=study"], "--stage=study works in one process"),
    (["--max_restarts=-1"], "expected 0 or more"),
    (["--sapling"], "unrecognized arguments"),
  ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_called(
  cloud, flags, words
):
  line = _refused(cloud, "--confirm_cost", *flags)
  assert words in line
  assert cloud.kinds == []


def test_nothing_is_spent_without_consent(cloud):
  line = _refused(cloud, "--spot")
  assert "8 chips (v4-16, 2 hosts, spot) in us-central2-b" in line
  assert "paid for by my-project" in line
  assert "--confirm_cost" in line
  assert cloud.kinds == []


def test_a_sweep_says_how_often_it_would_spend(cloud):
  assert ", 4 times," in _refused(
    cloud, "--sweep=EPSILON=3,8", "--sweep=CLIP_NORM=0.1,1"
  )


def test_private_state_in_a_bucket_needs_consent(cloud, monkeypatch):
  monkeypatch.setattr(
    type(cloud),
    "flags",
    [flag for flag in cloud.flags if flag != "--private_in_bucket"],
  )
  line = _refused(cloud, "--confirm_cost")
  assert "would lie in gs://my-bucket" in line
  assert "--private_in_bucket" in line
  assert cloud.kinds == []


@pytest.mark.parametrize(
  ("answers", "words"),
  [
    ({"account": [""]}, "gcloud auth login"),
    ({"bucket": [{"fail": "ERROR: 404"}]}, "gs://my-bucket cannot be read"),
    ({"bucket": ["False"]}, "no hierarchical namespace"),
    ({"list": [{"fail": "PERMISSION_DENIED"}]}, "PERMISSION_DENIED"),
    ({"list": ["other\ndemo-tiny"]}, "demo-tiny exists in us-central2-b"),
  ],
)
def test_what_gcloud_says_no_to_is_refused_before_a_slice_is_made(
  cloud, answers, words
):
  cloud.answers(**answers)
  assert words in _refused(cloud, "--confirm_cost")
  assert "delete" not in cloud.kinds, "it deletes only what it made"


def test_gcloud_has_to_be_there(cloud, monkeypatch):
  (cloud.folder / "bin/gcloud").unlink()
  git = cloud.folder / "bin/git"
  git.symlink_to("/usr/bin/git")
  monkeypatch.setenv("PATH", str(cloud.folder / "bin"))
  environment = {**os.environ, "FAKE_GCLOUD": str(cloud.folder)}
  monkeypatch.setattr(type(cloud), "environment", environment)
  assert "expected gcloud on the PATH" in _refused(cloud, "--confirm_cost")


def test_uncommitted_changes_would_not_reach_the_slice(cloud):
  recipe = cloud.checkout / "gin_configs/recipes/demo_tiny.gin"
  before = recipe.read_text()
  try:
    recipe.write_text(before + "\n# changed\n")
    assert "--allow_dirty" in _refused(cloud, "--confirm_cost")
    assert cloud.run("--confirm_cost", "--allow_dirty").returncode == 0
  finally:
    recipe.write_text(before)


def test_a_recipe_that_is_not_committed_would_not_reach_the_slice(cloud):
  recipe = cloud.checkout / "gin_configs/recipes/mine.gin"
  try:
    recipe.write_text("include 'gin_configs/recipes/demo_tiny.gin'\n")
    line = _refused(
      cloud, "--confirm_cost", "--gin_file=gin_configs/recipes/mine.gin"
    )
    assert "commit it" in line
  finally:
    recipe.unlink()


def test_a_recipe_outside_the_checkout_would_not_reach_the_slice(cloud):
  outside = cloud.folder / "mine.gin"
  outside.write_text("include 'gin_configs/recipes/demo_tiny.gin'\n")
  line = _refused(cloud, "--confirm_cost", f"--gin_file={outside}")
  assert "lies outside checkout" in line


def test_what_a_recipe_requires_has_to_be_given(cloud):
  recipe = "--gin_file=gin_configs/recipes/paper_t5_base.gin"
  line = _refused(cloud, recipe, "--gin.CHECKPOINT=c")
  assert "--gin.SOURCE=..." in line
  assert "--gin.VOCABULARY=..." in line
  assert "CHECKPOINT=..." not in line


@pytest.mark.parametrize(
  ("mesh", "is_right"),
  [
    ((8, 1, 1), True),
    ((2, 2, 2), True),
    ((-1, 1, 1), True),
    ((-1, 2, 4), True),
    ((4, 1, 1), False),  # four would be paid for and idle
    ((16, 1, 1), False),
    ((-1, 3, 1), False),
    ((-1, 0, 1), False),
    ((-2, -4, 1), False),
  ],
)
def test_a_mesh_has_to_use_every_device_of_the_slice(
  cloud, mesh, is_right, capsys
):
  axes = zip(("DATA", "FSDP", "TENSOR"), mesh, strict=True)
  flags = [f for f in cloud.flags if "MESH" not in f]
  flags += [f"--gin.MESH_{axis}={size}" for axis, size in axes]
  assert tpu_vm.main([*flags, "--dry_run"]) == (0 if is_right else 2)
  if not is_right:
    assert "v4-16 has 8 devices" in capsys.readouterr().err


def test_a_recipe_for_one_device_is_refused_on_a_slice(cloud, capsys):
  flags = [f for f in cloud.flags if "MESH" not in f]
  assert tpu_vm.main([*flags, "--dry_run"]) == 2
  assert "MESH_DATA=1 x MESH_FSDP=1" in capsys.readouterr().err


def test_rows_are_divided_among_data_and_fsdp_alone(cloud):
  flags = [*cloud.flags, "--gin.BATCH_SIZE=4", "--dry_run"]
  assert tpu_vm.main([*flags, "--gin.MESH_TENSOR=2"]) == 0
  assert tpu_vm.main([*flags, "--gin.MESH_FSDP=2"]) == 2


def test_a_dry_run_calls_nothing(cloud):
  done = cloud.run("--dry_run")
  assert done.returncode == 0
  assert done.stderr == ""
  assert cloud.kinds == []
  assert not (cloud.folder / "runs").exists()


def test_every_stage_can_be_launched():
  assert set(tpu_vm._STAGES) == {"run", "study", *stages.SUMMARIES}


def test_what_a_source_needs_is_installed(cloud):
  done = cloud.run(
    "--dry_run",
    "--extras=bert",
    "--gin.SOURCE=log:gs://b/clicks.parquet@gs://b/corpus.jsonl",
  )
  assert done.returncode == 0, done.stderr
  assert "[run,tpu,bert,gcs,parquet]" in done.stdout


def test_the_launcher_needs_nothing_but_the_standard_library(cloud):
  argv = cloud.command("--dry_run")
  # -I -S: no site-packages, no PYTHONPATH.
  code = f"import sys; sys.path.insert(0, {os.path.dirname(argv[1])!r})\n"
  code += f"import tpu_vm; sys.exit(tpu_vm.main({argv[2:]!r}))"
  done = subprocess.run(
    [sys.executable, "-I", "-S", "-c", code],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert re.search("(?m)^gcloud compute tpus tpu-vm create", done.stdout)
