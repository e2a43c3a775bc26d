"""Draws what was found of real queries among synthetic ones."""

from collections.abc import Sequence

from synthq_jax.pipeline import comparison_results as found_lib
from synthq_jax.pipeline import results
from synthq_jax.report import blocks, page, tables, words
from synthq_jax.retrieval import significance

__all__ = ["PRIVATE", "PUBLIC", "shareable_part", "text"]

_NAME = tables.row_name
_LEVEL = 0.05
Content = tuple[blocks.Block, ...]


def _private(leakage: found_lib.QueryLeakage | None) -> Content:
  if leakage is None:
    return (words.paragraph("leakage.nothing"),)
  content: list[blocks.Block] = [
    _summary(leakage),
    *_warnings(leakage),
    _memberships(leakage),
    _explained("leakage.reproduced", leakage.memberships),
    blocks.Heading(text="Share of the written queries"),
    _written(leakage),
    words.paragraph("leakage.written"),
    *_by_test_set(leakage),
  ]
  if leakage.overlaps:
    content.append(_explained("leakage.tested", leakage.overlaps))
  if leakage.examples:
    columns = {
      "Generator": lambda one: _NAME(one.name),
      "Near-duplicate": lambda one: one.detector,
      "Written": lambda one: one.written,
      "Private train query": lambda one: one.real,
    }
    content += [
      blocks.Heading(text="What came out"),
      tables.of(leakage.examples, columns, left=tuple(columns)),
    ]
  return (*content, words.paragraph("leakage.meaning"))


def shareable_part(
  leakage: found_lib.QueryLeakage | None,
  synthetic: Sequence[results.SyntheticQueries],
) -> found_lib.QueryLeakage | None:
  """Returns the result with everything empty that must stay private.

  Formal guarantee:
    A function of public test sets and of the queries of these generators.

  Args:
    leakage: None where nothing was looked for.
    synthetic: queries that may be shared.
  """
  if leakage is None:
    return None
  names = {one.name for one in synthetic}
  return found_lib.QueryLeakage(
    directory="",
    detectors=leakage.detectors,
    num_train=0,
    num_control=0,
    num_written={},
    confidence=leakage.confidence,
    memberships=(),
    overlaps=tuple(
      one for one in leakage.overlaps if not one.private and one.name in names
    ),
    examples=(),
    seconds=0.0,
  )


def _public(leakage: found_lib.QueryLeakage | None) -> Content:
  """Returns what the shareable page shows, or nothing."""
  if leakage is None:
    return ()
  content = [words.paragraph("leakage.checked"), *_by_test_set(leakage)]
  if leakage.overlaps:
    content.append(words.paragraph("leakage.kinds", kinds=_kinds(leakage)))
  return tuple(content)


def text(leakage: found_lib.QueryLeakage) -> str:
  """Returns the tables for the screen, without explanations and examples.

  Args:
    leakage: what was found.
  """
  overlaps = [_overlaps(leakage.overlaps)] if leakage.overlaps else []
  return page.text(
    [
      _summary(leakage),
      *_warnings(leakage),
      _memberships(leakage),
      _written(leakage),
      *overlaps,
    ]
  )


def _by_test_set(leakage: found_lib.QueryLeakage) -> list[blocks.Block]:
  content: list[blocks.Block] = []
  for name in dict.fromkeys(one.test_set for one in leakage.overlaps):
    own = name in results.OWN_TEST_SETS
    heading = f"Test queries: {'this run' if own else name}"
    chosen = [one for one in leakage.overlaps if one.test_set == name]
    content += [blocks.Heading(text=heading), _overlaps(chosen)]
  return content


def _summary(leakage: found_lib.QueryLeakage) -> blocks.Paragraph:
  names = dict.fromkeys(one.name for one in leakage.memberships)
  written = ", ".join(
    f"{leakage.num_written[name]:,} of {_NAME(name)}" for name in names
  )
  return words.paragraph(
    "leakage.summary",
    train=leakage.num_train,
    control=leakage.num_control,
    written=written,
    kinds=_kinds(leakage),
    confidence=leakage.confidence,
  )


def _kinds(leakage: found_lib.QueryLeakage) -> str:
  compared = leakage.memberships or leakage.overlaps
  names = dict.fromkeys(one.detector for one in compared)
  return "; ".join(f"{name}: {leakage.detectors[name]}" for name in names)


def _warnings(leakage: found_lib.QueryLeakage) -> list[blocks.Paragraph]:
  """Names what no reader should miss."""
  told = []
  if leakage.only_for_train:
    told.append(words.paragraph("leakage.only_for_train"))
  for one, p_value in _corrected(leakage.memberships):
    if p_value is None or p_value >= _LEVEL:
      continue
    key = "found" if one.difference.mean > 0 else "control_leaks"
    if one.name == "public_only":
      key = "public_differs"
    name = f"{_NAME(one.name)}, {one.detector}"
    told.append(words.paragraph(f"leakage.{key}", name=name, p=p_value))
  return told


def _memberships(leakage: found_lib.QueryLeakage) -> blocks.Table:
  return tables.of(
    _corrected(leakage.memberships),
    {
      "Generator": lambda pair: _NAME(pair[0].name),
      "Near-duplicate": lambda pair: pair[0].detector,
      "Trained on, reproduced": lambda pair: _both(
        pair[0].train, pair[0].train_all
      ),
      "Not trained on, reproduced": lambda pair: _both(
        pair[0].control, pair[0].control_all
      ),
      "Difference": lambda pair: tables.percent(pair[0].difference, "+"),
      "p": lambda pair: tables.p_value(pair[1]),
    },
    left=("Generator", "Near-duplicate"),
  )


def _written(leakage: found_lib.QueryLeakage) -> blocks.Table:
  return tables.of(
    leakage.memberships,
    {
      "Generator": lambda one: _NAME(one.name),
      "Near-duplicate": lambda one: one.detector,
      "Private queries": lambda one: f"{one.size:,}",
      "Near one trained on": lambda one: tables.percent(one.written_train),
      "Near one not trained on": lambda one: tables.percent(
        one.written_control
      ),
      "Difference": lambda one: tables.percent(one.written_difference, "+"),
    },
    left=("Generator", "Near-duplicate"),
  )


def _overlaps(overlaps: Sequence[found_lib.TestOverlap]) -> blocks.Table:
  return tables.of(
    _corrected(overlaps),
    {
      "Test set": lambda pair: pair[0].test_set,
      "Queries of": lambda pair: _NAME(pair[0].name),
      "Near-duplicate": lambda pair: pair[0].detector,
      "Test queries met": lambda pair: _count(pair[0].tested),
      "Share": lambda pair: tables.percent(pair[0].share),
      "Queries that meet one": lambda pair: _count(pair[0].written),
      "Beyond public only": lambda pair: tables.percent(
        pair[0].beyond_public, "+"
      ),
      "p": lambda pair: tables.p_value(pair[1]),
    },
    left=("Test set", "Queries of", "Near-duplicate"),
  )


Compared = Sequence[found_lib.Membership | found_lib.TestOverlap]


def _explained(key: str, compared: Compared) -> blocks.Paragraph:
  tests = sum(one.p_value is not None for one in compared)
  return words.paragraph(key, tests=tests)


def _corrected(compared: Compared) -> list[tuple]:
  """Returns each with its p value, times the number of those in the table."""
  there = [one.p_value for one in compared if one.p_value is not None]
  corrected = iter(significance.bonferroni(there))
  return [
    (one, None if one.p_value is None else next(corrected)) for one in compared
  ]


def _count(one: found_lib.Found) -> str:
  return f"{one.number:,} of {one.total:,}"


def _both(counted: found_lib.Found, every: found_lib.Found) -> str:
  share = tables.percent(every.number / every.total) if every.total else "-"
  return f"{_count(counted)} ({share})"


_TITLE = "Real queries among the synthetic ones"
PUBLIC = page.Section(_TITLE, _public, shareable=True)
PRIVATE = page.Section(_TITLE, _private)
