"""The flags of `synthq`, and what their text means."""

import argparse
import ast
import contextlib
import difflib
import dis
import errno
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
  "STAGES",
  "UsageError",
  "exit_code",
  "find_macro",
  "imports",
  "is_refusal",
  "literal",
  "macros",
  "names",
  "one_line",
  "opened",
  "os_error",
  "parser",
  "place",
  "processes",
  "refuse_urls",
]

STAGES = {
  "run": "runs the whole pipeline; skips what is finished",
  **stages.SUMMARIES,
  "study": "runs a study of gin_configs/studies, instead of the pipeline",
}
"""Commands that gin files configure, each with what it does."""

_COMMON = ("run", "search", "export", "privacy", "recipes", "settings")
"""Commands that `synthq --help` names first."""
_EXAMPLES = (
  "synthq run --gin_file=gin_configs/recipes/demo.gin --workdir=runs/demo",
  'synthq search "parse a date" --workdir=runs/demo',
  "synthq privacy --examples=6000 --batch_size=256 --epochs=13 --epsilon=8",
)
_WIDTH = 80
_HELP = (
  "--gin.NAME=value sets a macro (--gin.EPSILON=3) or a parameter"
  " (--gin.generate.Config.p=0.9). What is no Python value is taken as text;"
  " inf is infinity."
)


_REFERENCE = re.compile(r"%[\w./]+|@[\w./]+(\(\))?")
_MACRO = re.compile(r"%(\w+)(?![\w./])")
_QUOTED = re.compile(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"")
_CONSTANTS = ("INF", "REQUIRED")
_URL = re.compile(r"(^|[:@,])[A-Za-z][A-Za-z0-9+.-]*://")
_DEBUG = "show tracebacks"
AGAIN = "the same command goes on with what is finished"
"""Advice after an interruption."""
_FULL = "free some space, and the same command goes on"
_FORBIDDEN = "choose a folder that you may write to"
_HINTS = {
  errno.ENOSPC: _FULL,
  errno.EDQUOT: _FULL,
  errno.EFBIG: _FULL,
  errno.EACCES: _FORBIDDEN,
  errno.EPERM: _FORBIDDEN,
  errno.EROFS: _FORBIDDEN,
  errno.ENOTDIR: _FORBIDDEN,
}


_PASSING = (
  *(errno.EIO, errno.EPIPE, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
  *(errno.ECONNRESET, errno.EHOSTDOWN, errno.ENETDOWN, errno.EREMOTEIO),
)
_HINTS |= dict.fromkeys(_PASSING, AGAIN)


def os_error(error: OSError) -> str:
  """Says in one line what the system refused, where, and what helps.

  >>> os_error(OSError(errno.ENOSPC, "No space left on device", "w/x.npz"))
  'w/x.npz: No space left on device; free some space, and the same command goes on'
  """
  where = f"{error.filename}: " if error.filename else ""
  what = error.strerror or " ".join(str(error).split())
  return f"{where}{what}; {_HINTS.get(error.errno, 'check the path')}"


def exit_code(error: BaseException) -> int:
  """Returns the process exit code for an exception.

  Returns:
    2 for what the user can mend; 75 (EX_TEMPFAIL) for what a file system or a
    connection may not do again: launchers start the command anew.
  """
  passing = isinstance(error, OSError) and error.errno in _PASSING
  return os.EX_TEMPFAIL if passing else 2


def is_refusal(error: BaseException) -> bool:
  """Tests whether this package raised an error, to be read by the user.

  A ValueError of JAX or NumPy is a defect of ours, whose traceback is needed.
  JAX may take its own frames out of a traceback, so that the last frame is to be
  ours and to stand at a `raise`.
  """
  last = error.__traceback__
  if last is None:
    return False
  while last.tb_next is not None:
    last = last.tb_next
  frame, package = last.tb_frame, synthq_jax.__name__
  is_raise = frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
  return is_raise and frame.f_globals["__name__"].split(".")[0] == package


def one_line(error: BaseException) -> str:
  """Returns a message without line breaks, carets and gin's inner names."""
  lines = [line.strip() for line in (str(error) or repr(error)).splitlines()]
  text = " ".join(
    line
    for line in lines
    if line.strip("^") and not line.startswith("In call to configurable")
  )
  return re.sub(r"<module '([\w.]+)' from '[^']*'>", r"\1", text)


def place(
  name: str,
  files: Sequence[Sequence[pathlib.Path]],
  flags: Sequence[str],
) -> str:
  """Says where a gin name got its value: the last flag, or file:line.

  Args:
    name: a macro or parameter, e.g. "BATCH_SIZE" or "evaluate.Config.seed".
    files: for each --gin_file, the file and what it includes, outer ones first.
    flags: NAME=value of the command line, which win.

  Returns:
    "--gin.NAME=value" or "file:line"; the name itself where it stands nowhere.
  """
  for flag in reversed(flags):
    if flag.partition("=")[0] == name:
      return f"--gin.{flag}"
  pattern = re.compile(rf"{re.escape(name)}\s*=")
  for path in (path for group in reversed(files) for path in group):
    lines = enumerate(path.read_text().splitlines(), 1)
    found = [number for number, line in lines if pattern.match(line)]
    if found:
      return f"{path}:{found[-1]}"
  return name


def refuse_urls(given: Mapping[str, Any], but: Sequence[str] = ()) -> None:
  """Refuses what a path would take for a folder named "gs:".

  Args:
    given: settings by name; those inside of lists and mappings count, too.
    but: names of those that may be URLs.

  Raises:
    UsageError: naming the first that holds SCHEME://.
  """
  for name, value in given.items():
    if name.partition("[")[0] in but:
      continue
    if isinstance(value, Mapping):
      inside = {f"{name}.{key}": inner for key, inner in value.items()}
      refuse_urls(inside, but)
    elif isinstance(value, (list, tuple)):
      inside = {f"{name}[{n}]": inner for n, inner in enumerate(value)}
      refuse_urls(inside, but)
    elif isinstance(value, str) and _URL.search(value):
      raise UsageError(
        f"{name}={value}: expected a path of this machine, got a URL: mount"
        " the bucket, or copy what lies there (docs/tutorials/tpu_slice.md)"
      )


class UsageError(ValueError):
  """An error that the user can mend; its text is one line."""


class _Parser(argparse.ArgumentParser):
  """Raises errors of one line."""

  def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
    """Refuses an empty value, which a folder's name would make the current one."""
    options, rest = super().parse_known_args(args, namespace)
    for action in self._actions:
      value = getattr(options, action.dest, None)
      if value == "" != action.default and action.option_strings:
        self.error(
          f"{action.option_strings[0]}: expected a value, got none: is a variable"
          " of the shell empty?"
        )
    return options, rest

  def error(self, message: str) -> NoReturn:
    """Raises instead of printing the usage; names what was likely meant."""
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    near: list[str] = []
    if choice:
      known = re.findall(r"[\w.-]+", choice[2])
      near = difflib.get_close_matches(choice[1], known, 3)
      if near or len(known) > 9:
        message = message.partition(" (choose from")[0]
    if near:
      raise UsageError(f"{message}; did you mean {' or '.join(near)}?")
    raise UsageError(f"{message}; see {self.prog} --help")

  def list_commands(self) -> Mapping[str, "_Parser"]:
    """Returns the parser of each command below this one by name."""
    for action in self._actions:
      if isinstance(action, argparse._SubParsersAction):
        return action.choices
    return {}


class _TopParser(_Parser):
  """Parses `synthq`: lists its commands in groups, and explains unknown flags."""

  tools: Mapping[str, Any] = {}
  list_macros: Callable[[], Collection[str]] = tuple

  def parse_args(self, args=None, namespace=None):  # type: ignore[override]
    """Names the flag or macro that an unknown argument likely stands for."""
    options, rest = self.parse_known_args(args, namespace)
    if rest:
      message = f"unrecognized arguments: {' '.join(rest)}"
      if near := self._suggest(options, *rest[:2]):
        raise UsageError(f"{message}; did you mean {near}?")
      self.error(message)
    return options

  def _suggest(
    self, options: argparse.Namespace, word: str, value: str = ""
  ) -> str:
    """Returns the flag that a word likely stands for; "" if none is near."""
    name, equals, own = word.partition("=")
    command = self.list_commands()[options.stage]
    command = command.list_commands().get(getattr(options, "tool", ""), command)
    known = {flag.strip("-"): flag for flag in command._option_string_actions}
    near = difflib.get_close_matches(name.strip("-"), sorted(known), 1)
    close = [known[flag] for flag in near]
    if not close and options.stage in STAGES:
      macro = find_macro(name.strip("-"), self.list_macros())
      value = own if equals else value
      if macro and not value.startswith("-"):
        return f"--gin.{macro}={value or '...'}"
    return "".join(close)

  def format_help(self) -> str:
    """Returns the common commands, three examples, then all others."""
    words = {**STAGES, **{k: tool.words for k, tool in self.tools.items()}}
    others = ("study", *(k for k in self.tools if k not in _COMMON))
    stages_ = [k for k in STAGES if k not in ("run", "study")]
    parts = (
      f"usage: {self.prog} COMMAND ...\n\n{self.description}",
      _listing("commands", {k: words[k] for k in _COMMON if k in words}),
      "\n".join(["examples:", *(f"  {line}" for line in _EXAMPLES)]),
      _listing("more commands", {k: words[k] for k in others}),
      _listing(
        "stages of `run`, each with the stages that it needs",
        {k: words[k] for k in stages_},
      ),
      f"`{self.prog} COMMAND --help` lists its flags. `{self.prog} --version`"
      " prints the version.",
    )
    return "\n\n".join(parts) + "\n"


def _listing(title: str, words: Mapping[str, str]) -> str:
  """Formats commands below a title, each with its folded description."""
  lines = [f"{title}:"]
  for name, text in words.items():
    start = f"  {name:<17}"
    lines += textwrap.wrap(
      text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
    )
  return "\n".join(lines)


def find_macro(name: str, macros: Collection[str]) -> str:
  """Returns the macro that a name likely stands for, whatever its case.

  >>> find_macro("epsilon", ["EPSILON", "SEED"]), find_macro("x", ["SEED"])
  ('EPSILON', '')

  Args:
    name: as somebody wrote it; "-" counts as "_".
    macros: the names that there are.
  """
  name = name.replace("-", "_").upper()
  if name in macros:
    return name
  return "".join(difflib.get_close_matches(name, sorted(macros), 1))


def parser(
  tools: Mapping[str, Any] | None = None,
  list_macros: Callable[[], Collection[str]] = tuple,
) -> argparse.ArgumentParser:
  """Describes the command line.

  Args:
    tools: commands that are no stages, of type `tools.Tool`, by name; "a b" is
      the tool b of the group a.
    list_macros: returns the macros of our gin files, for suggestions.
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

  def add(parent: Any, name: str, words: str, **named: Any) -> Any:
    return parent.add_parser(
      name, help=words, description=words, allow_abbrev=False, **named
    )

  for name, words in STAGES.items():
    _add_stage_flags(add(commands, name, words, epilog=_HELP), name)
  groups: dict[str, Any] = {}
  for name, tool in (tools or {}).items():
    group, _, own = name.rpartition(" ")
    if group and group not in groups:
      groups[group] = add(commands, group, tool.group).add_subparsers(
        dest="tool", required=True, metavar="TOOL"
      )
    command = add(groups.get(group, commands), own, tool.words)
    for flag, named in tool.flags.items():
      if isinstance(named, str):
        named = {"help": named}
      command.add_argument(flag, **named)
    command.add_argument("--debug", action="store_true", help=_DEBUG)
  return top


def _add_stage_flags(command: argparse.ArgumentParser, name: str) -> None:
  flag = command.add_argument
  flag("--gin_file", action="append", help="may be given several times")
  flag("--gin_search_paths", default="", help="more folders, by comma")
  words = "where all results lie: a folder, or a URL such as gs://BUCKET/NAME"
  flag("--workdir", required=True, help=words)
  words = (
    "keep copies of what lies under URLs here; default: for this run alone"
  )
  flag("--mirror", metavar="DIR", help=words)
  words = "agree that secrets lie in the bucket of --workdir"
  flag("--private_in_bucket", action="store_true", help=words)
  flag("--quiet", action="store_true", help="no progress bars")
  words = (
    "say what would be made, what is there, and what it costs; make nothing"
  )
  if name == "study":  # which says so, where it is given
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
  flag("--coordinator_address", metavar="HOST:PORT", help="of process 0")
  flag("--num_processes", type=int, help="in all")
  flag("--process_id", type=int, help="of this one, from 0")
  words = "virtual devices of this process, on CPUs"
  flag("--cpu_devices", type=int, help=words)


def processes(options: argparse.Namespace) -> cluster.Settings:
  """Reads the flags by which processes of a run find each other.

  Raises:
    ValueError: if flags do not go together, or the stage takes one process.
  """
  settings = cluster.from_flags(options)
  if settings.mode != "none" and options.stage == "study":
    raise UsageError(
      f"synthq {options.stage} works in one process, got"
      f" --distributed={settings.mode}: leave it out"
    )
  return settings


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[pathlib.Path]:
  """Opens the working directory: a folder, or the mirror of a URL.

  Raises:
    ValueError: if it cannot be one of this stage, or another run is in it.
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


def literal(value: str) -> str:
  """Reads a flag's value as gin would, or else as text.

  >>> literal("3"), literal("beir:/data"), literal("inf"), literal("(%X, 1)")
  ('3', "'beir:/data'", '%INF', '(%X, 1)')
  >>> literal("(encoder|decoder)/.*")
  "'(encoder|decoder)/.*'"
  """
  if value == "inf":
    return "%INF"
  try:
    ast.literal_eval(_REFERENCE.sub("None", value))
  except (ValueError, SyntaxError):
    return repr(value)
  return value


def macros(text: str) -> list[str]:
  """Returns the macros that a binding refers to, but for gin's constants.

  >>> macros("plan.Rows.synthetic = (%EPSILON, %INF, '%x')")
  ['EPSILON']
  """
  found = _MACRO.findall(_QUOTED.sub("''", text))
  return [name for name in found if name not in _CONSTANTS]


def names(text: str) -> list[str]:
  """Returns the macros and parameters that a gin configuration binds."""
  return re.findall(r"(?m)^([\w./]+) =", text)


def imports(text: str) -> dict[str, str]:
  """Returns the imports of a gin file by the name that they bind.

  >>> imports("from a.b import c\\nimport d.e as f\\nc.C.x = 1")
  {'c': 'from a.b import c', 'f': 'import d.e as f'}
  """
  lines = re.findall(r"(?m)^((?:from \S+ )?import (?:\S+ as )?(\w+))$", text)
  return {name: line for line, name in lines}
