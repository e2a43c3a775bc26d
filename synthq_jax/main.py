"""The command line: `synthq STAGE --gin_file=... --gin.NAME=value --workdir=...`.

The only importer of gin: files and flags become frozen dataclasses here, and
everything below works with those. gin's habits are T5X's (files that include
files, UPPER_CASE macros for what users change); its dynamic registration makes
every dataclass that a gin file imports configurable.

Whatever the user can mend ends with one line on standard error that says what,
where and what to do, and exit code 2; `--debug` shows the traceback instead.
"""

import argparse
import ast
import contextlib
import contextvars
import dataclasses
import difflib
import importlib
import importlib.util  # gin uses it without importing it
import logging
import math
import os
import pathlib
import pkgutil
import re
import resource
import sys
import time
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gin

__all__ = ["STAGES", "UsageError", "main"]

STAGES = {
  "run": "the whole pipeline; finished stages are skipped",
  "prepare_data": "documents, queries, splits and tokens",
  "pretrain": "a public T5 from scratch (recipes/demo_pretrain.gin)",
  "finetune_dp": "the private generator",
  "generate": "synthetic queries",
  "train_retriever": "the dual encoders",
  "evaluate": "scores of every row of the table",
  "audit": "canaries: did the generator learn them?",
  "report": "report.html, report.md and the private page",
}
"""Stages by name, each with what it makes."""

_PACKAGE = pathlib.Path(__file__).resolve().parent
_FLAG = "--gin."
_DYNAMIC = "from __gin__ import dynamic_registration"
_NAMESPACES = ("pipeline", "models", "training", "data")
_SECRET = re.compile(r"^(\S*secret_seed)\s*=.*$", re.IGNORECASE | re.MULTILINE)
_QUIET = {
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "ABSL_MIN_LOG_LEVEL": "3",
  "GRPC_VERBOSITY": "ERROR",
  "GLOG_minloglevel": "3",
  "TOKENIZERS_PARALLELISM": "false",
}

_folders: contextvars.ContextVar[tuple[pathlib.Path, ...]] = (
  contextvars.ContextVar("folders", default=())
)


class UsageError(ValueError):
  """What the user can mend; its text is one line."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  >>> main(["privacy", "--noise_multiplier=1", "--examples=6000",
  ...       "--batch_size=256", "--steps=300", "--delta=1e-5"])
  6000 records, batches of 256, 300 steps, delta 1e-05
  Poisson batches (ADD_OR_REMOVE_ONE): noise multiplier 1 gives epsilon 5.16
  no amplification (REPLACE_SPECIAL): noise multiplier 1 gives epsilon 22.84

  Args:
    argv: the arguments after the program's name; None: the process's own.

  Returns:
    The exit code: 0, 2 for what the user can mend, 130 after Ctrl-C.
  """
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    _dispatch(argv)
    return 0
  except KeyboardInterrupt:
    return _stop("interrupted; the same command goes on where it stopped", 130)
  except (ValueError, OSError) as error:
    if "--debug" in argv:
      raise
    return _stop(_one_line(error), 2)


def _dispatch(argv: list[str]) -> None:
  """Parses the arguments and runs the stage or the calculator."""
  bindings = [a.removeprefix(_FLAG) for a in argv if a.startswith(_FLAG)]
  options = _parser().parse_args([a for a in argv if not a.startswith(_FLAG)])
  if options.stage == "privacy":
    if bindings:
      raise UsageError("synthq privacy takes no --gin.NAME; see synthq --help")
    print(_privacy(options))
  else:
    _run_stage(options, bindings)


def _stop(message: str, code: int) -> int:
  print(f"synthq: {message}", file=sys.stderr)
  return code


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one line."""

  def error(self, message: str) -> typing.NoReturn:
    """Raises instead of printing the usage."""
    raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
  """Describes the command line."""
  parser = _Parser(
    prog="synthq",
    allow_abbrev=False,
    description="Private query logs into retrievers that can be shared.",
  )
  commands = parser.add_subparsers(
    dest="stage", required=True, metavar="STAGE", title="stages"
  )
  for name, words in STAGES.items():
    _add_stage_flags(
      commands.add_parser(
        name,
        help=words,
        description=words,
        allow_abbrev=False,
        epilog="--gin.NAME=value sets a macro (--gin.EPSILON=3) or a "
        "parameter (--gin.generate.Config.p=0.9); what is no Python "
        "value is taken as text, inf as infinity.",
      )
    )
  words = "calculator: noise from epsilon, and back"
  _add_privacy_flags(
    commands.add_parser(
      "privacy", help=words, description=words, allow_abbrev=False
    )
  )
  return parser


def _add_stage_flags(parser: argparse.ArgumentParser) -> None:
  flag = parser.add_argument
  flag("--gin_file", action="append", help="may be given several times")
  flag("--gin_search_paths", default="", help="more folders, by comma")
  flag("--workdir", required=True, help="where all results lie")
  flag("--quiet", action="store_true", help="no progress bars")
  flag("--debug", action="store_true", help="show tracebacks")


def _add_privacy_flags(parser: argparse.ArgumentParser) -> None:
  flag = parser.add_argument
  target = parser.add_mutually_exclusive_group(required=True)
  target.add_argument("--epsilon", type=float)
  target.add_argument("--noise_multiplier", type=float)
  length = parser.add_mutually_exclusive_group(required=True)
  length.add_argument("--epochs", type=float, help="passes over the records")
  length.add_argument("--steps", type=int)
  flag("--examples", type=int, required=True, help="private records")
  flag("--batch_size", type=int, required=True)
  flag("--delta", type=float, help="1 / (2 examples) by default")
  flag("--debug", action="store_true", help="show tracebacks")


# The calculator.


def _privacy(options: argparse.Namespace) -> str:
  """Noise and epsilon of both kinds of batches, in words."""
  from synthq_jax.privacy import sampling

  n, batch = options.examples, options.batch_size
  delta = 1 / (2 * n) if options.delta is None and n > 0 else options.delta
  poisson = sampling.Poisson.with_margin(
    num_examples=n, expected_batch_size=batch
  )
  fixed = sampling.FixedOrder(num_examples=n, batch_size=batch)
  steps = options.steps
  if steps is None:
    steps = round(options.epochs * fixed.steps_per_epoch)
  return "\n".join(
    [
      f"{n} records, batches of {batch}, {steps} steps, delta {delta:.4g}",
      "Poisson batches (ADD_OR_REMOVE_ONE): "
      + _trade(options, poisson, "ADD_OR_REMOVE_ONE", steps, delta),
      "no amplification (REPLACE_SPECIAL): "
      + _trade(options, fixed, "REPLACE_SPECIAL", steps, delta),
    ]
  )


def _trade(
  options: argparse.Namespace,
  sampler: Any,
  relation: str,
  steps: int,
  delta: float,
) -> str:
  """Noise for an epsilon, or epsilon for a noise; rounded up, so both hold."""
  from synthq_jax.privacy import accounting

  known = dict(sampler=sampler, steps=steps, delta=delta, relation=relation)
  if options.epsilon is not None:
    noise = accounting.noise_multiplier(epsilon=options.epsilon, **known)
    needed = math.ceil(noise * 1e3) / 1e3
    return f"epsilon {options.epsilon:g} takes noise multiplier {needed:.3f}"
  noise = options.noise_multiplier
  reached = accounting.epsilon(noise_multiplier=noise, **known)
  if math.isfinite(reached):
    reached = math.ceil(reached * 100) / 100
  return f"noise multiplier {noise:g} gives epsilon {reached:g}"


# A stage: configure, run, say what came out.


def _run_stage(options: argparse.Namespace, bindings: Sequence[str]) -> None:
  """Runs a stage and what it needs that is not finished."""
  start = time.monotonic()
  module_name = "pretrain_recipe" if options.stage == "pretrain" else "plan"
  module = importlib.import_module(f"synthq_jax.pipeline.{module_name}")
  pretrain = options.stage == "pretrain"
  kind = module.Config if pretrain else module.RunConfig
  config, text = configure(
    kind,
    options.gin_file or (),
    bindings,
    search_paths=options.gin_search_paths.split(","),
  )
  workdir = pathlib.Path(options.workdir)
  _write_config(workdir, text)
  if pretrain:
    module.run(config, workdir)
    report = None
  else:
    stages = None if options.stage == "run" else (options.stage,)
    report = module.run(
      config, workdir, stages=stages, progress=not options.quiet
    )
  if report is not None and options.stage in ("run", "report"):
    print(_summary(report, workdir))
  print(f"{options.stage} finished: {_cost(time.monotonic() - start)}")


def _write_config(workdir: pathlib.Path, text: str) -> None:
  from synthq_jax import artifacts

  text = _SECRET.sub(r"# \1 is not written here: it undoes the noise.", text)
  artifacts.write_atomically(workdir / "config.gin", text)


def _summary(report: Any, workdir: pathlib.Path) -> str:
  """The main table, and where the reports are."""
  return "\n".join(
    [
      "",
      report.table.rstrip(),
      "",
      f"shareable report: {workdir / report.html}",
      f"        as text:  {workdir / report.markdown}",
      f"PRIVATE report:   {workdir / report.private_html}",
    ]
  )


def _cost(seconds: float) -> str:
  """Wall time and peak memory in words."""
  usage = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  peak = sum(resource.getrusage(who).ru_maxrss for who in usage)
  peak *= 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
  minutes, rest = divmod(round(seconds), 60)
  return f"{minutes} min {rest} s, peak memory {peak / 2**30:.1f} GiB"


# gin: files and flags into a dataclass.


def configure(
  kind: type,
  gin_files: Sequence[str],
  bindings: Sequence[str] = (),
  *,
  search_paths: Sequence[str] = (),
) -> tuple[Any, str]:
  """Builds a frozen dataclass from gin files and flags.

  Args:
    kind: the dataclass, which the files configure.
    gin_files: parsed in their order. Each is looked for as given, then in the
      search paths, below the working directory, in the repository and in the
      installed package, with and without `gin_configs/` before it.
    bindings: NAME=value, as they stand behind `--gin.`; they win.
    search_paths: more folders.

  Returns:
    The instance, and all that went into it as one gin file.

  Raises:
    UsageError: if a name, a value or a file is wrong or missing.
  """
  if not gin_files:
    raise UsageError(
      "expected --gin_file=FILE, got none; try"
      " --gin_file=gin_configs/recipes/demo.gin"
    )
  with _session(search_paths):
    for name in gin_files:
      with _explained(f"--gin_file={name}"):
        gin.parse_config_file(name)
    for binding in bindings:
      _bind(binding)
    _check_required()
    _check_values(kind)
    with _explained(_gin_name(kind)):
      gin.finalize()
      config = gin.get_configurable(kind)()
    _note_unused()
    return _typed(config, kind, _gin_name(kind)), gin.operative_config_str()


@contextlib.contextmanager
def _session(search_paths: Sequence[str]) -> Iterator[None]:
  """An empty gin without log lines that finds files where ours are."""
  here = pathlib.Path.cwd()
  roots = [*map(pathlib.Path, filter(None, search_paths)), here]
  roots += [_PACKAGE.parent, _PACKAGE]
  token = _folders.set(
    tuple(folder for r in roots for folder in (r, r / "gin_configs"))
  )
  gin.clear_config()
  gin.config.register_file_reader(_open, _is_file)
  before = logging.root.manager.disable
  logging.disable(logging.ERROR)  # gin logs every place where a file is not
  try:
    yield
  finally:
    logging.disable(before)
    _folders.reset(token)


def _found(name: str) -> Iterable[pathlib.Path]:
  return (f / name for f in _folders.get() if (f / name).is_file())


def _is_file(name: str) -> bool:
  return any(True for _ in _found(name))


def _open(name: str) -> typing.TextIO:
  return open(next(iter(_found(name))), encoding="utf-8")


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
  """Turns what gin and constructors raise into one line."""
  try:
    yield
  except UsageError:
    raise
  except OSError as error:
    words = _one_line(error).partition(" Searched config paths")[0]
    raise UsageError(
      f"{where}: {words} Check the name, or give --gin_search_paths=FOLDER"
    ) from error
  except Exception as error:
    raise UsageError(f"{where}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
  """The message without line breaks, carets and gin's inner names."""
  lines = [line.strip() for line in (str(error) or repr(error)).splitlines()]
  kept = [
    line
    for line in lines
    if line.strip("^") and not line.startswith("In call to configurable")
  ]
  text = " ".join(kept)
  return re.sub(r"<module '([\w.]+)' from '[^']*'>", r"\1", text)


def _bind(binding: str) -> None:
  """Applies one flag: a macro that a file defined, or a parameter."""
  name, equals, value = binding.partition("=")
  if not equals:
    raise UsageError(f"expected {_FLAG}NAME=value, got {_FLAG}{binding}")
  if "." not in name and name not in _macros():
    close = difflib.get_close_matches(name, _macros(), 1) or sorted(_macros())
    raise UsageError(
      f"{_FLAG}{binding}: no gin file defines {name}; did you mean"
      f" {' or '.join(close) or 'another gin file'}?"
    )
  text = f"{name} = {_literal(value)}"
  with _explained(f"{_FLAG}{binding}"):
    gin.parse_config([_DYNAMIC, *_imports(text), text])


def _literal(value: str) -> str:
  """Reads a flag's value as gin would, or else as text.

  >>> _literal("3"), _literal("beir:/data"), _literal("inf"), _literal("%X")
  ('3', "'beir:/data'", '%INF', '%X')
  """
  if value.strip() == "inf":
    return "%INF"
  if value.startswith(("%", "@", "(", "[", "{")):
    return value
  try:
    ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return repr(value)
  return value


def _imports(text: str) -> list[str]:
  """The gin imports of the modules whose names stand in a binding."""
  packages = {}
  for space in reversed(_NAMESPACES):
    folder = str(_PACKAGE / space)
    for module in pkgutil.iter_modules([folder]):
      packages[module.name] = f"synthq_jax.{space}"
  names = sorted(set(re.findall(r"(\w+)\.", text)) & set(packages))
  return [f"from {packages[name]} import {name}" for name in names]


def _macros() -> set[str]:
  return set(re.findall(r"^(\w+) =", gin.config_str(), re.MULTILINE))


def _note_unused() -> None:
  """Says which macros were set to no effect: likely a slip of the pen."""
  used = re.findall(r"^(\w+) =", gin.operative_config_str(), re.MULTILINE)
  for name in sorted(_macros() - set(used)):
    print(f"synthq: note: {name} is set, but nothing uses it", file=sys.stderr)


def _check_required() -> None:
  """Refuses bindings that are still `%gin.REQUIRED`."""
  pattern = r"^([\w./]+) =\s+(?:\\\n\s+)?%gin\.REQUIRED$"
  missing = re.findall(pattern, gin.config_str(), re.MULTILINE)
  if missing:
    flags = " ".join(f"{_FLAG}{name}=..." for name in missing)
    raise UsageError(f"the gin files leave open {', '.join(missing)}: {flags}")
