"""LoRA in a run: trained privately, and merged."""

import re

import numpy as np
import pytest
import random_t5
import small_data

from synthq_jax.cli import main
from synthq_jax.models import t5_checkpoints
from synthq_jax.runtime import results
from synthq_jax.storage import artifacts

TINY = "--gin_file=gin_configs/recipes/demo_tiny.gin"


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory):
  """Forty documents, each with one query."""
  folder = tmp_path_factory.mktemp("beir")
  return small_data.write_split_beir(folder, train=32, test=8)


@pytest.fixture(name="start", scope="module")
def _start(tmp_path_factory):
  return random_t5.save(tmp_path_factory.mktemp("start"))


def run(source, start, workdir, name, *flags, stage="generate"):
  """Runs up to a stage; returns the checkpoint and public parameters."""
  argv = [
    stage,
    TINY,
    f"--gin_file=gin_configs/optim/{name}.gin",
    f"--gin.SOURCE={source}",
    f"--gin.CHECKPOINT={start}",
    f"--workdir={workdir}",
    "--gin.NUM_DOCUMENTS=16",
    "--gin.plan.Rows.public_only=False",
    "--gin.LEARNING_RATE=0.1",
    "--quiet",
    *flags,
  ]
  assert main.main(argv) == 0
  made = artifacts.load(workdir / "finetune_dp/eps8", results.Checkpoint)
  before, config = t5_checkpoints.load(start)
  after, _ = t5_checkpoints.load(workdir / made.directory)
  flat = map(t5_checkpoints.flatten, (before, after))
  return made, config, *flat


def test_lora_changes_its_kernels_alone(source, start, tmp_path):
  kernels = ".*attention/(query|value)/kernel"
  made, config, before, after = run(
    source,
    start,
    tmp_path,
    "lora",
    "--gin.LORA_RANK=2",
    "--gin.finetune_dp.Config.scan_layers=True",
    stage="finetune_dp",
  )
  changed = {k for k in before if not np.array_equal(before[k], after[k])}
  assert changed == {k for k in before if re.fullmatch(kernels, k)}
  assert made.num_parameters == len(changed) * 2 * 2 * config.emb_dim
  for name in changed:
    rank = np.linalg.matrix_rank(after[name] - before[name], tol=1e-4)
    assert rank == 2, name
