"""Draws synthetic queries: examples, filters, and beside the real ones."""

from collections.abc import Sequence

from synthq_jax.generation import mauve
from synthq_jax.report import blocks, page, tables, words
from synthq_jax.runtime import comparison_results, results

__all__ = ["BESIDE_REAL", "FIRST", "SYNTHETIC", "similarity"]

_NAME = tables.row_name
Content = tuple[blocks.Block, ...]


def _first(
  synthetic: Sequence[results.SyntheticQueries],
  num_examples: int,
  document_words: int,
) -> Content:
  """Returns unchosen queries of the first generator that saw private ones."""
  for one in synthetic:
    if not one.statement.is_public and one.examples:
      return (
        blocks.Heading(
          text=f"Queries of {_NAME(one.name)}, drawn at random, and the"
          " beginnings of their documents"
        ),
        _examples(one, num_examples, document_words),
      )
  return ()


def _examples(
  one: results.SyntheticQueries, number: int, document_words: int
) -> blocks.Items:
  return blocks.Items(
    texts=tuple(
      f'"{query}" \u2013 {_beginning(document, document_words)}'
      for query, document in one.examples[:number]
    )
  )


def _synthetic_queries(
  synthetic: Sequence[results.SyntheticQueries],
  num_examples: int,
  document_words: int,
) -> Content:
  """Returns how queries were written, what they measure, and more examples."""
  if not synthetic:
    return (words.paragraph("queries.nothing"),)
  table = tables.of(
    synthetic,
    {
      "Generator": lambda one: _NAME(one.name),
      "epsilon": lambda one: tables.claimed(one.statement),
      "Documents": lambda one: f"{one.num_documents:,}",
      "Per document": lambda one: f"{one.queries_per_document:,}",
      "Queries kept": lambda one: f"{one.num_queries:,}",
      "Gauge": lambda one: f"{one.gauge:.3f}",
      "Copied": lambda one: f"{one.copy_rate:.3f}",
      "Words": lambda one: f"{one.mean_words:.1f}",
      "Time": lambda one: tables.duration(one.seconds),
    },
  )
  content: list[blocks.Block] = [
    table,
    words.paragraph("queries.columns"),
  ]
  settings = [
    (
      _NAME(one.name),
      [f'{one.sampler}, input "{one.prefix}DOCUMENT".']
      + [text for text in (one.filters, _removed(one.removed)) if text],
    )
    for one in synthetic
  ]
  text = " ".join(tables.noted(settings))
  content.append(words.paragraph("queries.settings", text=text))
  shown = _first(synthetic, num_examples, document_words)
  for one in synthetic:
    examples = _examples(one, num_examples, document_words)
    if examples.texts and examples not in shown:
      content += [
        blocks.Heading(text=f"Written by {_NAME(one.name)}"),
        examples,
      ]
  return tuple(content)


def _removed(counts: dict[str, int]) -> str:
  if not any(counts.values()):
    return "Filters removed nothing."
  parts = (f"{count:,} ({name})" for name, count in counts.items() if count)
  return f"Filters removed {', '.join(parts)}."


def _beginning(text: str, num_words: int) -> str:
  """Returns the first words of a text.

  >>> _beginning("one two  three", 2)
  'one two ...'
  """
  words = text.split()
  dots = ["..."] if len(words) > num_words else []
  return " ".join(words[:num_words] + dots)


def _beside_real(
  main: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
  comparison: comparison_results.QueryComparison,
  document_words: int,
) -> Content:
  """Returns real and synthetic queries side by side, with what they share."""
  return (
    _asked(comparison, document_words),
    *_gauges(main, synthetic),
    *similarity(comparison.similarity),
    *_filtered(synthetic),
  )


def _asked(
  comparison: comparison_results.QueryComparison, document_words: int
) -> blocks.Block:
  if not comparison.asked:
    return words.paragraph("queries.nobody_wrote")
  written = {
    f"Synthetic: {_NAME(name)}": lambda one, i=i: (
      " / ".join(one.synthetic[i]) or "-"
    )
    for i, name in enumerate(comparison.generators)
  }
  columns = {
    "Beginning of the document": lambda one: _beginning(
      one.document, document_words
    ),
    "Real queries": lambda one: " / ".join(one.real),
    **written,
  }
  return tables.of(comparison.asked, columns, left=tuple(columns))


def _gauges(
  main: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
) -> Content:
  gauges = [
    ("real queries", one.measures["nDCG@10"].mean)
    for one in main
    if one.name == "bm25" and "nDCG@10" in one.measures
  ]
  gauges += [(_NAME(one.name), one.gauge) for one in synthetic]
  if not gauges:
    return ()
  text = ", ".join(f"{name} {value:.3f}" for name, value in gauges)
  return (words.paragraph("queries.gauge", gauges=text),)


def similarity(
  similarities: Sequence[comparison_results.Similarity],
) -> Content:
  """Returns how near every generator comes to the real queries.

  Args:
    similarities: one for each generator.
  """
  shown = [one for one in similarities if one.num_queries]
  if not shown:
    return ()
  sides = {
    title: lambda one, name=name, form=form: (
      f"{getattr(one.synthetic, name):{form}} ({getattr(one.real, name):{form}})"
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
      "Generator": lambda one: _NAME(one.name),
      "Queries": lambda one: f"{one.num_queries:,}",
      "BLEU": lambda one: f"{one.bleu:.2f}",
      "MAUVE": lambda one: (
        tables.spread([each.score for each in one.mauve], "±")
        if one.mauve
        else "-"
      ),
      **sides,
    },
  )
  counts = sorted({one.num_compared for one in shown})
  number = f"{counts[0]:,}" + (f" to {counts[-1]:,}" if counts[1:] else "")
  signatures = ", ".join(sorted({one.bleu_signature for one in shown}))
  return (
    table,
    words.paragraph(
      "queries.one_to_one" if shown[0].one_to_one else "queries.similarity",
      number=number,
    ),
    words.paragraph("queries.bleu", signatures=signatures),
    *_mauve_explained([score for one in shown for score in one.mauve]),
  )


def _mauve_explained(scores: Sequence[mauve.Mauve]) -> Content:
  """Says what the numbers depend on."""
  if not scores:
    told = () if mauve.is_installed() else ("queries.no_mauve",)
    return tuple(map(words.paragraph, told))
  buckets = sorted({one.num_buckets for one in scores})
  clusters = str(buckets[0]) + (f" to {buckets[-1]}" if buckets[1:] else "")
  featurizer = scores[0].featurizer
  return (
    words.paragraph("queries.mauve", featurizer=featurizer, clusters=clusters),
  )


def _filtered(synthetic: Sequence[results.SyntheticQueries]) -> Content:
  """Returns counts of what each filter took out of every generator's queries."""
  if not any(count for one in synthetic for count in one.removed.values()):
    return ()
  reasons = dict.fromkeys(name for one in synthetic for name in one.removed)
  removed = {
    name.capitalize(): lambda one, name=name: f"{one.removed.get(name, 0):,}"
    for name in reasons
  }
  table = tables.of(
    synthetic,
    {
      "Generator": lambda one: _NAME(one.name),
      "Kept": lambda one: f"{one.num_queries:,}",
      **removed,
    },
  )
  return (
    blocks.Heading(text="What the filters took out"),
    table,
    words.paragraph("queries.filters"),
  )


FIRST = page.Section("Queries", _first, shareable=True)
SYNTHETIC = page.Section(
  "Synthetic queries", _synthetic_queries, shareable=True
)
BESIDE_REAL = page.Section("Real beside synthetic queries", _beside_real)
