"""Commands that are no stages: the calculator, and the export of a model."""

import argparse

from synthq_jax import _flags

__all__ = ["TOOLS"]


def _privacy(options: argparse.Namespace) -> str:
  """What the calculator or the ledger says."""
  from synthq_jax.privacy import calculator, ledger

  given = _flags.privacy_question(options)
  path = given.pop("ledger", None)
  return (
    ledger.describe(path, **given) if path else calculator.describe(**given)
  )


def _export(options: argparse.Namespace) -> str:
  """Writes a checkpoint in another format; says what holds for it."""
  from synthq_jax.pipeline import export

  return export.run(
    options.checkpoint,
    options.to,
    format=options.format,
    step=options.step,
    allow_private=options.allow_private,
  )


TOOLS = {"privacy": _privacy, "export": _export}
"""By command: takes the parsed flags, returns what is printed."""
