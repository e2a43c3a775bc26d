"""Defines the rows of the tables, and the plan of a run: the rows of each
stage.

A row's name is written by `str` in this module and parsed nowhere. The plan follows
from settings alone, so that a run and its dry run read one list.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
  "ADAPTER",
  "BM25",
  "DENSE",
  "DIRECT_DP",
  "FUSED",
  "KINDS",
  "LEXICAL",
  "ORIGINAL",
  "OWN_TEST_SETS",
  "PUBLIC_ONLY",
  "RANKED",
  "SYNTHETIC",
  "UNTRAINED",
  "Plan",
  "Row",
  "begins_with",
]

LEXICAL, DENSE, FUSED, RANKED = "bm25", "dense", "fused", "ltr"
"""Systems: BM25, a dense retriever, their fusion, and learning to rank."""
ADAPTER, DIRECT_DP, SYNTHETIC = "adapter", "direct_dp", "synthetic"
"""Training data of a retriever with an epsilon of its own."""
OWN_TEST_SETS = ("test", "public")
"""The test sets that every run has: private queries, and public sentences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A row of the tables: a system, and the training of its retriever.

  >>> row = Row(pairs=SYNTHETIC, epsilon=8.0)
  >>> str(row), str(row.of_system(FUSED)), row.queries
  ('synthetic_eps8', 'fused_synthetic_eps8', 'eps8')
  >>> str(PUBLIC_ONLY.of_system(RANKED)), str(BM25), PUBLIC_ONLY.queries
  ('ltr_public_only', 'bm25', 'public_only')
  """

  system: str = DENSE
  """`LEXICAL`, `DENSE`, `FUSED` (with BM25) or `RANKED` (learned weights beside
  BM25)."""
  pairs: str = ""
  """Training data of the retriever: "untrained" (none), "public_only" (queries of
  the public model), "synthetic", "original" (real queries without privacy),
  "direct_dp", "adapter"; empty for BM25."""
  method: str = ""
  """`direct_dp.Config.label`, where a table compares several methods."""
  epsilon: float | None = None
  """Target epsilon of the retriever's private training; inf without noise;
  None: there is no such training."""

  def __str__(self) -> str:
    if self.system == LEXICAL:
      return LEXICAL
    system = "" if self.system == DENSE else self.system
    epsilon = "" if self.epsilon is None else _name_epsilon(self.epsilon)
    return "_".join(filter(None, (system, self.pairs, self.method, epsilon)))

  @property
  def queries(self) -> str:
    """Name of the row's queries and of their generator, such as "eps8"."""
    return str(self) if self.epsilon is None else _name_epsilon(self.epsilon)

  @property
  def retriever(self) -> "Row":
    """The row of the retriever alone."""
    return self.of_system(DENSE)

  @property
  def is_without_privacy(self) -> bool:
    """Whether private queries trained the retriever without noise."""
    return self.pairs == ORIGINAL.pairs or self.epsilon == math.inf

  def of_system(self, system: str) -> "Row":
    """Returns the row of another system with the same retriever."""
    return dataclasses.replace(self, system=system)


def _name_epsilon(epsilon: float) -> str:
  return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


BM25 = Row(system=LEXICAL)
UNTRAINED = Row(pairs="untrained")
PUBLIC_ONLY = Row(pairs="public_only")
ORIGINAL = Row(pairs="original")
KINDS = (
  UNTRAINED.pairs,
  PUBLIC_ONLY.pairs,
  SYNTHETIC,
  ORIGINAL.pairs,
  DIRECT_DP,
  ADAPTER,
  RANKED,
)
"""Beginnings of rows' names that settings may give for all rows of a kind."""


def begins_with(row: Row | str, beginnings: Sequence[str]) -> bool:
  """Checks whether the name of a row begins with one of these, word by word.

  >>> row = Row(pairs=SYNTHETIC, epsilon=8.0)
  >>> begins_with(row, ["synthetic"]), begins_with(row, ["synthetic_eps"])
  (True, False)

  Args:
    row: a row, or its name.
    beginnings: names or beginnings as a user writes them, such as "synthetic"
      or "direct_dp_eps8".
  """
  return any(f"{row}_".startswith(f"{start}_") for start in beginnings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The rows of a run, from its settings alone.

  The plan ignores later decisions of the data: a stage may leave out a planned
  row.
  """

  config: Any
  """A `plan.RunConfig`."""
  stages: tuple[str, ...]
  """Names of the stages to run, with all stages that they need."""
  test_sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Further test sets by name, see `stages.prepare_test_set`."""

  @functools.cached_property
  def generators(self) -> tuple[Row, ...]:
    """The fine-tuned generators, by the rows of their queries."""
    epsilons = self.config.rows.synthetic
    return tuple(Row(pairs=SYNTHETIC, epsilon=float(e)) for e in epsilons)

  @functools.cached_property
  def written(self) -> tuple[Row, ...]:
    """The sets of synthetic queries."""
    public = (PUBLIC_ONLY,) if self.config.rows.public_only else ()
    return (*public, *self.generators)

  @functools.cached_property
  def trained(self) -> tuple[Row, ...]:
    """The retrievers that train without noise, or not at all."""
    chosen = self.config.rows
    rows = [UNTRAINED] if chosen.untrained else []
    is_trained = chosen.trained_part == "encoder"
    return (*rows, *self._learned) if is_trained else tuple(rows)

  @functools.cached_property
  def mapped(self) -> tuple[Row, ...]:
    """The public encoders with a map that is learned without noise."""
    is_mapped = self.config.rows.trained_part == "query_map"
    return self._learned if is_mapped else ()

  @property
  def _learned(self) -> tuple[Row, ...]:
    """The retrievers that learn from pairs without noise."""
    original = (ORIGINAL,) if self.config.rows.original else ()
    return (*self.written, *original)

  @functools.cached_property
  def direct(self) -> Mapping[Row, Any]:
    """The `direct_dp.Config` of each retriever that direct DP trains."""
    config = self.config
    return {
      Row(pairs=DIRECT_DP, method=method.label, epsilon=float(epsilon)): method
      for method in config.direct_dp_methods or (config.direct_dp,)
      for epsilon in config.rows.direct_dp
      if math.isfinite(epsilon)  # `original` is the row without noise
    }

  @functools.cached_property
  def adapters(self) -> tuple[Row, ...]:
    """The public encoders with a map that private queries teach."""
    epsilons = self.config.rows.adapted
    return tuple(Row(pairs=ADAPTER, epsilon=float(e)) for e in epsilons)

  @functools.cached_property
  def encoded(self) -> tuple[Row, ...]:
    """The retrievers with document vectors of their own."""
    return (*self.trained, *self.direct)

  @property
  def retrievers(self) -> tuple[Row, ...]:
    """Every dense retriever."""
    return (*self.encoded, *self.mapped, *self.adapters)

  @functools.cached_property
  def fused(self) -> tuple[Row, ...]:
    """The systems of a retriever and BM25 with one weight."""
    is_made = self.config.rows.fused
    rows = self.retrievers if is_made else ()
    return tuple(row.of_system(FUSED) for row in rows)

  @functools.cached_property
  def ranked(self) -> tuple[Row, ...]:
    """The systems whose weights private queries teach.

    No claim covers a unit of a whole query and a unit of its text alone
    together.
    """
    return tuple(
      row.of_system(RANKED)
      for row in self.retrievers
      if begins_with(row, self.config.rows.ltr)
      and not (row in self.direct and self.direct[row].unit == "query")
    )

  @property
  def scored(self) -> tuple[Row, ...]:
    """Every system, in the order of the tables."""
    lexical = (BM25,) if self.config.rows.bm25 else ()
    return (*lexical, *self.retrievers, *self.fused, *self.ranked)

  def left_out(self, row: Row) -> float:
    """Returns the share of documents whose queries do not train a retriever.

    These queries train the learning-to-rank weights beside the retriever of
    real queries.
    """
    if (
      row.retriever != ORIGINAL or ORIGINAL.of_system(RANKED) not in self.ranked
    ):
      return 0.0
    return self.config.learn_to_rank.held_out

  def is_compared(self, row: Row) -> bool:
    """Checks whether a row is only compared, and never released.

    A system with learned weights is compared if its own name or its retriever's
    is.
    """
    compared = self.config.rows.compared
    return any(begins_with(name, compared) for name in (row, row.retriever))

  def is_private(self, row: Row) -> bool:
    """Checks whether the results of a row lie under `private/`."""
    return row.is_without_privacy or self.is_compared(row)
