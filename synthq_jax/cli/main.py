"""The command line, `synthq STAGE --gin_file=FILE --workdir=FOLDER`.

The only importer of gin: files and flags become frozen dataclasses here, and
everything below works with those. Habits are T5X's (files that include files,
UPPER_CASE macros for what users change); gin's dynamic registration makes every
dataclass configurable that a gin file imports.

Whatever the user can mend ends with one line on standard error that says what,
where and what to do, and exit code 2; `--debug` shows the traceback instead. A
ValueError that a library raised is a defect of ours: it ends with its traceback.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import itertools
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

from synthq_jax import extras, stages, studies
from synthq_jax.cli import flags, folders, guide, parameters, screen, tools
from synthq_jax.runtime import config_types
from synthq_jax.storage import artifacts, stores
from synthq_jax.training import distributed, stopping

with extras.required("run"):
  import gin

__all__ = ["STAGES", "UsageError", "configure", "main"]

STAGES = flags.STAGES
UsageError = flags.UsageError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FLAG = "--gin."
_DYNAMIC = "from __gin__ import dynamic_registration"
# Lines of the written configuration that would undo the noise.
_SECRET = re.compile(r"(?im)^(\S*secret_seed) = (?!None$|%)(?:\\\n)?.*$")
_HIDDEN = r"# \1 is not written here: it undoes the noise.\n\1 = None"
_DOWNLOADED = (
  *("prepare_data.source", "prepare_data.vocabulary", "test_sets"),
  *("checkpoint", "encoder.folder"),
)
"""Settings of a run that may be URLs."""
_Read = list[list[pathlib.Path]]
"""For each --gin_file, the file and what it includes."""
_QUIET = {
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "GRPC_VERBOSITY": "ERROR",
}


class _NothingSaidError(UsageError):
  """The gin files do not configure what was asked for."""


class _MissingError(UsageError):
  """The gin files ask for values that nobody gave."""

  read: _Read


gin.constant("synthq.INF", math.inf)  # %INF: gin has no word for it


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the arguments after the program's name; None: the process's own.

  Returns:
    The exit code: 0, 2 for what the user can mend, 3 for an audit that refutes
    a claim (with --fail_above_claim) or for leaks (with --fail_above), 75 for
    failures of the system that may pass, 130 after Ctrl-C, 143 after SIGTERM;
    the same for all processes of a run, of which one says why.
  """
  code = 1  # of a bug, whose traceback is shown
  try:
    code = _outcome(argv)
  finally:
    distributed.finish(code)
  return code


def _outcome(argv: Sequence[str] | None) -> int:
  """Runs one command and explains how it ended."""
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    with stopping.raising():
      _dispatch(argv)
    return 0
  except screen.RefutedError as error:
    return _stop(str(error), 3)
  except KeyboardInterrupt:
    return _stop(f"interrupted; {flags.AGAIN}", 130)
  except stopping.Terminated:
    return _stop(f"told to stop (SIGTERM); {flags.AGAIN}", stopping.EXIT_CODE)
  except distributed.Left as left:
    return left.code
  except (ValueError, OSError, extras.MissingExtraError) as error:
    if "--debug" in argv or distributed.is_loss(error):
      raise
    if isinstance(error, ValueError) and not flags.is_refusal(error):
      raise
    explain = (
      flags.explain_os_error if isinstance(error, OSError) else flags.join_lines
    )
    return _stop(explain(error), flags.exit_code(error))


def _stop(message: str, code: int) -> int:
  if distributed.announce(code):
    print(f"synthq: {stores.as_urls(message)}", file=sys.stderr)
  return code


def _dispatch(argv: Sequence[str]) -> None:
  bindings = [a.removeprefix(_FLAG) for a in argv if a.startswith(_FLAG)]
  known = {**_GUIDES, **tools.TOOLS}
  for binding, value in itertools.pairwise([*argv, "-"]):
    if binding.startswith(_FLAG) and not ("=" in binding or value[0:1] == "-"):
      raise UsageError(f"expected {binding}={value}, got {binding} {value}")
  options = flags.parser(known, guide.list_macros).parse_args(
    [a for a in argv if not a.startswith(_FLAG)]
  )
  tool = tools.find_tool(options, known)
  downloads = ("workdir",) if tool is None else tool.downloads
  texts = {k: v for k, v in vars(options).items() if k != "query"}
  flags.refuse_urls(
    {f"--{name}": value for name, value in texts.items()},
    [f"--{name}" for name in downloads],
  )
  if tool is None:
    _run_stage(options, bindings)
  elif bindings:
    raise UsageError(f"synthq {options.stage} takes no {_FLAG}{bindings[0]}")
  else:
    folders.check_flags(options)
    for name in downloads:
      if given := getattr(options, name):
        setattr(options, name, tool.local(given))
    screen.show(tool.run(options))


# What there is to choose from.


def _recipes(options: argparse.Namespace) -> str:
  """Lists all recipes, or prints the header of one."""
  if options.recipe:
    return guide.render_recipe(_find_recipe(options.recipe))
  return guide.list_recipes(guide.gin_configs())


def _find_recipe(name: str) -> pathlib.Path:
  """Returns the path of a gin file; "demo" stands for demo.gin.

  Raises:
    UsageError: if there is none, with a near name.
  """
  find = _finder(())
  path = find(name) or find(f"{name}.gin")
  if path is None:
    near = _near_file(name)
    raise UsageError(
      f"{name}: expected a gin file, got none."
      f" {near or 'Give its path, or a name that `synthq recipes` lists'}"
    )
  return path


def _settings(options: argparse.Namespace) -> str:
  """Lists the settings of a recipe, or the defaults of all stages."""
  from synthq_jax.stages import plan

  named = dict(name=options.name, width=screen.get_width())
  if not options.recipe:
    return guide.settings(plan.RunConfig(), (), **named)
  kinds = (
    lambda: plan.RunConfig,
    *(functools.partial(_study_config, name) for name in studies.NAMES),
  )
  path = _find_recipe(options.recipe)
  with _explained(options.recipe):
    text = path.read_text(encoding="utf-8")
  if "synthq_jax.studies import" in text:
    kinds = kinds[::-1]  # of a study that runs the pipeline: its own settings
  for kind in kinds:
    try:
      config, _, read = _loaded(kind(), [os.fspath(path)])
    except _NothingSaidError:
      continue
    except _MissingError as error:
      said = guide.settings(None, error.read, **named)
      return f"{said}\n\n{error}"
    return guide.settings(config, read, **named)
  raise UsageError(
    f"{options.recipe}: expected a recipe or a study, got a part"
  )


def _study_config(name: str) -> type:
  return importlib.import_module(f"{studies.__name__}.{name}").STUDY.config


_GUIDES = {
  "recipes": tools.Tool(
    words="lists recipes and studies, a line each",
    flags={
      "recipe": {"nargs": "?", "help": "one of them: prints its header"},
    },
    run=_recipes,
  ),
  "settings": tools.Tool(
    words="lists the settings of a recipe: value, origin, meaning",
    flags={
      "recipe": {"nargs": "?", "help": "a gin file; without: the defaults"},
      "--name": {"default": "", "help": "only names that hold this"},
    },
    run=_settings,
  ),
}


# A stage: configure, run, say what came out.


def _run_stage(options: argparse.Namespace, bindings: Sequence[str]) -> None:
  start = time.monotonic()
  if options.dry_run and options.stage == "study":
    raise UsageError("--dry_run goes with stages of a run, got study")
  if options.fail_above_claim:
    screen.check_gate(options.stage)
  with stopping.deferred() as asked:
    # Others wait for this process: one that is told to stop joins, and leaves.
    distributed.start(flags.processes(options))
  if told := asked():
    raise told
  run = _study if options.stage == "study" else _pipeline
  with flags.open_workdir(options) as workdir:
    report = run(options, bindings, workdir)
  if not distributed.is_main():
    return
  if report is not None:
    screen.show(screen.summarize(report, options.workdir))
  if not options.dry_run:
    seconds = time.monotonic() - start
    screen.show(f"{options.stage} finished: {screen.describe_cost(seconds)}")


def _pipeline(options, bindings: Sequence[str], workdir: pathlib.Path) -> Any:
  if options.stage == "run":
    find = _finder(options.gin_search_paths.split(","))
    guide.check_documents(options.gin_file or (), bindings, find)
  from synthq_jax.stages import plan

  if options.strict:
    bindings = [*bindings, "prepare_data.Config.strict=True"]
  config, text, read = _configured(plan.RunConfig, options, bindings)
  folders.check_run(config)
  screen.check_audit(options.stage, config, options.fail_above_claim)
  wanted = plan.STAGES if options.stage == "run" else (options.stage,)
  if options.dry_run:
    screen.show(guide.dry_run(config, workdir, wanted, read, text))
    return None
  made: dict[str, Sequence[Any]] = {}
  report = plan.run(
    config,
    workdir,
    stages=None if options.stage == "run" else wanted,
    progress=not options.quiet,
    on_accepted=_noting(workdir, text),
    on_finished=made.update,
  )
  if distributed.is_main() and options.stage != "run":
    words = stages.get(options.stage).screen(made.get(options.stage, ()))
    print(words, end="")
  if options.fail_above_claim:
    screen.hold_claims(made.get("audit", ()))
  return report


def _study(options, bindings: Sequence[str], workdir: pathlib.Path) -> None:
  from synthq_jax.studies import frame

  for name in studies.NAMES:
    study = importlib.import_module(f"{studies.__name__}.{name}").STUDY
    try:
      config, text, _ = _configured(study.config, options, bindings)
    except _NothingSaidError:
      continue
    given = dict(progress=not options.quiet, on_accepted=_noting(workdir, text))
    print(frame.run(study, config, workdir, **given))
    return
  raise UsageError(
    "the gin files configure no study: give one of gin_configs/studies"
  )


def _configured(
  kind: type, options, bindings: Sequence[str]
) -> tuple[Any, str, _Read]:
  """Builds the configuration, its text without secrets, and lists its files."""
  files = options.gin_file or ()
  search_paths = options.gin_search_paths.split(",")
  config, text, read = _loaded(kind, files, bindings, search_paths)
  text = _SECRET.sub(_HIDDEN, text)
  secret = getattr(config, "secret_seed", None) or 0
  if secret > 10**6:  # under any name; smaller ones protect nothing
    text = re.sub(rf"(?m)^(\S+) = {secret}$", _HIDDEN, text)
  return config, text, read


def _noting(workdir: pathlib.Path, text: str) -> Callable[[], None]:
  """Returns a function that writes a configuration to the working directory."""
  place = workdir / guide.CONFIG
  return functools.partial(artifacts.write_atomically, place, text)


# gin: files and flags into a dataclass.


def configure(
  kind: type,
  gin_files: Sequence[str],
  bindings: Sequence[str] = (),
) -> tuple[Any, str]:
  """Builds a frozen dataclass from gin files and flags.

  Args:
    kind: the dataclass, which the files configure.
    gin_files: parsed in their order. Each is looked for as given, then
      in the `gin_configs` of the current folder, of the
      repository and of the installed package.
    bindings: NAME=value, as they stand behind `--gin.`; they win.

  Returns:
    The instance, and all that went into it as one gin file.

  Raises:
    UsageError: if a name, a value or a file is wrong or missing.
  """
  return _loaded(kind, gin_files, bindings)[:2]


def _loaded(
  kind: type,
  gin_files: Sequence[str],
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
) -> tuple[Any, str, _Read]:
  """Builds a dataclass, see `configure`; also returns the files it read."""
  if not gin_files:
    raise UsageError(
      "expected --gin_file=FILE, got none; try"
      " --gin_file=gin_configs/recipes/demo.gin"
    )
  with _session(search_paths) as read:
    for name in gin_files:
      read.append([])
      with _explained(f"--gin_file={name}"):
        gin.parse_config_file(name)
    meant = set(re.findall(r"%(\w+)", gin.config_str()))
    for binding in bindings:
      _bind(binding, read)
    _name_infinities()
    _check_required(read)
    _join(kind)
    _check_values(kind, bindings, read)
    with _explained(config_types.label(kind)):
      gin.finalize()
      config = gin.get_configurable(kind)()
      config = config_types.conform(config, kind, config_types.label(kind))
    operative = gin.operative_config_str()
    _note_unused(meant, operative)
    label = config_types.label(kind)
    may_be = [f"plan.RunConfig.{name}" for name in _DOWNLOADED]
    flags.refuse_urls({label: artifacts.to_json(config)}, may_be)
    return config, operative, read


def _finder(
  search_paths: Sequence[str],
) -> Callable[[str], pathlib.Path | None]:
  """Returns a finder of gin files: as named, in the search paths, among ours."""
  here, root = pathlib.Path.cwd(), _PACKAGE.parent
  ours = [p for r in (root, _PACKAGE) for p in (r, r / "gin_configs")]
  ours += sorted(guide.gin_configs().iterdir())
  given = map(pathlib.Path, filter(None, search_paths))
  roots = (here, *given, here / "gin_configs", *ours)

  def find(name: str) -> pathlib.Path | None:
    places = (root / name for root in roots)
    return next((place for place in places if place.is_file()), None)

  return find


@contextlib.contextmanager
def _session(search_paths: Sequence[str]) -> Iterator[_Read]:
  """An empty gin that finds our files; yields the files that are read."""
  read: _Read = []
  find = _finder(search_paths)

  def opened(name: str) -> TextIO:
    read[-1].append(find(name))
    return open(read[-1][-1], encoding="utf-8")

  # gin's second reader looks for files in Python packages and stumbles over a
  # folder without __init__.py; there is no public way to leave it out.
  readers = gin.config._FILE_READERS[:]
  gin.config._FILE_READERS[:] = [(opened, find)]
  gin.clear_config()
  try:
    yield read
  finally:
    gin.config._FILE_READERS[:] = readers


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
  """Turns what gin and constructors raise into one line."""
  try:
    yield
  except OSError as error:
    words = flags.join_lines(error).partition(" Searched config paths")[0]
    help_ = "Check the name, or give --gin_search_paths=FOLDER"
    raise UsageError(
      f"{where}: {words} {_near_file(where) or help_}"
    ) from error
  except Exception as error:
    raise UsageError(f"{where}: {flags.join_lines(error)}") from error


def _near_file(name: str) -> str:
  """Asks whether one of our gin files was meant; "" where none is near."""
  known = [path.stem for path in guide.gin_configs().glob("*/*.gin")]
  stem = pathlib.Path(name.removeprefix("--gin_file=")).stem
  near = difflib.get_close_matches(stem, known, 1)
  return f"Did you mean {near[0]}.gin?" if near else ""


def _bind(binding: str, read: _Read) -> None:
  """Applies one flag: a macro that a file defined, or a parameter."""
  name, equals, value = binding.partition("=")
  if not equals:
    raise UsageError(f"expected {_FLAG}NAME=value, got {_FLAG}{binding}")
  known = {n for n in flags.names(gin.config_str()) if "." not in n}
  text = f"{name} = {flags.write_literal(value)}"
  macros = [*flags.find_macros(text), *([name] if "." not in name else [])]
  for macro in (one for one in macros if one not in known):
    near = flags.find_macro(macro, known)
    if near and macro == name:
      near = f"{_FLAG}{near}={value}"
    near = near or ", ".join(sorted(known)) or "another gin file"
    raise UsageError(
      f"{_FLAG}{binding}: no gin file defines {macro}; did you mean {near}?"
    )
  try:
    with _explained(f"{_FLAG}{binding}"):
      gin.parse_config([_DYNAMIC, *parameters.find_imports(text, read), text])
  except UsageError as error:
    if parameters.is_class(name, read):
      raise UsageError(
        f"{_FLAG}{binding}: expected a parameter, got the class {name}: give"
        f" {_FLAG}{name}.NAME=value"
      ) from error
    near = parameters.suggest(name, read)
    near = f"; did you mean {near}?" if near else ""
    raise UsageError(f"{error}{near}") from error


def _join(kind: type) -> None:
  """Has gin build the parts of a class that files and flags say something of.

  A file then binds parameters of a stage, and need not say that they are meant.
  """
  if not _bound(kind):
    return
  for outer in config_types.nested(kind):
    said = _bound(outer)
    for name, inner in artifacts.hints(outer).items():
      if (
        name in said or not dataclasses.is_dataclass(inner) or not _bound(inner)
      ):
        continue
      ends = [
        f"from {c.__module__.rpartition('.')[0]} import"
        f" {c.__module__.rpartition('.')[2]}"
        for c in (outer, inner)
      ]
      text = (
        f"{config_types.label(outer)}.{name} = @{config_types.label(inner)}()"
      )
      gin.parse_config([_DYNAMIC, *dict.fromkeys(ends), text])


def _note_unused(meant: Collection[str], operative: str) -> None:
  """Notes settings without effect: likely slips of the pen.

  Macros that files use are meant, also where a flag binds what they stand for.
  """
  if not distributed.is_main():
    return
  used = {name.rpartition("/")[2] for name in flags.names(operative)}
  for name in flags.names(gin.config_str()):
    if name.rpartition("/")[2] in used or name in meant:
      continue
    print(f"synthq: note: {name} is set, but nothing uses it", file=sys.stderr)


def _check_required(read: _Read) -> None:
  """Refuses bindings that are still `%gin.REQUIRED`."""
  pattern = r"(?m)^([\w./]+) =\s+(?:\\\n\s+)?%gin\.REQUIRED$"
  missing = re.findall(pattern, gin.config_str())
  if missing:
    words = " ".join(f"{_FLAG}{name}=..." for name in missing)
    error = _MissingError(
      f"values are missing: give {words} (see the gin file)"
    )
    error.read = read
    raise error


def _name_infinities() -> None:
  """Binds %INF in the place of numbers too large for a float, such as 1e999.

  gin writes a parameter that is infinite as no line at all, and a macro as a line
  that it cannot read: the written configuration would be of another epsilon.
  """
  named = gin.config.parse_value("%INF")

  def name(value: Any) -> Any:
    if isinstance(value, dict):
      return {key: name(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
      return type(value)(map(name, value))
    return named if isinstance(value, float) and value == math.inf else value

  for bound in gin.config._CONFIG.values():
    for key, value in bound.items():
      bound[key] = name(value)


def _check_values(kind: type, bindings: Sequence[str], read: _Read) -> None:
  """Holds every bound value against its field's type, inner classes first."""
  if not _bound(kind):
    raise _NothingSaidError(
      f"the gin files say nothing about {config_types.label(kind)}: give a recipe for"
      " this stage with --gin_file"
    )
  for part in config_types.nested(kind):
    label, hints, raw = (
      config_types.label(part),
      artifacts.hints(part),
      _bound(part),
    )
    with _explained(label):
      values = gin.get_bindings(part) if raw else {}
    for name, value in values.items():
      try:
        config_types.conform(value, hints.get(name, Any), f"{label}.{name}")
      except ValueError as error:
        text = f"{label}.{name} = {raw[name]}"
        macro = re.findall(r"%(\w+)", text)
        where = flags.locate(
          macro[-1] if macro else f"{label}.{name}", read, bindings
        )
        raise UsageError(f"{where}: {error}; correct {text}") from error


def _bound(kind: type) -> dict[str, Any]:
  """Reads the bindings of a class by gin files and flags, references unresolved."""
  try:
    return gin.get_bindings(kind, resolve_references=False)
  except ValueError:  # no file or flag names the class
    return {}


if __name__ == "__main__":
  sys.exit(main())
