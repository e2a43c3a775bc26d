"""Builds the report of audits: ranks, leaks, lower bounds and verdicts."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from synthq_jax import intervals
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import exposure
from synthq_jax.report import blocks, page, plots, tables, words
from synthq_jax.report import values as values_lib
from synthq_jax.runtime import results

__all__ = ["PRIVATE", "text"]

_NAME = tables.row_name
_PAPERS = {
  (math.inf, 10): ("1", "67%"),
  (math.inf, 100): ("1", "100%"),
  (16.0, 10): ("43", "0%"),
  (16.0, 100): ("32", "0%"),
}
"""Published (rank among 100, leaked share) by epsilon and repetitions.

They are from the papers on DP query synthesis: T5-Base, 532,000 pairs of MS MARCO,
digits in the document.
"""

_GROUPS = {
  "digits in the document": canaries_lib.PAPERS,
  "digits in the query": canaries_lib.MIRRORED,
  "new tokens": ("new_tokens",),
  "rare words": ("rare_words",),
}

Audits = Sequence[results.AuditReport]


def _build(values: values_lib.Private) -> tuple[blocks.Block, ...]:
  audits = values.audits
  if not audits:
    return (words.paragraph("audit.nothing"),)
  return (
    *_make_warnings(audits),
    _make_verdicts(audits),
    _draw_ranks(audits),
    _make_summary(audits),
    _make_details(audits),
    _make_legend(audits),
    words.paragraph(
      "audit.explained",
      ranked=audits[0].num_ranked,
      chance=(audits[0].num_ranked + 1) / 2,
      bits=math.log2(audits[0].num_candidates),
      searched=audits[0].num_searched,
    ),
    _make_bounds(audits),
  )


def text(audits: Audits) -> str:
  """Returns the report for the screen, without drawing and explanations.

  Args:
    audits: one for each audited generator.
  """
  return page.text(
    [
      *_make_warnings(audits),
      _make_summary(audits),
      _make_details(audits),
      _make_legend(audits),
      _make_bounds(audits),
      _make_verdicts(audits),
    ]
  )


def _make_warnings(audits: Audits) -> list[blocks.Paragraph]:
  return [
    words.paragraph("audit.void", name=audit.name, p=audit.control)
    for audit in audits
    if audit.is_contaminated
  ]


def _make_verdicts(audits: Audits) -> blocks.Table:
  return tables.of(
    audits,
    {
      "Generator": lambda audit: _NAME(audit.name),
      "Claimed epsilon": lambda audit: tables.epsilon(audit.claimed_epsilon),
      "Lower bound": lambda audit: (
        "-" if audit.lower_bound is None else f"{audit.lower_bound:.2f}"
      ),
      "At most possible": lambda audit: f"{audit.ceiling:.2f}",
      "Control p": lambda audit: f"{audit.control:.2g}",
      "Verdict": _write_verdict,
    },
    left=("Generator", "Verdict"),
  )


def _write_verdict(audit: results.AuditReport) -> str:
  if audit.is_contaminated:
    return "VOID: canaries were known before"
  if audit.exceeds_claim:
    return "REFUTES THE CLAIM"
  if math.isinf(audit.claimed_epsilon):
    return "nothing is claimed"
  if audit.ceiling <= audit.claimed_epsilon:
    return "too few canaries to refute such a claim"
  return "does not refute the claim"


class _CanaryRow(NamedTuple):
  """The canaries of one generator with one number of repetitions."""

  audit: results.AuditReport
  repetitions: int
  kinds: Sequence[str] = ()  # kinds of canaries; empty until they are chosen

  @property
  def name(self) -> str:
    return self.audit.name

  @property
  def cells(self) -> list[results.AuditCell]:
    return [
      cell
      for cell in self.audit.cells
      if cell.repetitions == self.repetitions and cell.kind in self.kinds
    ]

  def gather(self, name: str) -> list[float]:
    """Joins a field of all cells, such as "ranks" or "exposure"."""
    return [value for cell in self.cells for value in getattr(cell, name)]

  def format_mean(self, name: str, form: str) -> str:
    values = self.gather(name)
    return format(statistics.fmean(values), form) if values else "-"

  def compute_mean_rank(self) -> intervals.Interval | None:
    """Returns the mean rank of inserted secrets, or None without secrets."""
    if not (ranks := self.gather("ranks")):
      return None
    return exposure.mean_rank(np.array(ranks), self.audit.num_ranked)

  def format_rank(self) -> str:
    return tables.interval(self.compute_mean_rank(), ".1f")

  def format_epsilon(self) -> str:
    """Formats the epsilon estimated from the mean rank; without ranks, from chance."""
    num, ranks = self.audit.num_ranked, self.gather("ranks")
    mean = statistics.fmean(ranks) if ranks else (num + 1) / 2
    return f"{exposure.epsilon_of_mean_rank(mean, num, self.repetitions):.3f}"

  def get_papers(self) -> tuple[str, str]:
    epsilon = self.audit.row.epsilon
    if epsilon is None:
      return "-", "-"
    return _PAPERS.get((epsilon, self.repetitions), ("-", "-"))

  def format_leaked(self, leaks: str = "leaked", of: str = "ranks") -> str:
    """Formats the share of canaries whose secret stands in a written query."""
    cells = [cell for cell in self.cells if cell.leaked is not None]
    if not (total := sum(len(getattr(cell, of)) for cell in cells)):
      return "-"
    return f"{sum(getattr(cell, leaks) for cell in cells) / total:.0%}"


def _list_rows(audits: Audits) -> list[_CanaryRow]:
  """Returns a row for each generator and number of repetitions."""
  return [
    _CanaryRow(audit, repetitions)
    for audit in audits
    for repetitions in sorted({cell.repetitions for cell in audit.cells})
  ]


def _make_summary(audits: Audits) -> blocks.Table:
  columns = {
    "Generator": lambda row: _NAME(row.name),
    "Repetitions": lambda row: f"{row.repetitions:,}",
    "Papers: rank": lambda row: row.get_papers()[0],
    "leaked": lambda row: row.get_papers()[1],
  }
  for group, kinds in _get_groups(audits).items():
    columns[f"{group}: rank"] = lambda row, kinds=kinds: row._replace(
      kinds=kinds
    ).format_rank()
    if canaries_lib.KINDS[kinds[0]].can_leak:
      columns[f"{group}: leaked"] = lambda row, kinds=kinds: row._replace(
        kinds=kinds
      ).format_leaked()
  return tables.of(_list_rows(audits), columns)


def _draw_ranks(audits: Audits) -> blocks.Figure:
  panels: dict[str, dict[str, list]] = {}
  for row in _list_rows(audits):
    panel = panels.setdefault(_NAME(row.name), {})
    for group, kinds in _get_groups(audits).items():
      points = panel.setdefault(group, [])
      if mean := row._replace(kinds=kinds).compute_mean_rank():
        points.append((row.repetitions, mean))
  return blocks.Figure(
    svg=plots.ranks(panels, num_ranked=audits[0].num_ranked),
    caption=words.paragraph.text("audit.figure"),
  )


def _make_details(audits: Audits) -> blocks.Table:
  rows = [
    row._replace(kinds=(kind,))
    for _, ours in itertools.groupby(_list_rows(audits), lambda row: row.name)
    for rows in [list(ours)]
    for kind in _list_kinds([rows[0].audit])
    for row in rows
  ]
  return tables.of(
    rows,
    {
      "Generator": lambda row: _NAME(row.name),
      "Canaries": lambda row: row.kinds[0].replace("_", " "),
      "Repetitions": lambda row: f"{row.repetitions:,}",
      "Inserted": lambda row: f"{len(row.gather('ranks')):,}",
      "Rank": lambda row: row.format_rank(),
      "Held out": lambda row: row.format_mean("held_out_ranks", ".1f"),
      "Exposure (bits)": lambda row: row.format_mean("exposure", ".2f"),
      "Leaked": lambda row: row.format_leaked(),
      "Held out leaked": lambda row: row.format_leaked(
        "leaked_held_out", of="held_out_ranks"
      ),
      "Epsilon of the rank": lambda row: row.format_epsilon(),
    },
    left=("Generator", "Canaries"),
  )


def _make_legend(audits: Audits) -> blocks.Paragraph:
  kinds = [
    f"{kind.replace('_', ' ')}: {canaries_lib.KINDS[kind].words}"
    for kind in _list_kinds(audits)
  ]
  return words.paragraph("audit.kinds", kinds="; ".join(kinds))


def _make_bounds(audits: Audits) -> blocks.Table:
  return tables.of(
    [(_NAME(audit.name), bound) for audit in audits for bound in audit.bounds],
    {
      "Generator": lambda row: row[0],
      "Attack": lambda row: row[1].attack,
      "Repetitions": lambda row: f"{row[1].repetitions:,}",
      "Canaries in / out": lambda row: (
        f"{row[1].num_inserted} / {row[1].num_held_out}"
      ),
      "AUROC": lambda row: _format_interval(row[1].auroc),
      "TPR at 1% FPR": lambda row: _format_interval(row[1].tpr_at_1_fpr),
      "One-run bound": lambda row: f"{row[1].epsilon_one_run:.2f}",
      "f-DP one-run bound": lambda row: f"{row[1].epsilon_one_run_fdp:.2f}",
      "Claimed epsilon": lambda row: tables.epsilon(row[1].claimed_epsilon),
    },
    left=("Generator", "Attack"),
  )


def _format_interval(values: tuple[float, float, float]) -> str:
  mean, low, high = values
  return f"{intervals.Interval(mean=mean, low=low, high=high):.3f}"


def _get_groups(audits: Audits) -> dict[str, Sequence[str]]:
  """Returns those of `_GROUPS` with a kind that an audit has."""
  kinds = {*_list_kinds(audits)}
  return {group: own for group, own in _GROUPS.items() if kinds & {*own}}


def _list_kinds(audits: Audits) -> list[str]:
  return [*dict.fromkeys(cell.kind for audit in audits for cell in audit.cells)]


PRIVATE = page.Section("Audit", _build)
