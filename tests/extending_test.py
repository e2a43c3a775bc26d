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
# What makes a whole run a small one, which the page need not say.
_SMALL = [
  "--gin.plan.Rows.synthetic=()", "--gin.NUM_DOCUMENTS=8", "--quiet",
]  # fmt: skip


def insert(diff: str, root: pathlib.Path) -> set[str]:
  """Inserts the "+" lines of a diff, each behind the line above it."""
  touched = set()
  for file in re.split(r"(?m)^--- ", diff)[1:]:
    name, *lines = file.splitlines()
    old = (root / name).read_text()
    for anchor, new in re.findall(r"(?m)^ (.*)\n((?:\+.*\n)+)", file):
      assert old.count(f"\n{anchor}\n") == 1, anchor
      text = re.sub(r"(?m)^\+", "", new)
      old = old.replace(f"\n{anchor}\n", f"\n{anchor}\n{text}")
    assert all(line[0] in " +" for line in lines), name
    (root / name).write_text(old)
    touched.add(name)
  return touched


def put_in(example: str, root: pathlib.Path) -> tuple[set[str], list, list]:
  """Changes a copy of the package; returns its files, Python and commands."""
  touched, code, commands = set(), [], []
  for before, kind, text in _BLOCK.findall(example):
    if new := _FILE.match(before):
      assert not (root / new[1]).exists()
      (root / new[1]).write_text(text)
      touched.add(new[1])
    elif kind == "diff":
      touched |= insert(text, root)
    else:
      (code if kind == "python" else commands).append(text)
  return touched, code, commands


def test_the_page_has_the_five_examples():
  assert len(EXAMPLES) == 5


@pytest.fixture(name="grown", scope="module")
def _grown(tmp_path_factory):
  """A copy of the package that has all examples, and what each puts in."""
  root = tmp_path_factory.mktemp("grown")
  shutil.copytree(
    ROOT / "synthq_jax",
    root / "synthq_jax",
    ignore=shutil.ignore_patterns("__pycache__"),
  )
  shutil.copytree(ROOT / "gin_configs", root / "gin_configs")
  return root, {name: put_in(text, root) for name, text in EXAMPLES.items()}


def test_an_example_touches_few_files_and_shows_what_it_does(grown):
  for name, (touched, code, commands) in grown[1].items():
    assert 1 <= len(touched) <= 3, name
    assert code or commands, name


@pytest.mark.slow
def test_the_python_of_the_examples_works_as_printed(grown):
  root, examples = grown
  texts = [text for _, code, _ in examples.values() for text in code]
  assert len(texts) >= 4
  script = "".join(f"exec({text!r}, {{}})\n" for text in texts)
  run([sys.executable, "-c", script], root)


@pytest.mark.slow
def test_the_stage_of_the_examples_runs_as_printed(grown, tmp_path):
  root, examples = grown
  [text] = [text for _, _, commands in examples.values() for text in commands]
  source = small_data.write_split_beir(tmp_path / "data", train=32, test=8)
  program, *flags = shlex.split(text.replace("\\\n", " "))
  assert program == "synthq"
  command = [sys.executable, "-m", "synthq_jax.cli.main", *flags, *_SMALL]
  output = run([*command, f"--gin.SOURCE={source}"], root)
  assert "[count_words/public_only] running" in output
  assert re.search(r"^\{'.*': \d+.*\}$", output, re.MULTILINE)


def run(command, folder) -> str:
  own = {**os.environ, "PYTHONPATH": str(folder)}
  done = subprocess.run(
    command, cwd=folder, env=own, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout
