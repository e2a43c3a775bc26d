"""Says first what a run comes to: release it, ship it, at which price.

The verdict stands at the top of both pages; the private page's is shown on the
screen, too. The shareable page's verdict is made of public or released scores and
of claims alone. The private page's follows from scores on private queries without
noise, and says so.
"""

from collections.abc import Iterator, Sequence

from synthq_jax import intervals
from synthq_jax.privacy import rounding, wording
from synthq_jax.report import blocks, claims, page, tables, words
from synthq_jax.runtime import (
  comparison_results,
  noisy_results,
  released_results,
  results,
  system_results,
)

__all__ = ["PRIVATE", "SHAREABLE", "as_text"]

_TITLE = "Verdict"
_Rows = Sequence[comparison_results.Row]
_Said = words.paragraph


def _shareable(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  public_rows: _Rows,
  shipped: Sequence[str],
  measures: Sequence[str],
  public_data: bool,
  made: Sequence[str],
  released_scores: Sequence[results.ReleasedScores],
  audited: bool,
) -> tuple[blocks.Block, ...]:
  """Returns the verdict for everybody."""
  if released_scores:
    ship = _ship_released(released_scores[0], shipped, measures[0])
  else:
    ship = _ship(public_rows, shipped, measures[0], "public pseudo-queries")
    ship += f" {_Said.text('verdict.pseudo')}"
  said = _verdict(released, synthetic, (), ship, public_data, made)
  # What came of it is no post-processing: that it is to be read is public.
  return (*said, *([_Said("verdict.audited")] if audited else ()))


def _private(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  comparison: comparison_results.QueryComparison,
  shipped: Sequence[str],
  audits: Sequence[results.AuditReport],
  public_data: bool,
  made: Sequence[str],
) -> tuple[blocks.Block, ...]:
  """Returns the verdict of scores on private queries and of audits."""
  rows = [
    row
    for row in comparison.rows
    if row.evaluation.test_set == comparison.test_set
  ]
  measure = comparison.measures[0]
  kind = f"queries of {comparison.test_set}"
  ship = _ship(rows, shipped, measure, kind, comparison.differences)
  if not public_data:
    ship += f" {_Said.text('verdict.unreleased')}"
  return _verdict(released, synthetic, audits, ship, public_data, made)


def as_text(content: Sequence[blocks.Block]) -> str:
  """Returns a verdict for the screen, a line for each of its blocks.

  Args:
    content: paragraphs and alerts.
  """
  return "\n".join(
    f"WARNING: {one.text}"
    if isinstance(one, blocks.Alert)
    else f"{one.lead}: {one.text}"
    for one in content
  )


def _verdict(
  found: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  ship: str,
  public_data: bool,
  made: Sequence[str],
) -> tuple[blocks.Block, ...]:
  """Returns the lines, and in red what voids them."""
  return (
    _Said(
      "verdict.release", said=_release(found, synthetic, audits, public_data)
    ),
    _Said("verdict.ship", said=ship),
    *_claim(found),
    *(blocks.Alert(text=one) for one in _voids(found, public_data, made)),
  )


def _release(
  found: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  public_data: bool,
) -> str:
  """Says whether to release the queries, and the first reason against it."""

  def said(name: str, /, **values: object) -> str:
    return _Said.text(f"verdict.{name}", **values)

  names = [
    tables.row_name(one.name)
    for one in synthetic
    if results.is_shareable(one) and not one.statement.is_public
  ]
  refuted = [
    (one.name, "is void" if one.is_contaminated else "refutes the claim")
    for one in audits
    if one.is_contaminated or one.exceeds_claim
  ]
  if not names:
    return said("no_queries")
  if found.unclaimed:
    return said("no_account", folders=", ".join(found.unclaimed))
  if found.together is None:
    protected = claims.protected(found.shared.values())
    return said("no_claim", protected=protected)
  if found.together.epsilon == float("inf"):
    return said("no_privacy")
  if refuted:
    name, outcome = refuted[0]
    return said("no_audit", name=name, outcome=outcome)
  if public_data:
    return said("yes_public", names=", ".join(names))
  if _is_fixed(found):
    return said("no_secret")
  return said("yes", names=", ".join(names))


def _ship(
  rows: _Rows,
  shipped: Sequence[str],
  measure: str,
  kind: str,
  differences: Sequence[comparison_results.Difference] = (),
) -> str:
  """Names the row that is furthest above BM25, of those clear of it.

  By intervals that hold for all rows at once: the best of several is taken.
  """
  beside = [
    row
    for row in rows
    if row.evaluation.name in shipped and row.over_bm25 is not None
  ]
  if not beside:
    return _Said.text("verdict.ship_none")
  clear = [row for row in beside if _over(row).low > 0]
  best = max(clear or beside, key=lambda row: row.over_bm25.mean)
  values = {
    "row": tables.row_name(best.evaluation.name),
    "measure": tables.measure_name(measure),
    "over": tables.interval(_over(best), "+.3f"),
    "number": tables.count(best.evaluation.num_queries),
    "kind": kind,
  }
  if not clear:
    return _Said.text("verdict.ship_no", **values)
  return _Said.text(
    "verdict.ship_yes",
    score=f"{best.evaluation.measures[measure].mean:.3f}",
    beside=_beside(best, clear, differences),
    rows=len(beside),
    **values,
  )


def _over(row: comparison_results.Row) -> intervals.Interval:
  return row.over_bm25_at_once or row.over_bm25


def _cost(row: results.ReleasedRow) -> float:
  return 0.0 if row.epsilon is None else row.epsilon


def _ship_released(
  scores: results.ReleasedScores, shipped: Sequence[str], measure: str
) -> str:
  """Names the row to ship by released scores, and how far it is from BM25.

  Of the rows within noise of the best, that with the least epsilon: an order that
  the noise alone may have made is no reason to spend more. By intervals that hold
  for all pairs of rows at once, as they do below.
  """
  if measure not in scores.rows[0].means:
    measure = next(iter(scores.rows[0].means))
  rows = {one.name: one for one in scores.rows}
  beside = [name for name in rows if name in shipped]
  if not beside or system_results.LEXICAL not in rows:
    return _Said.text("verdict.ship_none")
  less: dict[tuple[str, str], results.ReleasedMean] = {}
  for pair in noisy_results.pairs(scores, measure):
    less[pair.first, pair.second] = pair.less
    less[pair.second, pair.first] = pair.less.turned()
  over = {name: less[name, system_results.LEXICAL] for name in beside}
  means = {name: rows[name].means[measure].here.mean for name in beside}
  highest = max(beside, key=means.__getitem__)
  level = [
    name
    for name in beside
    if name == highest
    or less[highest, name].here.low <= 0
    and _outcome(over[name]) == _outcome(over[highest])
  ]
  best = min(level, key=lambda name: (_cost(rows[name]), -means[name]))
  said = ""
  if best != highest:
    said = _Said.text(
      "verdict.level_released",
      row=tables.row_name(highest),
      score=f"{means[highest]:.3f}",
    )
    said += " "
  public = [
    name
    for name in beside
    if name != best
    and rows[name].epsilon is None
    and less[best, name].beyond.low <= 0
  ]
  if rows[best].epsilon is None:
    said += f"{_Said.text('verdict.public_row')} "
  elif public:
    said += _Said.text(
      "verdict.beside_released",
      row=tables.row_name(public[0]),
      less=tables.interval(less[best, public[0]].beyond, "+.3f"),
    )
    said += " "
  return _Said.text(
    f"verdict.{_outcome(over[best])}",
    row=tables.row_name(best),
    measure=tables.measure_name(measure),
    score=f"{means[best]:.3f}",
    here=tables.interval(over[best].here, "+.3f"),
    beyond=tables.interval(over[best].beyond, "+.3f"),
    beside=said,
    number=tables.count(scores.num_queries),
    epsilon=tables.claimed(scores.statement),
  )


def _outcome(over: results.ReleasedMean) -> str:
  """Returns the words for what a row's difference from BM25 shows."""
  if over.here.low <= 0:
    return "released_no"
  return "released_yes" if over.beyond.low > 0 else "released_here"


def _beside(
  best: comparison_results.Row,
  clear: _Rows,
  differences: Sequence[comparison_results.Difference],
) -> str:
  """Says where a row without private queries is as good, or that this is one."""
  if best.evaluation.epsilon is None:
    return f"{_Said.text('verdict.public_row')} "
  level = {
    one.second
    for one in differences
    if one.first == best.evaluation.name and one.interval.low <= 0
  }
  for row in clear:
    if row.evaluation.epsilon is None and row.evaluation.name in level:
      said = _Said.text(
        "verdict.beside",
        row=tables.row_name(row.evaluation.name),
        over=tables.interval(_over(row), "+.3f"),
      )
      return f"{said} "
  return ""


def _claim(found: released_results.Released) -> Iterator[blocks.Paragraph]:
  """Yields the epsilons, and what they protect in a sentence."""
  claim, whole = found.together, found.everything
  values = {
    "all": "none" if whole is None else rounding.epsilon(whole.epsilon),
    "delta": "-" if whole is None else rounding.delta(whole.delta),
    "number": tables.count(len(found.started)),
  }
  if claim is None or claim.epsilon == float("inf"):
    yield _Said("verdict.no_epsilon", **values)
    yield _Said("verdict.unprotected")
    return
  epsilon = rounding.epsilon(claim.epsilon)
  yield _Said("verdict.epsilon", epsilon=epsilon, **values)
  if claim.is_public:
    yield _Said("verdict.unprotected")
    return
  yield _Said(
    "verdict.protected",
    unit=str(claim.unit),
    change=wording.change(claim),
    epsilon=epsilon,
    relation=claim.relation,
    two=wording.for_two(claim),
  )


def _voids(
  found: released_results.Released, public_data: bool, made: Sequence[str]
) -> Iterator[str]:
  """Yields what makes the claims worth less than they say."""
  if _is_fixed(found):
    yield _Said.text("verdict.secret")
  if public_data:
    yield _Said.text("verdict.public_data")
  if found.unclaimed:
    folders = ", ".join(found.unclaimed)
    yield _Said.text("verdict.unclaimed", folders=folders)
  if found.trials:
    whole = found.everything
    yield _Said.text(
      "verdict.trials",
      number=tables.count(found.trials),
      all="none" if whole is None else rounding.epsilon(whole.epsilon),
    )
  earlier = [
    place
    for place, claim in found.shared.items()
    if not claim.is_public and place not in made
  ]
  if earlier:
    yield _Said.text("verdict.earlier", places=", ".join(earlier))


def _is_fixed(found: released_results.Released) -> bool:
  """Whether the secret of a shared claim is known."""
  return any(claim.secret_is_fixed for claim in found.shared.values())


SHAREABLE = page.Section(_TITLE, _shareable, shareable=True)
PRIVATE = page.Section(_TITLE, _private)
