"""Draws what was found of private queries among synthetic ones: one table."""

from synthq_jax.report import blocks, page, tables, words
from synthq_jax.retrieval import significance
from synthq_jax.runtime import comparison_results

__all__ = ["PRIVATE", "text"]

_LEVEL = 0.05
_Row = tuple[comparison_results.Membership, float | None]


def _build(
  leakage: comparison_results.QueryLeakage | None,
) -> tuple[blocks.Block, ...]:
  if leakage is None:
    return (words.paragraph("leakage.nothing"),)
  tests = sum(member.p_value is not None for member in leakage.memberships)
  return (
    *_blocks(leakage),
    words.paragraph("leakage.reproduced", tests=tests),
    words.paragraph("leakage.meaning"),
  )


def text(leakage: comparison_results.QueryLeakage) -> str:
  """Returns the table for the screen, without explanations.

  Args:
    leakage: what was found.
  """
  return page.text(_blocks(leakage))


def _blocks(leakage: comparison_results.QueryLeakage) -> list[blocks.Block]:
  rows = _correct(leakage)
  names = dict.fromkeys(member.name for member in leakage.memberships)
  written = ", ".join(
    f"{leakage.num_written[name]:,} of {tables.row_name(name)}"
    for name in names
  )
  kinds = "; ".join(f"{k}: {v}" for k, v in leakage.detectors.items())
  summary = words.paragraph(
    "leakage.summary",
    train=leakage.num_train,
    control=leakage.num_control,
    written=written,
    kinds=kinds,
    confidence=leakage.confidence,
  )
  table = tables.of(
    rows,
    {
      "Generator": lambda row: tables.row_name(row[0].name),
      "Near-duplicate": lambda row: row[0].detector,
      "Trained on, reproduced": lambda row: _both(
        row[0].train, row[0].train_all
      ),
      "Not trained on, reproduced": lambda row: _both(
        row[0].control, row[0].control_all
      ),
      "Difference": lambda row: tables.percent(row[0].difference, "+"),
      "p": lambda row: tables.p_value(row[1]),
    },
    left=("Generator", "Near-duplicate"),
  )
  return [summary, *_warnings(leakage, rows), table]


def _warnings(
  leakage: comparison_results.QueryLeakage, rows: list[_Row]
) -> list[blocks.Paragraph]:
  """Names what no reader should miss."""
  told = []
  if leakage.only_for_train:
    told.append(words.paragraph("leakage.only_for_train"))
  for member, p_value in rows:
    if p_value is None or p_value >= _LEVEL:
      continue
    key = "found" if member.difference.mean > 0 else "control_leaks"
    if member.name == "public_only":
      key = "public_differs"
    name = f"{tables.row_name(member.name)}, {member.detector}"
    told.append(words.paragraph(f"leakage.{key}", name=name, p=p_value))
  return told


def _correct(leakage: comparison_results.QueryLeakage) -> list[_Row]:
  """Returns each row with its p value, times the number of tests."""
  rows = leakage.memberships
  there = [member.p_value for member in rows if member.p_value is not None]
  corrected = iter(significance.bonferroni(there))
  return [
    (member, None if member.p_value is None else next(corrected))
    for member in rows
  ]


def _both(
  counted: comparison_results.Found, every: comparison_results.Found
) -> str:
  share = tables.percent(every.number / every.total) if every.total else "-"
  return f"{counted.number:,} of {counted.total:,} ({share})"


PRIVATE = page.Section("Private queries among the synthetic ones", _build)
