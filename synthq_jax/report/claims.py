"""Turns claims into paragraphs of a page; `privacy.wording` has the sentences."""

from collections.abc import Collection, Iterable

from synthq_jax.privacy import joint, wording
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.report import blocks, words

__all__ = ["mechanisms", "paragraphs", "protected"]


def paragraphs(
  claim: statement_lib.PrivacyStatement,
  *,
  releases: bool = True,
  beside: statement_lib.PrivacyStatement | None = None,
  above: Collection[tuple[str, str]] = (),
) -> list[blocks.Paragraph]:
  """Returns a claim in English, the first words of each paragraph in bold.

  Args:
    claim: any.
    releases: whether each entry of its ledger has a paragraph.
    beside: a claim on the same page, whose sentences of `wording.SECTIONS` hold
      here, too, and are not repeated.
    above: paragraphs of entries that the page has already.
  """
  entries = mechanisms(claim) if releases else []
  parts = [("Privacy", wording.summarize(claim))]
  parts += [part for part in entries if part not in above]
  content = [blocks.Paragraph(lead=lead, text=text) for lead, text in parts]
  if names := ", ".join(part[0] for part in entries if part in above):
    content.append(words.paragraph("privacy.mechanisms", names=names))
  sections = {title: name for name, title in wording.SECTIONS.items()}
  for lead, text in wording.bounds(claim):
    if beside is not None and lead in sections:
      common = wording.sentences(beside, sections[lead])
      own = wording.sentences(claim, sections[lead])
      text = " ".join(x for x in own if x not in common)
    if text:
      content.append(blocks.Paragraph(lead=lead, text=text))
  return content


def mechanisms(
  claim: statement_lib.PrivacyStatement,
) -> list[tuple[str, str]]:
  """Returns title and text of each entry of a claim's ledger."""
  return [wording.write_release(part, claim.unit) for part in claim.ledger]


def protected(statements: Iterable[statement_lib.PrivacyStatement]) -> str:
  """Names what results protect, each unit with its relation."""
  kinds = joint.kinds([*statements])
  return ", ".join(f"one {unit} ({relation})" for unit, relation in kinds)
