"""What the study of planted leakage says in sentences."""

import statistics
from collections.abc import Iterable

from synthq_jax.leakage import splits, study
from synthq_jax.pipeline import _leakage_study_results as results
from synthq_jax.pipeline import _report_tables

__all__ = ["LIMITS", "data", "difference", "outcomes", "reading", "setting"]

LIMITS = (
  "Tests are over the test queries: they say what more queries of the same kind"
  " would show with these rerankers, and not what other rerankers, collections"
  " or other numbers of leaked instances would. A difference that is not"
  " significant is not shown to be none. Nothing here is protected by"
  " differential privacy: runs and values of single queries are as private as"
  " the queries are."
)

_NEAR = {
  "siblings": (
    "other people's queries with a relevant document in common, which the"
    " detector takes for near-duplicates"
  ),
  "reformulations": (
    "made by rule: function words dropped, words turned around, one word put"
    " into the other number"
  ),
  "train_source": (
    "queries of the collection that is trained on, which the detector takes for"
    " near-duplicates, with that collection's documents"
  ),
}


def setting(facts: results.Facts) -> str:
  """Says in one paragraph what was done."""
  other = f", trained on {facts.train_source}" if facts.train_source else ""
  return (
    f"Rerankers of BM25's candidates on {facts.num_documents:,} documents"
    f" ({facts.source}{other}), trained without leakage, and with"
    f" {facts.num_leaked:,} instances that leak the"
    f" {facts.num_test_queries} test queries: as near-duplicates, or as they"
    " are. Sets of one size and seed have the same other instances."
  )


def data(facts: results.Facts) -> list[str]:
  """Describes test queries, filler and near-duplicates."""
  kinds = ", ".join(
    f"{number} {kind}" for kind, number in sorted(facts.relations.items())
  )
  similar = "; ".join(
    f"{name} {mean:.2f} ({low:.2f} to {high:.2f})"
    for name, (low, mean, high) in facts.similarities.items()
  )
  return [
    f"BM25 finds a relevant document of {facts.num_found} of the"
    f" {facts.num_test_queries} test queries; the others nobody can rerank."
    f" Of {facts.num_pool:,} queries to train on, {facts.num_left_out:,} were"
    " left out of the filler, because a detector matched them with a test query"
    " or a leaked one.",
    f"Near-duplicates: {facts.num_near} for {facts.num_near_targets} test"
    f" queries, {_NEAR[facts.near]}. Their relation to the test query, by a rule"
    f" on words: {kinds}. Similarity, mean (smallest to largest): {similar}; the"
    " embedding is the cosine of the package's small encoder, which is not that"
    " of the paper.",
  ]


def reading(found: results.Study) -> str:
  """Says how the tables are to be read."""
  return (
    f"A star marks a difference from the same reranker without leakage whose"
    f" paired t test, over test queries and corrected by Bonferroni for all"
    f" tests of its family, has p < {found.alpha:g}. Families: a measure with"
    " chosen sizes; a measure with all fixed sizes; ranks; offsets. In brackets"
    f" stands the {1 - found.alpha:.0%} bootstrap interval of the difference,"
    " not corrected; p is corrected. A reranker that without leakage ranks like"
    " the random order of the candidates has learned nothing about queries: what"
    " it gains from leakage is memory alone."
  )


def outcomes(found: results.Study) -> list[str]:
  """Says plainly what is significant and what is not, family by family.

  Before that, how good the rerankers are without leakage.
  """
  chosen = [table for table in found.measures if not table.size]
  said = [_without(chosen[0])]
  for table in chosen:
    name = _report_tables.measure_name(table.measure)
    decimals = 1 if table.measure in study.FEWER_IS_BETTER else 3
    signs = _signs(table.measure)
    compared = _comparisons([table])
    said.append(
      f"{name}, sizes chosen by cross-validation:"
      f" {_family(compared, signs, decimals)} {_orders(table)}".strip()
    )
    fixed = [t for t in found.measures if t.size and t.measure == table.measure]
    compared = _comparisons(fixed)
    said.append(f"{name}, each size: {_family(compared, signs, decimals)}")
  for title, of, signs in (
    ("Mean rank of leaked relevant documents", "rank", ("later", "earlier")),
    ("Rank offset of leaked documents", "offset", ("wider", "narrower")),
  ):
    compared = [getattr(one, of) for one in found.memory]
    if compared:
      said.append(f"{title}: {_family(compared, signs, 1)}")
  return said


def _comparisons(
  tables: Iterable[results.MeasureTable],
) -> list[study.Comparison]:
  return [c.comparison for t in tables for c in t.cells if c.comparison]


def _signs(measure: str) -> tuple[str, str]:
  """Returns what a rise and a fall of a measure are called."""
  names = ("better", "worse")
  return names[::-1] if measure in study.FEWER_IS_BETTER else names


def _without(table: results.MeasureTable) -> str:
  """Says how good the rerankers are at all, next to BM25 and to chance."""
  decimals = 1 if table.measure in study.FEWER_IS_BETTER else 3
  means = {
    cell.model: cell.mean
    for cell in table.cells
    if cell.leakage == splits.NAMES[0]
  }
  ranked = study.order(
    means | {results.BASELINE: table.baseline}, table.measure
  )
  better = ranked[: ranked.index(results.BASELINE)]
  each = ", ".join(f"{name} {x:.{decimals}f}" for name, x in means.items())
  return (
    f"Without leakage, {_report_tables.measure_name(table.measure)}: {each};"
    f" {results.BASELINE} {table.baseline:.{decimals}f}, random order"
    f" {table.chance:.{decimals}f}. Better than {results.BASELINE}:"
    f" {_list(better) or 'none'} (not tested)."
  )


def _family(
  compared: list[study.Comparison], signs: tuple[str, str], decimals: int
) -> str:
  """Describes one family of tests."""
  significant = [one for one in compared if one.is_significant]
  half = statistics.median((one.high - one.low) / 2 for one in compared)
  wide = (
    "The median half width of the intervals of these differences is"
    f" {half:.{decimals}f}: much smaller effects cannot be seen here."
  )
  if not significant:
    return (
      f"none of the {len(compared)} differences from training without leakage is"
      f" significant. {wide}"
    )
  each = "; ".join(
    f"{one.label}: {difference(one, decimals)},"
    f" {signs[0] if one.difference > 0 else signs[1]}"
    for one in significant
  )
  rest = len(compared) - len(significant)
  none = ""
  if rest:
    none = f" Not significant: the other {rest}."
  return (
    f"{len(significant)} of {len(compared)} differences from training without"
    f" leakage are significant ({each}).{none} {wide}"
  )


def _orders(table: results.MeasureTable) -> str:
  """Says whether leakage changes which reranker is best."""
  orders = {
    kind: study.order(
      {cell.model: cell.mean for cell in table.cells if cell.leakage == kind},
      table.measure,
    )
    for kind in splits.NAMES
  }
  first = orders[splits.NAMES[0]]
  if len(first) < 2:
    return ""
  if all(order == first for order in orders.values()):
    return f"The order of the rerankers is always {_list(first)}."
  return "The order of the rerankers: " + "; ".join(
    f"{_list(order)} with {kind}" for kind, order in orders.items()
  ) + "."  # fmt: skip


def _list(names: Iterable[str]) -> str:
  return ", ".join(names)


def difference(one: study.Comparison, decimals: int) -> str:
  """Writes a difference, its interval and its corrected p value."""
  low, high = f"{one.low:+.{decimals}f}", f"{one.high:+.{decimals}f}"
  p_value = "p < .001" if one.corrected < 0.001 else f"p = {one.corrected:.3f}"
  return f"{one.difference:+.{decimals}f} [{low}, {high}], {p_value}"
