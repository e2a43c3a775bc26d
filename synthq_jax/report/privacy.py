"""Draws claims, for a whole page and for each result, and facts of the data."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import wording
from synthq_jax.report import blocks, claims, page, tables, words
from synthq_jax.runtime import released_results, results, system_results

__all__ = ["ALL_CLAIMS", "CLAIMS", "DATA", "PUBLIC_DATA"]

_LEFT_OUT = (
  *("directory", "private_directory", "seconds", "vocabulary", "token_ids"),
  *("versions", "extra_ids", "from_pairs", "num_passages", "passage_stride"),
)
Release = (
  results.Checkpoint
  | results.SyntheticQueries
  | results.ReleasedScores
  | system_results.Ranking
)


def _claims(
  checkpoints: Sequence[results.Checkpoint],
  synthetic: Sequence[results.SyntheticQueries],
  released_scores: Sequence[results.ReleasedScores],
  weights: Sequence[system_results.Ranking],
  released: released_results.Released,
) -> tuple[blocks.Block, ...]:
  """States what holds for all together, then what each result adds to it."""
  releases = [*checkpoints, *synthetic, *released_scores, *weights]
  if not released.shared:
    return (words.paragraph("privacy.nothing"),)
  together = released.together
  content = _together(
    "Everything that is released together",
    together,
    list(released.shared.values()),
  )
  return (*content, *_each(releases, together))


def _all_claims(
  checkpoints: Sequence[results.Checkpoint],
  synthetic: Sequence[results.SyntheticQueries],
  weights: Sequence[system_results.Ranking],
  released: released_results.Released,
) -> tuple[blocks.Block, ...]:
  """States the claim of all trainings, and those of rows that are compared."""
  if not released.started:
    return ()
  compared = [
    result
    for result in (*checkpoints, *synthetic, *weights)
    if not results.is_shareable(result) and result.statement.epsilon < math.inf
  ]
  content = _together(
    "Every private training ever started here",
    released.everything,
    list(released.started.values()),
    beside=released.together,
  )
  if compared:
    content.append(words.paragraph("privacy.compared"))
  above = {
    entry
    for claim in released.shared.values()
    for entry in claims.mechanisms(claim)
  }
  common = released.together or released.everything
  return (*content, *_each(compared, common, above))


def _together(
  title: str,
  together: statement_lib.PrivacyStatement | None,
  statements: Sequence[statement_lib.PrivacyStatement],
  beside: statement_lib.PrivacyStatement | None = None,
) -> list[blocks.Block]:
  """States one claim about many results, or that there is none.

  Args:
    title: of all results together.
    together: their claim.
    statements: those of single results.
    beside: the claim of the shareable page, whose sentences are not repeated.
  """
  content: list[blocks.Block] = [blocks.Heading(text=title)]
  if together is None:
    protected = claims.protected(statements)
    content.append(
      words.paragraph("privacy.no_joint_claim", protected=protected)
    )
    return content
  # Mechanisms stand with each result.
  claim = dataclasses.replace(together, notes=())
  content += claims.paragraphs(claim, releases=False, beside=beside)
  each = "privacy.each" if beside is None else "privacy.elsewhere"
  return [*content, words.paragraph(each)]


def _each(
  releases: Sequence[Release],
  together: statement_lib.PrivacyStatement | None,
  above: Collection[tuple[str, str]] = (),
) -> list[blocks.Block]:
  """States what each result claims by itself; equal claims once."""
  above = {*above}
  groups: dict[statement_lib.PrivacyStatement, dict[str, tuple[str, ...]]] = {}
  for result in releases:
    claim = dataclasses.replace(result.statement, notes=())
    kind = getattr(result, "kind", "queries")
    title = f"{kind} {tables.row_name(result.name)}"
    notes = wording.sentences(result.statement, "notes")
    groups.setdefault(claim, {})[title] = notes
  content: list[blocks.Block] = []
  for claim, notes in groups.items():
    ordered = sorted(notes.items())  # generator, queries, retriever
    title = ", ".join(name for name, _ in ordered).capitalize()
    content.append(blocks.Heading(text=title))
    content += claims.paragraphs(claim, beside=together, above=above)
    above.update(claims.mechanisms(claim))
    if text := " ".join(tables.noted(ordered)):
      content.append(words.paragraph("privacy.notes", notes=text))
  return content


def _public_data(
  documents: results.PublicDocuments, source: str, unit: str, versions: str
) -> tuple[blocks.Block, ...]:
  """Lists public facts of the data: no count or digest of queries."""
  facts = {
    "Source": source,
    "Unit of privacy": unit,
    "Documents": f"{documents.num_documents:,}",
    "Vocabulary": f"{documents.vocab_size:,} ids",
    "Tokens of a document": _lengths(documents),
    "Tokens of a query": f"at most {documents.query_length:,}",
  }
  if not versions:
    return (_facts(facts),)
  return (_facts(facts), words.paragraph("page.versions", versions=versions))


def _lengths(documents: results.PublicDocuments) -> str:
  written, read = documents.document_length, documents.read_length
  told = f"at most {written:,}"
  return told if read == written else f"{told}, {read:,} for retrievers"


def _private_data(prepared: results.PreparedData) -> tuple[blocks.Block, ...]:
  """Returns everything that preparing the data counted."""
  facts = {
    field.name.replace("_", " "): _value(getattr(prepared, field.name))
    for field in dataclasses.fields(prepared)
    if field.name not in _LEFT_OUT and getattr(prepared, field.name)
  }
  return (_facts({**facts, "time": tables.duration(prepared.seconds)}),)


def _facts(facts: Mapping[str, str]) -> blocks.Table:
  return blocks.Table(header=("Data", ""), rows=tuple(facts.items()))


def _value(value: object) -> str:
  if isinstance(value, dict):
    return ", ".join(f"{name}: {_value(part)}" for name, part in value.items())
  if isinstance(value, float):
    return f"{value:.4g}"
  return f"{value:,}" if isinstance(value, int) else str(value)


CLAIMS = page.Section("Privacy", _claims, shareable=True)
ALL_CLAIMS = page.Section("Privacy", _all_claims)
PUBLIC_DATA = page.Section("Data and versions", _public_data, shareable=True)
DATA = page.Section("Data", _private_data)
