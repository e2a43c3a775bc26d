"""Every module leads from a command, from a public name, or from a backend."""

import ast
import pathlib
import re

from synthq_jax import studies

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "synthq_jax"

# What others rely on (the page on design), beside the command.
PUBLIC = (
  "typing", "artifacts", "optim", "privacy.accounting", "privacy.sampling",
  "privacy.sensitivity", "privacy.statement", "privacy.users",
  "losses.contrastive",
  "models.t5", "models.t5_config", "models.t5_checkpoints",
  "generation.decoding", "retrieval.measures", "retrieval.trec",
)  # fmt: skip
# Modules that nothing of that leads to.
UNREACHED: set[str] = set()


def modules() -> dict[str, pathlib.Path]:
  """The modules of the package, by the name by which each is imported."""
  names = {}
  for path in {*PACKAGE.rglob("*.py")} - {*(PACKAGE / "assets").rglob("*.py")}:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    names[name.removesuffix(".__init__")] = path
  return names


def imports(path: pathlib.Path) -> set[str]:
  """What a module imports, now or later; names in modules stand for these."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def configurable() -> set[str]:
  """What the gin files import."""
  line = re.compile(
    r"(?m)^(?:from (synthq_jax\S*) )?import (synthq_jax\S*|\w+)"
  )
  texts = [path.read_text() for path in (ROOT / "gin_configs").rglob("*.gin")]
  matches = [match for text in texts for match in line.findall(text)]
  return {".".join(filter(None, match)) for match in matches}


def reached(entries: set[str], known: dict[str, pathlib.Path]) -> set[str]:
  """The modules that an import of the entries leads to, sooner or later."""
  seen, waiting = set(), [*entries]
  while waiting:
    name = waiting.pop()
    if parent := name.rpartition(".")[0]:
      waiting.append(parent)  # of a name in a module; and its package
    if name in known and name not in seen:
      seen.add(name)
      waiting.extend(imports(known[name]))
  return seen


def test_every_module_can_be_reached_from_a_command_or_a_public_name():
  known = modules()
  entries = {f"synthq_jax.{name}" for name in ("__main__", *PUBLIC)}
  # A file of stages is a command; a backend is started by another program.
  entries |= {
    n
    for n in known
    if n.startswith(("synthq_jax.stages.", "synthq_jax.backends"))
  }
  entries |= {f"{studies.__name__}.{name}" for name in studies.NAMES}
  left = known.keys() - reached(entries | configurable(), known)
  assert {name.removeprefix("synthq_jax.") for name in left} == UNREACHED


def test_what_nothing_imports_is_not_reached(tmp_path):
  texts = {"a": "import b.c", "b": "", "b.c": "def f():\n  import d", "e": "x"}
  known = {}
  for name, text in {**texts, "d": ""}.items():
    known[name] = tmp_path / f"{name}.py"
    known[name].write_text(text)
  assert reached({"a"}, known) == {"a", "b", "b.c", "d"}
