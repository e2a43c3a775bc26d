"""Draws claims, for a whole page and for each result, and facts of the data."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import wording
from synthq_jax.report import blocks, claims, page, tables, words
from synthq_jax.runtime import released_results, results, system_results

__all__ = ["ALL_CLAIMS", "CLAIMS", "DATA", "PUBLIC_DATA"]

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
  together = released.everything
  compared = [
    one
    for one in (*checkpoints, *synthetic, *weights)
    if not results.is_shareable(one) and one.statement.epsilon < math.inf
  ]
  statements = list(released.started.values())
  content = _together(
    "Every private training ever started here", together, statements
  )
  said = (words.paragraph("privacy.compared"),) if compared else ()
  return (*content, *said, *_each(compared, together))


def _together(
  title: str,
  together: statement_lib.PrivacyStatement | None,
  statements: Sequence[statement_lib.PrivacyStatement],
) -> list[blocks.Block]:
  """States one claim about many results, or that there is none."""
  content: list[blocks.Block] = [blocks.Heading(text=title)]
  if together is None:
    protected = claims.protected(statements)
    said = words.paragraph("privacy.no_joint_claim", protected=protected)
    content.append(said)
  else:
    # Mechanisms stand with each result.
    content += claims.paragraphs(
      dataclasses.replace(together, notes=()), releases=False
    )
    content.append(words.paragraph("privacy.each"))
  return content


def _each(
  releases: Sequence[Release], together: statement_lib.PrivacyStatement | None
) -> list[blocks.Block]:
  """States what each result claims by itself."""
  content: list[blocks.Block] = []
  for title, claim, notes in _grouped(releases):
    content.append(blocks.Heading(text=title))
    content += claims.paragraphs(claim, beside=together)
    content += notes
  return content


def _grouped(
  releases: Sequence[Release],
) -> Iterator[
  tuple[str, statement_lib.PrivacyStatement, list[blocks.Paragraph]]
]:
  """Yields title, claim and notes of results that make the same claim."""
  groups: dict[statement_lib.PrivacyStatement, dict[str, tuple[str, ...]]] = {}
  for one in releases:
    claim = dataclasses.replace(one.statement, notes=())
    kind = getattr(one, "kind", "queries")
    title = f"{kind} {tables.row_name(one.name)}"
    groups.setdefault(claim, {})[title] = wording.sentences(
      one.statement, "notes"
    )
  for claim, notes in groups.items():
    ordered = sorted(notes)  # generator, queries, retriever
    yield (
      ", ".join(ordered).capitalize(),
      claim,
      [
        words.paragraph("privacy.notes", name=one, notes=" ".join(notes[one]))
        for one in ordered
        if notes[one]
      ],
    )


def _public_data(
  documents: results.PublicDocuments, source: str, unit: str, versions: str
) -> tuple[blocks.Block, ...]:
  """Says what is public about the data: no count or digest of queries."""
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
    if field.name not in ("directory", "private_directory", "seconds")
  }
  return (_facts({**facts, "time": tables.duration(prepared.seconds)}),)


def _facts(facts: Mapping[str, str]) -> blocks.Table:
  return blocks.Table(header=("Data", ""), rows=tuple(facts.items()))


def _value(value: object) -> str:
  if isinstance(value, dict):
    return ", ".join(f"{name}: {_value(one)}" for name, one in value.items())
  if isinstance(value, float):
    return f"{value:.4g}"
  return f"{value:,}" if isinstance(value, int) else str(value)


CLAIMS = page.Section("Privacy", _claims, shareable=True)
ALL_CLAIMS = page.Section("Privacy", _all_claims)
PUBLIC_DATA = page.Section("Data and versions", _public_data, shareable=True)
DATA = page.Section("Data", _private_data)
