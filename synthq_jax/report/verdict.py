"""Builds the verdict of a run: the row to ship, the queries to release, epsilon.

Three tiles head both pages, and the screen shows those of the private page. On the
shareable page they depend only on public or released scores and on claims. On the
private page they depend on exact scores of private queries, and say so.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from synthq_jax.privacy import rounding, wording
from synthq_jax.report import blocks, claims, page, tables, words
from synthq_jax.report import values as values_lib
from synthq_jax.runtime import (
  comparison_results,
  noisy_results,
  released_results,
  results,
)
from synthq_jax.runtime import rows as rows_lib

__all__ = ["PRIVATE", "SHAREABLE", "as_text"]

_TITLE = "Verdict"
_Rows = Sequence[comparison_results.ScoredRow]


def _write(name: str, /, **values: object) -> str:
  return words.paragraph.text(f"verdict.{name}", **values)


def _build_shareable(values: values_lib.Shareable) -> tuple[blocks.Block, ...]:
  """Returns the verdict of the shareable page."""
  shipped, measure = values.shipped, values.measures[0]
  if values.released_scores:
    ship, _ = _ship_released(values.released_scores[0], shipped, measure)
  else:
    kind = "public pseudo-queries"
    ship = _ship_exact(values.public_rows, shipped, measure, kind, "pseudo")
  # The audit's result is private; that there was an audit is public.
  audited = [words.paragraph("verdict.audited")] if values.audited else ()
  return (*_make_verdict(values, (), ship), *audited)


def _build_private(values: values_lib.Private) -> tuple[blocks.Block, ...]:
  """Returns the verdict of the private page, by exact scores and audits.

  Among rows within noise of the best, it prefers the row of the shareable page.
  """
  comparison, shipped = values.comparison, values.shipped
  rows = [
    row
    for row in comparison.rows
    if row.evaluation.test_set == comparison.test_set
  ]
  measure, preferred = values.measures[0], ""
  if values.released_scores:
    release = values.released_scores[0]
    _, preferred = _ship_released(release, shipped, measure)
  kind = f"queries of {comparison.test_set}"
  caution = "" if values.public_data else "unreleased"
  ship = _ship_exact(rows, shipped, measure, kind, caution, preferred)
  return _make_verdict(values, values.audits, ship)


def as_text(content: Sequence[blocks.Block]) -> str:
  """Returns a verdict as text, with a line for each tile and warning.

  Args:
    content: tiles, paragraphs and alerts.
  """
  lines = []
  for entry in content:
    if isinstance(entry, blocks.Tiles):
      lines += [f"{x.title}: {x.head}. {x.text}" for x in entry.tiles]
    elif isinstance(entry, blocks.Alert):
      lines.append(f"WARNING: {entry.text}")
    elif isinstance(entry, blocks.Paragraph):
      lines.append(f"{entry.lead}: {entry.text}")
  return "\n".join(lines)


def _make_verdict(
  values: values_lib.Values,
  audits: Sequence[results.AuditReport],
  ship: blocks.Tile,
) -> tuple[blocks.Block, ...]:
  """Returns the tiles, a note on the run's settings above, and warnings below."""
  released, public_data = values.released, values.public_data
  tiles = (
    ship,
    _make_release_tile(released, values.synthetic, audits, public_data),
    _make_claim_tile(released),
  )
  is_fixed = _is_fixed(released)
  conditions = {
    (True, False): "public_data",
    (False, True): "secret",
    (True, True): "public_and_secret",
  }
  note = conditions.get((public_data, is_fixed))
  return (
    *([blocks.Alert(text=_write(note), is_calm=True)] if note else ()),
    blocks.Tiles(tiles=tiles),
    *(
      blocks.Alert(text=entry)
      for entry in _list_warnings(released, values.result_folders)
    ),
  )


def _make_release_tile(
  released: released_results.Released,
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  public_data: bool,
) -> blocks.Tile:
  """Returns the tile on releasing the queries, with the first reason against."""
  own = [
    entry
    for entry in synthetic
    if results.is_shareable(entry) and not entry.statement.is_public
  ]
  refuted = [
    (entry.name, "is void" if entry.is_contaminated else "refutes the claim")
    for entry in audits
    if entry.is_contaminated or entry.exceeds_claim
  ]
  head, names = "No", ", ".join(tables.row_name(entry.name) for entry in own)
  if not own:
    text = _write("no_queries")
  elif released.unclaimed:
    text = _write("no_account", folders=", ".join(released.unclaimed))
  elif released.together is None:
    protected = claims.protected(released.shared.values())
    text = _write("no_claim", protected=protected)
  elif math.isinf(released.together.epsilon):
    text = _write("no_privacy")
  elif refuted:
    text = _write("no_audit", name=refuted[0][0], outcome=refuted[0][1])
  elif not public_data and _is_fixed(released):
    text = _write("no_secret")
  else:
    number = tables.count(sum(entry.num_queries for entry in own))
    head = _write("release_yes", number=number)
    text = _write("yes_public" if public_data else "yes", names=names)
  return blocks.Tile(title="Queries", head=head, text=text)


def _make_ship_tile(head: str, text: str, **values: object) -> blocks.Tile:
  """Returns the tile on the row to ship."""
  text = " ".join(_write(text, **values).split())
  return blocks.Tile(title="Ship", head=head, text=text)


class _Candidate(NamedTuple):
  """A row that may be shipped, with its mean score and epsilon."""

  row: rows_lib.Row
  mean: float
  epsilon: float | None
  tier: int  # 0: not clear of BM25; a higher tier is preferred
  level: Collection[str]  # rows that it does not beat beyond noise

  @property
  def cost(self) -> float:
    return 0.0 if self.epsilon is None else self.epsilon


def _choose_row(
  rows: Mapping[str, _Candidate], preferred: str = ""
) -> tuple[str, str, str]:
  """Chooses the row with the least epsilon among those that tie with the best.

  A tie is a difference within noise: it is no reason to spend more epsilon.

  Args:
    rows: candidates by name.
    preferred: name of a row to choose if it ties with the best, whatever its
      epsilon.

  Returns:
    Name and label of the chosen row, and a sentence on the best row, or "".
    Without a row clear of BM25 the label is "None".
  """
  highest = max(rows, key=lambda name: (rows[name].tier, rows[name].mean))
  top, best = rows[highest], highest
  if top.tier:
    best = min(
      (
        name
        for name, entry in rows.items()
        if name == highest or name in top.level and entry.tier == top.tier
      ),
      key=lambda x: (x != preferred, rows[x].cost, -rows[x].mean),
    )
  text = "" if rows[best].cost else _write("public_row")
  if best != highest:
    score, cost = f"{top.mean:.3f}", tables.epsilon(top.cost)
    row = tables.call_row(top.row)
    text = f"{_write('ties', row=row, score=score, cost=cost)} {text}"
  head = (
    tables.call_row(rows[best].row, rows[best].epsilon) if top.tier else "None"
  )
  return best, head, text


def _ship_exact(
  rows: _Rows,
  shipped: Sequence[str],
  measure: str,
  kind: str,
  caution: str = "",
  preferred: str = "",
) -> blocks.Tile:
  """Returns the tile on the row to ship by exact scores, if one is clear of BM25.

  Its intervals hold for all rows at once, since it is the best of several rows.
  """
  scored, over = {}, {}
  for row in rows:
    name, interval = row.evaluation.name, row.over_bm25
    if name in shipped and interval is not None:
      scored[name], over[name] = row, row.over_bm25_at_once or interval
  if not scored:
    return _make_ship_tile("Not known", "ship_none")
  candidates = {
    name: _Candidate(
      row.evaluation.row,
      row.evaluation.measures[measure].mean,
      row.evaluation.epsilon,
      int(over[name].low > 0),
      row.level,
    )
    for name, row in scored.items()
  }
  best, head, ties = _choose_row(candidates, preferred)
  return _make_ship_tile(
    head,
    "ship_yes" if candidates[best].tier else "ship_no",
    code=best,
    measure=tables.measure_name(measure),
    score=f"{candidates[best].mean:.3f}",
    over=tables.interval(over[best], "+.3f"),
    number=tables.count(scored[best].evaluation.num_queries),
    kind=kind,
    ties=ties,
    rows=len(scored),
    caution=_write(caution) if caution else "",
  )


_OUTCOMES = ("released_no", "released_here", "released_yes")


def _ship_released(
  scores: results.ReleasedScores, shipped: Sequence[str], measure: str
) -> tuple[blocks.Tile, str]:
  """Returns the tile on the row to ship by released scores, and the row's name.

  Intervals hold for all pairs of rows at once, as in the order of the released
  scores. Without a row clear of BM25 the name is "".
  """
  if measure not in scores.rows[0].means:
    measure = next(iter(scores.rows[0].means))
  rows = {entry.name: entry for entry in scores.rows}
  scored = [name for name in rows if name in shipped]
  if not scored or rows_lib.LEXICAL not in rows:
    return _make_ship_tile("Not known", "ship_none"), ""
  less: dict[tuple[str, str], results.ReleasedMean] = {}
  for pair in noisy_results.pairs(scores, measure):
    less[pair.first, pair.second] = pair.less
    less[pair.second, pair.first] = pair.less.turned()
  over = {name: less[name, rows_lib.LEXICAL] for name in scored}
  candidates = {
    name: _Candidate(
      rows[name].row,
      rows[name].means[measure].here.mean,
      rows[name].epsilon,
      (over[name].here.low > 0) + (over[name].beyond.low > 0),
      [x for x in scored if x != name and less[name, x].here.low <= 0],
    )
    for name in scored
  }
  best, head, ties = _choose_row(candidates)
  tier = candidates[best].tier
  for name in scored if candidates[best].cost else ():
    if rows[name].epsilon is None and less[best, name].beyond.low <= 0:
      ties += " " + _write(
        "beside_released",
        row=tables.call_row(rows[name].row),
        less=tables.interval(less[best, name].beyond, "+.3f"),
      )
      break
  tile = _make_ship_tile(
    head,
    _OUTCOMES[tier],
    code=best,
    measure=tables.measure_name(measure),
    score=f"{candidates[best].mean:.3f}",
    here=tables.interval(over[best].here, "+.3f"),
    beyond=tables.interval(over[best].beyond, "+.3f"),
    ties=ties,
    number=tables.count(scores.num_queries),
    epsilon=tables.claimed(scores.statement),
  )
  return tile, best if tier else ""


def _make_claim_tile(released: released_results.Released) -> blocks.Tile:
  """Returns the tile on the epsilons and on what they protect."""
  claim, everything = released.together, released.everything
  text = _write(
    "epsilon",
    all="none" if everything is None else rounding.epsilon(everything.epsilon),
    delta="-" if everything is None else rounding.delta(everything.delta),
    number=tables.count(released.num_private),
  )
  if claim is None or math.isinf(claim.epsilon) or claim.is_public:
    return blocks.Tile(title="Privacy", head="Nothing is claimed", text=text)
  epsilon = rounding.epsilon(claim.epsilon)
  protected = _write(
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


def _list_warnings(
  released: released_results.Released, directories: Sequence[str]
) -> Iterator[str]:
  """Yields warnings: unclaimed files, lost trainings, results of other settings."""
  if released.unclaimed:
    yield _write("unclaimed", folders=", ".join(released.unclaimed))
  if released.trials:
    everything = released.everything
    yield _write(
      "trials",
      number=tables.count(released.trials),
      all="none"
      if everything is None
      else rounding.epsilon(everything.epsilon),
    )
  earlier = [
    directory
    for directory, claim in released.shared.items()
    if not claim.is_public and directory not in directories
  ]
  if earlier:
    yield _write("earlier", places=", ".join(earlier))


def _is_fixed(released: released_results.Released) -> bool:
  """Tests whether the settings fix the secret of a shared claim."""
  return any(claim.secret_is_fixed for claim in released.shared.values())


SHAREABLE = page.Section(_TITLE, _build_shareable)
PRIVATE = page.Section(_TITLE, _build_private)
