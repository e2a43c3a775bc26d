"""Prints the results of commands, and holds the gate on audits."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from synthq_jax.cli import flags
from synthq_jax.privacy import rounding
from synthq_jax.training import progress

__all__ = [
  "RefutedError",
  "check_audit",
  "check_gate",
  "describe_cost",
  "explain_epsilon",
  "get_width",
  "refuse_refuted",
  "show",
  "summarize",
]


_WIDTH = 100
_AUDITED = ("audit", "report", "run")


class RefutedError(Exception):
  """An error of a gate that the user set; its text is one line."""


def show(text: str) -> None:
  """Prints the output of a command.

  A closed standard output, as by `head`, is no error: the reader has enough.
  """
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes the rest at exit, which would fail again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def explain_epsilon(
  epsilon: float | None = None, unit: str | None = None
) -> str:
  """Explains the guarantee of an epsilon in words.

  >>> print(explain_epsilon(3.0))
  Epsilon bounds what a release tells about one query. The odds that it is in the
  log change by a factor of at most e^epsilon: about 20.1 for epsilon 3 (2.72 for
  1, 20.1 for 3, 2,981 for 8). The odds between two contents that it may have
  change by at most the square. Probabilities may exceed the first bound by delta.

  Args:
    epsilon: the epsilon to explain; None for examples alone.
    unit: "user" for all queries of one user; else for one query.
  """
  subject = "the queries of one user" if unit == "user" else "one query"
  factor_text = ""
  if epsilon is not None:
    factor_text = f": about {rounding.factor(epsilon)} for epsilon {rounding.epsilon(epsilon)}"
  examples = ", ".join(
    f"{rounding.factor(value)} for {value}" for value in (1, 3, 8)
  )
  return textwrap.fill(
    f"Epsilon bounds what a release tells about {subject}. The odds that"
    f" {'they are' if unit == 'user' else 'it is'} in the log change by a factor of at"
    f" most e^epsilon{factor_text} ({examples}). The odds between two contents that"
    f" {'they' if unit == 'user' else 'it'} may have change by at most the square."
    " Probabilities may exceed the first bound by delta.",
    80,
  )


def get_width() -> int | None:
  """Returns the width of the terminal in characters; None without a terminal.

  The environment's COLUMNS overrides the width, also without a terminal.
  """
  if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
    return max(40, shutil.get_terminal_size().columns)
  return None


def summarize(report: Any, workdir: str) -> str:
  """Returns the main table, the verdict and the paths of the reports."""
  verdict = "\n".join(
    textwrap.fill(line, _WIDTH, subsequent_indent="  ")
    for line in report.verdict.splitlines()
  )
  return (
    "\nPRIVATE: scores on private queries, without noise; quote the shareable"
    " report instead\n\n"
    f"{report.table.rstrip()}\n\n"
    "All intervals and the training data of each row: see the private report."
    f"\n\n{verdict}\n\n"
    f"shareable report: {os.path.join(workdir, report.html)}\n"
    f"        as text:  {os.path.join(workdir, report.markdown)}\n"
    f"PRIVATE report:   {os.path.join(workdir, report.private_html)}"
  )


def describe_cost(seconds: float) -> str:
  """Formats wall time and peak memory."""
  peak = sum(progress.peak_bytes())
  minutes, rest = divmod(round(seconds), 60)
  return f"{minutes} min {rest} s, peak memory {peak / 2**30:.1f} GiB"


def check_gate(stage: str) -> None:
  """Refuses --fail_above_claim for a command that runs no audit.

  Raises:
    UsageError: if the command is none of `_AUDITED`.
  """
  if stage not in _AUDITED:
    raise flags.UsageError(
      f"--fail_above_claim goes with {' or '.join(_AUDITED)}, got {stage}"
    )


def check_audit(stage: str, config: Any, with_gate: bool) -> None:
  """Refuses an audit without canaries, or a gate without a claim, before any work.

  Raises:
    UsageError: if no canary is planted, or the gate has no claim to test.
  """
  if not config.canaries.number and (with_gate or stage == "audit"):
    raise flags.UsageError(
      "expected canaries to audit, got none: set --gin.plan.Canaries.number=N"
      " (64, for example), which plants some in the private data"
    )
  if not with_gate:
    return
  if 1 not in config.canaries.repetitions:
    raise flags.UsageError(
      "--fail_above_claim: expected canaries that stand in the data once, which"
      " the claim is about, got plan.Canaries.repetitions="
      f"{config.canaries.repetitions}: add 1"
    )
  if not any(map(math.isfinite, config.rows.synthetic)):
    raise flags.UsageError(
      "--fail_above_claim: expected a finite epsilon to hold, got"
      f" plan.Rows.synthetic={config.rows.synthetic}"
    )


def refuse_refuted(audits: Sequence[Any]) -> None:
  """Refuses claims that an audit refutes, and audits that prove nothing.

  Too few canaries to refute a claim are no error; a note says so.

  Raises:
    RefutedError: naming the first generator whose claim is refuted, whose audit is
      void, or that has too few canaries for a lower bound.
  """
  for audit in audits:
    if audit.is_contaminated:
      raise RefutedError(
        f"{audit.name}: canaries were known before the private training, so the"
        f" audit is void: find where they got in; see {audit.directory}"
      )
    if audit.exceeds_claim:
      raise RefutedError(
        f"{audit.name}: the audit refutes the claimed epsilon: do not publish; see"
        f" {audit.directory}"
      )
    if audit.lower_bound is None:
      raise RefutedError(
        f"{audit.name}: too few canaries stand in the data once, so nothing was"
        " audited: set a greater plan.Canaries.number"
      )
    if (
      math.isfinite(audit.claimed_epsilon)
      and audit.ceiling <= audit.claimed_epsilon
    ):
      print(
        f"synthq: note: {audit.name}: so few canaries could not refute an epsilon"
        f" above {audit.ceiling:.2f}, whatever leaks; passing says nothing",
        file=sys.stderr,
      )
