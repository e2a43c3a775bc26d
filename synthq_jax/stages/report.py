"""Writes the shareable page, the private page, and the table on the screen.

`select_shareable` selects the values that the sections of the shareable page may
see. All files that this stage writes outside `private/` come from those values
alone. `Report.table` holds scores on private queries, so the result.json of this
stage lies under `private/`, too.
"""

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from synthq_jax.data import files
from synthq_jax.report import (
  audit,
  blocks,
  page,
  privacy,
  queries,
  scores,
  tables,
  verdict,
  words,
)
from synthq_jax.report import leakage as leakage_lib
from synthq_jax.report import values as values_lib
from synthq_jax.runtime import (
  comparison_results,
  released_results,
  results,
  runner,
  stage,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = [
  "PRIVATE",
  "SHAREABLE",
  "STAGE",
  "Config",
  "make_values",
  "run",
  "select_shareable",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the reports; earlier stages compute all their numbers."""

  GONE: ClassVar[Mapping[str, Any]] = {"num_examples": 5, "document_words": 12}

  title: str = "Retrieval from private queries"
  """Title of both pages, before the name of the data."""
  data: str = ""
  """Public name of the data set, for both titles; empty: the kind of its source."""


def make_job(run: runner.Run, _: None) -> stage.Job[values_lib.Private]:
  """Returns one report on all results."""
  names = (
    "compare_queries",
    "audit",
    "query_leakage",
    "release_scores",
    "learn_to_rank",
  )
  groups = (
    run.generators, run.queries, run.retrievers, *map(run.get_results, names)
  )  # fmt: skip
  digests = [result.digest for group in groups for result in group.values()]
  claims = released_results.read(run.folders.root)

  def values(group: Mapping[Any, stage.Made]) -> list[Any]:
    return [result.value for result in group.values()]

  decided = {
    "shipped": _shipped(run),
    "result_folders": [
      result.value.directory
      for rows in run.made.values()
      for result in rows.values()
      if hasattr(result.value, "directory")
    ],
    "public_data": run.config.has_public_queries,
    "audited": run.config.canaries.number > 0,
  }
  return stage.Job(
    depends=(run.config.report, *run.data, *digests, claims, decided),
    settings=run.config.report,
    inputs=make_values(
      values(run.get_results("compare_queries"))[0],
      prepared=run.prepared,
      synthetic=values(run.queries),
      checkpoints=[*values(run.generators), *values(run.retrievers)],
      audits=values(run.get_results("audit")),
      leakage=next(iter(values(run.get_results("query_leakage"))), None),
      released_scores=values(run.get_results("release_scores")),
      weights=values(run.get_results("learn_to_rank")),
      released=claims,
      **decided,
      date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.",
    ),
  )


def make_values(
  comparison: comparison_results.QueryComparison, **fields: Any
) -> values_lib.Private:
  """Returns the values of the private page, without learning curves.

  Args:
    comparison: the comparison of all rows.
    **fields: the fields that do not follow from it.
  """
  main, own, others = _group_by_test_set(comparison)
  return values_lib.Private(
    measures=comparison.measures,
    main=main,
    evaluations=own,
    further_evaluations=others,
    side_by_side=comparison.side_by_side,
    comparison=comparison,
    curves={},
    **fields,
  )


def _shipped(run: runner.Run) -> list[str]:
  """Returns the rows whose systems may be shared."""
  return sorted(
    str(row)
    for row, result in run.systems.items()
    if not results.is_private_path(result.value.directory)
  )


def run(task: stage.Task[Config, values_lib.Private]) -> results.Report:
  """Writes report/report.html, report/report.md and the private page.

  Formal guarantee: report/ is post-processing of results with finite epsilon
  and of public data (see `select_shareable`). private/report/ has none.

  Returns:
    Paths relative to the working directory, and the main table, which is private.

  Raises:
    ValueError: if a file that a result names is missing or malformed.
  """
  config, root, values = task.settings, task.folders.root, task.inputs
  models = [
    *values.synthetic,
    *values.checkpoints,
    *values.released_scores,
    *values.weights,
  ]
  private = dataclasses.replace(
    values,
    curves=_read_curves(root, values.checkpoints, private=True),
    released=values.released.including(models),
  )
  public = select_shareable(
    private, _read_curves(root, private.checkpoints, private=False)
  )
  title = f"{config.title}: {config.data or public.source.replace('_', ' ')}"
  shareable_page = blocks.Page(
    title=title,
    subtitle=words.paragraph.text("page.shareable", date=private.date).strip(),
    introduction=(
      *_join_blocks(page.parts(_FIRST, public)),
      words.paragraph("page.method"),
    ),
    parts=page.parts(SHAREABLE, public),
  )
  private_page = blocks.Page(
    title=f"{title} (private)",
    subtitle=words.paragraph.text(
      "page.private", date=private.date, source=private.prepared.source
    ).strip(),
    banner=words.paragraph.text("page.banner"),
    introduction=_join_blocks(page.parts(_PRIVATE_FIRST, private)),
    parts=page.parts(PRIVATE, private),
  )
  report = results.Report(
    html="report/report.html",
    markdown="report/report.md",
    private_html=f"{results.PRIVATE}/report/report.private.html",
    table=scores.screen_table(
      private.main, private.measures, private.comparison.rows
    ),
    verdict=verdict.as_text(verdict.PRIVATE.build(private)),
  )
  write = artifacts.write_atomically
  write(root / report.html, page.html(shareable_page))
  write(root / report.markdown, page.markdown(shareable_page))
  write(root / report.private_html, page.html(private_page))
  return report


def select_shareable(
  private: values_lib.Private, curves: values_lib.Curves
) -> values_lib.Shareable:
  """Selects the values of the shareable page: public or post-processed ones.

  Formal guarantee: the values are functions of public data and of results that
  each carry a finite epsilon for the private queries. So publishing a page of
  them costs no more than its own "Everything that is released together" says,
  for that one statement's unit and relation (`joint.claim`). If results protect
  different units that no claim covers, the page says that it has none. The
  guarantee relies on declarations of the stages: `Evaluation.private`, the
  folder `private/`, and their privacy statements. A value that is private by
  any of the three is left out.

  Args:
    private: all values. Scores, queries and models pass if they may be shared;
      of the data, its documents, unit and versions.
    curves: learning curves of stages whose metrics are not private.
  """
  comparison, prepared = private.comparison, private.prepared
  rows = [
    row for row in comparison.rows if results.is_shareable_score(row.evaluation)
  ]
  scored = [row.evaluation for row in rows]
  own = {*rows_lib.OWN_TEST_SETS, comparison.test_set}
  return values_lib.Shareable(
    measures=private.measures,
    evaluations=[
      item
      for item in scored
      if item.test_set in own and not private.released_scores
    ],
    further_evaluations=[item for item in scored if item.test_set not in own],
    side_by_side=comparison.shareable_side_by_side,
    released_scores=private.released_scores,
    synthetic=_keep_shareable(private.synthetic),
    checkpoints=_keep_shareable(private.checkpoints),
    weights=_keep_shareable(private.weights),
    curves=curves,
    released=private.released,
    shipped=private.shipped,
    result_folders=private.result_folders,
    public_data=private.public_data,
    audited=private.audited,
    public_rows=[
      row
      for row in rows
      if row.evaluation.test_set == rows_lib.OWN_TEST_SETS[1]
    ],
    documents=results.public_documents(prepared),
    source=prepared.source.partition(":")[0],  # not its location
    unit=str(prepared.unit),
    versions=prepared.versions,
    date=private.date,
  )


_Result = TypeVar("_Result", bound=results.Claimed)


def _keep_shareable(items: Sequence[_Result]) -> list[_Result]:
  return [item for item in items if results.is_shareable(item)]


def _join_blocks(parts: Sequence[blocks.Part]) -> tuple[blocks.Block, ...]:
  return tuple(block for part in parts for block in part.blocks)


def _group_by_test_set(
  comparison: comparison_results.QueryComparison,
) -> tuple[list[results.Evaluation], ...]:
  """Returns the rows of the main table, of the run's other sets, and of further
  sets."""
  groups: tuple[list[results.Evaluation], ...] = ([], [], [])
  for row in comparison.rows:
    test_set = row.evaluation.test_set
    at = 1 if test_set in rows_lib.OWN_TEST_SETS else 2
    groups[0 if test_set == comparison.test_set else at].append(row.evaluation)
  return groups


def _read_curves(
  root: pathlib.Path, checkpoints: Sequence[results.Checkpoint], private: bool
) -> values_lib.Curves:
  curves = {}
  for checkpoint in checkpoints:
    is_private = not results.is_shareable(
      checkpoint
    ) or results.is_private_path(checkpoint.metrics)
    if not checkpoint.metrics or is_private != private:
      continue
    lines = [
      x for _, x in files.json_lines(root / checkpoint.metrics) if "loss" in x
    ]
    if lines:
      curves[f"{checkpoint.kind} {tables.row_name(checkpoint.name)}"] = (
        [float(line["step"]) for line in lines],
        [float(line["loss"]) for line in lines],
      )
  return curves


_FIRST: tuple[page.Section[values_lib.Shareable], ...] = (
  verdict.SHAREABLE,
  scores.PICTURE,
  queries.FIRST,
)
"""Sections of the shareable page's first screen, without titles."""
SHAREABLE: tuple[page.Section[values_lib.Shareable], ...] = (
  scores.RELEASED,
  scores.PUBLIC,
  scores.FURTHER,
  queries.SYNTHETIC,
  privacy.CLAIMS,
  scores.TRAINING,
  privacy.PUBLIC_DATA,
)
"""Sections of the shareable page, in order."""
_PRIVATE_FIRST: tuple[page.Section[values_lib.Private], ...] = (
  verdict.PRIVATE,
  scores.PRIVATE_PICTURE,
)
PRIVATE: tuple[page.Section[values_lib.Private], ...] = (
  scores.PRIVATE,
  queries.BESIDE_REAL,
  scores.LEARNING,
  leakage_lib.PRIVATE,
  privacy.ALL_CLAIMS,
  audit.PRIVATE,
  scores.OTHERS,
  scores.FURTHER,
  scores.PRIVATE_TRAINING,
  privacy.DATA,
)
"""Sections of the private page, in order."""


STAGE = stage.Stage(
  name="report",
  result=results.Report,
  config=Config,
  plan=stage.plan_one_result,
  job=make_job,
  run=run,
  needs=(
    "prepare_data",
    "prepare_test_set",
    "filter_queries",
    "query_leakage",
    "evaluate",
    "audit",
    "compare_queries",
    "release_scores",
  ),
  get_directory=lambda result: f"{results.PRIVATE}/report",
)
