"""Draws the shareable pages, the private one, and the table on the screen.

Each section of `SECTIONS` says whether it may be shared, and is private if it
says nothing. `shareable_values` lets through what shareable sections may see.
Everything that this stage writes outside `private/` comes from those alone.
`Report.table` holds scores on private queries, so the result.json of this stage
lies under `private/`, too.
"""

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

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
from synthq_jax.runtime import (
  comparison_results,
  config_types,
  released_results,
  results,
  runner,
  stage,
  system_results,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = ["SECTIONS", "STAGE", "Config", "Inputs", "run", "shareable_values"]

_Curves = dict[str, tuple[list[float], list[float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What the reports show; all of it is computed by earlier stages."""

  title: str = "Retrieval from private queries"
  """The title of both pages, before the name of the data."""
  data: str = ""
  """Public name of the data set, for both titles; empty: the kind of its source."""
  num_examples: int = 5
  """Synthetic queries shown for each generator, at most those it kept."""
  document_words: int = 12
  """Words shown of a document."""

  def __post_init__(self):
    config_types.at_least(self, 1, "num_examples", "document_words")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Everything that a run has made and found."""

  prepared: results.PreparedData
  comparison: comparison_results.QueryComparison
  """Of all rows, and of real and synthetic queries."""
  synthetic: Sequence[results.SyntheticQueries]  # all synthetic queries
  checkpoints: Sequence[results.Checkpoint]  # all trained models
  audits: Sequence[results.AuditReport]
  leakage: comparison_results.QueryLeakage | None
  """Real queries among the synthetic ones; None: nothing was looked for."""
  released_scores: Sequence[results.ReleasedScores]  # with noise
  weights: Sequence[system_results.Ranking]  # beside BM25
  released: released_results.Released  # the claims of the working directory
  shipped: Sequence[str]  # rows that may be given away
  made: Sequence[str]  # the folders of the results of the run
  public_data: bool  # whether the queries are public
  audited: bool  # whether canaries stand among them
  date: str = ""  # of the report


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns one report on everything that there is."""
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
  digests = [made.digest for group in groups for made in group.values()]
  claims = released_results.read(run.folders.root)

  def values(group: Mapping[Any, stage.Made]) -> list[Any]:
    return [made.value for made in group.values()]

  return stage.Job(
    depends=(run.config.report, *run.data, *digests, claims),
    settings=run.config.report,
    inputs=Inputs(
      prepared=run.prepared,
      comparison=values(run.get_results("compare_queries"))[0],
      synthetic=values(run.queries),
      checkpoints=[*values(run.generators), *values(run.retrievers)],
      audits=values(run.get_results("audit")),
      leakage=next(iter(values(run.get_results("query_leakage"))), None),
      released_scores=values(run.get_results("release_scores")),
      weights=values(run.get_results("learn_to_rank")),
      released=claims,
      shipped=_shipped(run),
      made=[
        made.value.directory
        for rows in run.made.values()
        for made in rows.values()
        if hasattr(made.value, "directory")
      ],
      public_data=run.config.has_public_queries,
      audited=run.config.canaries.number > 0,
      date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.",
    ),
  )


def _shipped(run: runner.Run) -> list[str]:
  """Returns the rows whose systems may be given away."""
  return sorted(
    str(row)
    for row, made in run.systems.items()
    if not results.is_private_path(made.value.directory)
  )


def run(task: stage.Task[Config, Inputs]) -> results.Report:
  """Writes report/report.html, report/report.md and the private page.

  Formal guarantee: report/ is post-processing of results with finite epsilon
  and of public data (see `shareable_values`). private/report/ has none.

  Returns:
    Paths relative to the working directory, and the main table, which is private.

  Raises:
    ValueError: if a file that a result names is missing or malformed.
  """
  config, root, given = task.settings, task.folders.root, task.inputs
  prepared, comparison = given.prepared, given.comparison
  synthetic, checkpoints = given.synthetic, given.checkpoints
  decided = {
    "released": given.released.including(
      [*synthetic, *checkpoints, *given.released_scores, *given.weights]
    ),
    "shipped": given.shipped,
    "made": given.made,
    "public_data": given.public_data,
    "audited": given.audited,
  }
  measures = comparison.measures
  main, others, further = _test_sets(comparison)
  table = scores.screen_table(main, measures, comparison.rows)
  public = shareable_values(
    config,
    prepared=prepared,
    comparison=comparison,
    synthetic=synthetic,
    checkpoints=checkpoints,
    curves=_curves(root, checkpoints, private=False),
    released_scores=given.released_scores,
    weights=given.weights,
    decided=decided,
  )
  private = {
    **decided,
    "released_scores": given.released_scores,
    "main": main,
    "evaluations": others,
    "further": further,
    "side_by_side": comparison.side_by_side,
    "measures": measures,
    "comparison": comparison,
    "synthetic": synthetic,
    "checkpoints": checkpoints,
    "weights": given.weights,
    "curves": _curves(root, checkpoints, private=True),
    "audits": given.audits,
    "leakage": given.leakage,
    "prepared": prepared,
    "document_words": config.document_words,
  }
  firsts = {
    shareable: [
      block
      for part in page.parts(_FIRST, values, shareable=shareable)
      for block in part.blocks
    ]
    for shareable, values in ((True, public), (False, private))
  }
  title = f"{config.title}: {public['data']}"
  shared = blocks.Page(
    title=title,
    subtitle=words.paragraph.text("page.shareable", date=given.date).strip(),
    introduction=(*firsts[True], words.paragraph("page.method")),
    parts=page.parts(SECTIONS, public, shareable=True),
  )
  kept = blocks.Page(
    title=f"{title} (private)",
    subtitle=words.paragraph.text(
      "page.private", date=given.date, source=prepared.source
    ).strip(),
    banner=words.paragraph.text("page.banner"),
    introduction=tuple(firsts[False]),
    parts=page.parts(SECTIONS, private),
  )
  report = results.Report(
    html="report/report.html",
    markdown="report/report.md",
    private_html=f"{results.PRIVATE}/report/report.private.html",
    table=table,
    verdict=verdict.as_text(page.parts([verdict.PRIVATE], private)[0].blocks),
  )
  write = artifacts.write_atomically
  write(root / report.html, page.html(shared))
  write(root / report.markdown, page.markdown(shared))
  write(root / report.private_html, page.html(kept))
  return report


def shareable_values(
  config: Config,
  *,
  prepared: results.PreparedData,
  comparison: comparison_results.QueryComparison,
  synthetic: Sequence[results.SyntheticQueries],
  checkpoints: Sequence[results.Checkpoint],
  curves: _Curves,
  released_scores: Sequence[results.ReleasedScores] = (),
  weights: Sequence[system_results.Ranking] = (),
  decided: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns what shareable sections may see: public or post-processed values.

  Formal guarantee: the values are functions of public data and of results that
  each carry a finite epsilon for the private queries, so publishing a page of
  them costs no more than its own "Everything that is released together" says, for
  that one statement's unit and relation (`joint.claim`). Where results protect
  different units that no claim covers, the page says that it has none. It relies
  on what stages declare: `Evaluation.private`, the folder `private/`, and their
  privacy statements. What is private by any of the three is left out.

  Args:
    config: what to show.
    prepared: of which only documents, settings and versions are let through.
    comparison: of which only scores of shareable rows are.
    synthetic: of which the non-private ones are left out.
    checkpoints: of which the non-private ones are left out.
    curves: learning curves of stages whose metrics are not private.
    released_scores: with noise; they stand in place of pseudo-queries.
    weights: of which those without noise are left out.
    decided: what the verdict is made of: claims, places and names of rows.
  """
  scored = [row.evaluation for row in comparison.rows]
  scored = [one for one in scored if results.is_shareable_score(one)]
  own = {*rows_lib.OWN_TEST_SETS, comparison.test_set}
  kind = prepared.source.partition(":")[0]  # not its place
  synthetic = [one for one in synthetic if results.is_shareable(one)]
  return {
    **decided,
    "public_rows": [
      row
      for row in comparison.rows
      if row.evaluation.test_set == rows_lib.OWN_TEST_SETS[1]
      and results.is_shareable_score(row.evaluation)
    ],
    "evaluations": [
      one for one in scored if one.test_set in own and not released_scores
    ],
    "released_scores": released_scores,
    "weights": [one for one in weights if results.is_shareable(one)],
    "further": [one for one in scored if one.test_set not in own],
    "side_by_side": comparison.shareable_side_by_side,
    "measures": comparison.measures,
    "synthetic": synthetic,
    "checkpoints": [one for one in checkpoints if results.is_shareable(one)],
    "curves": curves,
    "documents": results.public_documents(prepared),
    "source": kind,
    "data": config.data or kind.replace("_", " "),
    "unit": str(prepared.unit),
    "versions": prepared.versions,
    "num_examples": config.num_examples,
    "document_words": config.document_words,
  }


def _test_sets(
  comparison: comparison_results.QueryComparison,
) -> tuple[list[results.Evaluation], ...]:
  """Returns the rows of the main table, of the run's other sets, of further."""
  groups: tuple[list[results.Evaluation], ...] = ([], [], [])
  for row in comparison.rows:
    test_set = row.evaluation.test_set
    at = 1 if test_set in rows_lib.OWN_TEST_SETS else 2
    groups[0 if test_set == comparison.test_set else at].append(row.evaluation)
  return groups


def _curves(
  root: pathlib.Path, checkpoints: Sequence[results.Checkpoint], private: bool
) -> _Curves:
  curves = {}
  for one in checkpoints:
    is_private = not results.is_shareable(one) or results.is_private_path(
      one.metrics
    )
    if not one.metrics or is_private != private:
      continue
    lines = [x for _, x in files.json_lines(root / one.metrics) if "loss" in x]
    if lines:
      curves[f"{one.kind} {tables.row_name(one.name)}"] = (
        [float(line["step"]) for line in lines],
        [float(line["loss"]) for line in lines],
      )
  return curves


_FIRST = (
  verdict.SHAREABLE,
  scores.PICTURE,
  queries.FIRST,
  verdict.PRIVATE,
  scores.PRIVATE_PICTURE,
)
"""The sections of the first screens, without titles."""

SECTIONS = (
  scores.RELEASED,
  scores.PUBLIC,
  scores.PUBLIC_FURTHER,
  queries.SYNTHETIC,
  privacy.CLAIMS,
  scores.TRAINING,
  privacy.PUBLIC_DATA,
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
"""The sections of both pages, in order."""


STAGE = stage.Stage(
  name="report",
  result=results.Report,
  config=Config,
  plan=stage.only,
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
  place_of=lambda made: f"{results.PRIVATE}/report",
)
