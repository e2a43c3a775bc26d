"""Defines the flags of `synthq`, parses their values and explains errors."""

import argparse
import ast
import contextlib
import difflib
import dis
import errno
import functools
import os
import pathlib
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import synthq_jax
from synthq_jax import stages
from synthq_jax.storage import object_store, stores
from synthq_jax.training import cluster, distributed

__all__ = [
  "AGAIN",
  "GIN_ENCODING",
  "STAGES",
  "UsageError",
  "check_order",
  "exit_code",
  "explain_os_error",
  "find_macro",
  "find_macros",
  "is_refusal",
  "join_lines",
  "locate",
  "names",
  "open_workdir",
  "parse_imports",
  "parser",
  "processes",
  "read_gin",
  "refuse_urls",
  "write_literal",
]

STAGES = {
  "run": "runs the whole pipeline; skips what is finished",
  **stages.SUMMARIES,
  "study": "runs a study of gin_configs/studies, instead of the pipeline",
}
"""Summaries of the commands that gin files configure, by command."""

_COMMON = ("run", "search", "export", "privacy", "recipes", "settings")
"""Commands that `synthq --help` lists first."""
_EXAMPLES = (
  "synthq run --gin_file=gin_configs/recipes/demo.gin --workdir=runs/demo",
  'synthq search "parse a date" --workdir=runs/demo',
  "synthq privacy --examples=6000 --batch_size=256 --epochs=13 --epsilon=8",
)
_WIDTH = 80
_HELP = (
  "--gin.NAME=value sets a macro (--gin.EPSILON=3) or a parameter"
  " (--gin.generate.Config.p=0.9). A value that is no Python literal is text; inf"
  " is infinity."
)


_REFERENCE = re.compile(r"%[\w./]+|@[\w./]+(\(\))?")
_MACRO = re.compile(r"%(\w+)(?![\w./])")
_BINDING = re.compile(r"([\w./]+)\s*=")
_HOME = re.compile(r"(?<![^:@])~(?=/)")
_QUOTED = re.compile(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"")
_CONSTANTS = ("INF", "REQUIRED")
GIN_ENCODING = "utf-8-sig"
"""Encoding of gin files: Windows puts a byte order mark first."""
_URL = re.compile(r"(^|[:@,])[A-Za-z][A-Za-z0-9+.-]*://")
_DEBUG = "show tracebacks"
AGAIN = "the same command goes on with what is finished"
"""Advice after an interruption."""
_FREE_SPACE = "free some space, and the same command goes on"
_CHOOSE_FOLDER = "choose a folder that you may write to"
_HINTS = {
  errno.ENOSPC: _FREE_SPACE,
  errno.EDQUOT: _FREE_SPACE,
  errno.EFBIG: _FREE_SPACE,
  errno.EACCES: _CHOOSE_FOLDER,
  errno.EPERM: _CHOOSE_FOLDER,
  errno.EROFS: _CHOOSE_FOLDER,
  errno.ENOTDIR: _CHOOSE_FOLDER,
}


_TEMPORARY = (
  *(errno.EIO, errno.EPIPE, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
  *(errno.ECONNRESET, errno.EHOSTDOWN, errno.ENETDOWN, errno.EREMOTEIO),
)
_HINTS |= dict.fromkeys(_TEMPORARY, AGAIN)


def explain_os_error(error: OSError) -> str:
  """Explains an error of the operating system in one line: path, reason, remedy.

  >>> explain_os_error(OSError(errno.ENOSPC, "No space left on device", "w/x.npz"))
  'w/x.npz: No space left on device; free some space, and the same command goes on'
  """
  where = f"{error.filename}: " if error.filename else ""
  reason = error.strerror or " ".join(str(error).split())
  return f"{where}{reason}; {_HINTS.get(error.errno, 'check the path')}"


def exit_code(error: BaseException) -> int:
  """Returns the process exit code for an exception.

  Returns:
    75 (EX_TEMPFAIL) for a failure of a file system or a connection that may be
    temporary, after which launchers start the command again; else 2.
  """
  passing = isinstance(error, OSError) and error.errno in _TEMPORARY
  return os.EX_TEMPFAIL if passing else 2


def is_refusal(error: BaseException) -> bool:
  """Tests whether a `raise` of this package refused something, for the user to mend.

  A ValueError of JAX or NumPy is a defect of this package and needs its traceback.
  JAX may drop its own frames from a traceback, so a last frame of this package is
  not enough: it must stand at a `raise`, too.
  """
  last = error.__traceback__
  if last is None:
    return False
  while last.tb_next is not None:
    last = last.tb_next
  frame, package = last.tb_frame, synthq_jax.__name__
  is_raise = frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
  return is_raise and frame.f_globals["__name__"].split(".")[0] == package


def join_lines(error: BaseException) -> str:
  """Joins the lines of an error's message, without carets and gin's inner names."""
  lines = [line.strip() for line in (str(error) or repr(error)).splitlines()]
  text = " ".join(
    line
    for line in lines
    if line.strip("^") and not line.startswith("In call to configurable")
  )
  return re.sub(r"<module '([\w.]+)' from '[^']*'>", r"\1", text)


def locate(
  name: str,
  files: Sequence[Sequence[pathlib.Path]],
  flags: Sequence[str],
) -> str:
  """Finds the flag, or else the line of a file, that sets a gin name.

  Args:
    name: a macro or parameter, e.g. "BATCH_SIZE" or "evaluate.Config.seed".
    files: for each --gin_file, the file and those it includes, outer ones first.
    flags: NAME=value of each flag; flags win over files.

  Returns:
    "--gin.NAME=value" or "file:line"; the name itself if nothing sets it.
  """
  for flag in reversed(flags):
    if flag.partition("=")[0] == name:
      return f"--gin.{flag}"
  pattern, source = re.compile(rf"{re.escape(name)}\s*="), name
  for outer, *included in filter(None, files):
    find = functools.partial(_find_included, included)
    for path, number, line in _walk_lines(outer, find):
      if pattern.match(line):
        source = f"{path}:{number}"
  return source


def _find_included(
  included: Sequence[pathlib.Path], name: str
) -> pathlib.Path | None:
  """Returns the first of some files that an `include` of this name means."""
  return next((path for path in included if path.match(name)), None)


def read_gin(path: pathlib.Path) -> str:
  """Reads a gin file without its byte order mark."""
  return path.read_text(encoding=GIN_ENCODING)


def check_order(
  path: pathlib.Path, find: Callable[[str], pathlib.Path | None]
) -> None:
  """Refuses a setting that a file included below it sets again, and so undoes.

  Args:
    path: a gin file.
    find: function that returns the path of an included file from its name.

  Raises:
    UsageError: naming both lines.
  """
  lines = read_gin(path).splitlines()
  own = {  # the last line of each name
    match[1]: number
    for number, line in enumerate(lines, 1)
    if (match := _BINDING.match(line))
  }
  for number, line in enumerate(lines, 1):
    if not line.startswith("include "):
      continue
    included = find(ast.literal_eval(line.removeprefix("include ")))
    for other, at, text in _walk_lines(included, find) if included else ():
      match = _BINDING.match(text)
      if match and own.get(match[1], number) < number:
        raise UsageError(
          f"{path}:{own[match[1]]}: {match[1]} is set again by {other}:{at}, which"
          f" line {number} includes: move it below that line"
        )


def _walk_lines(
  path: pathlib.Path,
  find: Callable[[str], pathlib.Path | None],
  within: tuple[pathlib.Path, ...] = (),
) -> Iterator[tuple[pathlib.Path, int, str]]:
  """Yields file, number and text of the lines of a gin file, as gin reads them.

  A file stands where it is included. Of two lines that set a name, the last wins.
  """
  if path in within:
    raise ValueError(f"{path} includes itself")
  for number, line in enumerate(read_gin(path).splitlines(), 1):
    if not line.startswith("include "):
      yield path, number, line
      continue
    if inner := find(ast.literal_eval(line.removeprefix("include "))):
      yield from _walk_lines(inner, find, (*within, path))


def refuse_urls(
  settings: Mapping[str, Any], allowed: Sequence[str] = ()
) -> None:
  """Refuses URLs in settings that must be paths; "gs:" would be a folder's name.

  Args:
    settings: values by name; values inside of lists and mappings count, too.
    allowed: names of settings that may be URLs.

  Raises:
    UsageError: naming the first value with SCHEME://.
  """
  for name, value in settings.items():
    if name.partition("[")[0] in allowed:
      continue
    if isinstance(value, Mapping):
      parts = {f"{name}.{key}": inner for key, inner in value.items()}
      refuse_urls(parts, allowed)
    elif isinstance(value, (list, tuple)):
      parts = {f"{name}[{n}]": inner for n, inner in enumerate(value)}
      refuse_urls(parts, allowed)
    elif isinstance(value, str) and _URL.search(value):
      raise UsageError(
        f"{name}={value}: expected a path of this machine, got a URL: mount"
        " the bucket, or copy its files (docs/tutorials/tpu_slice.md)"
      )


class UsageError(ValueError):
  """An error that the user can mend, with a text of one line."""


class _Parser(argparse.ArgumentParser):
  """Parses one command; its errors are `UsageError`s of one line."""

  def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
    """Refuses empty values, and expands "~", which shells leave behind "=".

    As a folder, "" would be the current one, and "~" one of this name.
    """
    options, rest = super().parse_known_args(args, namespace)
    for action in self._actions:
      value = getattr(options, action.dest, None)
      if value == "" != action.default and action.option_strings:
        self.error(
          f"{action.option_strings[0]}: expected a value, got none: is a variable"
          " of the shell empty?"
        )
      if action.option_strings and isinstance(value, str):
        setattr(options, action.dest, os.path.expanduser(value))
      elif action.option_strings and isinstance(value, list):
        value[:] = map(os.path.expanduser, value)
    return options, rest

  def error(self, message: str) -> NoReturn:
    """Raises a `UsageError`, with likely alternatives to an unknown command."""
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    similar: list[str] = []
    if choice:
      choices = re.findall(r"[\w.-]+", choice[2])
      similar = difflib.get_close_matches(choice[1], choices, 3)
      if similar or len(choices) > 9:
        message = message.partition(" (choose from")[0]
    if similar:
      raise UsageError(f"{message}; did you mean {' or '.join(similar)}?")
    raise UsageError(f"{message}; see {self.prog} --help")

  def list_commands(self) -> Mapping[str, "_Parser"]:
    """Returns the parsers of this command's subcommands by name."""
    for action in self._actions:
      if isinstance(action, argparse._SubParsersAction):
        return action.choices
    return {}


class _TopParser(_Parser):
  """Parses `synthq`: lists its commands in groups, and explains unknown flags."""

  tools: Mapping[str, Any] = {}
  list_macros: Callable[[], Collection[str]] = tuple

  def parse_args(self, args=None, namespace=None):  # type: ignore[override]
    """Refuses unknown arguments, and suggests a flag or a macro instead."""
    options, rest = self.parse_known_args(args, namespace)
    if rest:
      message = f"unrecognized arguments: {' '.join(rest)}"
      if suggestion := self._suggest(options, *rest[:2]):
        raise UsageError(f"{message}; did you mean {suggestion}?")
      self.error(message)
    return options

  def _suggest(
    self, options: argparse.Namespace, word: str, value: str = ""
  ) -> str:
    """Returns the flag or macro most similar to a word, or ""."""
    name, equals, inline_value = word.partition("=")
    command = self.list_commands()[options.stage]
    flag_by_word = {
      flag.strip("-"): flag for flag in command._option_string_actions
    }
    similar = difflib.get_close_matches(
      name.strip("-"), sorted(flag_by_word), 1
    )
    candidates = [flag_by_word[flag] for flag in similar]
    if not candidates and options.stage in STAGES:
      macro = find_macro(name.strip("-"), self.list_macros())
      value = inline_value if equals else value
      if macro and not value.startswith("-"):
        return f"--gin.{macro}={value or '...'}"
    return "".join(candidates)

  def format_help(self) -> str:
    """Returns the common commands, three examples, then all others."""
    words = {**STAGES, **{k: tool.words for k, tool in self.tools.items()}}
    others = ("study", *(k for k in self.tools if k not in _COMMON))
    stages_ = [k for k in STAGES if k not in ("run", "study")]
    parts = (
      f"usage: {self.prog} COMMAND ...\n\n{self.description}",
      _format_commands(
        "commands", {k: words[k] for k in _COMMON if k in words}
      ),
      "\n".join(["examples:", *(f"  {line}" for line in _EXAMPLES)]),
      _format_commands("more commands", {k: words[k] for k in others}),
      _format_commands(
        "stages of `run`, each with the stages that it needs",
        {k: words[k] for k in stages_},
      ),
      f"`{self.prog} COMMAND --help` lists its flags. `{self.prog} --version`"
      " prints the version.",
    )
    return "\n\n".join(parts) + "\n"


def _format_commands(title: str, words: Mapping[str, str]) -> str:
  """Formats commands below a title, each with its folded description."""
  lines = [f"{title}:"]
  for name, text in words.items():
    start = f"  {name:<17}"
    lines += textwrap.wrap(
      text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
    )
  return "\n".join(lines)


def find_macro(name: str, macros: Collection[str]) -> str:
  """Returns the macro of a name or most similar to it, or ""; ignores case.

  >>> find_macro("epsilon", ["EPSILON", "SEED"]), find_macro("x", ["SEED"])
  ('EPSILON', '')

  Args:
    name: the name that the user wrote; "-" counts as "_".
    macros: names of all macros.
  """
  name = name.replace("-", "_").upper()
  if name in macros:
    return name
  return "".join(difflib.get_close_matches(name, sorted(macros), 1))


def parser(
  tools: Mapping[str, Any] | None = None,
  list_macros: Callable[[], Collection[str]] = tuple,
) -> argparse.ArgumentParser:
  """Makes the parser of the command line.

  Args:
    tools: a `tools.Tool` for each command that is no stage, by name.
    list_macros: function that returns the macros of our gin files, for suggestions.
  """
  top = _TopParser(
    prog="synthq",
    allow_abbrev=False,
    description="Turns private query logs into retrievers that can be shared.",
  )
  top.tools, top.list_macros = tools or {}, list_macros
  top.add_argument(
    "--version", action="version", version=f"synthq {synthq_jax.__version__}"
  )
  commands = top.add_subparsers(
    dest="stage", required=True, metavar="COMMAND", parser_class=_Parser
  )

  def add(name: str, words: str, **named: Any) -> Any:
    return commands.add_parser(
      name, help=words, description=words, allow_abbrev=False, **named
    )

  for name, words in STAGES.items():
    _add_stage_flags(add(name, words, epilog=_HELP), name)
  for name, tool in (tools or {}).items():
    command = add(name, tool.words)
    for flag, named in tool.flags.items():
      if isinstance(named, str):
        named = {"help": named}
      command.add_argument(flag, **named)
    command.add_argument("--debug", action="store_true", help=_DEBUG)
  return top


def _add_stage_flags(command: argparse.ArgumentParser, name: str) -> None:
  flag = command.add_argument
  flag(
    "--gin_file", action="append", help="gin file; may be given several times"
  )
  flag(
    "--gin_search_paths", default="", help="more folders of gin files, by comma"
  )
  words = "where all results lie: a folder, or a URL such as gs://BUCKET/NAME"
  flag("--workdir", required=True, help=words)
  words = "folder for copies of files under URLs; default: a temporary one"
  flag("--mirror", metavar="DIR", help=words)
  words = "agree that secrets lie in the bucket of --workdir"
  flag("--private_in_bucket", action="store_true", help=words)
  flag("--quiet", action="store_true", help="no progress bars")
  words = (
    "list the results to make, those that exist and the epsilons; make nothing"
  )
  if name == "study":  # it refuses the flag
    words = argparse.SUPPRESS
  flag("--dry_run", action="store_true", help=words)
  words = "stop at a judgement of an unknown query or document"
  flag("--strict", action="store_true", help=words)
  words = "exit with 3 if an audit refutes a claim"
  flag("--fail_above_claim", action="store_true", help=words)
  flag("--debug", action="store_true", help=_DEBUG)
  flag = command.add_argument_group("several processes").add_argument
  modes = "; ".join(f"{name}: {words}" for name, words in cluster.MODES.items())
  flag("--distributed", choices=cluster.MODES, help=modes)
  flag(
    "--coordinator_address", metavar="HOST:PORT", help="address of process 0"
  )
  flag("--num_processes", type=int, help="number of all processes")
  flag("--process_id", type=int, help="number of this process, from 0")
  words = "virtual devices of this process, on CPUs"
  flag("--cpu_devices", type=int, help=words)


def processes(options: argparse.Namespace) -> cluster.Settings:
  """Reads the settings by which the processes of a run find each other.

  Raises:
    ValueError: if flags do not go together, or a study is to be distributed.
  """
  settings = cluster.from_flags(options)
  if settings.mode != "none" and options.stage == "study":
    raise UsageError(
      f"synthq {options.stage} works in one process, got"
      f" --distributed={settings.mode}: leave it out"
    )
  return settings


@contextlib.contextmanager
def open_workdir(options: argparse.Namespace) -> Iterator[pathlib.Path]:
  """Opens the working directory: a folder, or the mirror of a URL.

  Raises:
    ValueError: if the command cannot work there, or another run does.
    OSError: if a URL cannot be reached.
  """
  url = options.workdir
  stores.keep_in(options.mirror)
  if not object_store.is_url(url):
    yield pathlib.Path(url)
    return
  if options.stage == "study":
    raise UsageError(
      f"synthq {options.stage} works in a folder, got --workdir={url}"
    )
  if distributed.count() > 1:
    raise UsageError(
      f"--workdir={url}: expected one process, got {distributed.count()}, whose"
      " training states need a file system that they share: mount the bucket"
      " (docs/tutorials/tpu_slice.md)"
    )
  if options.dry_run:
    yield pathlib.Path(stores.local(url, missing_ok=True))
    return
  agreed = options.private_in_bucket
  with stores.mirrored(url, private_in_bucket=agreed) as workdir:
    yield workdir


def write_literal(value: str) -> str:
  """Returns a flag's value as gin source: a literal as it is, else a string.

  In a string, "~/" at the beginning, or after ":" or "@", is the home.

  >>> write_literal("3"), write_literal("inf"), write_literal("(%X, 1)")
  ('3', '%INF', '(%X, 1)')
  >>> write_literal("beir:/data"), write_literal("(encoder|decoder)/.*")
  ("'beir:/data'", "'(encoder|decoder)/.*'")
  """
  if value == "inf":
    return "%INF"
  try:
    ast.literal_eval(_REFERENCE.sub("None", value))
  except (ValueError, SyntaxError):
    return repr(_HOME.sub(lambda match: os.path.expanduser(match[0]), value))
  return value


def find_macros(text: str) -> list[str]:
  """Finds the macros that a binding refers to, without gin's constants.

  >>> find_macros("plan.Rows.synthetic = (%EPSILON, %INF, '%x')")
  ['EPSILON']
  """
  macro_names = _MACRO.findall(_QUOTED.sub("''", text))
  return [name for name in macro_names if name not in _CONSTANTS]


def names(text: str) -> list[str]:
  """Lists the macros and parameters that a gin configuration binds."""
  return re.findall(r"(?m)^([\w./]+) =", text)


def parse_imports(text: str) -> dict[str, str]:
  """Parses the imports of a gin file, by the name that they bind.

  >>> parse_imports("from a.b import c\\nimport d.e as f\\nc.C.x = 1")
  {'c': 'from a.b import c', 'f': 'import d.e as f'}
  """
  lines = re.findall(r"(?m)^((?:from \S+ )?import (?:\S+ as )?(\w+))$", text)
  return {name: line for line, name in lines}
