"""What was found of real queries among synthetic ones, for pages and screen."""

from collections.abc import Collection, Iterable, Sequence

from synthq_jax.pipeline import _query_leakage_results as found_lib
from synthq_jax.pipeline import _report_blocks as blocks
from synthq_jax.pipeline import _report_tables, results
from synthq_jax.retrieval import significance

__all__ = ["section", "shareable", "text"]

_NAME = _report_tables.row_name
_LEVEL = 0.05
_REPRODUCED = (
  "A private query is reproduced if a written query is a near-duplicate of it. "
  "Counted are private queries without a near-duplicate among the other private "
  "ones. The control are those that no generator was trained on: what of them is "
  "reproduced is coincidence, and the difference is what being trained on adds. "
  "Intervals are Newcombe's, with queries as independent draws; p of Fisher's "
  "exact test, two-sided, times {tests} tests (Bonferroni). The row of the public "
  "checkpoint, which saw none of them, should show no difference: if it does, "
  "both groups are not draws of one kind, or the checkpoint knows one of them. "
  "In brackets: the share of all private queries, also of those not counted."
)
_WRITTEN = (
  "The same from the other side: the share of written queries with a "
  "near-duplicate among so many private ones, of all and not of the counted ones "
  "alone. A share grows with that number, so it is the same on both sides. "
  "Intervals are over documents and private queries, too wide rather than too "
  "narrow."
)
_TESTED = (
  "Test queries with a near-duplicate among the queries that a retriever may be "
  "trained on: there, scores also measure memory. The row train is that of the "
  "real train queries. More than the public checkpoint can come from what a "
  "generator learned of all queries; more than the real train queries should "
  "not. p of McNemar's exact test, times {tests} tests."
)
_MEANING = (
  "Not a guarantee, and no refutation of one: privacy at epsilon 8 allows a "
  "record to make an outcome about 3,000 times as likely. A difference says that "
  "single queries come out, none that this search saw none of them."
)
_CHECKED = (
  "The synthetic queries were searched for near-duplicates of private queries, "
  "beside a control group that no generator was trained on. What was found is a "
  "function of private queries without noise, and stands in the private report."
)


def section(
  found: found_lib.QueryLeakage | None,
) -> tuple[blocks.Block, ...]:
  """Returns the blocks of the private page.

  Args:
    found: None where nothing was looked for.
  """
  if found is None:
    return (blocks.Paragraph(text="Nothing was looked for."),)
  parts: list[blocks.Block] = [
    _summary(found),
    *_warnings(found),
    _memberships(found),
    _explained(_REPRODUCED, _p_values(found.memberships)),
    blocks.Heading(text="Share of the written queries"),
    _written(found),
    blocks.Paragraph(text=_WRITTEN),
  ]
  for name in dict.fromkeys(one.test_set for one in found.overlaps):
    chosen = [one for one in found.overlaps if one.test_set == name]
    parts += [blocks.Heading(text=_heading(name)), _overlaps(chosen)]
  if found.overlaps:
    parts.append(_explained(_TESTED, _p_values(found.overlaps)))
  if found.examples:
    parts += [blocks.Heading(text="What came out"), _examples(found.examples)]
  return (*parts, blocks.Paragraph(lead="What this means", text=_MEANING))


def shareable(
  found: found_lib.QueryLeakage | None, names: Collection[str]
) -> tuple[blocks.Section, ...]:
  """Returns the section of the shareable page, or nothing.

  Formal guarantee:
    A function of public test sets and of the queries of these generators.

  Args:
    found: None where nothing was looked for.
    names: the generators whose queries may be shared.
  """
  if found is None:
    return ()
  own = [one for one in found.overlaps if not one.private and one.name in names]
  parts: list[blocks.Block] = [blocks.Paragraph(text=_CHECKED)]
  for name in dict.fromkeys(one.test_set for one in own):
    chosen = [one for one in own if one.test_set == name]
    parts += [blocks.Heading(text=_heading(name)), _overlaps(chosen)]
  if own:
    parts.append(_kinds(found))
  title = "Real queries among the synthetic ones"
  return (blocks.Section(title=title, blocks=tuple(parts)),)


def text(found: found_lib.QueryLeakage) -> str:
  """Returns the tables for the screen, without explanations and examples.

  Args:
    found: what was found.
  """
  parts = [
    _report_tables.aligned(one) if isinstance(one, blocks.Table) else one.text
    for one in (
      _summary(found),
      *_warnings(found),
      _memberships(found),
      _written(found),
      *([_overlaps(found.overlaps)] if found.overlaps else []),
    )
  ]
  return "\n\n".join(part.rstrip() for part in parts)


def _summary(found: found_lib.QueryLeakage) -> blocks.Paragraph:
  names = dict.fromkeys(one.name for one in found.memberships)
  written = ", ".join(
    f"{found.num_written[name]:,} of {_NAME(name)}" for name in names
  )
  return blocks.Paragraph(
    text=f"{found.num_train:,} private queries that were trained on,"
    f" {found.num_control:,} that were not, and as written queries {written}."
    f" {_kinds(found).text} Intervals of {found.confidence:.0%}.",
  )


def _kinds(found: found_lib.QueryLeakage) -> blocks.Paragraph:
  names = dict.fromkeys(one.detector for one in found.memberships)
  kinds = "; ".join(f"{name}: {found.detectors[name]}" for name in names)
  return blocks.Paragraph(text=f"What a near-duplicate is: {kinds}.")


def _warnings(found: found_lib.QueryLeakage) -> list[blocks.Paragraph]:
  """Names what no reader should miss."""
  p_values = _p_values(found.memberships)
  told = []
  for one, p_value in zip(found.memberships, p_values, strict=True):
    if p_value is None or p_value >= _LEVEL:
      continue
    public = results.row_of(one.name) == "public_only"
    more = one.difference.mean > 0
    if public:
      what = (
        "the groups differ before any private step, and no difference below"
        " shows what training did"
      )
    elif more:
      what = "train queries come out more often than by coincidence"
    else:
      what = (
        "queries that were not trained on come out more often than train"
        " queries: look for them in what the generator was made of"
      )
    told.append(
      blocks.Paragraph(
        lead="Found" if more and not public else "Look here",
        text=f"{_NAME(one.name)}, {one.detector}: {what} (p = {p_value:.1g}).",
      )
    )
  return told


def _memberships(found: found_lib.QueryLeakage) -> blocks.Table:
  header = (
    "Generator",
    "Near-duplicate",
    "Trained on, reproduced",
    "Not trained on, reproduced",
    "Difference",
    "p",
  )
  p_values = _p_values(found.memberships)
  rows = tuple(
    (
      _NAME(one.name),
      one.detector,
      f"{_count(one.train)} ({_share(one.train_all)})",
      f"{_count(one.control)} ({_share(one.control_all)})",
      _difference(one.difference),
      _report_tables.p_value(p_value),
    )
    for one, p_value in zip(found.memberships, p_values, strict=True)
  )
  return blocks.Table(header=header, rows=rows, numeric=header[2:])


def _written(found: found_lib.QueryLeakage) -> blocks.Table:
  header = (
    "Generator",
    "Near-duplicate",
    "Private queries",
    "Near one trained on",
    "Near one not trained on",
    "Difference",
  )
  rows = tuple(
    (
      _NAME(one.name),
      one.detector,
      f"{one.size:,}",
      _percent(one.written_train),
      _percent(one.written_control),
      _difference(one.written_difference),
    )
    for one in found.memberships
  )
  return blocks.Table(header=header, rows=rows, numeric=header[2:])


def _overlaps(found: Sequence[found_lib.TestOverlap]) -> blocks.Table:
  header = (
    "Test set",
    "Queries of",
    "Near-duplicate",
    "Test queries met",
    "Share",
    "Queries that meet one",
    "Beyond public only",
    "p",
  )
  rows = tuple(
    (
      one.test_set,
      _NAME(one.name),
      one.detector,
      _count(one.tested),
      _interval(one.share),
      _count(one.written),
      _difference(one.beyond_public),
      _report_tables.p_value(p_value),
    )
    for one, p_value in zip(found, _p_values(found), strict=True)
  )
  return blocks.Table(header=header, rows=rows, numeric=header[3:])


def _examples(found: Sequence[found_lib.Example]) -> blocks.Table:
  header = ("Generator", "Near-duplicate", "Written", "Private train query")
  rows = tuple(
    (_NAME(one.name), one.detector, one.written, one.real) for one in found
  )
  return blocks.Table(header=header, rows=rows)


def _heading(test_set: str) -> str:
  own = test_set in results.OWN_TEST_SETS
  return f"Test queries: {'this run' if own else test_set}"


def _explained(words: str, p_values: Iterable[float | None]):
  tests = sum(value is not None for value in p_values)
  return blocks.Paragraph(text=words.format(tests=tests))


def _p_values(
  found: Sequence[found_lib.Membership | found_lib.TestOverlap],
) -> list[float | None]:
  """Returns the p values of a table, times their number."""
  there = [one.p_value for one in found if one.p_value is not None]
  corrected = iter(significance.bonferroni(there))
  return [None if one.p_value is None else next(corrected) for one in found]


def _count(one: found_lib.Found) -> str:
  return f"{one.number:,} of {one.total:,}"


def _share(one: found_lib.Found) -> str:
  return _percent(one.number / one.total) if one.total else "-"


def _percent(value: float) -> str:
  return f"{100 * value:.2f}%"


def _interval(one: results.Measure) -> str:
  low, high = 100 * one.low, 100 * one.high
  return f"{100 * one.mean:.2f}% [{low:.2f}, {high:.2f}]"


def _difference(one: results.Measure | None) -> str:
  if one is None:
    return "-"
  low, high = 100 * one.low, 100 * one.high
  return f"{100 * one.mean:+.2f}% [{low:+.2f}, {high:+.2f}]"
