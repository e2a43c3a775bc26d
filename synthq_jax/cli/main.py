"""Runs the command line, `synthq STAGE --gin_file=FILE --workdir=FOLDER`.

No other module imports gin: files and flags become frozen dataclasses here. The
habits are those of T5X: files include files, and UPPER_CASE macros are for users.
Gin's dynamic registration can configure every dataclass that a gin file imports.

An error that the user can mend ends with exit code 2 and one line on standard error:
the problem, its place and the remedy. `--debug` shows the traceback instead. A
library's ValueError that nothing here explains is a defect and has its traceback.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from synthq_jax import extras, stages, studies
from synthq_jax.cli import flags, folders, guide, parameters, screen, tools
from synthq_jax.runtime import config_types
from synthq_jax.storage import artifacts, stores
from synthq_jax.training import distributed, progress, stopping

with extras.required("run"):
  import gin

__all__ = ["STAGES", "UsageError", "configure", "main"]

STAGES = flags.STAGES
UsageError = flags.UsageError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FLAG = "--gin."
_DYNAMIC = "from __gin__ import dynamic_registration"
# Lines of the written configuration from which the noise could be removed.
_SECRET = re.compile(r"(?im)^(\S*secret_seed) = (?!None$|%)(?:\\\n)?.*$")
_HIDDEN = r"# \1 is not written here: it undoes the noise.\n\1 = None"
_MAY_BE_URLS = (
  *("prepare_data.source", "prepare_data.vocabulary", "test_sets"),
  *("checkpoint", "encoder.folder"),
)
"""Settings of a run that may be URLs."""
_Read = list[list[pathlib.Path]]
"""For each --gin_file, the file and those it includes."""
_QUIET = {
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "GRPC_VERBOSITY": "ERROR",
}


class _NotConfiguredError(UsageError):
  """An error of gin files that do not configure the wanted class."""


class _MissingError(UsageError):
  """An error of gin files with a required value that is missing."""

  read: _Read


gin.constant("synthq.INF", math.inf)  # %INF: gin has no word for it


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the arguments after the program's name; None: the process's own.

  Returns:
    The exit code, equal for all processes of a run, of which one prints the reason.
    0: success. 2: an error that the user can mend. 3: an audit refutes a claim
    (--fail_above_claim), or queries leak (--fail_above). 75: a failure of the system
    that may be temporary. 130: Ctrl-C. 143: SIGTERM.
  """
  code = 1  # a bug, with its traceback
  try:
    code = _run_command(argv)
  finally:
    distributed.finish(code)
  return code


def _run_command(argv: Sequence[str] | None) -> int:
  """Runs one command, prints its error if any, and returns the exit code."""
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
  commands = {**_GUIDES, **tools.TOOLS}
  for binding, value in itertools.pairwise([*argv, "-"]):
    if binding.startswith(_FLAG) and not ("=" in binding or value[0:1] == "-"):
      raise UsageError(f"expected {binding}={value}, got {binding} {value}")
  options = flags.parser(commands, guide.list_macros).parse_args(
    [a for a in argv if not a.startswith(_FLAG)]
  )
  tool = commands.get(options.stage)
  downloads = ("workdir",) if tool is None else tool.downloads
  texts = {k: v for k, v in vars(options).items() if k != "query"}
  flags.refuse_urls(
    {f"--{name}": value for name, value in texts.items()},
    [f"--{name}" for name in downloads],
  )
  with progress.shown(not getattr(options, "quiet", False)):
    if tool is None:
      _run_stage(options, bindings)
    elif bindings:
      raise UsageError(f"synthq {options.stage} takes no {_FLAG}{bindings[0]}")
    else:
      folders.check(
        {f"--{x}": getattr(options, x, "") for x in ("checkpoint", "bert")}
      )
      for name in downloads:
        if location := getattr(options, name):
          setattr(options, name, tool.local(location))
      screen.show(tool.run(options))


# Lists of recipes and settings.


def _show_recipes(options: argparse.Namespace) -> str:
  """Lists all recipes, or prints the header of one."""
  if options.recipe:
    return guide.render_recipe(_find_recipe(options.recipe))
  return guide.list_recipes(guide.gin_configs())


def _find_recipe(name: str) -> pathlib.Path:
  """Returns the path of a gin file; "demo" means demo.gin.

  Raises:
    UsageError: if there is no such file; suggests a similar name.
  """
  find = _make_finder(())
  path = find(name) or find(f"{name}.gin")
  if path is None:
    near = _suggest_file(name)
    raise UsageError(
      f"{name}: expected a gin file, got none."
      f" {near or 'Give its path, or a name that `synthq recipes` lists'}"
    )
  return path


def _show_settings(options: argparse.Namespace) -> str:
  """Lists the settings of a recipe, or the defaults of all stages."""
  from synthq_jax.stages import plan

  named = dict(name=options.name, width=screen.get_width())
  if not options.recipe:
    return guide.settings(plan.RunConfig(), (), **named)
  kinds = (
    lambda: plan.RunConfig,
    *(functools.partial(_load_study_config, name) for name in studies.NAMES),
  )
  path = _find_recipe(options.recipe)
  with _explain_errors(options.recipe):
    text = flags.read_gin(path)
  if "synthq_jax.studies import" in text:
    kinds = kinds[::-1]  # a study may configure the pipeline, too
  for kind in kinds:
    try:
      config, _, read = _load(kind(), [os.fspath(path)])
    except _NotConfiguredError:
      continue
    except _MissingError as error:
      table = guide.settings(None, error.read, **named)
      return f"{table}\n\n{error}"
    return guide.settings(config, read, **named)
  raise UsageError(
    f"{options.recipe}: expected a recipe or a study, got a part"
  )


def _load_study_config(name: str) -> type:
  return importlib.import_module(f"{studies.__name__}.{name}").STUDY.config


_GUIDES = {
  "recipes": tools.Tool(
    words="lists recipes and studies, a line each",
    flags={
      "recipe": {"nargs": "?", "help": "one of them: prints its header"},
    },
    run=_show_recipes,
  ),
  "settings": tools.Tool(
    words="lists the settings of a recipe: value, origin, meaning",
    flags={
      "recipe": {"nargs": "?", "help": "a gin file; without: the defaults"},
      "--name": {"default": "", "help": "only names that hold this"},
    },
    run=_show_settings,
  ),
}


# Stages: configure, run, print the results.


def _run_stage(options: argparse.Namespace, bindings: Sequence[str]) -> None:
  start = time.monotonic()
  if options.dry_run and options.stage == "study":
    raise UsageError("--dry_run goes with stages of a run, got study")
  if options.fail_above_claim:
    screen.check_gate(options.stage)
  with stopping.deferred() as asked:
    # The others wait for this process, so on SIGTERM it joins them, then leaves.
    distributed.start(flags.processes(options))
  if told := asked():
    raise told
  run = _run_study if options.stage == "study" else _run_pipeline
  with flags.open_workdir(options) as workdir:
    report = run(options, bindings, workdir)
  if not distributed.is_main():
    return
  if report is not None:
    screen.show(screen.summarize(report, options.workdir))
  if not options.dry_run:
    seconds = time.monotonic() - start
    screen.show(f"{options.stage} finished: {screen.describe_cost(seconds)}")


def _run_pipeline(
  options, bindings: Sequence[str], workdir: pathlib.Path
) -> Any:
  from synthq_jax.stages import plan

  if options.strict:
    bindings = [*bindings, "prepare_data.Config.strict=True"]
  config, text, read = _read_configuration(plan.RunConfig, options, bindings)
  folders.check(
    {
      f"{_FLAG}CHECKPOINT": config.checkpoint,
      f"{_FLAG}ENCODER": config.encoder.folder,
    }
  )
  screen.check_audit(options.stage, config, options.fail_above_claim)
  stage_names = plan.STAGES if options.stage == "run" else (options.stage,)
  if options.dry_run:
    screen.show(guide.dry_run(config, workdir, stage_names, read, text))
    return None
  results: dict[str, Sequence[Any]] = {}
  report = plan.run(
    config,
    workdir,
    stages=None if options.stage == "run" else stage_names,
    on_accepted=_make_config_writer(workdir, text),
    on_finished=results.update,
  )
  if distributed.is_main() and options.stage != "run":
    words = stages.get(options.stage).screen(results.get(options.stage, ()))
    print(words, end="")
  if options.fail_above_claim:
    screen.refuse_refuted(results.get("audit", ()))
  return report


def _run_study(options, bindings: Sequence[str], workdir: pathlib.Path) -> None:
  from synthq_jax.studies import frame

  for name in studies.NAMES:
    study = importlib.import_module(f"{studies.__name__}.{name}").STUDY
    try:
      config, text, _ = _read_configuration(study.config, options, bindings)
    except _NotConfiguredError:
      continue
    writer = _make_config_writer(workdir, text)
    print(frame.run(study, config, workdir, on_accepted=writer))
    return
  raise UsageError(
    "the gin files configure no study: type the command of their header, such as"
    " `synthq run` (`synthq recipes NAME` prints it)"
  )


def _read_configuration(
  kind: type, options, bindings: Sequence[str]
) -> tuple[Any, str, _Read]:
  """Builds the configuration; returns it, its text without secrets, its files."""
  files = options.gin_file or ()
  search_paths = options.gin_search_paths.split(",")
  config, text, read = _load(kind, files, bindings, search_paths)
  text = _SECRET.sub(_HIDDEN, text)
  secret = getattr(config, "secret_seed", None) or 0
  # A macro may hold the secret under any name. Smaller ones can be guessed.
  if secret > 10**6:
    text = re.sub(rf"(?m)^(\S+) = {secret}$", _HIDDEN, text)
  return config, text, read


def _make_config_writer(workdir: pathlib.Path, text: str) -> Callable[[], None]:
  """Returns a function that writes a configuration to the working directory."""
  path = workdir / guide.CONFIG
  return functools.partial(artifacts.write_atomically, path, text)


# gin: from files and flags to a dataclass.


def configure(
  kind: type,
  gin_files: Sequence[str],
  bindings: Sequence[str] = (),
) -> tuple[Any, str]:
  """Builds a frozen dataclass from gin files and flags.

  Args:
    kind: the dataclass that the files configure.
    gin_files: gin files in the order of parsing. Each is searched as a path, then
      in the `gin_configs` of the current folder, of the repository and of the
      installed package.
    bindings: NAME=value of each `--gin.` flag; flags win over files.

  Returns:
    The instance, and its whole configuration as the text of a gin file.

  Raises:
    UsageError: if a name, a value or a file is wrong or missing.
  """
  return _load(kind, gin_files, bindings)[:2]


def _load(
  kind: type,
  gin_files: Sequence[str],
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
) -> tuple[Any, str, _Read]:
  """Builds a dataclass as `configure` does; also returns the files."""
  if not gin_files:
    raise UsageError(
      "expected --gin_file=FILE, got none; try"
      " --gin_file=gin_configs/recipes/demo.gin"
    )
  find = _make_finder(search_paths)
  with _open_gin(search_paths) as read:
    for name in gin_files:
      read.append([])
      with _explain_errors(f"--gin_file={name}"):
        gin.parse_config_file(name)
      for path in read[-1]:
        flags.check_order(path, find)
    macros_in_files = set(re.findall(r"%(\w+)", gin.config_str()))
    for binding in bindings:
      _bind(binding, read)
    _name_infinities()
    _check_required(read)
    _bind_parts(kind)
    _check_values(kind, bindings, read)
    with _explain_errors(config_types.label(kind)):
      gin.finalize()
      config = gin.get_configurable(kind)()
      config = config_types.conform(config, kind, config_types.label(kind))
    operative = gin.operative_config_str()
    unused = parameters.find_unused(
      gin.config_str(), operative, macros_in_files, read
    )
    for words in unused if distributed.is_main() else ():
      print(f"synthq: note: {words}", file=sys.stderr)
    label = config_types.label(kind)
    may_be = [f"plan.RunConfig.{name}" for name in _MAY_BE_URLS]
    flags.refuse_urls({label: artifacts.to_json(config)}, may_be)
    return config, operative, read


def _make_finder(
  search_paths: Sequence[str],
) -> Callable[[str], pathlib.Path | None]:
  """Returns a function that searches a gin file: here, in search paths, in ours."""
  here, root = pathlib.Path.cwd(), _PACKAGE.parent
  ours = [p for r in (root, _PACKAGE) for p in (r, r / "gin_configs")]
  ours += sorted(guide.gin_configs().iterdir())
  extra = map(pathlib.Path, filter(None, search_paths))
  roots = (here, *extra, here / "gin_configs", *ours)

  def find(name: str) -> pathlib.Path | None:
    paths = (root / name for root in roots)
    return next((path for path in paths if path.is_file()), None)

  return find


@contextlib.contextmanager
def _open_gin(search_paths: Sequence[str]) -> Iterator[_Read]:
  """Clears gin and lets it find our files; yields the list of files it reads."""
  read: _Read = []
  find = _make_finder(search_paths)

  def opened(name: str) -> TextIO:
    read[-1].append(find(name))
    return open(read[-1][-1], encoding=flags.GIN_ENCODING)

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
def _explain_errors(where: str) -> Iterator[None]:
  """Turns errors of gin and of constructors into a `UsageError` of one line."""
  try:
    yield
  except OSError as error:
    words = flags.join_lines(error).partition(" Searched config paths")[0]
    help_ = "Check the name, or give --gin_search_paths=FOLDER"
    raise UsageError(
      f"{where}: {words} {_suggest_file(where) or help_}"
    ) from error
  except Exception as error:
    raise UsageError(f"{where}: {flags.join_lines(error)}") from error


def _suggest_file(name: str) -> str:
  """Suggests one of our gin files with a similar name, or ""."""
  stems = [path.stem for path in guide.gin_configs().glob("*/*.gin")]
  stem = pathlib.Path(name.removeprefix("--gin_file=")).stem
  near = difflib.get_close_matches(stem, stems, 1)
  return f"Did you mean {near[0]}.gin?" if near else ""


def _bind(binding: str, read: _Read) -> None:
  """Applies one `--gin.` flag, which sets a defined macro or a parameter."""
  name, equals, value = binding.partition("=")
  if not equals:
    raise UsageError(f"expected {_FLAG}NAME=value, got {_FLAG}{binding}")
  defined = {n for n in flags.names(gin.config_str()) if "." not in n}
  text = f"{name} = {flags.write_literal(value)}"
  macros = [*flags.find_macros(text), *([name] if "." not in name else [])]
  for macro in [macro for macro in macros if macro not in defined]:
    suggestion = flags.find_macro(macro, defined)
    if suggestion and macro == name:
      suggestion = f"{_FLAG}{suggestion}={value}"
    suggestion = suggestion or ", ".join(sorted(defined)) or "another gin file"
    raise UsageError(
      f"{_FLAG}{binding}: no gin file defines {macro}; did you mean {suggestion}?"
    )
  try:
    with _explain_errors(f"{_FLAG}{binding}"):
      gin.parse_config([_DYNAMIC, *parameters.find_imports(text, read), text])
  except UsageError as error:
    if parameters.is_class(name, read):
      raise UsageError(
        f"{_FLAG}{binding}: expected a parameter, got the class {name}: give"
        f" {_FLAG}{name}.NAME=value"
      ) from error
    suggestion = parameters.suggest(name, read)
    suggestion = f"; did you mean {suggestion}?" if suggestion else ""
    raise UsageError(f"{error}{suggestion}") from error


def _bind_parts(kind: type) -> None:
  """Makes gin build the parts of a class whose parameters are bound.

  So a file can bind a stage's parameter without a reference to the stage's class.
  """
  if not _get_bindings(kind):
    return
  for outer in config_types.nested(kind):
    bindings = _get_bindings(outer)
    for name, inner in artifacts.hints(outer).items():
      if (
        name in bindings
        or not dataclasses.is_dataclass(inner)
        or not _get_bindings(inner)
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


def _check_required(read: _Read) -> None:
  """Refuses bindings whose value is still `%gin.REQUIRED`."""
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
  """Replaces infinite floats, such as 1e999, with %INF.

  gin writes no line for an infinite parameter, and a line that it cannot read for an
  infinite macro. The written configuration would have another epsilon.
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
  """Checks each bound value against its field's type, inner classes first."""
  if not _get_bindings(kind):
    raise _NotConfiguredError(
      f"the gin files do not configure {config_types.label(kind)}: give a recipe for"
      " this stage with --gin_file, or type `synthq study` if they are a study's"
    )
  for part in config_types.nested(kind):
    label, hints, raw = (
      config_types.label(part),
      artifacts.hints(part),
      _get_bindings(part),
    )
    with _explain_errors(label):
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


def _get_bindings(kind: type) -> dict[str, Any]:
  """Returns the bindings of a class, with references unresolved."""
  try:
    return gin.get_bindings(kind, resolve_references=False)
  except ValueError:  # no file or flag names the class
    return {}


if __name__ == "__main__":
  sys.exit(main())
