"""The page that may be shared: public or post-processed things, nothing else.

Formal guarantee: the page is a function of public data and of results that
each carry a finite epsilon for the private queries, so publishing it costs no
more than its own "Everything on this page together" says, for that one
statement's unit and relation (`joint.claim`). Where results protect different
units that no claim covers, the page says that it has none. It relies on what
stages declare: `Evaluation.private`, the folder `private/`, and their privacy
statements. What is private by any of the three is left out.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from synthq_jax.pipeline import (
  _plots,
  _query_leakage_results,
  _repeats,
  _report_leakage,
  _report_sets,
  _report_tables,
  results,
)
from synthq_jax.pipeline import _report_blocks as blocks
from synthq_jax.privacy import joint
from synthq_jax.privacy import statement as statement_lib

__all__ = [
  "beginning",
  "curve_blocks",
  "first_seeds",
  "page",
  "shareable_rows",
]

_Named = TypeVar("_Named", results.Checkpoint, results.SyntheticQueries)
_MEASURES_EXPLAINED = (
  "Gauge: nDCG@10 of BM25 finding each query's own document; it shows whether "
  "queries are about their documents (a filter that asks BM25 raises it by "
  "itself). Copied: share of a query's 4-grams that "
  "stand in its document. Words: mean length of a query."
)


def page(
  title: str,
  *,
  prepared: results.PreparedData,
  evaluations: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
  checkpoints: Sequence[results.Checkpoint],
  curves: dict[str, tuple[Sequence[float], Sequence[float]]],
  measures: Sequence[str],
  num_examples: int,
  document_words: int,
  further: Sequence[blocks.Block] = (),
  leakage: _query_leakage_results.QueryLeakage | None = None,
) -> blocks.Page:
  """Returns the shareable page; the arguments may hold private results.

  Args:
    title: of the page.
    prepared: of which only documents, settings and versions are used.
    evaluations: of which the private ones are left out.
    synthetic: of which the non-private ones are left out.
    checkpoints: of which the non-private ones are left out.
    curves: learning curves of stages whose metrics are not private.
    measures: columns of the table of scores.
    num_examples: examples shown for each generator.
    document_words: words shown of a document.
    further: tables of `shareable_rows` on further test sets.
    leakage: of which only what is about public test sets is used.

  Returns:
    The page.
  """
  evaluations = [one for one in evaluations if _is_shareable_score(one)]
  synthetic = [one for one in synthetic if results.is_shareable(one)]
  checkpoints = [one for one in checkpoints if results.is_shareable(one)]
  section = blocks.Section
  sections = [
    section(
      title="Scores on public queries", blocks=_scores(evaluations, measures)
    ),
    *_report_sets.section(further),
    section(
      title="Synthetic queries",
      blocks=_synthesis(synthetic, num_examples, document_words),
    ),
    *_report_leakage.shareable(leakage, {one.name for one in synthetic}),
    section(title="Privacy", blocks=_privacy([*checkpoints, *synthetic])),
    section(
      title="Training",
      blocks=(_report_tables.training(checkpoints), *curve_blocks(curves)),
    ),
    section(title="Data and versions", blocks=_data(prepared)),
  ]
  return blocks.Page(
    title=title,
    introduction=_introduction(prepared),
    sections=tuple(sections),
  )


def _is_shareable_score(one: results.Evaluation) -> bool:
  finite = one.epsilon is None or not math.isinf(one.epsilon)
  return (
    not one.private and finite and not results.is_private_path(one.directory)
  )


def shareable_rows(rows: Sequence[_repeats.Row]) -> list[_repeats.Row]:
  """Returns the rows whose scores may be shared."""
  return [row for row in rows if _is_shareable_score(row.evaluation)]


def _introduction(prepared: results.PreparedData) -> tuple[blocks.Block, ...]:
  return (
    blocks.Paragraph(
      text="A public language model was fine-tuned with differential privacy "
      "on private search queries, wrote synthetic queries for public "
      "documents, and retrievers were trained on those; other ways to the "
      "same end stand beside it. "
      f"Data: {_source(prepared)}."
    ),
    blocks.Paragraph(
      text="This page may be shared. It holds public things and results of "
      "differentially private computations only. Scores on private queries, "
      "learning curves of private stages and everything that was trained "
      "without privacy are in a report of their own, which is private."
    ),
  )


def _privacy(
  made: Sequence[results.Checkpoint | results.SyntheticQueries],
) -> tuple[blocks.Block, ...]:
  """States what holds for all together, then what each result adds to it."""
  if not made:
    return (blocks.Paragraph(text="No result that may be shared was made."),)
  found: list[blocks.Block] = [
    blocks.Heading(text="Everything on this page together")
  ]
  statements = [one.statement for one in made]
  together = joint.claim(statements)
  if together is None:
    found.append(_no_joint_claim(statements))
  else:
    found += [
      one
      for one in _statement_blocks(dataclasses.replace(together, notes=()))
      if not one.lead.startswith("Mechanism")  # they stand with each result
    ]
    found.append(
      blocks.Paragraph(
        text="What is treated as public, assumed and not protected holds for "
        "each result below, too, unless it says otherwise. The claims below "
        "hold for whoever sees one result alone."
      )
    )
  for title, claim, notes in _grouped(made):
    found.append(blocks.Heading(text=title))
    found += _statement_blocks(_without_common(claim, together))
    found += notes
  return tuple(found)


def _no_joint_claim(
  statements: Sequence[statement_lib.PrivacyStatement],
) -> blocks.Paragraph:
  """Says that nothing is claimed for whoever sees the page."""
  protected = ", ".join(
    f"one {unit} ({relation})" for unit, relation in joint.kinds(statements)
  )
  return blocks.Paragraph(
    lead="No joint claim",
    text=f"The results below protect different things: {protected}. No claim "
    "covers them all, so nothing is claimed for whoever sees this page: each "
    "claim below holds for whoever sees its result alone.",
  )


def _without_common(
  claim: statement_lib.PrivacyStatement,
  together: statement_lib.PrivacyStatement | None,
) -> statement_lib.PrivacyStatement:
  """Empties the lists of sentences that are those of the joint claim."""
  if together is None:
    return claim
  names = ("public", "assumptions", "not_protected")
  equal = (n for n in names if getattr(claim, n) == getattr(together, n))
  return dataclasses.replace(claim, **dict.fromkeys(equal, ()))


def _grouped(
  made: Sequence[results.Checkpoint | results.SyntheticQueries],
) -> Iterator[
  tuple[str, statement_lib.PrivacyStatement, list[blocks.Paragraph]]
]:
  """Yields title, claim and notes of results that make the same claim."""
  groups: dict[statement_lib.PrivacyStatement, dict[str, tuple[str, ...]]] = {}
  for one in made:
    claim = dataclasses.replace(one.statement, notes=())
    kind = getattr(one, "kind", "queries")
    title = f"{kind} {_report_tables.row_name(one.name)}"
    groups.setdefault(claim, {})[title] = one.statement.notes
  for claim, notes in groups.items():
    ordered = sorted(notes)  # generator, queries, retriever
    yield (
      ", ".join(ordered).capitalize(),
      claim,
      [
        blocks.Paragraph(lead=f"How {one} was made", text=" ".join(notes[one]))
        for one in ordered
        if notes[one]
      ],
    )


def _statement_blocks(
  statement: statement_lib.PrivacyStatement,
) -> tuple[blocks.Paragraph, ...]:
  """Returns the statement in words, the first words of paragraphs in bold."""
  texts = statement_lib.in_words(statement).split("\n\n")
  parts = [text.partition(". ") for text in texts]
  return tuple(
    blocks.Paragraph(lead=lead, text=rest) for lead, _, rest in parts
  )


def _scores(
  evaluations: Sequence[results.Evaluation], measures: Sequence[str]
) -> tuple[blocks.Block, ...]:
  if not evaluations:
    return (blocks.Paragraph(text="Nothing was scored on public queries."),)
  return (
    blocks.Paragraph(
      text="Public queries stand in for private ones here: read these numbers "
      "beside each other, not as the quality on private queries."
    ),
    *_report_tables.scores(evaluations, measures),
  )


def _synthesis(
  synthetic: Sequence[results.SyntheticQueries],
  num_examples: int,
  document_words: int,
) -> tuple[blocks.Block, ...]:
  """Returns how queries were written, what they measure, and examples."""
  if not synthetic:
    return (blocks.Paragraph(text="No synthetic queries that may be shared."),)
  found: list[blocks.Block] = [
    _written(synthetic),
    blocks.Paragraph(text=_MEASURES_EXPLAINED),
  ]
  for one in first_seeds(synthetic):
    found.append(
      blocks.Heading(text=f"Written by {_report_tables.row_name(one.name)}")
    )
    found.append(
      blocks.Paragraph(
        text=" ".join(
          filter(
            None,
            (
              f'{one.sampler}, input "{one.prefix}DOCUMENT".',
              one.filters,
              _removed(one.removed),
            ),
          )
        )
      )
    )
    rows = tuple(
      (query, beginning(document, document_words))
      for query, document in one.examples[:num_examples]
    )
    header = ("Synthetic query", "Beginning of its document")
    if rows:
      found.append(blocks.Table(header=header, rows=rows))
  return tuple(found)


def first_seeds(found: Sequence[_Named]) -> list[_Named]:
  """Returns the first result of each row: what there is room to show."""
  by_row: dict[str, _Named] = {}
  for one in found:
    by_row.setdefault(f"{type(one)} {results.row_of(one.name)}", one)
  return list(by_row.values())


def _written(synthetic: Sequence[results.SyntheticQueries]) -> blocks.Table:
  header = (
    "Generator",
    "epsilon",
    "Documents",
    "Per document",
    "Queries kept",
    "Gauge",
    "Copied",
    "Words",
    "Time",
  )
  rows = tuple(
    (
      _report_tables.row_name(one.name),
      _report_tables.claimed(one.statement),
      f"{one.num_documents:,}",
      f"{one.queries_per_document:,}",
      f"{one.num_queries:,}",
      f"{one.gauge:.3f}",
      f"{one.copy_rate:.3f}",
      f"{one.mean_words:.1f}",
      _report_tables.duration(one.seconds),
    )
    for one in synthetic
  )
  return blocks.Table(header=header, rows=rows, numeric=header[1:])


def _removed(counts: dict[str, int]) -> str:
  if not any(counts.values()):
    return "Filters removed nothing."
  parts = (f"{count:,} ({name})" for name, count in counts.items() if count)
  return f"Filters removed {', '.join(parts)}."


def beginning(text: str, num_words: int) -> str:
  """Returns the first words of a text.

  >>> beginning("one two  three", 2)
  'one two ...'
  """
  words = text.split()
  dots = ["..."] if len(words) > num_words else []
  return " ".join(words[:num_words] + dots)


def curve_blocks(
  curves: dict[str, tuple[Sequence[float], Sequence[float]]],
) -> tuple[blocks.Block, ...]:
  """Returns a drawing of learning curves, or nothing where there are none."""
  if not curves:
    return ()
  return (
    blocks.Figure(
      svg=_plots.curves(curves, label="loss (nats)"),
      caption="Training loss, mean over the steps since the point before.",
    ),
  )


def _source(prepared: results.PreparedData) -> str:
  """Names the kind of the source without its place, e.g. a path."""
  return prepared.source.partition(":")[0]


def _data(prepared: results.PreparedData) -> tuple[blocks.Block, ...]:
  """Says what is public about the data: no count or digest of queries."""
  rows = (
    ("Source", _source(prepared)),
    ("Unit of privacy", prepared.unit),
    ("Documents", f"{prepared.num_documents:,}"),
    ("Vocabulary", f"{prepared.vocab_size:,} ids"),
    ("Tokens of a document", f"at most {prepared.document_length:,}"),
    ("Tokens of a query", f"at most {prepared.query_length:,}"),
  )
  table = blocks.Table(header=("Data", ""), rows=rows)
  if not prepared.versions:
    return (table,)
  return (
    table,
    blocks.Paragraph(
      lead="Versions of the packages the data came from", text=prepared.versions
    ),
  )
