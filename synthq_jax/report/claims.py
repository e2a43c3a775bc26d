"""Turns claims into paragraphs of a page; `privacy.wording` has the sentences."""

from collections.abc import Iterable

from synthq_jax.privacy import joint, wording
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.report import blocks

__all__ = ["paragraphs", "protected"]


def paragraphs(
  claim: statement_lib.PrivacyStatement,
  *,
  releases: bool = True,
  beside: statement_lib.PrivacyStatement | None = None,
) -> list[blocks.Paragraph]:
  """Returns a claim in English, the first words of each paragraph in bold.

  Args:
    claim: any.
    releases: whether each entry of its ledger has a paragraph.
    beside: a claim on the same page, whose `wording.SECTIONS` are not repeated.
  """
  entries = claim.ledger if releases else ()
  titles = {*wording.SECTIONS.values()}
  common = {
    part
    for part in (() if beside is None else wording.bounds(beside))
    if part[0] in titles
  }
  parts = [
    ("Privacy", wording.summarize(claim)),
    *(wording.write_release(one, claim.unit) for one in entries),
    *(part for part in wording.bounds(claim) if part not in common),
  ]
  return [blocks.Paragraph(lead=lead, text=text) for lead, text in parts]


def protected(statements: Iterable[statement_lib.PrivacyStatement]) -> str:
  """Names what results protect, each unit with its relation."""
  kinds = joint.kinds([*statements])
  return ", ".join(f"one {unit} ({relation})" for unit, relation in kinds)
