"""The flags of `synthq`, and what their text means."""

import argparse
import ast
import errno
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from synthq_jax.training import cluster

__all__ = [
  "STAGES",
  "UsageError",
  "exit_code",
  "imports",
  "literal",
  "names",
  "one_line",
  "os_error",
  "parser",
  "place",
  "privacy_question",
  "processes",
  "share",
]

STAGES = {
  "run": "the whole pipeline; finished stages are skipped",
  "prepare_data": "documents, queries, splits and tokens",
  "pretrain": "a public T5 (from scratch: recipes/demo_pretrain.gin)",
  "finetune_dp": "the private generators",
  "generate": "synthetic queries",
  "filter_queries": "the queries that filters keep; optional",
  "train_retriever": "the dual encoders",
  "evaluate": "scores of every row of the table",
  "query_leakage": "real queries among the synthetic ones: more than by chance?",
  "audit": "canaries: did a generator learn them?",
  "compare_queries": "rows against each other, synthetic beside real queries",
  "report": "the shareable pages and the private one",
  "study": "a study of gin_configs/studies; no stage of the pipeline",
}
"""Stages by name, each with what it makes."""

_HELP = (
  "--gin.NAME=value sets a macro (--gin.EPSILON=3) or a parameter"
  " (--gin.generate.Config.p=0.9). What is no Python value is taken as text;"
  " inf is infinity."
)


_FULL = "free some space, and the same command goes on"
_FORBIDDEN = "choose a --workdir that you may write to"
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
_HINTS |= dict.fromkeys(_PASSING, "the same command goes on where it stopped")


def os_error(error: OSError) -> str:
  """Says in one line what the system refused, where, and what helps.

  >>> os_error(OSError(errno.ENOSPC, "No space left on device", "w/x.npz"))
  'w/x.npz: No space left on device; free some space, and the same command goes on'
  """
  where = f"{error.filename}: " if error.filename else ""
  what = error.strerror or " ".join(str(error).split())
  return f"{where}{what}; {_HINTS.get(error.errno, 'check the path')}"


def exit_code(error: BaseException) -> int:
  """Returns what a command exits with that failed so.

  Args:
    error: a ValueError or an OSError.

  Returns:
    2 for what the user can mend; 75 (EX_TEMPFAIL) for what a file system or a
    connection may not do again: launchers start the command anew.
  """
  passing = isinstance(error, OSError) and error.errno in _PASSING
  return os.EX_TEMPFAIL if passing else 2


def one_line(error: BaseException) -> str:
  """Returns a message without line breaks, carets and gin's inner names.

  Args:
    error: whose message.
  """
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


_COMMON = ("stage", "debug")


class UsageError(ValueError):
  """What the user can mend; its text is one line."""


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one line."""

  def error(self, message: str) -> NoReturn:
    """Raises instead of printing the usage."""
    raise UsageError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
  """Describes the command line."""
  top = _Parser(
    prog="synthq",
    allow_abbrev=False,
    description="Private query logs into retrievers that can be shared.",
  )
  commands = top.add_subparsers(
    dest="stage", required=True, metavar="STAGE", title="stages"
  )
  for name, words in STAGES.items():
    _add_stage_flags(
      commands.add_parser(
        name, help=words, description=words, epilog=_HELP, allow_abbrev=False
      )
    )
  words = "calculator: noise from epsilon, and back; adds up a ledger"
  _add_privacy_flags(
    commands.add_parser(
      "privacy", help=words, description=words, allow_abbrev=False
    )
  )
  words = "writes a checkpoint for T5X or transformers, or in our own format"
  _add_export_flags(
    commands.add_parser(
      "export", help=words, description=words, allow_abbrev=False
    )
  )
  words = "private: how much of queries and documents a public corpus holds"
  _add_overlap_flags(
    commands.add_parser(
      "corpus_overlap", help=words, description=words, allow_abbrev=False
    )
  )
  _add_leakage(commands)
  return top


def _add_leakage(commands: Any) -> None:
  words = "private: leaks between a query log and other texts"
  group = commands.add_parser(
    "leakage", help=words, description=words, allow_abbrev=False
  )
  tools = group.add_subparsers(dest="tool", required=True, metavar="TOOL")
  words = "pairs of queries and targets that say the same"
  _add_duplicates_flags(
    tools.add_parser(
      "near_duplicates", help=words, description=words, allow_abbrev=False
    )
  )


def _add_duplicates_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  words = "the log, streamed: id, tab, query; or JSONL with _id and text"
  flag("--queries", required=True, help=words)
  words = "the smaller side: topics (JSONL), or a file like the log"
  flag("--targets", required=True, help=words)
  words = "exact, token_set, containment, minhash or embedding; several times"
  flag("--detector", action="append", required=True, help=words)
  flag("--threshold", type=float, help="least similarity, of all of them")
  words = "JSONL of pairs with their texts; its owner alone may read it"
  flag("--output", required=True, help=words)
  words = "of the encoder of embedding: a folder of any known format"
  flag("--checkpoint", help=words)
  flag("--vocabulary", help="the SentencePiece model of --checkpoint")
  words = "instead: a BERT of Hugging Face or sentence-transformers"
  flag("--bert", metavar="FOLDER", help=words)
  flag("--quiet", action="store_true", help="no progress bars")
  flag("--debug", action="store_true", help="show tracebacks")


def _add_stage_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  flag("--gin_file", action="append", help="may be given several times")
  flag("--gin_search_paths", default="", help="more folders, by comma")
  flag("--workdir", required=True, help="where all results lie")
  flag("--quiet", action="store_true", help="no progress bars")
  words = "exit with 3 if an audit refutes a claim"
  flag("--fail_above_claim", action="store_true", help=words)
  flag("--debug", action="store_true", help="show tracebacks")
  _add_cluster_flags(
    command.add_argument_group("several processes").add_argument
  )


def _add_cluster_flags(flag: Callable[..., Any]) -> None:
  modes = "; ".join(f"{name}: {words}" for name, words in cluster.MODES.items())
  flag("--distributed", choices=cluster.MODES, help=modes)
  flag("--coordinator_address", metavar="HOST:PORT", help="of process 0")
  flag("--num_processes", type=int, help="in all")
  flag("--process_id", type=int, help="of this one, from 0")
  words = "virtual devices of this process, on CPUs"
  flag("--cpu_devices", type=int, help=words)


def _add_privacy_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  flag("--epsilon", type=float, help="the target, or")
  flag("--noise_multiplier", type=float, help="noise over sensitivity")
  flag("--epochs", type=float, help="passes over the records, or")
  flag("--steps", type=int)
  flag("--examples", type=int, dest="num_examples")
  flag("--batch_size", type=int)
  flag("--delta", type=float, help="1 / (2 examples) where it is not given")
  flag("--ledger", help="instead: add up a private/ledger.jsonl")
  flag("--debug", action="store_true", help="show tracebacks")


def _add_export_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  flag("--checkpoint", required=True, help="a folder of any known format")
  flag("--to", required=True, help="the new folder")
  formats = ("t5x", "huggingface", "safetensors")
  flag("--format", required=True, choices=formats)
  flag("--step", type=int, default=0, help="of a T5X checkpoint")
  words = "also what was trained without differential privacy"
  flag("--allow_private", action="store_true", help=words)
  flag("--debug", action="store_true", help="show tracebacks")


def _add_overlap_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  words = "a glob of text or JSONL files, in quotes, or tfds:NAME[@SPLIT]"
  flag("--corpus", required=True, help=words)
  flag("--workdir", required=True, help="of a run whose data is prepared")
  flag("--sample_size", type=int, default=10_000, help="items of each run")
  flag("--runs", type=int, default=5, help="random samples")
  flag("--ngram", type=int, default=8, help="words of an n-gram")
  flag("--seed", type=int, default=0, help="of the samples")
  words = "i/n: this process searches every n-th part of the corpus"
  flag("--share", default="0/1", help=words)
  flag("--quiet", action="store_true", help="no progress bar")
  flag("--debug", action="store_true", help="show tracebacks")


def processes(options: argparse.Namespace) -> cluster.Settings:
  """Returns how the processes of a run find each other.

  Args:
    options: the parsed flags of a stage.

  Raises:
    ValueError: if flags do not go together, or the stage takes one process.
  """
  settings = cluster.from_flags(options)
  if settings.mode != "none" and options.stage in ("pretrain", "study"):
    raise UsageError(
      f"synthq {options.stage} works in one process, got"
      f" --distributed={settings.mode}: leave it out"
    )
  return settings


def share(text: str) -> tuple[int, int]:
  """Reads a share of the parts of a corpus.

  >>> share("3/8")
  (3, 8)

  Args:
    text: i/n, 0 <= i < n.

  Returns:
    Both numbers.

  Raises:
    UsageError: if it is no such thing.
  """
  found = re.fullmatch(r"(\d+)/(\d+)", text)
  if not found or int(found[1]) >= int(found[2]):
    raise UsageError(f"expected --share=i/n with 0 <= i < n, got {text!r}")
  return int(found[1]), int(found[2])


def privacy_question(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the flags of `synthq privacy` for the calculator or the ledger.

  Args:
    options: the parsed flags.

  Returns:
    Either `ledger` and `delta`, or the arguments of `calculator.describe`.

  Raises:
    UsageError: if flags are missing or do not go together.
  """
  given = {k: v for k, v in vars(options).items() if k not in _COMMON}
  path = given.pop("ledger")
  missing = [k for k in ("num_examples", "batch_size") if given[k] is None]
  if path is None and missing:
    names = " and ".join(f"--{k.removeprefix('num_')}" for k in missing)
    raise UsageError(f"expected {names}, or --ledger=FILE, got none")
  if path is None:
    return given
  delta = given.pop("delta")
  others = [k for k, value in given.items() if value is not None]
  if others:
    raise UsageError(f"--ledger goes with --delta alone, got --{others[0]}")
  return {"ledger": path, "delta": delta}


def literal(value: str) -> str:
  """Reads a flag's value as gin would, or else as text.

  >>> literal("3"), literal("beir:/data"), literal("inf"), literal("%X")
  ('3', "'beir:/data'", '%INF', '%X')
  """
  if value == "inf":
    return "%INF"
  if value.startswith(("%", "@", "(", "[", "{")):
    return value
  try:
    ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return repr(value)
  return value


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
