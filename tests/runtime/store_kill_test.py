"""A run whose directory, data and checkpoint lie in a store, killed in a training.

The store is no file system: a dict behind a server (`loop_store`). What is in it
at the end is what a run leaves in a folder that nobody disturbs.
"""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import loop_store
import pytest
import random_t5
import small_data

from synthq_jax.cli import main
from synthq_jax.storage import stores
from tests.runtime import kills

FLAGS = (
  f"--gin_file={kills.RECIPE}",
  "--gin.plan.RunConfig.public_data=True",
  "--gin.prepare_data.Config.public_test_documents=20",
  "--gin.plan.Canaries.number=0",
  "--gin.plan.Rows.public_only=False",
  "--gin.plan.Rows.original=False",
  "--gin.plan.Rows.direct_dp=()",
  "--gin.NUM_DOCUMENTS=32",
  "--gin.LTR=()",
  "--gin.ADAPTED=()",
)


def start(workdir, log, flags):
  command = [sys.executable, loop_store.__file__, "run", "--quiet"]
  command += [f"--workdir={workdir}", *FLAGS, *flags]
  environment = os.environ | {
    "PYTHONPATH": str(kills.ROOT),
    "PYTHONUNBUFFERED": "1",
    "SYNTHQ_LEASE_SECONDS": str(loop_store.LEASE),
    "TMPDIR": str(log.parent),  # mirrors of those that are killed
  }
  return subprocess.Popen(
    command,
    env=environment,
    stdout=log.open("w"),
    stderr=subprocess.STDOUT,
    cwd=kills.ROOT,
  )


def stages(log):
  return re.findall(r"\[(\S+)\] running", log.read_text())


def without_places(folder, *texts):
  """Takes from all files the places that the settings of two runs differ in."""
  for path in filter(pathlib.Path.is_file, folder.rglob("*")):
    content = path.read_bytes()
    if path.suffix == ".gin":  # which breaks lines that are too long
      content = content.replace(b" \\\n    ", b" ")
    for text in texts:
      content = content.replace(text.encode(), b"PLACE")
    path.write_bytes(content)


@pytest.mark.timeout(1800)
def test_a_run_in_a_store_that_is_killed_ends_like_one_in_a_folder(tmp_path):
  pairs = tmp_path / "pairs.jsonl"
  small_data.write_pairs(pairs, 100)
  checkpoint = pathlib.Path(random_t5.save(tmp_path / "t5"))
  whole, log = tmp_path / "whole", tmp_path / "log"
  flags = [f"--gin.SOURCE=jsonl:{pairs}", f"--gin.CHECKPOINT={checkpoint}"]
  argv = ["run", "--quiet", f"--workdir={whole}", *FLAGS, *flags]
  assert main.main(argv) == 0
  with loop_store.serving() as server:
    there = [server.put("in", pairs), server.put("in", checkpoint)]
    flags = [f"--gin.SOURCE=jsonl:{there[0]}", f"--gin.CHECKPOINT={there[1]}"]
    url = f"{server.url}/b/run"
    # Its mirror stays; the next one has another.
    process = start(url, log, [*flags, f"--mirror={tmp_path / 'kept'}"])
    while "finetune_dp/eps8" not in stages(log) and process.poll() is None:
      time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
      process.wait(random.uniform(0, 3))
    process.kill()
    process.wait()
    print(f"killed in {stages(log)[-1]}")
    assert start(url, log, flags).wait() == 0, log.read_text()
    stores.keep_in(tmp_path / "mirror")
    copy = pathlib.Path(stores.local(url))
    names = server.names("/b/run/")
  # One object for each training, and none that a kill left half written.
  assert "private/ledger.jsonl.lines/000001" in names
  assert not [name for name in names if "partial" in name or "state_" in name]
  without_places(whole, str(pairs), str(checkpoint))
  without_places(copy, *there)
  assert len(kills.files(whole)) > 30
  assert kills.differences(whole, copy) == []


def test_a_difference_of_one_byte_is_found(tmp_path):
  for name, byte in (("a", 1), ("b", 2)):
    (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / name / "x/params.safetensors").write_bytes(bytes([0, byte]))
    timed = json.dumps({"result": {"seconds": byte, "steps": 3}})
    (tmp_path / name / "x/result.json").write_text(timed)
    (tmp_path / name / "x/report.md").write_text(f"took {byte} min 3 s")
  (tmp_path / "b/only.txt").write_text("left over")
  different = ["only.txt", "x/params.safetensors"]
  assert kills.differences(tmp_path / "a", tmp_path / "b") == different
