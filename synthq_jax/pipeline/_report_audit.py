"""What audits found, for the private page and for the screen."""

import itertools
import math
from collections.abc import Iterable, Sequence

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import exposure
from synthq_jax.pipeline import _plots, _report_tables, results
from synthq_jax.pipeline import _report_blocks as blocks

__all__ = ["section", "text"]

_PAPERS = {
  (math.inf, 10): ("1", "67%"),
  (math.inf, 100): ("1", "100%"),
  (16.0, 10): ("43", "0%"),
  (16.0, 100): ("32", "0%"),
}
"""Rank among 100 and share leaked, by epsilon and repetitions: table 7 of the
papers (T5 on 530,000 MS MARCO queries, digits in the document)."""

_GROUPS = {
  "digits in the document": canaries_lib.PAPERS,
  "digits in the query": canaries_lib.MIRRORED,
  "new tokens": ("new_tokens",),
  "rare words": ("rare_words",),
}

_EXPLAINED = (
  "Canaries are made-up queries with a random secret; a fair coin decided which "
  "stood in the fine-tuning data. The rank of the secret among random ones says "
  "whether the generator learned it: 1 is learned by heart, the middle is "
  "chance. A leak is a secret that stands in a written query; one in a document "
  "cannot. A canary that stands there k times is covered by the claim for groups "
  "of k alone, which soon claims nothing. The lower bound on epsilon of each "
  "generator holds with the confidence given, one generator at a time; above the "
  "claim it refutes the claim. The f-DP bounds refute a Gaussian trade-off curve, "
  "not the claim itself. An audit can show that a claim is wrong, never that it "
  "is right."
)


def section(
  audits: Sequence[results.AuditReport],
) -> tuple[blocks.Block, ...]:
  """Returns the blocks of the private page.

  Args:
    audits: all of them; seeds are gathered.
  """
  if not audits:
    return (blocks.Paragraph(text="No audit was run."),)
  ranked = f"Ranks are among {audits[0].num_ranked:,} secrets, by chance"
  chance = (audits[0].num_ranked + 1) / 2
  return (
    *_warnings(audits),
    _verdicts(audits),
    _figure(audits),
    _summary(audits),
    _details(audits),
    _legend(audits),
    blocks.Paragraph(
      lead="Ranks, exposure, leaks",
      text=f"{ranked} {chance:g}, with 95% intervals over canaries; exposure is"
      f" of {math.log2(audits[0].num_candidates):.2f} bits at most. Leaks were"
      " looked for in queries written for each canary's document and in"
      f" {audits[0].num_searched:,} queries of the run. {_EXPLAINED}",
    ),
    _bounds(audits),
  )


def text(audits: Sequence[results.AuditReport]) -> str:
  """Returns the same tables for the screen, without the explanations."""
  parts = [
    _report_tables.aligned(one) if isinstance(one, blocks.Table) else one.text
    for one in (
      *_warnings(audits),
      _summary(audits),
      _details(audits),
      _legend(audits),
      _bounds(audits),
      _verdicts(audits),
    )
  ]
  return "\n\n".join(part.rstrip() for part in parts)


def _warnings(audits) -> tuple[blocks.Paragraph, ...]:
  bad = [one for one in audits if one.is_contaminated]
  return tuple(
    blocks.Paragraph(
      lead="Not a valid audit",
      text=f"{one.name}: secrets that nobody can know rank too low (p ="
      f" {one.control:.1g}). Canaries were known before the private training,"
      " and nothing else here means anything.",
    )
    for one in bad
  )


def _verdicts(audits) -> blocks.Table:
  header = (
    "Generator",
    "Claimed epsilon",
    "Lower bound",
    "At most possible",
    "Control p",
    "Verdict",
  )
  rows = tuple(
    (
      _report_tables.row_name(one.name),
      _report_tables.epsilon(one.claimed_epsilon),
      "-" if one.lower_bound is None else f"{one.lower_bound:.2f}",
      f"{one.ceiling:.2f}",
      f"{one.control:.2g}",
      _verdict(one),
    )
    for one in audits
  )
  return blocks.Table(header=header, rows=rows, numeric=header[1:5])


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


def _by_row(audits) -> dict[str, list[results.AuditReport]]:
  """Gathers the seeds of each row."""
  found: dict[str, list[results.AuditReport]] = {}
  for one in audits:
    found.setdefault(results.row_of(one.name), []).append(one)
  return found


def _target(name: str) -> float:
  """Returns the epsilon that was asked for, by which rows are named."""
  return math.inf if name == "inf" else float(name.removeprefix("eps"))


def _summary(audits) -> blocks.Table:
  """Sets groups of kinds side by side, and beside the papers' table."""
  header = ["Generator", "Repetitions", "Papers: rank", "leaked"]
  for group in _present(audits):
    header.append(f"{group}: rank")
    if _leaks(group):
      header.append(f"{group}: leaked")
  rows = []
  for name, ours in _by_row(audits).items():
    for repetitions in _repetitions(ours):
      row = [_report_tables.row_name(name), f"{repetitions:,}"]
      row += _PAPERS.get((_target(name), repetitions), ("-", "-"))
      for group in _present(audits):
        cells = _cells(ours, repetitions, _GROUPS[group])
        row.append(_interval(_ranks(cells), ours[0].num_ranked))
        if _leaks(group):
          row.append(_leaked(cells))
      rows.append(tuple(row))
  return blocks.Table(
    header=tuple(header), rows=tuple(rows), numeric=tuple(header[1:])
  )


def _figure(audits) -> blocks.Figure:
  """Draws ranks against repetitions."""
  panels = {}
  for name, ours in _by_row(audits).items():
    series = panels[_report_tables.row_name(name)] = {}
    for group in _present(audits):
      series[group] = []
      for repetitions in _repetitions(ours):
        found = _ranks(_cells(ours, repetitions, _GROUPS[group]))
        if found:
          mean = exposure.mean_rank(found, ours[0].num_ranked)
          series[group].append((repetitions, mean))
  return blocks.Figure(
    svg=_plots.ranks(panels, num_ranked=audits[0].num_ranked),
    caption="Mean rank of inserted secrets, with 95% intervals over canaries.",
  )


def _details(audits) -> blocks.Table:
  """Returns every cell, all seeds together."""
  header = (
    "Generator", "Canaries", "Repetitions", "Inserted", "Rank", "Held out",
    "Exposure (bits)", "Leaked", "Held out leaked", "Epsilon of the rank",
  )  # fmt: skip
  rows = []
  for name, ours in _by_row(audits).items():
    num = ours[0].num_ranked
    for kind, repetitions in _kinds_and_repetitions(ours):
      cells = _cells(ours, repetitions, (kind,))
      ranks = _ranks(cells)
      outside = [rank for one in cells for rank in one.held_out_ranks]
      bits = [value for one in cells for value in one.exposure]
      mean = sum(ranks) / len(ranks) if ranks else (num + 1) / 2
      rows.append(
        (
          _report_tables.row_name(name),
          kind.replace("_", " "),
          f"{repetitions:,}",
          f"{len(ranks):,}",
          _interval(ranks, num),
          f"{sum(outside) / len(outside):.1f}" if outside else "-",
          f"{sum(bits) / len(bits):.2f}" if bits else "-",
          _leaked(cells),
          _leaked(cells, held_out=True),
          f"{exposure.epsilon_of_mean_rank(mean, num, repetitions):.3f}",
        )
      )
  return blocks.Table(header=header, rows=tuple(rows), numeric=header[2:])


def _legend(audits) -> blocks.Paragraph:
  words = [
    f"{kind.replace('_', ' ')}: {canaries_lib.KINDS[kind].words}"
    for kind in _kinds(audits)
  ]
  return blocks.Paragraph(lead="Kinds", text="; ".join(words) + ".")


def _bounds(audits) -> blocks.Table:
  header = (
    "Generator", "Attack", "Repetitions", "Canaries in / out", "AUROC",
    "TPR at 1% FPR", "One-run bound", "f-DP one-run bound", "Claimed epsilon",
  )  # fmt: skip
  rows = tuple(
    (
      _report_tables.row_name(one.name),
      bound.attack,
      f"{bound.repetitions:,}",
      f"{bound.num_inserted} / {bound.num_held_out}",
      _three(bound.auroc),
      _three(bound.tpr_at_1_fpr),
      f"{bound.epsilon_one_run:.2f}",
      f"{bound.epsilon_one_run_fdp:.2f}",
      _report_tables.epsilon(bound.claimed_epsilon),
    )
    for one in audits
    for bound in one.bounds
  )
  return blocks.Table(header=header, rows=rows, numeric=header[2:])


def _three(values: tuple[float, float, float]) -> str:
  return "{:.3f} [{:.3f}, {:.3f}]".format(*values)


def _present(audits) -> list[str]:
  """Returns the groups of kinds that any audit has."""
  kinds = {*_kinds(audits)}
  return [group for group, names in _GROUPS.items() if kinds & {*names}]


def _kinds(audits) -> list[str]:
  """Returns the kinds in their order."""
  return [*dict.fromkeys(cell.kind for one in audits for cell in one.cells)]


def _leaks(group: str) -> bool:
  return canaries_lib.KINDS[_GROUPS[group][0]].can_leak


def _repetitions(audits) -> list[int]:
  return sorted({cell.repetitions for one in audits for cell in one.cells})


def _kinds_and_repetitions(audits) -> Iterable[tuple[str, int]]:
  return itertools.product(_kinds(audits), _repetitions(audits))


def _cells(
  audits, repetitions: int, kinds: Sequence[str]
) -> list[results.AuditCell]:
  return [
    cell
    for one in audits
    for cell in one.cells
    if cell.repetitions == repetitions and cell.kind in kinds
  ]


def _ranks(cells: Sequence[results.AuditCell]) -> list[int]:
  return [rank for one in cells for rank in one.ranks]


def _interval(ranks: Sequence[int], num: int) -> str:
  if not ranks:
    return "-"
  return f"{exposure.mean_rank(ranks, num):.1f}"


def _leaked(cells: Sequence[results.AuditCell], held_out: bool = False) -> str:
  """Writes the share of canaries whose secret was found in a query."""
  pairs = [
    (one.leaked_held_out, len(one.held_out_ranks))
    if held_out
    else (one.leaked, len(one.ranks))
    for one in cells
    if one.leaked is not None
  ]
  total = sum(number for _, number in pairs)
  if not total:
    return "-"
  return f"{sum(leaked for leaked, _ in pairs) / total:.0%}"
