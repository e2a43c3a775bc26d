"""The last stage: one page to share, one page to keep, one table to print.

The shareable page is made by `_report_shareable`, which says what it lets
through; the private page by `_report_private`. Everything that this stage
writes outside `private/` comes from the first. `Report.table` holds scores on
private queries, so the result.json of this stage lies under `private/`, too.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from synthq_jax import artifacts
from synthq_jax.data import files
from synthq_jax.generation import mauve
from synthq_jax.pipeline import (
  _comparisons,
  _query_leakage_results,
  _repeats,
  _report_html,
  _report_markdown,
  _report_private,
  _report_sets,
  _report_shareable,
  _report_tables,
  config_types,
  results,
  workspace,
)
from synthq_jax.retrieval import text_encoders

__all__ = ["Config", "run"]

_Curves = dict[str, tuple[list[float], list[float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What the reports show; none of it is computed here."""

  title: str = "Retrieval from differentially private synthetic queries"
  """The title of both pages."""
  num_examples: int = 10
  """Synthetic queries shown for each generator, at most those it kept."""
  num_comparisons: int = 10
  """Documents with real beside synthetic queries, on the private page."""
  num_similar: int = 5000
  """Real and synthetic queries behind MAUVE, at most; MAUVE's authors take
  5,000 of each."""
  document_words: int = 40
  """Words shown of a document."""
  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Columns of the tables; the first is drawn against epsilon."""
  test_set: str = "test"
  """The test set of the main table: a split of private queries."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind means over seeds and differences."""
  seed: int = 0
  """Which documents are shown on the private page."""

  def __post_init__(self):
    config_types.at_least(
      self,
      1,
      "num_examples",
      "num_comparisons",
      "num_similar",
      "document_words",
    )
    if not self.measures:
      raise ValueError(
        "expected a measure in report.Config.measures, got none: name one of "
        'the evaluate stage, e.g. "nDCG@10"'
      )


def run(
  config: Config,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  evaluations: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
  checkpoints: Sequence[results.Checkpoint],
  audits: Sequence[results.AuditReport] = (),
  leakage: _query_leakage_results.QueryLeakage | None = None,
  encoder: pathlib.Path | None = None,
) -> results.Report:
  """Writes report/report.html, report/report.md and the private page.

  Formal guarantee: report/ is post-processing of results with finite epsilon
  and of public data (see `_report_shareable`). private/report/ has none.

  Args:
    config: what to show.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: the data.
    evaluations: all scores; the tables keep their order.
    synthetic: all synthetic queries.
    checkpoints: all trained models.
    audits: all audits.
    leakage: what was found of real queries among the synthetic ones.
    encoder: the public checkpoint whose vectors MAUVE compares; None: no MAUVE.

  Returns:
    Paths relative to the working directory, and the main table, which is private.

  Raises:
    ValueError: if no evaluation is of the main table's test set, or a file
      that a result names is missing or malformed.
  """
  root = space.root
  found = _rows(config, root, evaluations)
  own_sets = {*results.OWN_TEST_SETS, config.test_set}
  own = [row for row in found if row.evaluation.test_set in own_sets]
  further = [row for row in found if row.evaluation.test_set not in own_sets]
  side_by_side = functools.partial(
    _report_sets.side_by_side,
    measures=config.measures,
    samples=config.bootstrap_samples,
    seed=config.seed,
  )
  evaluations = [row.evaluation for row in own]
  main = [row for row in found if row.evaluation.test_set == config.test_set]
  table = _main_table(config, evaluations)
  shareable = _report_shareable.page(
    config.title,
    prepared=prepared,
    evaluations=evaluations,
    synthetic=synthetic,
    checkpoints=checkpoints,
    curves=_curves(root, checkpoints, private=False),
    measures=config.measures,
    further=side_by_side(_report_shareable.shareable_rows(further)),
    leakage=leakage,
    num_examples=config.num_examples,
    document_words=config.document_words,
  )
  private = _report_private.page(
    config.title,
    table=table,
    test_set=config.test_set,
    prepared=prepared,
    evaluations=evaluations,
    checkpoints=checkpoints,
    synthetic=synthetic,
    audits=audits,
    curves=_curves(root, checkpoints, private=True),
    comparisons=_comparisons.read(
      root,
      prepared,
      _report_shareable.first_seeds(synthetic),
      split=prepared.test_split,
      number=config.num_comparisons,
      seed=config.seed,
    ),
    rows=main,
    differences=_repeats.differences(
      main,
      config.measures[0],
      samples=config.bootstrap_samples,
      seed=config.seed,
    ),
    similarity=_comparisons.similarity(
      root,
      prepared,
      synthetic,
      split=prepared.test_split,
      featurizer=_featurizer(root, prepared, encoder),
      limit=config.num_similar,
      seed=config.seed,
    ),
    measures=config.measures,
    further=side_by_side(further),
    leakage=leakage,
    document_words=config.document_words,
  )
  report = results.Report(
    html="report/report.html",
    markdown="report/report.md",
    private_html=f"{results.PRIVATE}/report/report.private.html",
    table=table,
  )
  write = artifacts.write_atomically
  write(root / report.html, _report_html.render(shareable))
  write(root / report.markdown, _report_markdown.render(shareable))
  write(root / report.private_html, _report_html.render(private))
  artifacts.save(space.private("report"), report, digest)
  return report


def _featurizer(
  root: pathlib.Path,
  prepared: results.PreparedData,
  encoder: pathlib.Path | None,
) -> text_encoders.TextEncoder | None:
  """Returns what makes vectors of queries: a model that saw none of them."""
  if encoder is None or not mauve.is_installed():
    return None
  return text_encoders.OwnEncoder(
    checkpoint=encoder,
    vocabulary=root / prepared.vocabulary,
    length=prepared.query_length,
  )


def _rows(
  config: Config,
  root: pathlib.Path,
  evaluations: Sequence[results.Evaluation],
) -> list[_repeats.Row]:
  """Gathers seeds into rows, test set by test set."""
  return [
    row
    for test_set in dict.fromkeys(one.test_set for one in evaluations)
    for row in _repeats.rows(
      root,
      [one for one in evaluations if one.test_set == test_set],
      samples=config.bootstrap_samples,
      seed=config.seed,
    )
  ]


def _main_table(
  config: Config, evaluations: Sequence[results.Evaluation]
) -> str:
  chosen = [one for one in evaluations if one.test_set == config.test_set]
  if not chosen:
    found = sorted({one.test_set for one in evaluations})
    raise ValueError(
      f"expected evaluations with test_set={config.test_set!r}, got "
      f"{found or 'none'}: evaluate on it or change report.Config.test_set"
    )
  return _report_tables.aligned(
    _report_tables.main_table(chosen, config.measures)
  )


def _curves(
  root: pathlib.Path, checkpoints: Sequence[results.Checkpoint], private: bool
) -> _Curves:
  """Reads the losses of private stages, or of those that may be shared."""
  curves = {}
  for one in _report_shareable.first_seeds(checkpoints):
    if not one.metrics or _has_private_metrics(one) != private:
      continue
    steps, losses = _losses(root / one.metrics)
    if steps:
      title = f"{one.kind} {_report_tables.row_name(one.name)}"
      curves[title] = (steps, losses)
  return curves


def _has_private_metrics(one: results.Checkpoint) -> bool:
  """Says whether losses of a training belong on the private page alone."""
  return not results.is_shareable(one) or results.is_private_path(one.metrics)


def _losses(path: pathlib.Path) -> tuple[list[float], list[float]]:
  """Reads steps and losses from a file of metrics."""
  lines = [line for _, line in files.json_lines(path) if "loss" in line]
  steps = [float(line["step"]) for line in lines]
  return steps, [float(line["loss"]) for line in lines]
