"""A few files for every parser; `python tests/benchmarks/fuzz.py` reads more."""

import os
import re
import subprocess
import sys

from tests.benchmarks import fuzz


def test_every_file_is_read_or_refused_in_one_line():
  """In a process of its own, which forks and has not started JAX."""
  command = [sys.executable, fuzz.__file__, "--inputs=1800", "--seed=1"]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": "."},
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
  rows = re.findall(r"(?m)^(.{20}) +(\d+) +(\d+) +(\d+)$", done.stdout)
  assert len(rows) >= 17
  for name, read, refused, wrong in rows:
    assert int(read) + int(refused) >= 90 and int(wrong) == 0, name
    assert int(refused) or name.strip() == "npy", name


def test_what_is_wrong_is_found(tmp_path):
  def careless(path):
    data = path.read_bytes()
    if data == b"a":
      raise KeyError(data)
    if data == b"b":
      raise ValueError("raised here, not in the package")

  parser = fuzz.Parser(careless, "x", [b"sound"])
  said = []
  for data in (b"a", b"b", b"c"):
    (tmp_path / "x").write_bytes(data)
    said.append(fuzz.outcome(parser, tmp_path / "x"))
  assert said[0].startswith("KeyError from fuzz_test.py:")
  assert said[1].startswith("ValueError from fuzz_test.py:")
  assert said[2] == "read"
