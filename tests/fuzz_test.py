"""A few files for every parser; `python tests/benchmarks/fuzz.py` reads more."""

import os
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

from synthq_jax.data import vocabulary
from synthq_jax.models import t5_checkpoints
from synthq_jax.storage import array_files
from synthq_jax.training import checkpoints
from tests.benchmarks import fuzz


def test_every_file_is_read_or_refused_in_one_line():
  """In a process of its own, which forks and has not started JAX."""
  command = [sys.executable, fuzz.__file__, "--inputs=750", "--seed=1"]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": "."},
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
  *rows, whole = re.findall(
    r"(?m)^(.{20}) +([\d,]+) +([\d,]+) +([\d,]+)$", done.stdout
  )
  assert len(rows) >= 24 and int(whole[3]) == 0
  for name, read, refused, wrong in rows:
    assert int(read) + int(refused) == -(-750 // len(rows)), name
    assert int(refused) and int(wrong) == 0, name


class _Code:
  """Makes a file when a pickle of it is read."""

  def __init__(self, place: pathlib.Path):
    self.place = place

  def __reduce__(self):
    return pathlib.Path.touch, (self.place,)


def test_reading_a_checkpoint_runs_no_code(tmp_path):
  ran = tmp_path / "ran"
  code = pickle.dumps(_Code(ran))
  pickle.loads(code)
  ran.unlink()  # it would
  shape = (tmp_path / "hf" / "config.json", tmp_path / "t5x" / "checkpoint_3")
  shape[0].parent.mkdir()
  shape[1].mkdir(parents=True)
  shape[0].write_text(fuzz.hugging_face_shape())
  objects = np.array([_Code(ran)], object)
  np.save(tmp_path / "a.npy", objects, allow_pickle=True)
  np.savez(tmp_path / "a.npz", a=objects)
  places = ("hf/pytorch_model.bin", "hf/model.safetensors", "x.model")
  for name in (*places, "t5x/checkpoint_3/checkpoint"):
    (tmp_path / name).write_bytes(code)
  state = tmp_path / "states"
  checkpoints.save(state, 3, {"a": np.ones(3)})
  for path in state.rglob("*"):
    if path.is_file():
      path.write_bytes(code)
  like = {"a": np.zeros(3)}
  for call in (
    lambda: array_files.read(tmp_path / "a.npy"),
    lambda: array_files.read_npz(tmp_path / "a.npz"),
    lambda: t5_checkpoints.load(tmp_path / "hf"),
    lambda: (
      (tmp_path / places[1]).unlink() or t5_checkpoints.load(tmp_path / "hf")
    ),
    lambda: t5_checkpoints.load(tmp_path / "t5x"),
    lambda: vocabulary.load(tmp_path / "x.model"),
    lambda: checkpoints.restore(state, 3, like),
  ):
    with pytest.raises(ValueError, match="expected") as error:
      call()
    assert "\n" not in str(error.value)
  assert not ran.exists()


def test_what_is_wrong_is_found(tmp_path):
  def careless(path):
    data = path.read_bytes()
    if data == b"a":
      raise KeyError(data)
    if data == b"b":
      raise ValueError("raised here, not in the package")
    if data == b"c":
      exec(elsewhere, {})

  # Of a library in an environment within a clone.
  file = "/home/a/synthq_jax/.venv/lib/numpy.py"
  elsewhere = compile("raise ValueError('elsewhere')", file, "exec")
  parser = fuzz.Parser(careless, "x", [b"sound"])
  said = []
  for data in (b"a", b"b", b"c", b"d"):
    (tmp_path / "x").write_bytes(data)
    said.append(fuzz.outcome(parser, tmp_path / "x"))
  assert said[0].startswith("KeyError from fuzz_test.py:")
  assert said[1].startswith("ValueError from fuzz_test.py:")
  assert said[2].startswith("ValueError from numpy.py:")
  assert said[3] == "read"
