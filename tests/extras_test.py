"""What is not installed is named with the extra that brings it."""

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from synthq_jax import extras

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGE = ROOT / "synthq_jax"
SOURCES = sorted(
  {*PACKAGE.rglob("*.py")} - {*(PACKAGE / "assets").rglob("*.py")}
)
BROUGHT = {
  "clu": "seqio",
  "etils": "orbax-checkpoint",
  "fsspec": "gcsfs",
  "jaxlib": "jax",
  "tensorflow": "tensorflow-datasets",
}
"""Packages that come with one that an extra names."""
NAMES = {
  "faiss": "faiss-cpu",
  "gin": "gin-config",
  "mauve": "mauve-text",
  "orbax": "orbax-checkpoint",
  "sklearn": "scikit-learn",
  "Stemmer": "pystemmer",
}
"""Distributions that are not called as they are imported."""


def distribution(name):
  return NAMES.get(name, BROUGHT.get(name, name)).lower().replace("_", "-")


def brought_by(extra):
  wanted = [re.match(r"[\w-]+", line)[0] for line in EXTRAS[extra]]
  return {name.lower().replace("_", "-") for name in wanted}


BASE = {
  re.match(r"[\w-]+", line)[0].replace("_", "-")
  for line in PROJECT["dependencies"]
}


def imports(tree, extra=None):
  """Yields packages that code imports, and the extra that is named there."""
  for node in ast.iter_child_nodes(tree):
    inner = extra
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
      continue
    if isinstance(node, ast.With):
      for item in node.items:
        call = item.context_expr
        if ast.unparse(call).startswith("extras.required("):
          inner = call.args[0].value
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name.split(".")[0], extra
    elif isinstance(node, ast.ImportFrom):
      yield node.module.split(".")[0], extra
    yield from imports(node, inner)


@pytest.mark.parametrize(
  "path", SOURCES, ids=lambda p: str(p.relative_to(ROOT))[11:-3]
)
def test_every_import_beyond_the_base_names_the_extra_that_brings_it(path):
  for name, extra in imports(ast.parse(path.read_text())):
    if name == "synthq_jax" or name in sys.stdlib_module_names:
      continue
    if distribution(name) not in BASE:
      assert extra, f"{path} imports {name} outside of extras.required"
      known = {"t5x"} if extra == "t5x" else brought_by(extra)
      assert distribution(name) in known, f"{extra} does not bring {name}"


def test_the_imports_of_tensorflow_and_flax_are_seen():
  seen = {
    pair for path in SOURCES for pair in imports(ast.parse(path.read_text()))
  }
  assert {("seqio", "seqio"), ("flax", "run"), ("jax", None)} <= seen


MISSING = {
  "run": ("flax", "from synthq_jax.models import t5"),
  "seqio": (
    "seqio",
    "from synthq_jax.data import tasks; tasks.register_beir('folder', None)",
  ),
  "bert": (
    "tokenizers",
    "from synthq_jax.data import wordpiece; wordpiece.load('folder')",
  ),
  "gcs": (
    "fsspec",
    "from synthq_jax.storage import object_store;"
    " object_store.Store('gs://bucket')",
  ),
  "images": (
    "sklearn",
    "from synthq_jax.data import images; images.load('digits')",
  ),
  "ir-datasets": (
    "ir_datasets",
    "from synthq_jax.data import ir_datasets_sets as sets; sets.read('x')",
  ),
  "parquet": (
    "pyarrow",
    "from synthq_jax.data import table_files;"
    " open('table.parquet', 'w').close();"
    " list(table_files.rows('table.parquet'))",
  ),
  "mauve": (
    "mauve",
    "from synthq_jax.generation import mauve;"
    " mauve.from_vectors([[1.0]], [[1.0]], seed=0, featurizer='none')",
  ),
  "transformers": (
    "torch",
    "from synthq_jax.retrieval import text_encoders as encoders;"
    " encoders.Gpt2(folder='folder').encode(['text'])",
  ),
}
WITHOUT = """
import sys

class Blocked:
  package = ""

  @classmethod
  def find_spec(cls, name, *_):
    if name.split(".")[0] == cls.package:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked)
from synthq_jax import extras

for package, script in MISSING.values():
  Blocked.package = package
  for name in [name for name in sys.modules if name.split(".")[0] == package]:
    del sys.modules[name]
  try:
    exec(script, {})
    print("went on")
  except extras.MissingExtraError as error:
    print(error)
"""


def test_a_missing_extra_is_one_line_that_names_it(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", f"MISSING = {MISSING!r}\n{WITHOUT}"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.stdout.splitlines() == [
    f"{package} is not installed: pip install 'synthq_jax[{extra}]'"
    for extra, (package, _) in MISSING.items()
  ], done.stderr


def test_t5x_is_named_with_its_place():
  with pytest.raises(ImportError, match="t5x @ git"), extras.required("t5x"):
    raise ModuleNotFoundError("no t5x", name="t5x")


def test_a_mistake_of_ours_is_no_missing_extra():
  with pytest.raises(ModuleNotFoundError) as caught, extras.required("run"):
    import synthq_jax.no_such_module  # noqa: F401
  assert not isinstance(caught.value, extras.MissingExtraError)


def test_extras_name_packages_that_are_real():
  for line in [*EXTRAS["run"], *EXTRAS["seqio"], *EXTRAS["bert"]]:
    importlib.metadata.version(re.match(r"[\w-]+", line)[0])
