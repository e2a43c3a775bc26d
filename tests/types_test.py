"""A type checker passes over the packages that pyproject.toml names."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("pyrefly")

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
INCLUDED = SETTINGS["pyrefly"]["project-includes"]


def check(*arguments):
  """Runs the checker with the libraries of this interpreter."""
  done = subprocess.run(
    [
      *(sys.executable, "-m", "pyrefly", "check", *arguments),
      f"--python-interpreter-path={sys.executable}",
      "--output-format=min-text",
      "--min-severity=warn",
      "--color=never",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout + done.stderr


def test_types_fit():
  code, output = check()
  assert code == 0, output


def test_the_checked_packages_are_those_of_runs_and_promises():
  packages = {"privacy", "optim", "runtime", "tools", "stages", "report"}
  assert {f"synthq_jax/{name}" for name in packages} <= {*INCLUDED}
  assert all((ROOT / name).is_dir() for name in INCLUDED)


@pytest.mark.parametrize(
  ("line", "rule"),
  [
    ("claim.calibrated(epsilon='8', sampler=poisson, steps=1, l2_clip_norm=1)",
     "bad-argument-type"),
    ("poisson.batch(seed=0)", "missing-argument"),
    ("poisson.batches(seed=0, step=0)", "missing-attribute"),
    ("jnp.zeros(3).no_such_method()", "missing-attribute"),
    ("def run(task: Task): return task.settings.dept", "missing-attribute"),
    ("def run(task: Task): return task.inputs.prepared", "missing-attribute"),
    ("static_encoder.Inputs(documents=poisson)", "bad-argument-type"),
    ("stage.Stage(name='', result=int, needs=(), plan=stage.plan_one_result,"
     " job=fuse.make_job, run=static_encoder.run)", "bad-argument-type"),
    ("def show(seen: values.Shareable): page.parts(report.PRIVATE, seen)",
     "bad-argument-type"),
  ],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_refused(tmp_path, line, rule):
  """Imports are resolved, ours and JAX's: nothing has become Any on the way."""
  path = tmp_path / "wrong.py"
  path.write_text(
    "import jax.numpy as jnp\n"
    "from synthq_jax.privacy import claim, sampling\n"
    "from synthq_jax.report import page, values\n"
    "from synthq_jax.runtime import stage\n"
    "from synthq_jax.stages import fuse, report, static_encoder\n"
    "Task = stage.Task[fuse.Config, fuse.Inputs]\n"
    "poisson = sampling.Poisson(\n"
    "  num_examples=10, expected_batch_size=2, max_batch_size=4)\n"
    f"{line}\n"
  )
  code, output = check(
    f"--config={ROOT / 'pyproject.toml'}", f"--search-path={ROOT}", str(path)
  )
  errors = [one for one in output.splitlines() if one.startswith("ERROR")]
  assert code == 1 and errors, output
  assert all(":9:" in one and one.endswith(f"[{rule}]") for one in errors)


def test_what_is_ignored_is_named():
  blanket = re.compile(r"#\s*(?:type|pyrefly|pyright):\s*ignore(?!\[[a-z-]+\])")
  for name in INCLUDED:
    for path in (ROOT / name).rglob("*.py"):
      assert not blanket.search(path.read_text()), path
