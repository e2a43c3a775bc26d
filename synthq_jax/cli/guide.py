"""Lists recipes, their settings, and the plan of a run."""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import stages, text_tables
from synthq_jax.cli import flags
from synthq_jax.runtime import config_types

__all__ = [
  "CONFIG",
  "check_documents",
  "dry_run",
  "gin_configs",
  "header",
  "list_macros",
  "recipe",
  "recipes",
  "settings",
]

CONFIG = "config.gin"
"""The file of a working directory that holds the settings of its last run."""
_HIDDEN = re.compile(r"(?m)^# (\S+) is not written here")
_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.*?)(?:  +# (.*))?$")
_BEHIND = re.compile(r"[^#\s].*  +# ")
"""A setting with a comment behind it, which the next lines may continue."""
_NAMED = re.compile(
  r"^(\S*(?:prepare_data\.Config\.source|generate\.Config\.num_documents))"
  r" *= *(\S+)"
)
"""Parameters that SOURCE and NUM_DOCUMENTS set."""
_SHOWN = ("recipes", "studies")
"""Folders of gin_configs that a command takes."""
_LINE = 100
"""Characters of a line of `synthq recipes`."""
_WIDEST = 60
"""Characters of a value that is listed."""


def gin_configs() -> pathlib.Path:
  """Returns the folder of our gin files."""
  package = pathlib.Path(__file__).resolve().parents[1]
  folders = (root / "gin_configs" for root in (package.parent, package))
  return next(folder for folder in folders if folder.is_dir())


def list_macros() -> list[str]:
  """Returns the macros that our gin files define."""
  lines = (
    line
    for path in gin_configs().glob("*/*.gin")
    for line in path.read_text(encoding="utf-8").splitlines()
  )
  return sorted({match[1] for match in map(_MACRO.match, lines) if match})


def check_documents(
  names: Sequence[str],
  bindings: Sequence[str],
  find: Callable[[str], pathlib.Path | None],
) -> None:
  """Refuses more documents than a source can have, before JAX is loaded.

  It reads texts alone: whatever it cannot tell from them is refused by
  `plan.run`, some seconds later.

  Args:
    names: gin files.
    bindings: NAME=value of the command line, which win.
    find: from the name of a gin file to its path.

  Raises:
    ValueError: if NUM_DOCUMENTS is too large for SOURCE.
  """
  said: dict[str, str] = {}
  opened = number = None

  def read(name: str, within: tuple[pathlib.Path, ...] = ()) -> None:
    path = find(name)
    if path in within:
      raise ValueError(f"{path} includes itself")  # gin says so, later
    for line in path.read_text().splitlines() if path else ():
      if line.startswith("include "):
        read(ast.literal_eval(line.removeprefix("include ")), (*within, path))
      elif found := _MACRO.match(line) or _NAMED.match(line):
        said[found[1]] = found[2]

  with contextlib.suppress(OSError, ValueError, SyntaxError):
    for name in names:
      read(name)
    for binding in bindings:
      name, _, value = binding.partition("=")
      said[name] = flags.write_literal(value)
    macros = ("NUM_DOCUMENTS", "SOURCE")
    for name, value in said.items():
      if _NAMED.match(f"{name}={value}") and value[1:] not in macros:
        return  # the macros are not what counts
    number, source = (ast.literal_eval(said.get(m, "None")) for m in macros)
    if isinstance(number, int) and isinstance(source, str):
      from synthq_jax.data import sources

      opened = sources.open(source)
  if opened:
    opened.check_size(number)


def header(path: pathlib.Path) -> dict[str, str]:
  """Parses the first comment of a gin file.

  Args:
    path: the file.

  Returns:
    Paragraphs by their first words, e.g. "Required"; "" is the first one.
  """
  lines = _comment(path.read_text().splitlines())
  found, name, is_first = {"": ""}, "", True
  for line in lines:
    is_first = is_first and line != "#"
    titled = not is_first and re.match(
      r"# ([A-Z][\w ]*(?: \([^)]*\))?): (.*)", line
    )
    if titled:
      name, line = titled[1], titled[2]
    found[name] = f"{found.get(name, '')} {line.removeprefix('#').strip()}"
  return {name: " ".join(text.split()) for name, text in found.items()}


def recipes(folder: pathlib.Path) -> str:
  """Lists recipes and studies, a line each: first those that need nothing.

  Args:
    folder: gin_configs.
  """
  groups: dict[bool, list[str]] = {True: [], False: []}
  for path in (p for name in _SHOWN for p in sorted((folder / name).glob("*"))):
    paragraphs = header(path)
    words = re.split(r"(?<=[.?]) ", paragraphs[""])[0]
    words = textwrap.shorten(words, _LINE - 37, placeholder=" ...")
    line = f"{path.relative_to(folder)!s:<36} {words}"
    groups[paragraphs["Required"].startswith("nothing")].append(line)
  return "\n".join(
    [
      "need nothing:",
      *groups[True],
      "\nneed data or a checkpoint:",
      *groups[False],
      "\n`synthq recipes NAME` prints what one needs and how long it takes.",
    ]
  )


def recipe(path: pathlib.Path) -> str:
  """Formats the header of a recipe: needs, time, usual settings."""
  paragraphs = (
    f"{name}: {text}" if name else text for name, text in header(path).items()
  )
  return "\n".join([path.name, *map(_wrapped, paragraphs)])


def _wrapped(text: str) -> str:
  return textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  ")


def settings(
  config: Any,
  read: Sequence[Sequence[pathlib.Path]],
  *,
  name: str = "",
  width: int | None = None,
) -> str:
  """Lists what can be set: name, value, where from, meaning.

  Args:
    config: an instance of the dataclass that the files configure; None: only
      the files' macros are listed.
    read: the gin files and what they include; none for the defaults.
    name: only settings whose name holds this.
    width: characters of a line, for a terminal: the meaning stands below its
      setting. None: one line each, as columns.
  """
  parameters = [] if config is None else [*_parameters(config, read)]
  meanings = {row[0]: row[3] for row in parameters}
  rows = [
    (called, textwrap.shorten(str(value), _WIDEST, placeholder=" ..."), *rest)
    for called, value, *rest in [*_macros(read, meanings), *parameters]
  ]
  rows = [row for row in rows if name.lower() in row[0].lower()]
  if width:
    return "\n".join(_folded(row, width) for row in rows)
  return text_tables.Table(
    header=("Name", "Value", "From", "Meaning"), rows=tuple(rows)
  ).text()


def _folded(row: Sequence[str], width: int) -> str:
  """Returns a setting as a flag and its origin, the meaning folded below."""
  called, value, origin, meaning = row
  return "\n".join(
    line
    for text, indent in (
      (f"{called}={value}  ({origin})", ""),
      (meaning, "    "),
    )
    for line in textwrap.wrap(
      text,
      width,
      initial_indent=indent,
      subsequent_indent=indent or "  ",
      break_on_hyphens=False,
    )
  )


def _macros(
  read: Sequence[Sequence[pathlib.Path]], meanings: Mapping[str, str]
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the macros of gin files, each as the file has it that wins.

  One without a comment behind it means what the parameter means that it sets, or
  what stands above it and does not continue the comment of the line before.
  """
  paths = list(dict.fromkeys(path for group in read for path in group))
  lines = {path: path.read_text().splitlines() for path in paths}
  names = {
    found[1]: None
    for path in paths
    for line in lines[path]
    if (found := _MACRO.match(line))
  }
  for name in names:
    file, _, number = flags.locate(name, read, ()).rpartition(":")
    at = int(number) - 1
    behind, above = zip(
      *(_comments(lines[p], name) for p in paths), strict=True
    )
    sets = re.compile(rf"([\w.]+) = %{name}$")
    texts = (m for path in paths for m in map(sets.match, lines[path]) if m)
    parameter = next((meanings.get(f"--gin.{m[1]}", "") for m in texts), "")
    meaning = next(filter(None, (*behind, parameter, *above)), "")
    value = _MACRO.match(lines[pathlib.Path(file)][at])[2]
    yield f"--gin.{name}", value, f"{pathlib.Path(file).name}:{number}", meaning


def _comments(lines: Sequence[str], name: str) -> tuple[str, str]:
  """Returns the comments behind a macro in a file, and above it."""
  for at, line in enumerate(lines):
    found = _MACRO.match(line)
    if found and found[1] == name:
      below, above = lines[at + 1 :], lines[:at][::-1]
      behind = [found[3], *_comment(below)] if found[3] else []
      before = [*_comment(above)]
      if before and any(map(_BEHIND.match, above[len(before) :][:1])):
        before = []  # it goes on with what stands behind the line above
      return _joined(behind), _joined(before[::-1])
  return "", ""


def _comment(lines: Sequence[str]) -> Iterator[str]:
  return itertools.takewhile(lambda line: line.startswith("#"), lines)


def _joined(comment: Sequence[str]) -> str:
  return " ".join(line.lstrip("# ") for line in comment)


def _parameters(
  config: Any, read: Sequence[Sequence[pathlib.Path]]
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the fields of a configuration and of all its parts."""
  label, meanings = config_types.label(type(config)), _meanings(type(config))
  parts = []
  for field in (one for one in dataclasses.fields(config) if one.init):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      parts.append(value)
      continue
    name = f"{label}.{field.name}"
    place = flags.locate(name, read, ())
    where = "default" if place == name else pathlib.Path(place).name
    yield f"--gin.{name}", repr(value), where, meanings.get(field.name, "")
  for part in parts:
    yield from _parameters(part, read)


def _meanings(kind: type) -> dict[str, str]:
  """Returns the docstrings of a dataclass's fields."""
  found: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    if base.__module__ == "builtins" or not dataclasses.is_dataclass(base):
      continue
    try:
      tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
    except (OSError, TypeError):  # made of others
      continue
    body = tree.body[0].body
    for field, below in itertools.pairwise(body):
      match field, below:
        case (
          ast.AnnAssign(target=ast.Name(id=name)),
          ast.Expr(value=ast.Constant(value=str() as text)),
        ):
          found[name] = " ".join(text.split())
  return found


def dry_run(
  config: Any,
  workdir: pathlib.Path,
  wanted: Sequence[str],
  read: Sequence[Sequence[pathlib.Path]],
  text: str = "",
) -> str:
  """Lists the results that a run would make or find, and its price.

  Args:
    config: a `plan.RunConfig`.
    workdir: the working directory, which need not be there.
    wanted: stages.
    read: the gin files and what they include.
    text: the configuration as the run would write it to `CONFIG`.
  """
  from synthq_jax.stages import plan, prepare_data

  seen = plan.outlook(config, workdir, wanted)
  lines, later = [], []
  for name, rows in seen.there:
    if rows is None:
      if seen.rows[name]:
        later.append(f"{name}: {_listed(name, seen.rows[name])}")
      continue
    there = [row or name for row, is_there in rows.items() if is_there]
    missing = [row or name for row, is_there in rows.items() if not is_there]
    said = [f"there: {', '.join(there)}"] if there else []
    if missing:
      why = _explain_others(workdir, name, rows, text)
      said.append(f"to make: {', '.join(missing)}{why}")
    lines.append(f"{name}: {'; '.join(said) or 'nothing to do'}")
  if later:
    lines += ["then:", *later]
  unit = prepare_data.get_unit(config.prepare_data)
  lines += ["", f"unit of privacy: one {unit}", *map(_training, seen.trainings)]
  made = stages.with_needs(wanted, config)
  lines += plan.export_notes(config, made)
  lines += ["", *_price(config, workdir, made, seen.trainings)]
  times = [
    f"{key}: {text}"
    for group in read
    for path in group[:1]
    for key, text in header(path).items()
    if key in ("Hardware and time", "Time", "Hours")
  ]
  return "\n".join([*lines, *times])


def _explain_others(
  workdir: pathlib.Path, name: str, rows: Mapping[str, bool], text: str
) -> str:
  """Names the settings in which a stage's results here differ; "" without any."""
  from synthq_jax.report import means
  from synthq_jax.runtime import results
  from synthq_jax.storage import artifacts

  stage = stages.get(name)
  folders = [
    workdir / top / (stage.folder or name) / row
    for row, is_there in rows.items()
    for top in ("", results.PRIVATE)
    if not is_there
  ]
  if not any((folder / artifacts.RESULT_NAME).exists() for folder in folders):
    return ""
  path = workdir / CONFIG
  texts = [path.read_text("utf-8") if path.exists() else text, text]
  old, new = map(means.parse_settings, texts)
  names = {x for x in {*old, *new} if old.get(x) != new.get(x)}
  names = {x for x in names if "." not in x} or names
  hidden, shown = ({*_HIDDEN.findall(each)} for each in texts)
  names |= hidden ^ shown
  listed = ", ".join(sorted(names)) or "see its config.gin, or another version"
  return f" (made with other settings: {listed})"


def _listed(name: str, rows: Sequence[str]) -> str:
  """Returns the rows of a stage in words; sets with the same rows together."""
  if name == "release_scores":
    return f"{name}, if there are enough test queries"
  if name != "evaluate":
    return ", ".join(row or name for row in rows)
  by_set: dict[str, list[str]] = {}
  for row in rows:
    called, _, system = row.rpartition("/")
    by_set.setdefault(called, []).append(system)
  by_rows: dict[tuple[str, ...], list[str]] = {}
  for called, systems in by_set.items():
    by_rows.setdefault(tuple(systems), []).append(called)
  return "; ".join(
    f"{', '.join(systems)} on {', '.join(sets)}"
    for systems, sets in by_rows.items()
  )


def _training(one: Any) -> str:
  """Returns a line on a private training of a plan."""
  from synthq_jax.privacy import rounding

  delta = "1/(2n)" if one.delta is None else rounding.delta(one.delta)
  size = "n" if one.batch_size is None else f"{one.batch_size:,}"
  if one.num_records is None:
    number, most = "is known once the data is read", "what n allows"
  else:
    number, most = f"{one.num_records:,}", f"{one.max_batch_size:,}"
  if one.num_users not in (None, one.num_records):
    number = f"{number} of {one.num_users:,} users"
  return (
    f"{one.place}: epsilon {rounding.epsilon(one.epsilon)}, delta {delta}, n"
    f" {number}, batch {size} expected, at most {most}, {one.steps:,} steps"
  )


def _price(
  config: Any,
  workdir: pathlib.Path,
  wanted: Sequence[str],
  trainings: Sequence[Any],
) -> Iterator[str]:
  """Yields what the private trainings of a run are to cost."""
  from synthq_jax.privacy import rounding
  from synthq_jax.runtime import released_results

  weights = [one for one in trainings if one.stage == "learn_to_rank"]
  total = sum(one.epsilon for one in trainings if one.is_released)
  for one in trainings:
    if one not in weights:
      use = "released" if one.is_released else "only compared"
      yield f"epsilon of {one.row}: {rounding.epsilon(one.epsilon)}, {use}"
  if weights:
    epsilon = config.learn_to_rank.epsilon
    number = sum(one.is_released for one in weights)
    yield (
      f"epsilon of the weights of BM25's scores: {rounding.epsilon(epsilon)} for"
      f" each of {number} rows, released"
    )
  scores = config.release_scores
  if scores.enabled and "release_scores" in wanted:
    total += scores.epsilon
    yield f"epsilon of the scores: {rounding.epsilon(scores.epsilon)}, released"
  yield (
    "epsilon of what this run releases, together: at most"
    f" {rounding.epsilon(total)}, at the sum of their deltas (both simply added up)"
  )
  found = released_results.read(workdir)
  whole = found.everything
  if found.started and whole is not None:
    yield (
      f"started here before: {len(found.started)} private trainings, epsilon"
      f" {rounding.epsilon(whole.epsilon)} together; what is there costs nothing"
      " again"
    )
