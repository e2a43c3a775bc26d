"""Prints the results of commands."""

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
  "cost",
  "explain_epsilon",
  "get_width",
  "hold_claims",
  "show",
  "summary",
]


_WIDTH = 100
_AUDITED = ("audit", "report", "run")


class RefutedError(Exception):
  """A gate that was asked for did not hold; its text is one line."""


def show(text: str) -> None:
  """Prints what a command has to say.

  Whoever closed standard output, as `head` does, has read enough: no error.
  """
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # What is still buffered would fail again when the process ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def explain_epsilon(
  epsilon: float | None = None, unit: str | None = None
) -> str:
  """Says in words what an epsilon promises.

  >>> print(explain_epsilon(3.0))
  Epsilon bounds what a release tells about one query. It changes the odds of any
  guess about it by a factor of at most e^epsilon: about 20.1 for epsilon 3 (2.72
  for 1, 20.1 for 3, 2,981 for 8). Probabilities may exceed that bound by delta.

  Args:
    epsilon: the one that was asked about; None: only the examples are given.
    unit: "user" for all queries of one user; else one query.
  """
  who = "the queries of one user" if unit == "user" else "one query"
  asked = ""
  if epsilon is not None:
    asked = f": about {rounding.factor(epsilon)} for epsilon {rounding.epsilon(epsilon)}"
  examples = ", ".join(
    f"{rounding.factor(each)} for {each}" for each in (1, 3, 8)
  )
  return textwrap.fill(
    f"Epsilon bounds what a release tells about {who}. It changes the odds of any"
    f" guess about {'them' if unit == 'user' else 'it'} by a factor of at most"
    f" e^epsilon{asked} ({examples}). Probabilities may exceed that bound by delta.",
    80,
  )


def get_width() -> int | None:
  """Returns the columns of the terminal; None where the output is no terminal.

  COLUMNS in the environment wins, as elsewhere.
  """
  if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
    return max(40, shutil.get_terminal_size().columns)
  return None


def summary(report: Any, workdir: str) -> str:
  """Returns the main table, the verdict, and where the reports are."""
  verdict = "\n".join(
    textwrap.fill(line, _WIDTH, subsequent_indent="  ")
    for line in report.verdict.splitlines()
  )
  return (
    "\nPRIVATE: scores on private queries, without noise; what may be quoted"
    " stands in the shareable report\n\n"
    f"{report.table.rstrip()}\n\n"
    "All intervals, and what rows are trained on: see the private report."
    f"\n\n{verdict}\n\n"
    f"shareable report: {os.path.join(workdir, report.html)}\n"
    f"        as text:  {os.path.join(workdir, report.markdown)}\n"
    f"PRIVATE report:   {os.path.join(workdir, report.private_html)}"
  )


def cost(seconds: float) -> str:
  """Returns wall time and peak memory in words."""
  peak = sum(progress.peak_bytes())
  minutes, rest = divmod(round(seconds), 60)
  return f"{minutes} min {rest} s, peak memory {peak / 2**30:.1f} GiB"


def check_gate(stage: str) -> None:
  """Refuses --fail_above_claim with a stage that comes to no audit.

  Raises:
    UsageError: if it is none of them.
  """
  if stage not in _AUDITED:
    raise flags.UsageError(
      f"--fail_above_claim goes with {' or '.join(_AUDITED)}, got {stage}"
    )


def check_audit(stage: str, config: Any, with_gate: bool) -> None:
  """Refuses an audit of nothing, before any work.

  Raises:
    UsageError: if no canary is planted, or the gate has no claim to hold.
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


def hold_claims(audits: Sequence[Any]) -> None:
  """Lets nothing pass that an audit refutes, or whose audit is void.

  Raises:
    RefutedError: naming the first such generator.
  """
  for one in audits:
    if one.is_contaminated:
      raise RefutedError(
        f"{one.name}: canaries were known before the private training, so the"
        f" audit is void: find where they got in; see {one.directory}"
      )
    if one.exceeds_claim:
      raise RefutedError(
        f"{one.name}: the audit refutes the claimed epsilon: do not publish; see"
        f" {one.directory}"
      )
    if one.lower_bound is None:
      raise RefutedError(
        f"{one.name}: too few canaries stand in the data once, so nothing was"
        " audited: set a greater plan.Canaries.number"
      )
    if (
      math.isfinite(one.claimed_epsilon) and one.ceiling <= one.claimed_epsilon
    ):
      print(
        f"synthq: note: {one.name}: so few canaries could not refute an epsilon"
        f" above {one.ceiling:.2f}, whatever leaks; passing says nothing",
        file=sys.stderr,
      )
