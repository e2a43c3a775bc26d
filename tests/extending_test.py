"""The examples of docs/extending.md: put in as they are printed, and run."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import small_data

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/extending.md").read_text()
EXAMPLES = dict(
  re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
)
_BLOCK = re.compile(r"([^\n]*)\n\n```(python|bash|diff)\n(.*?)```", re.DOTALL)
_FILE = re.compile(r"^`(synthq_jax/\S+)`:$")
_PLACE = re.compile(r"^In `(synthq_jax/\S+)`, after `(.*)`:$")
# What makes a whole run a small one, which the page need not say.
_SMALL = [
  "--gin.plan.Rows.synthetic=()", "--gin.NUM_DOCUMENTS=8", "--quiet",
]  # fmt: skip


def put_in(example: str, root: pathlib.Path) -> tuple[set[str], list, list]:
  """Changes a copy of the package; returns its files, Python and commands."""
  touched, code, commands = set(), [], []
  for before, kind, text in _BLOCK.findall(example):
    if new := _FILE.match(before):
      assert not (root / new[1]).exists()
      (root / new[1]).write_text(text)
      touched.add(new[1])
    elif place := _PLACE.match(before):
      text = re.sub(r"(?m)^\+", "", text)
      path, (name, anchor) = root / place[1], place.groups()
      old = path.read_text()
      assert old.count(f"\n{anchor}\n") == 1, anchor
      path.write_text(old.replace(f"\n{anchor}\n", f"\n{anchor}\n{text}"))
      touched.add(name)
    else:
      (code if kind == "python" else commands).append(text)
  return touched, code, commands


def test_the_page_has_the_five_examples():
  assert len(EXAMPLES) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_works_as_printed_and_touches_few_files(name, tmp_path):
  shutil.copytree(
    ROOT / "synthq_jax",
    tmp_path / "synthq_jax",
    ignore=shutil.ignore_patterns("__pycache__"),
  )
  shutil.copytree(ROOT / "gin_configs", tmp_path / "gin_configs")
  touched, code, commands = put_in(EXAMPLES[name], tmp_path)
  assert 1 <= len(touched) <= 3
  assert code or commands
  own = {**os.environ, "PYTHONPATH": str(tmp_path)}
  for text in code:
    run([sys.executable, "-c", text], tmp_path, own)
  for text in commands:
    small_data.write_split_beir(tmp_path / "data", train=32, test=8)
    program, *flags = shlex.split(text.replace("\\\n", " "))
    assert program == "synthq"
    command = [sys.executable, "-m", "synthq_jax.cli.main", *flags, *_SMALL]
    source = f"--gin.SOURCE=beir:{tmp_path / 'data'}"
    output = run([*command, source], tmp_path, own)
    assert "[count_words/public_only] running" in output
    assert re.search(r"^\{'.*': \d+.*\}$", output, re.MULTILINE)


def run(command, folder, environment) -> str:
  done = subprocess.run(
    command, cwd=folder, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout
