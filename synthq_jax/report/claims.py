"""Turns privacy statements into paragraphs; `privacy.wording` has the sentences."""

from collections.abc import Collection, Iterable

from synthq_jax.privacy import joint, wording
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.report import blocks, words

__all__ = ["mechanisms", "paragraphs", "protected"]


def paragraphs(
  claim: statement_lib.PrivacyStatement,
  *,
  releases: bool = True,
  reference: statement_lib.PrivacyStatement | None = None,
  shown: Collection[tuple[str, str]] = (),
) -> list[blocks.Paragraph]:
  """Returns the paragraphs of a statement, their first words in bold.

  Args:
    claim: the statement.
    releases: whether each entry of the ledger gets a paragraph.
    reference: a statement that this page or the shareable page has in full. Its
      sentences of `wording.SECTIONS` are left out here.
    shown: (title, text) of ledger entries that the page has already; here only
      their titles are listed.
  """
  entries = mechanisms(claim) if releases else []
  leads = [("Privacy", wording.summarize(claim))]
  leads += [part for part in entries if part not in shown]
  content = [blocks.Paragraph(lead=lead, text=text) for lead, text in leads]
  if names := ", ".join(part[0] for part in entries if part in shown):
    content.append(words.paragraph("privacy.mechanisms", names=names))
  sections = {title: name for name, title in wording.SECTIONS.items()}
  for lead, text in wording.bounds(claim):
    if reference is not None and lead in sections:
      common = wording.sentences(reference, sections[lead])
      own = wording.sentences(claim, sections[lead])
      text = " ".join(sentence for sentence in own if sentence not in common)
    if text:
      content.append(blocks.Paragraph(lead=lead, text=text))
  return content


def mechanisms(
  claim: statement_lib.PrivacyStatement,
) -> list[tuple[str, str]]:
  """Returns (title, text) of each entry in a statement's ledger."""
  return [wording.write_release(part, claim.unit) for part in claim.ledger]


def protected(statements: Iterable[statement_lib.PrivacyStatement]) -> str:
  """Lists the protected units of statements, each with its relation."""
  kinds = joint.kinds([*statements])
  return ", ".join(f"one {unit} ({relation})" for unit, relation in kinds)
