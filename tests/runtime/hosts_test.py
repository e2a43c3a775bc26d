"""The pipeline over two processes on one working directory."""

import pathlib
import re
import shlex
import sys

import hosts
import pytest
import random_t5
import small_data

from synthq_jax.cli import main
from synthq_jax.privacy import ledger
from tests.runtime import hosts_script, kills

SCRIPT = pathlib.Path(__file__).with_name("hosts_script.py")


@pytest.fixture(name="flags", scope="module")
def _flags(tmp_path_factory):
  place = tmp_path_factory.mktemp("data")
  return [
    "--gin_file=recipes/demo_tiny.gin",
    f"--gin.SOURCE={small_data.write_pairs(place / 'pairs.jsonl', 100)}",
    f"--gin.CHECKPOINT={random_t5.save(place / 't5')}",
    "--gin.plan.RunConfig.public_data=True",
    "--gin.SECRET_SEED=5",
    "--gin.TRAIN_STEPS=6",
    "--gin.RETRIEVER_STEPS=6",
    "--gin.NUM_DOCUMENTS=48",
    "--gin.MESH_DATA=2",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Rows.original=False",
    "--gin.plan.Rows.direct_dp=()",
    "--gin.LTR=()",
    "--gin.ADAPTED=()",
    "--gin.finetune_dp.Config.settings=@loop.Settings()",
    "--gin.train_retriever.Config.settings=@loop.Settings()",
    "--gin.loop.Settings.save_seconds=0.0",
    "--gin.loop.Settings.log_every=3",
  ]


def in_two(*command, code=0, max_restarts=0):
  return hosts.ended(
    hosts.launch(*command, devices=1, max_restarts=max_restarts), code
  )


def test_two_processes_of_which_one_is_killed_end_like_one_that_was_not(
  tmp_path, flags, monkeypatch, capfd
):
  """The one that writes the ledger, in the middle of its training."""
  whole, cut, dead = (tmp_path / name for name in ("whole", "cut", "dead"))
  stage = ["evaluate", "--quiet", *flags]
  with monkeypatch.context() as patched:
    hosts_script.patch(pathlib.Path("-"), "", patched.setattr)
    assert main.main([*stage, f"--workdir={whole}"]) == 0
  one = capfd.readouterr().out
  dead.mkdir()
  kill = "eps8:0:3"
  two = [SCRIPT, dead, kill, *stage, f"--workdir={cut}"]
  two = in_two(*two, max_restarts=1)
  (died,) = (int(path.read_text()) for path in dead.iterdir())
  assert died < 6
  assert two.count(": restart ") == 1
  assert two.count("[0] process 0 alone makes, while the others wait") == 2
  said = re.search(r"others wait: (.*)\. If", two)[1].split(", ")
  assert "prepare_data" in said
  assert not {"finetune_dp", "train_retriever"} & set(said)
  saved = re.findall(r"saving (\S+) (\d+)", two)
  assert (cut / "train_retriever/synthetic_eps8/result.json").exists()
  steps = [int(step) for place, step in saved if place == "eps8"]
  assert min(steps) < died
  assert steps.count(min(steps)) == 1, "it began anew"
  assert len(kills.files(whole)) > 30
  assert not kills.differences(whole, cut)
  assert list(ledger.read(cut / "private" / "ledger.jsonl")) == list(
    ledger.read(whole / "private" / "ledger.jsonl")
  )
  said = re.findall(r"\[(\d)\] \[(\S+)\] running", two)
  assert {number for number, _ in said} == {"0"}
  names = [name for _, name in said]
  assert names.count("finetune_dp/eps8") == 2
  assert names.count("train_retriever/synthetic_eps8") == 1
  assert names.count("prepare_data") == 1
  assert two.count("evaluate finished") == 1
  for what in ("part", "block"):  # each made once, by both in turns
    made = {me: re.findall(rf"(?m)^\[{me}\] {what} (\d+)$", two) for me in "01"}
    assert min(map(len, made.values())) > 0
    assert one.count(f"{what} ") == sum(map(len, made.values()))


def test_processes_with_working_directories_of_their_own_are_refused(
  tmp_path, flags
):
  """Two secrets would be two samples and two noises in one training."""
  for number in "01":
    secret = tmp_path / number / "private" / "secret_seed"
    secret.parent.mkdir(parents=True)
    secret.write_text(f"{number}abc\n")
    secret.chmod(0o600)
  command = [sys.executable, "-m", "synthq_jax.cli.main", "finetune_dp", *flags]
  line = shlex.join([*command, "--gin.SECRET_SEED=None"])
  own = f"exec {line} --workdir={tmp_path}/$SYNTHQ_PROCESS_ID"
  flags = ["--num_processes=2", "--max_restarts=0", "--", "sh", "-c", own]
  output = hosts.ended(hosts.start(hosts.LAUNCHER, *flags), code=2)
  said = [one for one in output.splitlines() if "synthq:" in one]
  assert len(said) == 1 and "--workdir" in said[0]
  assert "abc" not in output
  assert not list(tmp_path.glob("*/private/ledger.jsonl"))
