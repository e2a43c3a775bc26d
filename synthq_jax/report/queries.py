"""Builds the parts on synthetic queries: examples, and real queries."""

from collections.abc import Sequence

from synthq_jax.generation import mauve
from synthq_jax.report import blocks, page, tables, words
from synthq_jax.report import values as values_lib
from synthq_jax.runtime import comparison_results, results

__all__ = ["BESIDE_REAL", "FIRST", "SYNTHETIC", "similarity"]

_NAME = tables.row_name
_EXAMPLES = 5
"""Most synthetic queries that are shown of a generator."""
_WORDS = 12
"""Words of a document that are shown."""
Content = tuple[blocks.Block, ...]


def _build_first(values: values_lib.Shareable) -> Content:
  """Returns random queries of the first generator that private queries trained."""
  for row in values.synthetic:
    if not row.statement.is_public and row.examples:
      return (
        blocks.Heading(
          text=f"Queries of {_NAME(row.name)}, drawn at random, and the"
          " beginnings of their documents"
        ),
        _list_examples(row),
      )
  return ()


def _list_examples(row: results.SyntheticQueries) -> blocks.Items:
  return blocks.Items(
    texts=tuple(
      f'"{query}" \u2013 {_cut_beginning(document, _WORDS)}'
      for query, document in row.examples[:_EXAMPLES]
    )
  )


def _build_synthetic(values: values_lib.Shareable) -> Content:
  """Returns measures, settings and examples of each generator."""
  synthetic = values.synthetic
  if not synthetic:
    return (words.paragraph("queries.nothing"),)
  table = tables.of(
    synthetic,
    {
      "Generator": lambda row: _NAME(row.name),
      "epsilon": lambda row: tables.claimed(row.statement),
      "Documents": lambda row: f"{row.num_documents:,}",
      "Per document": lambda row: f"{row.queries_per_document:,}",
      "Queries kept": lambda row: f"{row.num_queries:,}",
      "Gauge": lambda row: f"{row.gauge:.3f}",
      "Copied": lambda row: f"{row.copy_rate:.3f}",
      "Words": lambda row: f"{row.mean_words:.1f}",
      "Time": lambda row: tables.duration(row.seconds),
    },
  )
  content: list[blocks.Block] = [
    table,
    words.paragraph("queries.columns"),
  ]
  settings = [
    (
      _NAME(row.name),
      [f'{row.sampler}, input "{row.prefix}DOCUMENT".']
      + [text for text in (row.filters, _write_removed(row.removed)) if text],
    )
    for row in synthetic
  ]
  text = " ".join(tables.noted(settings))
  content.append(words.paragraph("queries.settings", text=text))
  shown = _build_first(values)
  for row in synthetic:
    examples = _list_examples(row)
    if examples.texts and examples not in shown:
      content += [
        blocks.Heading(text=f"Written by {_NAME(row.name)}"),
        examples,
      ]
  return tuple(content)


def _write_removed(counts: dict[str, int]) -> str:
  if not any(counts.values()):
    return "Filters removed nothing."
  parts = (f"{count:,} ({name})" for name, count in counts.items() if count)
  return f"Filters removed {', '.join(parts)}."


def _cut_beginning(text: str, num_words: int) -> str:
  """Cuts a text after its first words.

  >>> _cut_beginning("one two  three", 2)
  'one two ...'
  """
  words = text.split()
  dots = ["..."] if len(words) > num_words else []
  return " ".join(words[:num_words] + dots)


def _build_comparison(values: values_lib.Private) -> Content:
  """Compares real and synthetic queries: texts, BM25's nDCG, similarity."""
  return (
    _make_asked_table(values.comparison),
    *_write_gauges(values.main, values.synthetic),
    *similarity(values.comparison.similarity),
  )


def _make_asked_table(
  comparison: comparison_results.QueryComparison,
) -> blocks.Block:
  if not comparison.asked:
    return words.paragraph("queries.nobody_wrote")
  written = {
    f"Synthetic: {_NAME(name)}": lambda row, i=i: (
      " / ".join(row.synthetic[i]) or "-"
    )
    for i, name in enumerate(comparison.generators)
  }
  columns = {
    "Beginning of the document": lambda row: _cut_beginning(
      row.document, _WORDS
    ),
    "Real queries": lambda row: " / ".join(row.real),
    **written,
  }
  return tables.of(comparison.asked, columns, left=tuple(columns))


def _write_gauges(
  main: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
) -> Content:
  gauges = [
    ("real queries", row.measures["nDCG@10"].mean)
    for row in main
    if row.name == "bm25" and "nDCG@10" in row.measures
  ]
  gauges += [(_NAME(row.name), row.gauge) for row in synthetic]
  if not gauges:
    return ()
  text = ", ".join(f"{name} {value:.3f}" for name, value in gauges)
  return (words.paragraph("queries.gauge", gauges=text),)


def similarity(
  similarities: Sequence[comparison_results.Similarity],
) -> Content:
  """Returns a table of each generator's similarity to real queries, explained.

  Args:
    similarities: one for each generator.
  """
  shown = [row for row in similarities if row.num_queries]
  if not shown:
    return ()
  sides = {
    title: lambda row, name=name, form=form: (
      f"{getattr(row.synthetic, name):{form}} ({getattr(row.real, name):{form}})"
    )
    for title, name, form in (
      ("Words", "words", ".1f"),
      ("Different 2-grams", "distinct", ".2f"),
      ("Copied 4-grams", "copied", ".3f"),
    )
  }
  table = tables.of(
    shown,
    {
      "Generator": lambda row: _NAME(row.name),
      "Queries": lambda row: f"{row.num_queries:,}",
      "BLEU": lambda row: tables.number(row.bleu, ".2f"),
      "MAUVE": lambda row: (
        tables.spread([each.score for each in row.mauve], "±")
        if row.mauve
        else "-"
      ),
      **sides,
    },
  )
  counts = sorted({row.num_compared for row in shown})
  number = f"{counts[0]:,}" + (f" to {counts[-1]:,}" if counts[1:] else "")
  signatures = ", ".join(sorted({row.bleu_signature for row in shown}))
  return (
    table,
    words.paragraph(
      "queries.one_to_one" if shown[0].one_to_one else "queries.similarity",
      number=number,
    ),
    words.paragraph("queries.bleu", signatures=signatures),
    *_explain_mauve([score for row in shown for score in row.mauve]),
  )


def _explain_mauve(scores: Sequence[mauve.Mauve]) -> Content:
  """Explains MAUVE by its vectors and clusters, or says that it is missing."""
  if not scores:
    names = () if mauve.is_installed() else ("queries.no_mauve",)
    return tuple(map(words.paragraph, names))
  buckets = sorted({row.num_buckets for row in scores})
  clusters = str(buckets[0]) + (f" to {buckets[-1]}" if buckets[1:] else "")
  featurizer = scores[0].featurizer
  return (
    words.paragraph("queries.mauve", featurizer=featurizer, clusters=clusters),
  )


FIRST = page.Section("Queries", _build_first)
SYNTHETIC = page.Section("Synthetic queries", _build_synthetic)
BESIDE_REAL = page.Section("Real beside synthetic queries", _build_comparison)
