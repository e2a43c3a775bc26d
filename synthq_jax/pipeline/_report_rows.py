"""Tables about rows: seeds, differences, similarity, time. All private."""

import collections
import statistics
from collections.abc import Sequence

from synthq_jax.generation import mauve
from synthq_jax.pipeline import (
  _comparisons,
  _repeats,
  _report_tables,
  results,
)
from synthq_jax.pipeline import _report_blocks as blocks

__all__ = [
  "differences",
  "filtered",
  "kept",
  "seeds",
  "similarity",
  "times",
]

_NAME = _report_tables.row_name


def seeds(
  rows: Sequence[_repeats.Row], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns what each seed scored, where there were several."""
  several = [row for row in rows if len(row.by_seed[measure]) > 1]
  if not several:
    return ()
  number = max(len(row.by_seed[measure]) for row in several)
  header = ("Row", *(f"Seed {i + 1}" for i in range(number)))
  lines = tuple(
    (_NAME(row.evaluation.name), *(f"{v:.3f}" for v in row.by_seed[measure]))
    for row in several
  )
  return (
    blocks.Heading(text=f"{measure} of each seed"),
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
  )


def differences(
  found: Sequence[_repeats.Difference], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns the paired tests."""
  if not found:
    return ()
  header = ("Row", "Against", f"Difference in {measure}", "p")
  lines = tuple(
    (
      _NAME(one.first),
      _NAME(one.second),
      f"{one.interval.mean:+.3f} "
      f"[{one.interval.low:+.3f}, {one.interval.high:+.3f}]",
      _report_tables.p_value(one.p_value),
    )
    for one in found
  )
  return (
    blocks.Heading(text="Differences, query by query"),
    blocks.Table(header=header, rows=lines, numeric=header[2:]),
    blocks.Paragraph(
      text="Intervals are 95% paired bootstrap intervals over queries, for "
      f"these seeds; p of a paired t test, times {len(found)} tests "
      "(Bonferroni)."
    ),
  )


def kept(
  rows: Sequence[_repeats.Row], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns what every row keeps of the score of the real queries."""
  means = {
    row.evaluation.name: row.evaluation.measures[measure].mean
    for row in rows
    if measure in row.evaluation.measures
  }
  whole = means.pop("original", 0.0)
  if not whole:
    return ()
  parts = (f"{_NAME(name)} {mean / whole:.3f}" for name, mean in means.items())
  return (
    blocks.Paragraph(
      lead=f"Share of original's {measure}", text=f"{', '.join(parts)}."
    ),
  )


def similarity(
  found: Sequence[_comparisons.Similarity],
) -> tuple[blocks.Block, ...]:
  """Returns how near every generator comes to the real queries."""
  found = [one for one in found if one.num_queries]
  if not found:
    return ()
  titles = ("Words", "Different 2-grams", "Copied 4-grams")
  header = ("Generator", "Queries", "BLEU", "MAUVE", *titles)
  lines = tuple(
    (
      _NAME(one.name),
      f"{one.num_queries:,}",
      f"{one.bleu.score:.2f}",
      _mean_mauve(one),
      f"{one.synthetic.words:.1f} ({one.real.words:.1f})",
      f"{one.synthetic.distinct:.2f} ({one.real.distinct:.2f})",
      f"{one.synthetic.copied:.3f} ({one.real.copied:.3f})",
    )
    for one in found
  )
  return (
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
    *_similarity_explained(found),
  )


def _mean_mauve(one: _comparisons.Similarity) -> str:
  """Returns the mean over clusterings, and how far they lie apart."""
  if not one.mauve:
    return "-"
  scores = [clustering.score for clustering in one.mauve]
  return f"{statistics.mean(scores):.3f} ± {statistics.stdev(scores):.3f}"


def _similarity_explained(
  found: Sequence[_comparisons.Similarity],
) -> list[blocks.Block]:
  """Says what the numbers depend on."""
  counts = sorted({one.num_compared for one in found})
  number = f"{counts[0]:,}" + (f" to {counts[-1]:,}" if counts[1:] else "")
  signatures = ", ".join(sorted({one.bleu.signature for one in found}))
  paragraphs = [
    blocks.Paragraph(
      text="Synthetic queries for documents of held-out pairs; in parentheses,"
      " the real queries of the same documents. All but BLEU is of"
      f" {number} queries of each side."
    ),
    blocks.Paragraph(
      lead="BLEU",
      text="0 to 100, against the real queries of the same documents;"
      f" sacrebleu's signature {signatures}.",
    ),
  ]
  scores = [clustering for one in found for clustering in one.mauve]
  if scores:
    buckets = sorted({one.num_buckets for one in scores})
    clusters = str(buckets[0]) + (f" to {buckets[-1]}" if buckets[1:] else "")
    text = (
      f"0 to 1, of vectors from the {scores[0].featurizer}, in {clusters}"
      " clusters: mean and standard deviation of several clusterings. It depends"
      " on all these and on the number of queries: compare it within this table"
      " only."
    )
    paragraphs.append(blocks.Paragraph(lead="MAUVE", text=text))
  elif not mauve.is_installed():
    text = (
      "Not computed: it takes mauve-text (pip install 'synthq_jax[mauve]')."
    )
    paragraphs.append(blocks.Paragraph(lead="MAUVE", text=text))
  return paragraphs


def filtered(
  found: Sequence[results.SyntheticQueries],
) -> tuple[blocks.Block, ...]:
  """Returns what each filter took out of every generator's queries."""
  reasons = list(dict.fromkeys(name for one in found for name in one.removed))
  if not reasons:
    return ()
  header = ("Generator", "Kept", *(name.capitalize() for name in reasons))
  lines = tuple(
    (
      _NAME(one.name),
      f"{one.num_queries:,}",
      *(f"{one.removed.get(name, 0):,}" for name in reasons),
    )
    for one in found
  )
  return (
    blocks.Heading(text="What the filters took out"),
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
    blocks.Paragraph(
      text="Each query counts under the first reason that fits. Not found: by"
      " BM25. Round trip: by a retriever that was trained on the queries"
      " themselves."
    ),
  )


def times(
  rows: Sequence[_repeats.Row],
  checkpoints: Sequence[results.Checkpoint],
  synthetic: Sequence[results.SyntheticQueries],
) -> blocks.Table:
  """Returns how long each row took from the public checkpoint to its score.

  Means over seeds; the cost of a row is its time on this machine.
  """
  spent = _spent(checkpoints, synthetic)
  header = ("Row", "Fine-tuning", "Writing", "Retriever", "Scoring", "Together")
  lines = []
  for row in rows:
    name = row.evaluation.name
    made = name.removeprefix("synthetic_")
    repeats = len(next(iter(row.by_seed.values())))
    parts = [
      spent["generator", made] if made != name else 0.0,
      spent["queries", made],
      spent["retriever", name],
      row.evaluation.seconds / repeats,
    ]
    cells = (_report_tables.duration(part) if part else "-" for part in parts)
    lines.append((_NAME(name), *cells, _report_tables.duration(sum(parts))))
  return blocks.Table(header=header, rows=tuple(lines), numeric=header[1:])


def _spent(checkpoints, synthetic) -> dict[tuple[str, str], float]:
  """Returns mean seconds by kind and row."""
  found = collections.defaultdict(list)
  for one in checkpoints:
    found[one.kind, results.row_of(one.name)].append(one.seconds)
  for one in synthetic:
    found["queries", results.row_of(one.name)].append(one.seconds)
  means = {key: sum(values) / len(values) for key, values in found.items()}
  return collections.defaultdict(float, means)
