"""LoRA and prompts in a run: trained privately, merged, and read as trained."""

import re

import jax
import numpy as np
import pytest
import random_t5
import small_data

from synthq_jax.cli import main
from synthq_jax.generation import decoding
from synthq_jax.models import t5_checkpoints
from synthq_jax.runtime import inputs, results, workspace
from synthq_jax.storage import artifacts

TINY = "--gin_file=gin_configs/recipes/demo_tiny.gin"
EMBEDDING = "token_embedder/embedding"


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
  assert made.prompt_tokens == 0
  for name in changed:
    rank = np.linalg.matrix_rank(after[name] - before[name], tol=1e-4)
    assert rank == 2, name


def test_a_prompt_is_read_as_it_was_trained(source, start, tmp_path):
  made, config, before, after = run(
    source, start, tmp_path, "prompt", "--gin.PROMPT_LENGTH=3"
  )
  changed = {k for k in before if not np.array_equal(before[k], after[k])}
  assert changed == {EMBEDDING}
  np.testing.assert_array_equal(before[EMBEDDING][:-3], after[EMBEDDING][:-3])
  assert (made.num_parameters, made.prompt_tokens) == (3 * config.emb_dim, 3)
  # What generate wrote is what the merged model writes behind these ids.
  space = workspace.Folders(tmp_path)
  prepared = artifacts.load(
    tmp_path / "private/prepare_data", results.PreparedData
  )
  written = np.load(tmp_path / "generate/eps8/tokens.npz")
  read = inputs.document_tokens(space, prepared)
  ids, tokens = read.ids, read.tokens
  vocabulary = inputs.vocabulary(space, prepared)
  rows = written["documents"]
  prompt = config.vocab_size - 3 + np.arange(3)
  head = np.array([*prompt, *vocabulary.encode("generate_query: ")])
  head = np.broadcast_to(head, (len(rows), len(head)))
  first = vocabulary.vocab_size - vocabulary.extra_ids

  def generate(read):
    return decoding.generate(
      t5_checkpoints.unflatten(after),
      config,
      read,
      ids=[str(i) for i in ids[rows]],
      key=jax.random.key(0),
      sampler=decoding.Nucleus(p=0.8, temperature=0.5),
      max_length=12,
      forbidden=(2, *range(first, config.vocab_size)),
      batch_size=128,
    )[:, 0]

  expected = generate(np.concatenate([head, tokens[rows]], axis=1))
  np.testing.assert_array_equal(written["tokens"], expected)
  without = generate(np.concatenate([head[:, 3:], tokens[rows]], axis=1))
  assert (without != expected).any()
