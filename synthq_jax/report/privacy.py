"""Builds the parts on privacy claims and on the data."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import wording
from synthq_jax.report import blocks, claims, page, tables, words
from synthq_jax.report import values as values_lib
from synthq_jax.runtime import results, system_results

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


def _build_claims(values: values_lib.Shareable) -> tuple[blocks.Block, ...]:
  """States the joint claim of all releases, then the claim of each result."""
  released = values.released
  releases = [
    *values.checkpoints,
    *values.synthetic,
    *values.released_scores,
    *values.weights,
  ]
  if not released.shared:
    return (words.paragraph("privacy.nothing"),)
  together = released.together
  content = _state_joint_claim(
    "Everything that is released together",
    together,
    list(released.shared.values()),
  )
  return (*content, *_state_each_claim(releases, together))


def _build_all_claims(values: values_lib.Private) -> tuple[blocks.Block, ...]:
  """States the claim of all private trainings, then those of compared rows."""
  released = values.released
  if not released.started:
    return ()
  compared = [
    result
    for result in (*values.checkpoints, *values.synthetic, *values.weights)
    if not results.is_shareable(result) and result.statement.epsilon < math.inf
  ]
  content = _state_joint_claim(
    "Every private training ever started here",
    released.everything,
    list(released.started.values()),
    reference=released.together,
  )
  if compared:
    content.append(words.paragraph("privacy.compared"))
  shown = {
    entry
    for claim in released.shared.values()
    for entry in claims.mechanisms(claim)
  }
  common = released.together or released.everything
  return (*content, *_state_each_claim(compared, common, shown))


def _state_joint_claim(
  title: str,
  together: statement_lib.PrivacyStatement | None,
  statements: Sequence[statement_lib.PrivacyStatement],
  reference: statement_lib.PrivacyStatement | None = None,
) -> list[blocks.Block]:
  """States the joint claim of several results, or that there is none.

  Args:
    title: heading above the claim.
    together: the joint claim; None if there is none.
    statements: statements of the single results.
    reference: the statement of the shareable page, whose sentences are left out.
  """
  content: list[blocks.Block] = [blocks.Heading(text=title)]
  if together is None:
    protected = claims.protected(statements)
    content.append(
      words.paragraph("privacy.no_joint_claim", protected=protected)
    )
    return content
  # The mechanisms are stated with each result.
  claim = dataclasses.replace(together, notes=())
  content += claims.paragraphs(claim, releases=False, reference=reference)
  each = "privacy.each" if reference is None else "privacy.elsewhere"
  return [*content, words.paragraph(each)]


def _state_each_claim(
  releases: Sequence[Release],
  together: statement_lib.PrivacyStatement | None,
  shown: Collection[tuple[str, str]] = (),
) -> list[blocks.Block]:
  """States the claim of each result on its own; results with equal claims share one."""
  shown = {*shown}
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
    content += claims.paragraphs(claim, reference=together, shown=shown)
    shown.update(claims.mechanisms(claim))
    if text := " ".join(tables.noted(ordered)):
      content.append(words.paragraph("privacy.notes", notes=text))
  return content


def _build_public_data(
  values: values_lib.Shareable,
) -> tuple[blocks.Block, ...]:
  """Lists public facts of the data; counts and digests of queries are not public."""
  documents = values.documents
  facts = {
    "Source": values.source,
    "Unit of privacy": values.unit,
    "Documents": f"{documents.num_documents:,}",
    "Vocabulary": f"{documents.vocab_size:,} ids",
    "Tokens of a document": _format_lengths(documents),
    "Tokens of a query": f"at most {documents.query_length:,}",
  }
  if not values.versions:
    return (_make_table(facts),)
  return (
    _make_table(facts),
    words.paragraph("page.versions", versions=values.versions),
  )


def _format_lengths(documents: results.PublicDocuments) -> str:
  written, read = documents.document_length, documents.read_length
  text = f"at most {written:,}"
  return text if read == written else f"{text}, {read:,} for retrievers"


def _build_private_data(values: values_lib.Private) -> tuple[blocks.Block, ...]:
  """Lists the counts and settings of the prepared data, which are private."""
  prepared = values.prepared
  facts = {
    field.name.replace("_", " "): _format_value(getattr(prepared, field.name))
    for field in dataclasses.fields(prepared)
    if field.name not in _LEFT_OUT and getattr(prepared, field.name)
  }
  return (_make_table({**facts, "time": tables.duration(prepared.seconds)}),)


def _make_table(facts: Mapping[str, str]) -> blocks.Table:
  return blocks.Table(header=("Data", ""), rows=tuple(facts.items()))


def _format_value(value: object) -> str:
  if isinstance(value, dict):
    return ", ".join(
      f"{name}: {_format_value(part)}" for name, part in value.items()
    )
  if isinstance(value, float):
    return f"{value:.4g}"
  return f"{value:,}" if isinstance(value, int) else str(value)


CLAIMS = page.Section("Privacy", _build_claims)
ALL_CLAIMS = page.Section("Privacy", _build_all_claims)
PUBLIC_DATA = page.Section("Data and versions", _build_public_data)
DATA = page.Section("Data", _build_private_data)
