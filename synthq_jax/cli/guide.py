"""Lists recipes, their settings, and the plan of a run."""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import stages, text_tables
from synthq_jax.cli import flags
from synthq_jax.runtime import config_types

__all__ = [
  "CONFIG",
  "dry_run",
  "gin_configs",
  "header",
  "list_macros",
  "list_recipes",
  "render_recipe",
  "settings",
]

CONFIG = "config.gin"
"""File of a working directory with the settings of its latest run."""
_HIDDEN = re.compile(r"(?m)^# (\S+) is not written here")
_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.*?)(?:  +# (.*))?$")
_FOLDERS = ("recipes", "studies")
"""Folders of gin_configs with files that a command can run."""
_LINE_WIDTH = 100
"""Length of a line of `synthq recipes` in characters."""
_VALUE_WIDTH = 60
"""Largest length of a listed value in characters."""


def gin_configs() -> pathlib.Path:
  """Returns the folder of our gin files."""
  package = pathlib.Path(__file__).resolve().parents[1]
  folders = (root / "gin_configs" for root in (package.parent, package))
  return next(folder for folder in folders if folder.is_dir())


def list_macros() -> list[str]:
  """Lists the macros that our gin files define."""
  lines = (
    line
    for path in gin_configs().glob("*/*.gin")
    for line in path.read_text(encoding="utf-8").splitlines()
  )
  return sorted({match[1] for match in map(_MACRO.match, lines) if match})


def header(path: pathlib.Path) -> dict[str, str]:
  """Parses the first comment of a gin file.

  Args:
    path: the file.

  Returns:
    Paragraphs by title, e.g. "Required"; the first paragraph has the title "".
  """
  lines = _take_comment(flags.read_gin(path).splitlines())
  paragraphs, name, is_first = {"": ""}, "", True
  for line in lines:
    is_first = is_first and line != "#"
    titled = not is_first and re.match(
      r"# ([A-Z][\w ]*(?: \([^)]*\))?): (.*)", line
    )
    if titled:
      name, line = titled[1], titled[2]
    paragraphs[name] = (
      f"{paragraphs.get(name, '')} {line.removeprefix('#').strip()}"
    )
  return {name: " ".join(text.split()) for name, text in paragraphs.items()}


def list_recipes(folder: pathlib.Path) -> str:
  """Lists recipes and studies, a line each; those that need nothing come first.

  Args:
    folder: the folder gin_configs.
  """
  groups: dict[bool, list[str]] = {True: [], False: []}
  for path in (
    p for name in _FOLDERS for p in sorted((folder / name).glob("*"))
  ):
    paragraphs = header(path)
    words = re.split(r"(?<=[.?]) ", paragraphs[""])[0]
    words = textwrap.shorten(words, _LINE_WIDTH - 37, placeholder=" ...")
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


def render_recipe(path: pathlib.Path) -> str:
  """Formats the header of a recipe: requirements, time, usual settings."""
  paragraphs = (
    f"{name}: {text}" if name else text for name, text in header(path).items()
  )
  return "\n".join([path.name, *map(_wrap, paragraphs)])


def _wrap(text: str) -> str:
  return textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  ")


def settings(
  config: Any,
  read: Sequence[Sequence[pathlib.Path]],
  *,
  name: str = "",
  width: int | None = None,
) -> str:
  """Lists settings with value, origin and meaning.

  Args:
    config: an instance of the dataclass that the files configure. None: lists only
      the files' macros.
    read: for each gin file, the file and those it includes; empty for the defaults.
    name: part of the names to list.
    width: width of the terminal in characters; meanings are folded below their
      settings. None: a table with one line for each setting.
  """
  parameters = [] if config is None else [*_list_parameters(config, read)]
  meanings = {row[0]: row[3] for row in parameters}
  rows = [
    (
      flag,
      textwrap.shorten(str(value), _VALUE_WIDTH, placeholder=" ..."),
      *rest,
    )
    for flag, value, *rest in [*_list_macros(read, meanings), *parameters]
  ]
  rows = [row for row in rows if name.lower() in row[0].lower()]
  if width:
    return "\n".join(_fold(row, width) for row in rows)
  return text_tables.Table(
    header=("Name", "Value", "From", "Meaning"), rows=tuple(rows)
  ).text()


def _fold(row: Sequence[str], width: int) -> str:
  """Formats a setting as a flag with its origin, and folds its meaning below."""
  flag, value, origin, meaning = row
  return "\n".join(
    line
    for text, indent in (
      (f"{flag}={value}  ({origin})", ""),
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


def _list_macros(
  read: Sequence[Sequence[pathlib.Path]], meanings: Mapping[str, str]
) -> Iterator[tuple[str, str, str, str]]:
  """Yields (flag, value, origin, meaning) of each macro.

  Value and origin are those that gin takes: the last line that it reads. The
  meaning is the trailing comment of that line, else the first one in any file, else
  the meaning of the parameter that the macro sets.
  """
  paths = list(dict.fromkeys(path for group in read for path in group))
  lines = {path: flags.read_gin(path).splitlines() for path in paths}
  macro_names = {
    match[1]: None
    for path in paths
    for line in lines[path]
    if (match := _MACRO.match(line))
  }
  for name in macro_names:
    file, _, number = flags.locate(name, read, ()).rpartition(":")
    index = int(number) - 1
    taken_first = sorted(paths, key=lambda path: path != pathlib.Path(file))
    comments = (_find_comment(lines[path], name) for path in taken_first)
    sets = re.compile(rf"([\w.]+) = %{name}$")
    matches = (m for path in paths for m in map(sets.match, lines[path]) if m)
    parameters = (meanings.get(f"--gin.{m[1]}", "") for m in matches)
    meaning = next(filter(None, (*comments, *parameters)), "")
    value = _MACRO.match(lines[pathlib.Path(file)][index])[2]
    yield f"--gin.{name}", value, f"{pathlib.Path(file).name}:{number}", meaning


def _find_comment(lines: Sequence[str], name: str) -> str:
  """Returns the comment behind a macro, which the next lines may continue."""
  for index, line in enumerate(lines):
    match = _MACRO.match(line)
    if match and match[1] == name and match[3]:
      comment = [match[3], *_take_comment(lines[index + 1 :])]
      return " ".join(part.lstrip("# ") for part in comment)
  return ""


def _take_comment(lines: Sequence[str]) -> Iterator[str]:
  return itertools.takewhile(lambda line: line.startswith("#"), lines)


def _list_parameters(
  config: Any, read: Sequence[Sequence[pathlib.Path]]
) -> Iterator[tuple[str, str, str, str]]:
  """Yields (flag, value, origin, meaning) of each field, parts included."""
  label, meanings = (
    config_types.label(type(config)),
    _read_meanings(type(config)),
  )
  parts = []
  for field in dataclasses.fields(config):
    if not field.init:
      continue
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      parts.append(value)
      continue
    name = f"{label}.{field.name}"
    source = flags.locate(name, read, ())
    where = "default" if source == name else pathlib.Path(source).name
    yield f"--gin.{name}", repr(value), where, meanings.get(field.name, "")
  for part in parts:
    yield from _list_parameters(part, read)


def _read_meanings(kind: type) -> dict[str, str]:
  """Reads the docstrings of a dataclass's fields from its source."""
  meanings: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    if base.__module__ == "builtins" or not dataclasses.is_dataclass(base):
      continue
    try:
      tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
    except (OSError, TypeError):  # a class without source, made at run time
      continue
    body = tree.body[0].body
    for field, below in itertools.pairwise(body):
      match field, below:
        case (
          ast.AnnAssign(target=ast.Name(id=name)),
          ast.Expr(value=ast.Constant(value=str() as text)),
        ):
          meanings[name] = " ".join(text.split())
  return meanings


def dry_run(
  config: Any,
  workdir: pathlib.Path,
  stage_names: Sequence[str],
  read: Sequence[Sequence[pathlib.Path]],
  text: str = "",
) -> str:
  """Lists the results that a run would make or find, and its epsilons.

  Args:
    config: a `plan.RunConfig`.
    workdir: the working directory, which may be missing.
    stage_names: names of the stages to run.
    read: for each gin file, the file and those it includes.
    text: the configuration that the run would write to `CONFIG`.
  """
  from synthq_jax.stages import plan, prepare_data

  seen = plan.outlook(config, workdir, stage_names)
  lines, unknown = [], []
  for name, rows in seen.progress:
    if rows is None:
      if seen.rows[name]:
        unknown.append(f"{name}: {_format_rows(name, seen.rows[name])}")
      continue
    present = [row or name for row, is_there in rows.items() if is_there]
    missing = [row or name for row, is_there in rows.items() if not is_there]
    notes = [f"there: {', '.join(present)}"] if present else []
    if missing:
      why = _explain_others(workdir, name, rows, text)
      notes.append(f"to make: {', '.join(missing)}{why}")
    lines.append(f"{name}: {'; '.join(notes) or 'nothing to do'}")
  if unknown:
    lines += ["then:", *unknown]
  unit = prepare_data.get_unit(config.prepare_data)
  lines += [
    "",
    f"unit of privacy: one {unit}",
    *map(_format_training, seen.trainings),
  ]
  run_stages = stages.with_needs(stage_names)
  lines += plan.list_notes(config, run_stages)
  lines += ["", *_price(config, workdir, run_stages, seen.trainings)]
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
  """Names the settings in which existing results differ; "" without results."""
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
  listed = ", ".join(sorted(names)) or (
    "none in config.gin, so other files of a model or of the data, or another version"
  )
  return f" (made with other settings: {listed})"


def _format_rows(name: str, rows: Sequence[str]) -> str:
  """Formats the rows of a stage; test sets with equal rows share an entry."""
  if name == "release_scores":
    return f"{name}, if there are enough test queries"
  if name != "evaluate":
    return ", ".join(row or name for row in rows)
  by_set: dict[str, list[str]] = {}
  for row in rows:
    test_set, _, system = row.rpartition("/")
    by_set.setdefault(test_set, []).append(system)
  by_rows: dict[tuple[str, ...], list[str]] = {}
  for test_set, systems in by_set.items():
    by_rows.setdefault(tuple(systems), []).append(test_set)
  return "; ".join(
    f"{', '.join(systems)} on {', '.join(sets)}"
    for systems, sets in by_rows.items()
  )


def _format_training(training: Any) -> str:
  """Formats a planned private training as a line."""
  from synthq_jax.privacy import rounding

  delta = "1/(2n)" if training.delta is None else rounding.delta(training.delta)
  size = "n" if training.batch_size is None else f"{training.batch_size:,}"
  if training.num_records is None:
    number, most = "is known once the data is read", "what n allows"
  else:
    number, most = f"{training.num_records:,}", f"{training.max_batch_size:,}"
  if training.num_users not in (None, training.num_records):
    number = f"{number} of {training.num_users:,} users"
  return (
    f"{training.result_path}: epsilon {rounding.epsilon(training.epsilon)},"
    f" delta {delta}, n"
    f" {number}, batch {size} expected, at most {most}, {training.steps:,} steps"
  )


def _price(
  config: Any,
  workdir: pathlib.Path,
  stage_names: Sequence[str],
  trainings: Sequence[Any],
) -> Iterator[str]:
  """Yields lines with the epsilon of each private training and of the run."""
  from synthq_jax.privacy import rounding
  from synthq_jax.runtime import released_results

  weights = [
    training for training in trainings if training.stage == "learn_to_rank"
  ]
  total = sum(
    training.epsilon for training in trainings if training.is_released
  )
  for training in trainings:
    if training not in weights:
      use = "released" if training.is_released else "only compared"
      yield f"epsilon of {training.row}: {rounding.epsilon(training.epsilon)}, {use}"
  if number := sum(training.is_released for training in weights):
    epsilon = config.learn_to_rank.epsilon
    yield (
      f"epsilon of the weights of BM25's scores: {rounding.epsilon(epsilon)} for"
      f" {'one row' if number == 1 else f'each of {number} rows'}, released"
    )
  scores = config.release_scores
  if scores.enabled and "release_scores" in stage_names:
    total += scores.epsilon
    yield f"epsilon of the scores: {rounding.epsilon(scores.epsilon)}, released"
  yield (
    "epsilon of what this run releases, together: at most"
    f" {rounding.epsilon(total)}, at the sum of their deltas (both simply added up)"
  )
  released = released_results.read(workdir)
  everything = released.everything
  if released.started and everything is not None:
    yield (
      f"started here before: {len(released.started)} private trainings, epsilon"
      f" {rounding.epsilon(everything.epsilon)} together; existing results cost"
      " nothing again"
    )
