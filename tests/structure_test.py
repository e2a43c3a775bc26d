"""The shape of the project: who may import whom, how long, how documented."""

import ast
import dataclasses
import doctest
import functools
import importlib
import pathlib
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence

import pytest

from synthq_jax import stages
from synthq_jax.runtime import encoder_start, results, stage

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "synthq_jax"
ASSETS = PACKAGE / "assets"  # for programs without this package
MODULES = sorted({*PACKAGE.rglob("*.py")} - {*ASSETS.rglob("*.py")})
LAUNCHERS = sorted((ROOT / "launch").glob("*.py"))

ORDER = (
  "extras",
  "field_kinds",
  "typing",
  "checks",
  "intervals",
  "memory",
  "text_tables",
  "storage",
  "privacy",
  "losses",
  "optim",
  "models",
  "data",
  "retrieval",
  "training generation",
  "audit leakage federated",
  "runtime",
  "report",
  "stages",
  "studies",
  "tools",
  "backends",
  "cli",
  "__main__",
)
"""Who may import whom: a package those that stand in a line before it, and itself."""
RANKS = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}
LIGHT = {"typing", "privacy", "losses", "optim"}
LIGHT_LIBRARIES = {
  "numpy", "scipy", "jax", "jaxtyping", "optax", "jax_privacy",
  "dp_accounting",
}  # fmt: skip


def place(path: pathlib.Path) -> str:
  """The package of a module, or its own name at the top."""
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


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
def imports(path: pathlib.Path) -> set[str]:
  return imports_of(ast.parse(path.read_text()))


def without_type_checking(tree: ast.Module) -> ast.Module:
  """Drops what only type checkers import."""
  tree.body = [
    node
    for node in tree.body
    if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
  ]
  return tree


def test_the_reader_of_imports_sees_every_form():
  tree = ast.parse("import a.b\nfrom c import d\ndef f():\n  import e")
  assert imports_of(tree) == {"a.b", "c.d", "e"}


def wrong_in(
  paths: Sequence[pathlib.Path], faults: Callable[[pathlib.Path], Iterable[str]]
) -> dict[str, list[str]]:
  """What is found in each file, of those in which something is."""
  assert paths
  wrong = {}
  for path in paths:
    try:
      found = [*faults(path)]
    except AssertionError as error:  # it cannot be read
      found = [str(error)]
    if found:
      wrong[path.relative_to(ROOT).as_posix()] = found
  return wrong


def roots_of(names: Iterable[str]) -> set[str]:
  return {name.split(".")[0] for name in names}


def wrong_ranks(path: pathlib.Path) -> Iterable[str]:
  own = place(path)
  for name in sorted(imports(path)):
    if own == "__init__":
      if "synthq_jax" in name:
        yield f"imports {name}"
    elif name.startswith("synthq_jax."):
      other = name.split(".")[1]
      if other != own and RANKS[other] >= RANKS[own]:
        yield f"{own} imports {name}"


def test_a_package_imports_only_what_stands_before_it():
  assert wrong_in(MODULES, wrong_ranks) == {}


def misplaced_libraries(path: pathlib.Path) -> Iterable[str]:
  roots = roots_of(imports(path))
  runtime = without_type_checking(ast.parse(path.read_text()))
  if place(path) != "data":
    heavy = {"tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio"}
    yield from sorted(roots_of(imports_of(runtime)) & heavy)
  if place(path) != "cli":
    yield from roots & {"gin"}
  if place(path) != "backends":
    yield from roots & {"t5x"}


def test_slow_and_optional_libraries_stay_where_they_belong():
  assert wrong_in(MODULES, misplaced_libraries) == {}


def slow_at_import(path: pathlib.Path) -> Iterable[str]:
  tree = without_type_checking(ast.parse(path.read_text()))
  at_import = ast.Module([n for n in tree.body if not is_definition(n)], [])
  roots = roots_of(imports_of(at_import))
  slow = {"tensorflow", "tensorflow_datasets", "seqio", "clu"}
  if "t5x" in roots:  # loads all of it anyway, and only where it is installed
    if place(path) != "backends":
      yield "t5x"
    slow -= {"clu"}
  yield from sorted(roots & slow)


def test_nothing_loads_tensorflow_when_it_is_imported():
  assert wrong_in(MODULES, slow_at_import) == {}


def is_definition(node: ast.AST) -> bool:
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  return isinstance(node, kinds)


def test_the_core_uses_few_libraries():
  known = LIGHT_LIBRARIES | set(sys.stdlib_module_names) | {"synthq_jax"}
  light = [path for path in MODULES if place(path) in LIGHT]
  others = lambda path: sorted(roots_of(imports(path)) - known)  # noqa: E731
  assert wrong_in(light, others) == {}


def test_stages_import_neither_each_other_nor_what_runs_them():
  names = stages.SUMMARIES
  assert {"prepare_data", "finetune_dp", "generate", "evaluate"} <= set(names)
  others = {f"synthq_jax.stages.{name}" for name in (*names, "plan")}
  for name in names:
    seen = imports(PACKAGE / "stages" / f"{name}.py")
    assert not {n for n in seen if ".".join(n.split(".")[:3]) in others}, name


def test_a_stage_runs_after_what_it_needs():
  order = list(stages.SUMMARIES)
  for name in order:
    one = stages.get(name)
    assert one.name == name
    assert {*one.needs} <= {*order[: order.index(name)]}


def test_few_stages_hold_the_secret_or_read_private_queries():
  known = [stages.get(name) for name in stages.SUMMARIES]
  holders = {one.name for one in known if one.needs_secret}
  assert holders == {
    *("prepare_data", "finetune_dp", "direct_dp", "audit", "release_scores"),
    *("learn_to_rank", "learn_adapter"),
  }
  private = {one.name: private_inputs(one) for one in known}
  assert {name: fields for name, fields in private.items() if fields} == {
    **{
      name: {"prepared"}
      for name in (
        *("finetune_dp", "direct_dp", "learn_to_rank", "learn_adapter"),
        "audit",
        *("evaluate", "query_leakage", "compare_queries"),
        *("release_scores", "report"),
      )
    },
    # For the row `original` alone, as the test of their jobs holds.
    "train_retriever": {"documents"},
    "learn_map": {"documents"},
  }


def private_inputs(one: stage.Stage) -> set[str]:
  """Names the inputs of a stage whose types let private queries in."""
  [(_, inputs)] = [
    typing.get_args(hint)
    for hint in typing.get_type_hints(one.run).values()
    if typing.get_origin(hint) is stage.Task
  ]
  if inputs is type(None):
    return set()
  return {
    name
    for name, hint in typing.get_type_hints(inputs).items()
    if any(map(lets_in_private_queries, parts_of(hint)))
  }


def parts_of(hint) -> Iterable:
  """Yields a type and all that it is made of: X | None, Sequence[X]."""
  yield hint
  for part in typing.get_args(hint):
    yield from parts_of(part)


def lets_in_private_queries(part) -> bool:
  return part in (typing.Any, object, results.PreparedData)


@pytest.mark.parametrize(
  "hint",
  [
    results.PreparedData,
    results.PreparedData | None,
    Sequence[results.PreparedData],
    dict[str, tuple[results.PreparedData, ...]],
    typing.Any,
    Sequence[typing.Any] | None,
    object,
  ],
)
def test_an_input_that_lets_private_queries_in_is_told(hint):
  inputs = dataclasses.make_dataclass("Inputs", [("documents", hint)])

  def run(task):
    """Stands for a stage's."""

  run.__annotations__["task"] = stage.Task[None, inputs]
  assert private_inputs(types.SimpleNamespace(run=run)) == {"documents"}


def test_a_stage_that_starts_from_a_checkpoint_says_from_which():
  for one in map(stages.get, stages.SUMMARIES):
    inputs = getattr(sys.modules[one.run.__module__], "Inputs", None)
    hints = typing.get_type_hints(inputs).values() if inputs else ()
    starts = {pathlib.Path, encoder_start.EncoderStart}
    is_read = any(starts & set(parts_of(hint)) for hint in hints)
    assert bool(one.starts_from) == is_read, one.name


def test_every_module_with_a_stage_is_in_the_table():
  held = {
    path.stem
    for path in (PACKAGE / "stages").glob("*.py")
    if "\nSTAGE = " in path.read_text()
  }
  assert held == set(stages.SUMMARIES)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda p: p.stem)
def test_launchers_build_command_lines_with_the_standard_library(path):
  tree = ast.parse(path.read_text())
  roots = {name.split(".")[0] for name in imports_of(tree)}
  own = {other.stem for other in LAUNCHERS}
  others = roots - set(sys.stdlib_module_names) - own
  assert others <= ({"absl", "xmanager"} if path.stem == "xm" else set())
  # XManager is imported where it is used, so that --dry_run needs none.
  at_import = ast.Module([n for n in tree.body if not is_definition(n)], [])
  assert not {"absl", "xmanager"} & {
    name.split(".")[0] for name in imports_of(at_import)
  }


def test_there_are_launchers():
  assert {"sweeps", "tpu_vm", "xm"} <= {path.stem for path in LAUNCHERS}


def unreadable(path: pathlib.Path) -> Iterable[str]:
  text = path.read_text()
  if (lines := len(text.splitlines())) > 600:
    yield f"{lines} lines"
  summary = ast.get_docstring(ast.parse(text)) or ""
  if summary.split("\n\n")[0].rstrip()[-1:] not in {".", ":"}:
    yield "no docstring that begins with a sentence"


def test_a_module_is_short_and_says_what_it_is():
  assert wrong_in([*MODULES, *LAUNCHERS], unreadable) == {}


def unchecked(path: pathlib.Path) -> Iterable[str]:
  """Arrays that NumPy hands to C, which does not hear of a full disk."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      called = ast.unparse(node.func)
      if called == "np.save" or node.func.attr == "tofile":
        yield f"{called} in line {node.lineno}"


def test_arrays_are_written_by_the_module_that_hears_of_a_full_disk():
  modules = [path for path in MODULES if path.name != "array_files.py"]
  assert wrong_in(modules, unchecked) == {}
  assert [*unchecked(PACKAGE / "storage/array_files.py")]


def test_all_files_with_a_fault_are_named(tmp_path, monkeypatch):
  monkeypatch.setitem(globals(), "ROOT", tmp_path)
  monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
  (tmp_path / "losses").mkdir()
  paths = [tmp_path / f"losses/{name}.py" for name in "abc"]
  paths[0].write_text('"""No end"""\nimport seqio, gin, t5x\nimport chex\n')
  paths[1].write_text("from synthq_jax.optim import noise\n" * 601)
  paths[2].write_text('"""Good."""\nfrom synthq_jax.privacy import terms\n')
  one, two, _ = (f"losses/{name}.py" for name in "abc")
  assert wrong_in(paths, misplaced_libraries) == {one: ["seqio", "gin", "t5x"]}
  assert wrong_in(paths, slow_at_import) == {one: ["t5x", "seqio"]}
  said = "losses imports synthq_jax.optim.noise"
  assert wrong_in(paths, wrong_ranks) == {two: [said]}
  words = "no docstring that begins with a sentence"
  assert wrong_in(paths, unreadable) == {
    one: [words],
    two: ["601 lines", words],
  }


def test_every_folder_of_the_package_is_a_documented_package():
  folders = {p.parent for p in MODULES}
  assert PACKAGE / "optim" in folders
  for folder in folders:
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree), folder


def test_the_command_line_loads_nothing_slow_before_it_knows_the_stage():
  script = (
    "import sys, synthq_jax.cli.main\n"
    "print(sorted({'tensorflow', 'seqio', 'flax', 'jax'} & set(sys.modules)))"
  )
  done = subprocess.run(
    [sys.executable, "-c", script],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  assert done.stdout == "[]\n"


def has_example(path: pathlib.Path) -> bool:
  return ">>> " in path.read_text()


EXAMPLES = [p for p in [*MODULES, *LAUNCHERS] if has_example(p)]


def test_the_packages_show_examples():
  shown = {place(p) for p in EXAMPLES if p in MODULES}
  assert {"storage", "privacy", "optim", "data", "retrieval"} <= shown


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_in_docstrings_are_right(path):
  home = path.parent if path in LAUNCHERS else ROOT  # launchers are no package
  name = ".".join(path.relative_to(home).with_suffix("").parts)
  module = importlib.import_module(name.removesuffix(".__init__"))
  outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
  assert outcome.attempted > 0
  assert outcome.failed == 0
