"""The flags of `synthq`, and what their text means."""

import argparse
import ast
from typing import NoReturn

__all__ = ["STAGES", "UsageError", "literal", "parser"]

STAGES = {
  "run": "the whole pipeline; finished stages are skipped",
  "prepare_data": "documents, queries, splits and tokens",
  "pretrain": "a public T5 (from scratch: recipes/demo_pretrain.gin)",
  "finetune_dp": "the private generators",
  "generate": "synthetic queries",
  "train_retriever": "the dual encoders",
  "evaluate": "scores of every row of the table",
  "audit": "canaries: did a generator learn them?",
  "report": "the shareable pages and the private one",
}
"""Stages by name, each with what it makes."""

_HELP = (
  "--gin.NAME=value sets a macro (--gin.EPSILON=3) or a parameter"
  " (--gin.generate.Config.p=0.9). What is no Python value is taken as text;"
  " inf is infinity."
)


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
  words = "calculator: noise from epsilon, and back"
  _add_privacy_flags(
    commands.add_parser(
      "privacy", help=words, description=words, allow_abbrev=False
    )
  )
  return top


def _add_stage_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  flag("--gin_file", action="append", help="may be given several times")
  flag("--gin_search_paths", default="", help="more folders, by comma")
  flag("--workdir", required=True, help="where all results lie")
  flag("--quiet", action="store_true", help="no progress bars")
  flag("--debug", action="store_true", help="show tracebacks")


def _add_privacy_flags(command: argparse.ArgumentParser) -> None:
  flag = command.add_argument
  flag("--epsilon", type=float, help="the target, or")
  flag("--noise_multiplier", type=float, help="noise over sensitivity")
  flag("--epochs", type=float, help="passes over the records, or")
  flag("--steps", type=int)
  flag("--examples", type=int, required=True, dest="num_examples")
  flag("--batch_size", type=int, required=True)
  flag("--delta", type=float, help="1 / (2 examples) where it is not given")
  flag("--debug", action="store_true", help="show tracebacks")


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
