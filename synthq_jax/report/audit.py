"""Draws what audits found: ranks, leaks, bounds, verdicts."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from synthq_jax import intervals
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import exposure
from synthq_jax.report import blocks, page, plots, tables, words
from synthq_jax.runtime import results

__all__ = ["PRIVATE", "text"]

_NAME = tables.row_name
_PAPERS = {
  (math.inf, 10): ("1", "67%"),
  (math.inf, 100): ("1", "100%"),
  (16.0, 10): ("43", "0%"),
  (16.0, 100): ("32", "0%"),
}
"""Rank among 100 and share leaked, by epsilon and repetitions, in the papers on
DP query synthesis (T5 on 530,000 MS MARCO queries, digits in the document)."""

_GROUPS = {
  "digits in the document": canaries_lib.PAPERS,
  "digits in the query": canaries_lib.MIRRORED,
  "new tokens": ("new_tokens",),
  "rare words": ("rare_words",),
}

Audits = Sequence[results.AuditReport]


def _private(audits: Audits) -> tuple[blocks.Block, ...]:
  if not audits:
    return (words.paragraph("audit.nothing"),)
  return (
    *_warnings(audits),
    _verdicts(audits),
    _figure(audits),
    _summary(audits),
    _details(audits),
    _legend(audits),
    words.paragraph(
      "audit.explained",
      ranked=audits[0].num_ranked,
      chance=(audits[0].num_ranked + 1) / 2,
      bits=math.log2(audits[0].num_candidates),
      searched=audits[0].num_searched,
    ),
    _bounds(audits),
  )


def text(audits: Audits) -> str:
  """Returns the same tables for the screen, without the explanations.

  Args:
    audits: all of them.
  """
  return page.text(
    [
      *_warnings(audits),
      _summary(audits),
      _details(audits),
      _legend(audits),
      _bounds(audits),
      _verdicts(audits),
    ]
  )


def _warnings(audits: Audits) -> list[blocks.Paragraph]:
  return [
    words.paragraph("audit.void", name=one.name, p=one.control)
    for one in audits
    if one.is_contaminated
  ]


def _verdicts(audits: Audits) -> blocks.Table:
  return tables.of(
    audits,
    {
      "Generator": lambda one: _NAME(one.name),
      "Claimed epsilon": lambda one: tables.epsilon(one.claimed_epsilon),
      "Lower bound": lambda one: (
        "-" if one.lower_bound is None else f"{one.lower_bound:.2f}"
      ),
      "At most possible": lambda one: f"{one.ceiling:.2f}",
      "Control p": lambda one: f"{one.control:.2g}",
      "Verdict": _verdict,
    },
    left=("Generator", "Verdict"),
  )


def _verdict(one: results.AuditReport) -> str:
  if one.is_contaminated:
    return "VOID: canaries were known before"
  if one.exceeds_claim:
    return "REFUTES THE CLAIM"
  if math.isinf(one.claimed_epsilon):
    return "nothing is claimed"
  if one.ceiling <= one.claimed_epsilon:
    return "too few canaries to refute such a claim"
  return "does not refute the claim"


class _Row(NamedTuple):
  """Canaries of one generator that stand in the data equally often."""

  audit: results.AuditReport
  repetitions: int
  kinds: Sequence[str] = ()  # of canaries; none: not yet chosen

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

  def gathered(self, name: str) -> list[float]:
    """Returns all values of that name: ranks, exposure, ..."""
    return [value for cell in self.cells for value in getattr(cell, name)]

  def mean(self, name: str, form: str) -> str:
    values = self.gathered(name)
    return format(statistics.fmean(values), form) if values else "-"

  def mean_rank(self) -> intervals.Interval | None:
    """Returns the mean rank of inserted secrets; None: there are none."""
    if not (ranks := self.gathered("ranks")):
      return None
    return exposure.mean_rank(ranks, self.audit.num_ranked)

  def rank(self) -> str:
    return tables.interval(self.mean_rank(), ".1f")

  def epsilon(self) -> str:
    """Writes the epsilon that the mean rank speaks of."""
    num, ranks = self.audit.num_ranked, self.gathered("ranks")
    mean = statistics.fmean(ranks) if ranks else (num + 1) / 2
    return f"{exposure.epsilon_of_mean_rank(mean, num, self.repetitions):.3f}"

  def papers(self) -> tuple[str, str]:
    target = self.audit.row.epsilon
    return _PAPERS.get((target, self.repetitions), ("-", "-"))

  def leaked(self, leaks: str = "leaked", of: str = "ranks") -> str:
    """Writes the share of canaries whose secret was found in a query."""
    cells = [cell for cell in self.cells if cell.leaked is not None]
    if not (total := sum(len(getattr(cell, of)) for cell in cells)):
      return "-"
    return f"{sum(getattr(cell, leaks) for cell in cells) / total:.0%}"


def _rows(audits: Audits) -> list[_Row]:
  """Lists each generator's canaries, by repetitions."""
  return [
    _Row(one, repetitions)
    for one in audits
    for repetitions in sorted({cell.repetitions for cell in one.cells})
  ]


def _summary(audits: Audits) -> blocks.Table:
  columns = {
    "Generator": lambda row: _NAME(row.name),
    "Repetitions": lambda row: f"{row.repetitions:,}",
    "Papers: rank": lambda row: row.papers()[0],
    "leaked": lambda row: row.papers()[1],
  }
  for group, kinds in _groups(audits).items():
    columns[f"{group}: rank"] = lambda row, kinds=kinds: row._replace(
      kinds=kinds
    ).rank()
    if canaries_lib.KINDS[kinds[0]].can_leak:
      columns[f"{group}: leaked"] = lambda row, kinds=kinds: row._replace(
        kinds=kinds
      ).leaked()
  return tables.of(_rows(audits), columns)


def _figure(audits: Audits) -> blocks.Figure:
  panels: dict[str, dict[str, list]] = {}
  for row in _rows(audits):
    panel = panels.setdefault(_NAME(row.name), {})
    for group, kinds in _groups(audits).items():
      points = panel.setdefault(group, [])
      if mean := row._replace(kinds=kinds).mean_rank():
        points.append((row.repetitions, mean))
  return blocks.Figure(
    svg=plots.ranks(panels, num_ranked=audits[0].num_ranked),
    caption=words.paragraph.text("audit.figure"),
  )


def _details(audits: Audits) -> blocks.Table:
  rows = [
    row._replace(kinds=(kind,))
    for _, ours in itertools.groupby(_rows(audits), lambda row: row.name)
    for rows in [list(ours)]
    for kind in _kinds([rows[0].audit])
    for row in rows
  ]
  return tables.of(
    rows,
    {
      "Generator": lambda row: _NAME(row.name),
      "Canaries": lambda row: row.kinds[0].replace("_", " "),
      "Repetitions": lambda row: f"{row.repetitions:,}",
      "Inserted": lambda row: f"{len(row.gathered('ranks')):,}",
      "Rank": lambda row: row.rank(),
      "Held out": lambda row: row.mean("held_out_ranks", ".1f"),
      "Exposure (bits)": lambda row: row.mean("exposure", ".2f"),
      "Leaked": lambda row: row.leaked(),
      "Held out leaked": lambda row: row.leaked(
        "leaked_held_out", of="held_out_ranks"
      ),
      "Epsilon of the rank": lambda row: row.epsilon(),
    },
    left=("Generator", "Canaries"),
  )


def _legend(audits: Audits) -> blocks.Paragraph:
  kinds = [
    f"{kind.replace('_', ' ')}: {canaries_lib.KINDS[kind].words}"
    for kind in _kinds(audits)
  ]
  return words.paragraph("audit.kinds", kinds="; ".join(kinds))


def _bounds(audits: Audits) -> blocks.Table:
  return tables.of(
    [(_NAME(one.name), bound) for one in audits for bound in one.bounds],
    {
      "Generator": lambda row: row[0],
      "Attack": lambda row: row[1].attack,
      "Repetitions": lambda row: f"{row[1].repetitions:,}",
      "Canaries in / out": lambda row: (
        f"{row[1].num_inserted} / {row[1].num_held_out}"
      ),
      "AUROC": lambda row: _three(row[1].auroc),
      "TPR at 1% FPR": lambda row: _three(row[1].tpr_at_1_fpr),
      "One-run bound": lambda row: f"{row[1].epsilon_one_run:.2f}",
      "f-DP one-run bound": lambda row: f"{row[1].epsilon_one_run_fdp:.2f}",
      "Claimed epsilon": lambda row: tables.epsilon(row[1].claimed_epsilon),
    },
    left=("Generator", "Attack"),
  )


def _three(values: tuple[float, float, float]) -> str:
  mean, low, high = values
  return f"{intervals.Interval(mean=mean, low=low, high=high):.3f}"


def _groups(audits: Audits) -> dict[str, Sequence[str]]:
  """Returns the groups of kinds that any audit has."""
  kinds = {*_kinds(audits)}
  return {group: own for group, own in _GROUPS.items() if kinds & {*own}}


def _kinds(audits: Audits) -> list[str]:
  return [*dict.fromkeys(cell.kind for one in audits for cell in one.cells)]


PRIVATE = page.Section("Audit", _private)
