"""Defines what the sections of a report see, shareable and private.

The parameter of a section's builder is `Shareable` or `Private`: its type says on
which page the section stands, and a type checker holds it to that.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from synthq_jax.runtime import (
  comparison_results,
  released_results,
  results,
  system_results,
)

__all__ = ["Curves", "Private", "Shareable", "Values"]

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Name of a training -> its steps and losses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
  """Values of both pages. On the shareable page, the ones that may be shared."""

  measures: Sequence[str]
  """Names of the measures; the first is the main one."""
  evaluations: Sequence[results.Evaluation]
  """Scores on the run's own test sets, except the private page's main table."""
  further_evaluations: Sequence[results.Evaluation]
  """Scores on further test sets."""
  side_by_side: Sequence[comparison_results.SideBySide]
  """Tables of all rows over the further test sets."""
  released_scores: Sequence[results.ReleasedScores]
  """Scores on private queries with noise; at most one."""
  synthetic: Sequence[results.SyntheticQueries]
  """Synthetic queries of each generator."""
  checkpoints: Sequence[results.Checkpoint]
  """Trained models."""
  weights: Sequence[system_results.Ranking]
  """Learned weights beside BM25."""
  curves: Curves
  """Learning curves."""
  released: released_results.Released
  """Claims of the working directory."""
  shipped: Sequence[str]
  """Names of the rows that may be given away."""
  result_folders: Sequence[str]
  """Folders of all results of the run."""
  public_data: bool
  """Whether the queries are public."""
  audited: bool
  """Whether canaries stand among the queries."""
  date: str = ""
  """Date of the report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shareable(Values):
  """Values of the shareable page.

  Formal guarantee: `stages.report.select_shareable` says what they are functions
  of, and on which declarations that rests.
  """

  public_rows: Sequence[comparison_results.ScoredRow]
  """Rows scored on public pseudo-queries, with their differences."""
  documents: results.PublicDocuments
  """The public part of the data."""
  source: str
  """Kind of the source, without its path."""
  unit: str
  """Unit of privacy, in words."""
  versions: str
  """Versions of the libraries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Private(Values):
  """Values of the private page: all of them."""

  main: Sequence[results.Evaluation]
  """Scores on the private test queries."""
  comparison: comparison_results.QueryComparison
  """Comparison of all rows, and of real and synthetic queries."""
  audits: Sequence[results.AuditReport]
  """Audits of the generators."""
  leakage: comparison_results.QueryLeakage | None
  """Real queries among the synthetic ones; None: there was no search."""
  prepared: results.PreparedData
  """The prepared data."""
