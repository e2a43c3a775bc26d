"""The shape of the project: who may import whom, how long, how documented."""

import ast
import doctest
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "synthq_jax"
LAUNCHERS = sorted((ROOT / "launch").glob("*.py"))


def name_of(path: pathlib.Path) -> str:
  """The name by which a module of the package is imported."""
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}

# A package may import those of a lower rank, and itself.
RANKS = {
  "typing": 0,
  "artifacts": 0,
  "privacy": 1,
  "losses": 2,
  "optim": 3,
  "models": 4,
  "data": 5,
  "retrieval": 6,
  "training": 7,
  "generation": 7,
  "audit": 8,
  "federated": 8,
  "leakage": 8,
  "pipeline": 9,
  "backends": 10,
  "_flags": 11,
  "_screen": 12,
  "_studies": 12,
  "_tools": 12,
  "main": 13,
}
LIGHT = {"typing", "privacy", "losses", "optim"}
LIGHT_LIBRARIES = {
  "numpy", "scipy", "jax", "jaxtyping", "optax", "jax_privacy",
  "dp_accounting",
}  # fmt: skip
DATA_LIBRARIES = {
  "tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio",
}  # fmt: skip
SHARED_BY_STAGES = {
  "config_types",
  "inputs",
  "private_training",
  "results",
  "workspace",
}
# A run, and pre-training from scratch.
COMPOSERS = {"execute", "plan", "pretrain_recipe", "runner"}
# What ../shared/DESIGN.md promises to others, beside the command.
PUBLIC = (
  "typing", "artifacts", "optim", "privacy.accounting", "privacy.sampling",
  "privacy.sensitivity", "privacy.statement", "losses.contrastive",
  "models.t5", "models.t5_config", "models.t5_checkpoints",
  "generation.decoding", "retrieval.measures", "retrieval.trec",
)  # fmt: skip
# Modules that no command, public name or backend leads to yet: to become none.
UNREACHED = {
  "audit._beam_search", "audit._treatments", "audit.inversion",
  "audit.inversion_measures", "audit.mechanism", "audit.vector_bounds",
  "audit.vector_secrets", "data.cache_writers", "data.feature_converters",
  "data.task_sources", "data.tasks", "data.written_queries",
  "federated.few_clients", "federated.noise_table", "federated.sampling",
  "federated.silo", "federated.silo_privacy", "federated.summaries",
  "federated.user_privacy", "leakage.calibration", "retrieval.approximate",
  "retrieval.topk",
}  # fmt: skip


def package_of(module: str) -> str:
  """The package of a module, or its own name at the top."""
  return [*module.split("."), "__init__"][1]


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text())


def imports_of(tree: ast.AST) -> set[str]:
  """Full names of the modules that a syntax tree imports."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative imports hide where a name is from"
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


@functools.cache
def imports(path: pathlib.Path) -> frozenset[str]:
  return frozenset(imports_of(tree_of(path)))


def roots(names: set[str]) -> set[str]:
  return {name.split(".")[0] for name in names}


def at_runtime(tree: ast.Module) -> ast.Module:
  """Drops what only type checkers import."""
  is_for_types = lambda node: (  # noqa: E731
    isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
  )
  return ast.Module([n for n in tree.body if not is_for_types(n)], [])


def at_import(tree: ast.Module) -> ast.Module:
  """Drops what runs only when something of the module is called."""
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  return ast.Module([n for n in tree.body if not isinstance(n, kinds)], [])


def test_the_reader_of_imports_sees_every_form():
  tree = ast.parse("import a.b\nfrom c import d\ndef f():\n  import e")
  assert imports_of(tree) == {"a.b", "c.d", "e"}
  assert imports_of(at_import(tree)) == {"a.b", "c.d"}


def test_a_package_imports_only_what_stands_before_it():
  for module, path in MODULES.items():
    own = package_of(module)
    for name in imports(path):
      if name.startswith("synthq_jax."):
        other = package_of(name)
        assert other == own or RANKS[other] < RANKS[own], (module, name)


def test_slow_and_optional_libraries_stay_where_they_belong():
  for module, path in MODULES.items():
    own, used = package_of(module), roots(imports(path))
    runtime = roots(imports_of(at_runtime(tree_of(path))))
    assert own == "data" or not runtime & DATA_LIBRARIES, module
    assert own == "main" or "gin" not in used, module
    assert own == "backends" or "t5x" not in used, module


def test_nothing_loads_tensorflow_when_it_is_imported():
  for module, path in MODULES.items():
    loaded = roots(imports_of(at_import(at_runtime(tree_of(path)))))
    slow = {"tensorflow", "tensorflow_datasets", "seqio", "clu"}
    if "t5x" in loaded:  # loads all of it anyway, where it is installed
      slow -= {"clu"}
    assert not loaded & slow, module


def test_the_core_uses_few_libraries():
  allowed = {*sys.stdlib_module_names, "synthq_jax", *LIGHT_LIBRARIES}
  for module, path in MODULES.items():
    if package_of(module) in LIGHT:
      assert roots(imports(path)) <= allowed, module


def test_stages_never_import_each_other():
  folder = PACKAGE / "pipeline"
  stages = {p.stem for p in folder.glob("[a-z]*.py")}
  stages -= SHARED_BY_STAGES | COMPOSERS
  assert {"prepare_data", "finetune_dp", "generate", "evaluate"} <= stages
  others = {f"synthq_jax.pipeline.{s}" for s in stages | COMPOSERS}
  for stage in stages:
    seen = imports(folder / f"{stage}.py")
    assert not {n for n in seen if ".".join(n.split(".")[:3]) in others}, stage


def reached(entries: set[str]) -> set[str]:
  """The modules that an import of these leads to, sooner or later."""
  found, waiting = set(), [*entries]
  while waiting:
    name = waiting.pop()
    parent = name.rpartition(".")[0]
    if parent:
      waiting.append(parent)  # of a name in a module; and its package
    if name in MODULES and name not in found:
      found.add(name)
      waiting.extend(imports(MODULES[name]))
  return found


def configurable() -> set[str]:
  """What the gin files import."""
  line = re.compile(
    r"(?m)^(?:from (synthq_jax\S*) )?import (synthq_jax\S*|\w+)"
  )
  texts = [path.read_text() for path in (ROOT / "gin_configs").rglob("*.gin")]
  return {
    ".".join(filter(None, m)) for text in texts for m in line.findall(text)
  }


def test_every_module_can_be_reached_from_a_command_or_a_public_name():
  entries = {f"synthq_jax.{name}" for name in ("main", *PUBLIC)}
  entries |= {name for name in MODULES if "synthq_jax.backends" in name}
  found = reached(entries | configurable())
  left = {name.removeprefix("synthq_jax.") for name in MODULES.keys() - found}
  assert left == UNREACHED


def test_launchers_build_command_lines_with_the_standard_library():
  own = {path.stem for path in LAUNCHERS}
  assert {"sweeps", "tpu_vm", "xm"} <= own
  for path in LAUNCHERS:
    others = roots(imports(path)) - set(sys.stdlib_module_names) - own
    assert others <= ({"absl", "xmanager"} if path.stem == "xm" else set())
    # XManager is imported where it is used, so that --dry_run needs none.
    loaded = roots(imports_of(at_import(tree_of(path))))
    assert not {"absl", "xmanager"} & loaded


def test_a_module_is_short_and_says_what_it_is():
  for path in (*MODULES.values(), *LAUNCHERS):
    assert len(path.read_text().splitlines()) <= 600, path
    summary = ast.get_docstring(tree_of(path))
    assert summary, path
    assert summary.split("\n\n")[0].rstrip()[-1] in ".:", path
    assert path in LAUNCHERS or path.with_name("__init__.py").exists(), path


@pytest.mark.parametrize(
  ("modules", "absent"),
  [
    (
      "synthq_jax, synthq_jax.optim, synthq_jax.privacy, synthq_jax.losses,"
      " synthq_jax.typing",
      {"tensorflow", "seqio", "flax", "gin"},
    ),
    ("synthq_jax.privacy", {"jax", "dp_accounting", "scipy"}),
    ("synthq_jax.main", {"tensorflow", "seqio", "flax", "jax"}),
  ],
  ids=["the core", "privacy", "the command line"],
)
def test_the_core_loads_no_tensorflow_seqio_flax_or_gin(modules, absent):
  script = f"import sys, {modules}; print(*sys.modules)"
  done = subprocess.run(
    [sys.executable, "-c", script],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  assert not absent & set(done.stdout.split())


EXAMPLES = {
  name: path
  for name, path in (MODULES | {p.stem: p for p in LAUNCHERS}).items()
  if ">>> " in path.read_text()
}


def test_the_packages_show_examples():
  shown = {package_of(name) for name in EXAMPLES.keys() & MODULES.keys()}
  assert {"artifacts", "privacy", "optim", "data", "retrieval"} <= shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_docstrings_are_right(name):
  module = importlib.import_module(name)
  outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
  assert outcome.attempted > 0
  assert outcome.failed == 0
