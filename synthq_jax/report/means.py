"""Averages the scores of several runs that differ only in their seed.

A run has one seed. To see how far the seed moves a score, make a run for each of
several seeds (launch/sweeps.py) and average them here.

Formal guarantee:
  None of its own. Without `private`, the output has only scores that may be shared.
"""

import collections
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from synthq_jax import intervals
from synthq_jax.report import blocks, page, tables, words
from synthq_jax.runtime import comparison_results, results
from synthq_jax.storage import artifacts

__all__ = ["parse_settings", "run"]

_Evaluations = Sequence[results.Evaluation]


def run(workdirs: Sequence[str | os.PathLike], *, private: bool = False) -> str:
  """Reads the scores of finished runs, and returns their means as text.

  Args:
    workdirs: working directories of the runs, at least two.
    private: whether to show scores that must not be shared, too.

  Raises:
    ValueError: if a run is unfinished or named twice, differs from the first in
      a setting other than a seed, or shares a training with another run; or if
      no run has scores to show.
  """
  roots = [pathlib.Path(workdir) for workdir in workdirs]
  if len({root.resolve() for root in roots}) < max(2, len(roots)):
    raise ValueError(
      "expected two or more different runs, got"
      f" {', '.join(map(str, roots))}: name each working directory once"
    )
  comparisons = [_read_comparison(root) for root in roots]
  scored = [[row.evaluation for row in part.rows] for part in comparisons]
  _check_settings(roots)
  _check_releases(roots, scored)
  shown = [
    [score for score in run if private or results.is_shareable_score(score)]
    for run in scored
  ]
  if not any(shown):
    raise ValueError(
      f"{roots[0]}: expected scores that may be shared, got none: --private shows"
      " those on private queries"
    )
  return page.text(_make_blocks(shown, comparisons[0].measures))


def _make_blocks(
  runs: Sequence[_Evaluations], measures: Sequence[str]
) -> list[blocks.Block]:
  """Returns a table of means over runs for each test set."""
  sets: dict[str, dict[str, list[results.Evaluation]]] = {}
  for score in (score for run in runs for score in run):
    rows = sets.setdefault(score.test_set, collections.defaultdict(list))
    rows[score.name].append(score)
  scores = [score for run in runs for score in run]
  content: list[blocks.Block] = []
  if not all(map(results.is_shareable_score, scores)):
    content.append(words.paragraph("means.private"))
  for test_set, rows in sets.items():
    content += [
      blocks.Heading(text=f"Test set {test_set}"),
      _make_table(rows, measures),
    ]
  content.append(words.paragraph("means.columns", runs=len(runs)))
  if any(score.epsilon is not None for score in scores):
    content.append(words.paragraph("means.cost"))
  return content


def _make_table(
  rows: Mapping[str, _Evaluations], measures: Sequence[str]
) -> blocks.Table:
  columns = {
    "Row": lambda group: tables.row_name(group[0].name),
    "epsilon": lambda group: tables.epsilon(
      max((x.epsilon for x in group if x.epsilon is not None), default=None)
    ),
    "Runs": lambda group: str(len(group)),
  }
  for name in measures:
    title = tables.measure_name(name)
    for index, column in enumerate((title, f"sd of {title}")):
      columns[column] = lambda group, name=name, index=index: _format_scores(
        group, name
      )[index]
  return tables.of(rows.values(), columns)


def _format_scores(group: _Evaluations, measure: str) -> tuple[str, str]:
  """Formats the mean of a measure over runs, and its standard deviation."""
  means = [x.measures[measure].mean for x in group if measure in x.measures]
  if len(means) > 1:
    values = np.array(means)
    mean = tables.interval(intervals.student(values))
    return mean, f"{np.std(values, ddof=1):.4f}"
  return (f"{means[0]:.3f}" if means else "-"), "-"


def _read_comparison(root: pathlib.Path) -> comparison_results.QueryComparison:
  """Reads the scores of a run's latest report."""
  folder, report = (
    root / results.PRIVATE / name for name in ("compare_queries", "report")
  )
  # A run that was interrupted has scores, but no report, of the settings before.
  if None in map(artifacts.read_fingerprint, (folder, report)):
    raise ValueError(
      f"{root}: expected the working directory of a finished run, got none: run"
      " `synthq run` first"
    )
  artifacts.check(folder)
  return artifacts.load(folder, comparison_results.QueryComparison)


def _check_settings(roots: Sequence[pathlib.Path]) -> None:
  """Refuses runs whose settings differ other than in a seed."""
  first_settings, *others = map(_read_settings, roots)
  for root, other in zip(roots[1:], others, strict=True):
    names = sorted(
      name
      for name in {*first_settings, *other}
      if first_settings.get(name) != other.get(name)
    )
    if names:
      raise ValueError(
        f"{root}: expected the settings of {roots[0]} but for seeds, got other"
        f" values of {', '.join(names)}: name runs of one recipe"
      )


def _check_releases(
  roots: Sequence[pathlib.Path], scored: Sequence[_Evaluations]
) -> None:
  """Refuses runs that share a training, whose noise would count twice."""
  owners: dict[str, pathlib.Path] = {}
  for root, run in zip(roots, scored, strict=True):
    claims = [score.statement for score in run if score.statement is not None]
    for entry in (entry for claim in claims for entry in claim.ledger):
      other = owners.setdefault(entry.identifier, root)
      if other != root:
        raise ValueError(
          f"{root}: expected trainings of its own, got {entry.identifier} of"
          f" {other}: leave SECRET_SEED out, so that each run draws its noise"
        )


def _read_settings(root: pathlib.Path) -> dict[str, str]:
  """Reads a run's config.gin without seeds; a missing file gives no settings."""
  path = root / "config.gin"
  if not path.exists():  # Python started the run, not the command line
    return {}
  return {
    name: value
    for name, value in parse_settings(path.read_text(encoding="utf-8")).items()
    if name.rpartition(".")[2].lower() != "seed"
  }


def parse_settings(text: str) -> dict[str, str]:
  """Parses the text of a run's config.gin into values by name.

  >>> parse_settings("# Macros:\\nA = 1\\nx.Config.y = \\\\\\n  (%A,\\n  2)\\n")
  {'A': '1', 'x.Config.y': '\\\\ (%A, 2)'}
  """
  text = re.sub(r"(?m)^\s*#.*\n", "", text)
  lines = re.findall(r"(?m)^([\w./]+) =((?:.*\n(?:[ \t].*\n)*))", text)
  return {name: " ".join(value.split()) for name, value in lines}
