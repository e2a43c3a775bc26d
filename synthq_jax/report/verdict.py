"""Answers first what a run comes to: what to ship, what to release, at which price.

Three tiles stand at the top of both pages; the screen shows the private page's. The
shareable page's are made of public or released scores and of claims alone. The
private page's follow from scores on private queries without noise, and say so.
"""

import math
from collections.abc import Iterator, Sequence

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


def _say(name: str, /, **values: object) -> str:
  return words.paragraph.text(f"verdict.{name}", **values)


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
    ship, _ = _ship_released(released_scores[0], shipped, measures[0])
  else:
    kind = "public pseudo-queries"
    ship = _ship(public_rows, shipped, measures[0], kind, "pseudo")
  content = _verdict(released, synthetic, (), ship, public_data, made)
  # What came of it is no post-processing: that it is to be read is public.
  return (
    *content,
    *([words.paragraph("verdict.audited")] if audited else ()),
  )


def _private(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  comparison: comparison_results.QueryComparison,
  shipped: Sequence[str],
  audits: Sequence[results.AuditReport],
  public_data: bool,
  made: Sequence[str],
  released_scores: Sequence[results.ReleasedScores],
) -> tuple[blocks.Block, ...]:
  """Returns the verdict of scores on private queries and of audits.

  Where they leave open which row to ship, it is that of the shareable page.
  """
  rows = [
    row
    for row in comparison.rows
    if row.evaluation.test_set == comparison.test_set
  ]
  measure, preferred = comparison.measures[0], ""
  if released_scores:
    _, preferred = _ship_released(released_scores[0], shipped, measure)
  kind = f"queries of {comparison.test_set}"
  caution = "" if public_data else "unreleased"
  ship = _ship(rows, shipped, measure, kind, caution, preferred)
  return _verdict(released, synthetic, audits, ship, public_data, made)


def as_text(content: Sequence[blocks.Block]) -> str:
  """Returns a verdict for the screen, a line for each tile and warning.

  Args:
    content: tiles, paragraphs and alerts.
  """
  lines = []
  for one in content:
    if isinstance(one, blocks.Tiles):
      lines += [f"{x.title}: {x.head}. {x.text}" for x in one.tiles]
    elif isinstance(one, blocks.Alert):
      lines.append(f"WARNING: {one.text}")
    else:
      lines.append(f"{one.lead}: {one.text}")
  return "\n".join(lines)


def _verdict(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  ship: blocks.Tile,
  public_data: bool,
  made: Sequence[str],
) -> tuple[blocks.Block, ...]:
  """Returns the condition of the run, the tiles, and warnings below them."""
  tiles = (
    ship,
    _release(released, synthetic, audits, public_data),
    _claim(released),
  )
  is_fixed = _is_fixed(released)
  conditions = {
    (True, False): "public_data",
    (False, True): "secret",
    (True, True): "public_and_secret",
  }
  note = conditions.get((public_data, is_fixed))
  return (
    *([blocks.Alert(text=_say(note), is_calm=True)] if note else ()),
    blocks.Tiles(tiles=tiles),
    *(blocks.Alert(text=one) for one in _voids(released, made)),
  )


def _release(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  public_data: bool,
) -> blocks.Tile:
  """Returns whether to release the queries, and the first reason against it."""
  own = [
    one
    for one in synthetic
    if results.is_shareable(one) and not one.statement.is_public
  ]
  refuted = [
    (one.name, "is void" if one.is_contaminated else "refutes the claim")
    for one in audits
    if one.is_contaminated or one.exceeds_claim
  ]
  head, names = "No", ", ".join(tables.row_name(one.name) for one in own)
  if not own:
    text = _say("no_queries")
  elif released.unclaimed:
    text = _say("no_account", folders=", ".join(released.unclaimed))
  elif released.together is None:
    protected = claims.protected(released.shared.values())
    text = _say("no_claim", protected=protected)
  elif math.isinf(released.together.epsilon):
    text = _say("no_privacy")
  elif refuted:
    text = _say("no_audit", name=refuted[0][0], outcome=refuted[0][1])
  elif not public_data and _is_fixed(released):
    text = _say("no_secret")
  else:
    number = tables.count(sum(one.num_queries for one in own))
    head = _say("release_yes", number=number)
    text = _say("yes_public" if public_data else "yes", names=names)
  return blocks.Tile(title="Queries", head=head, text=text)


def _tile(head: str, text: str, name: str, **values: object) -> blocks.Tile:
  """Returns the tile on what to ship."""
  text = " ".join(_say(text, code=name, **values).split())
  return blocks.Tile(title="Ship", head=head, text=text)


def _ship(
  rows: _Rows,
  shipped: Sequence[str],
  measure: str,
  kind: str,
  caution: str = "",
  preferred: str = "",
) -> blocks.Tile:
  """Names the cheapest row of those that are clear of BM25 and tie with the best.

  By intervals that hold for all rows at once: the best of several is taken.

  Args:
    rows: of one test set.
    shipped: names of rows that may be given away.
    measure: that decides.
    kind: the queries, in words.
    caution: name of a sentence behind the others.
    preferred: a row that is taken if it ties with the best, whatever it costs.
  """
  scored = {
    row.evaluation.name: row
    for row in rows
    if row.evaluation.name in shipped and row.over_bm25 is not None
  }
  if not scored:
    return _tile("Not known", "ship_none", "")
  over = {
    k: row.over_bm25_at_once or row.over_bm25 for k, row in scored.items()
  }
  clear = [name for name in scored if over[name].low > 0]
  highest = max(clear or scored, key=lambda name: over[name].mean)
  level = [x for x in clear if x in (highest, *scored[highest].level)]
  costs = {k: _cost(row.evaluation.epsilon) for k, row in scored.items()}
  best = min(
    level or [highest],
    key=lambda name: (name != preferred, costs[name], -over[name].mean),
  )
  means = {
    k: row.evaluation.measures[measure].mean for k, row in scored.items()
  }
  return _tile(
    _call(best, costs) if clear else "None",
    "ship_yes" if clear else "ship_no",
    best,
    measure=tables.measure_name(measure),
    score=f"{means[best]:.3f}",
    over=tables.interval(over[best], "+.3f"),
    number=tables.count(scored[best].evaluation.num_queries),
    kind=kind,
    ties=_tie(best, highest, means, costs),
    rows=len(scored),
    caution=_say(caution) if caution else "",
  )


def _cost(epsilon: float | None) -> float:
  return 0.0 if epsilon is None else epsilon


def _call(name: str, costs: dict[str, float]) -> str:
  return tables.call_row(name, costs[name] or None)


def _tie(
  best: str, highest: str, means: dict[str, float], costs: dict[str, float]
) -> str:
  """Names the row of the highest score where a cheaper one ties with it."""
  own = "" if costs[best] else _say("public_row")
  if best == highest:
    return own
  tie = _say(
    "ties",
    row=tables.call_row(highest),
    score=f"{means[highest]:.3f}",
    cost=tables.epsilon(costs[highest]),
  )
  return f"{tie} {own}"


def _ship_released(
  scores: results.ReleasedScores, shipped: Sequence[str], measure: str
) -> tuple[blocks.Tile, str]:
  """Names the row to ship by released scores; "" where it is none.

  Of the rows within noise of the best, that with the least epsilon: an order that
  the noise alone may have made is no reason to spend more. By intervals that hold
  for all pairs of rows at once, as they do below.
  """
  if measure not in scores.rows[0].means:
    measure = next(iter(scores.rows[0].means))
  rows = {one.name: one for one in scores.rows}
  scored = [name for name in rows if name in shipped]
  if not scored or system_results.LEXICAL not in rows:
    return _tile("Not known", "ship_none", ""), ""
  less: dict[tuple[str, str], results.ReleasedMean] = {}
  for pair in noisy_results.pairs(scores, measure):
    less[pair.first, pair.second] = pair.less
    less[pair.second, pair.first] = pair.less.turned()
  over = {name: less[name, system_results.LEXICAL] for name in scored}
  means = {name: rows[name].means[measure].here.mean for name in scored}
  costs = {name: _cost(rows[name].epsilon) for name in scored}
  highest = max(scored, key=means.__getitem__)
  level = [
    name
    for name in scored
    if name == highest
    or less[highest, name].here.low <= 0
    and _outcome(over[name]) == _outcome(over[highest])
  ]
  best = min(level, key=lambda name: (costs[name], -means[name]))
  ties = _tie(best, highest, means, costs)
  public = [
    name
    for name in scored
    if name != best
    and rows[name].epsilon is None
    and less[best, name].beyond.low <= 0
  ]
  if public and costs[best]:
    ties += " " + _say(
      "beside_released",
      row=tables.call_row(public[0]),
      less=tables.interval(less[best, public[0]].beyond, "+.3f"),
    )
  outcome = _outcome(over[best])
  is_none = outcome == "released_no"
  tile = _tile(
    "None" if is_none else _call(best, costs),
    outcome,
    best,
    measure=tables.measure_name(measure),
    score=f"{means[best]:.3f}",
    here=tables.interval(over[best].here, "+.3f"),
    beyond=tables.interval(over[best].beyond, "+.3f"),
    ties=ties.strip(),
    number=tables.count(scores.num_queries),
    epsilon=tables.claimed(scores.statement),
  )
  return tile, "" if is_none else best


def _outcome(over: results.ReleasedMean) -> str:
  """Returns the words for what a row's difference from BM25 shows."""
  if over.here.low <= 0:
    return "released_no"
  return "released_yes" if over.beyond.low > 0 else "released_here"


def _claim(released: released_results.Released) -> blocks.Tile:
  """Returns the epsilons, and what they protect in a sentence."""
  claim, whole = released.together, released.everything
  values = {
    "all": "none" if whole is None else rounding.epsilon(whole.epsilon),
    "delta": "-" if whole is None else rounding.delta(whole.delta),
    "number": tables.count(len(released.started)),
  }
  if claim is None or math.isinf(claim.epsilon):
    text = _say("no_epsilon", **values)
    return blocks.Tile(title="Privacy", head="Nothing is claimed", text=text)
  epsilon = rounding.epsilon(claim.epsilon)
  text = _say("epsilon", **values)
  if claim.is_public:
    return blocks.Tile(title="Privacy", head="Nothing is claimed", text=text)
  protected = _say(
    "protected",
    unit=str(claim.unit),
    change=wording.change(claim),
    epsilon=epsilon,
    factor=rounding.factor(float(epsilon)),
    relation=claim.relation,
    two=wording.for_two(claim),
  )
  return blocks.Tile(
    title="Privacy",
    head=f"epsilon {epsilon} for one {claim.unit}",
    text=f"{protected} {text}",
  )


def _voids(
  released: released_results.Released, made: Sequence[str]
) -> Iterator[str]:
  """Yields what makes the claims worth less than they say."""
  if released.unclaimed:
    yield _say("unclaimed", folders=", ".join(released.unclaimed))
  if released.trials:
    whole = released.everything
    yield _say(
      "trials",
      number=tables.count(released.trials),
      all="none" if whole is None else rounding.epsilon(whole.epsilon),
    )
  earlier = [
    place
    for place, claim in released.shared.items()
    if not claim.is_public and place not in made
  ]
  if earlier:
    yield _say("earlier", places=", ".join(earlier))


def _is_fixed(released: released_results.Released) -> bool:
  """Returns whether the secret of a shared claim is known."""
  return any(claim.secret_is_fixed for claim in released.shared.values())


SHAREABLE = page.Section(_TITLE, _shareable, shareable=True)
PRIVATE = page.Section(_TITLE, _private)
