"""Builds the table of private queries reproduced among synthetic ones."""

from synthq_jax.report import blocks, page, tables, words
from synthq_jax.report import values as values_lib
from synthq_jax.retrieval import significance
from synthq_jax.runtime import comparison_results

__all__ = ["PRIVATE", "text"]

_LEVEL = 0.05
_Row = tuple[comparison_results.Membership, float | None]


def _build(values: values_lib.Private) -> tuple[blocks.Block, ...]:
  leakage = values.leakage
  if leakage is None:
    return (words.paragraph("leakage.nothing"),)
  tests = sum(member.p_value is not None for member in leakage.memberships)
  return (
    *_make_blocks(leakage),
    words.paragraph("leakage.reproduced", tests=tests),
    words.paragraph("leakage.meaning"),
  )


def text(leakage: comparison_results.QueryLeakage) -> str:
  """Returns the table for the screen, without explanations."""
  return page.text(_make_blocks(leakage))


def _make_blocks(
  leakage: comparison_results.QueryLeakage,
) -> list[blocks.Block]:
  rows = _correct_p_values(leakage)
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
      "Trained on, reproduced": lambda row: _format_counts(
        row[0].train, row[0].train_all
      ),
      "Not trained on, reproduced": lambda row: _format_counts(
        row[0].control, row[0].control_all
      ),
      "Difference": lambda row: tables.percent(row[0].difference, "+"),
      "p": lambda row: tables.p_value(row[1]),
    },
    left=("Generator", "Near-duplicate"),
  )
  return [summary, *_make_warnings(leakage, rows), table]


def _make_warnings(
  leakage: comparison_results.QueryLeakage, rows: list[_Row]
) -> list[blocks.Paragraph]:
  """Returns warnings: no test was possible, or a difference is significant."""
  paragraphs = []
  if leakage.only_for_train:
    paragraphs.append(words.paragraph("leakage.only_for_train"))
  for member, p_value in rows:
    difference = member.difference
    if difference is None or p_value is None or p_value >= _LEVEL:
      continue
    key = "found" if difference.mean > 0 else "control_leaks"
    if member.name == "public_only":
      key = "public_differs"
    name = f"{tables.row_name(member.name)}, {member.detector}"
    paragraphs.append(words.paragraph(f"leakage.{key}", name=name, p=p_value))
  return paragraphs


def _correct_p_values(leakage: comparison_results.QueryLeakage) -> list[_Row]:
  """Returns each row with its p value after Bonferroni's correction."""
  rows = leakage.memberships
  p_values = [member.p_value for member in rows if member.p_value is not None]
  corrected = iter(significance.bonferroni(p_values))
  return [
    (member, None if member.p_value is None else next(corrected))
    for member in rows
  ]


def _format_counts(
  counted: comparison_results.Found, every: comparison_results.Found
) -> str:
  share = tables.percent(every.number / every.total) if every.total else "-"
  return f"{counted.number:,} of {counted.total:,} ({share})"


PRIVATE = page.Section("Private queries among the synthetic ones", _build)
