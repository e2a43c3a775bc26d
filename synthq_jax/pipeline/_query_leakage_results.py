"""What the check of synthetic queries found; private, but for what says so."""

import dataclasses

from synthq_jax.pipeline import results

__all__ = ["Example", "Found", "Membership", "QueryLeakage", "TestOverlap"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """How many of some queries have a near-duplicate."""

  number: int
  """Those that have."""
  total: int
  """All of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
  """Near-duplicates of private queries in one set of synthetic ones."""

  name: str
  """Who wrote them: "public_only", "eps8", ..."""
  detector: str
  """What counts as a near-duplicate."""
  train: Found
  """Private queries that were trained on and are reproduced; of those without
  a near-duplicate among the other private ones."""
  control: Found
  """The same of private queries that were not trained on: coincidence."""
  difference: results.Measure | None
  """Share of `train` minus share of `control`; None: one of them is empty."""
  p_value: float | None
  """Two-sided, of the hypothesis that being trained on changes nothing."""
  train_all: Found
  """As `train`, with those that do have such a near-duplicate."""
  control_all: Found
  """As `control`, with those that do."""
  size: int
  """Private queries of each side, of all, that the written ones are held
  against in what follows; 0: too few."""
  written_train: float
  """Share of the written queries with a near-duplicate among so many that were
  trained on."""
  written_control: float
  """The same for those that were not."""
  written_difference: results.Measure | None
  """The first minus the second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestOverlap:
  """Near-duplicates of test queries in one set of queries."""

  __test__ = False  # for pytest

  test_set: str
  """"test" (private) or the name of a `results.TestSet`."""
  name: str
  """Who wrote the queries; "train": the private train queries themselves."""
  detector: str
  """What counts as a near-duplicate."""
  private: bool
  """Whether this may not be shared: the test queries are private, or what is
  compared with them."""
  tested: Found
  """Test queries with a near-duplicate among the queries."""
  share: results.Measure
  """Their share."""
  written: Found
  """Queries with a near-duplicate among the test queries."""
  beyond_public: results.Measure | None
  """`share` minus that of the public checkpoint's queries; None: there are
  none."""
  p_value: float | None
  """Two-sided, of no difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """A train query that a written query is a near-duplicate of."""

  name: str
  """Who wrote it."""
  detector: str
  """What found it."""
  written: str
  """The synthetic query."""
  real: str
  """The private query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryLeakage:
  """Near-duplicates between synthetic queries and real ones."""

  directory: str
  """Private."""
  detectors: dict[str, str]
  """What each counts as a near-duplicate, in words."""
  num_train: int
  """Private train queries that were looked at."""
  num_control: int
  """Private queries that no generator was trained on, and were looked at."""
  num_written: dict[str, int]
  """Synthetic queries that were looked at, by who wrote them."""
  confidence: float
  """Of each interval by itself."""
  memberships: tuple[Membership, ...]
  """Each generator with each detector."""
  overlaps: tuple[TestOverlap, ...]
  """Each test set, each generator with each detector."""
  examples: tuple[Example, ...]
  """Some of what was found."""
  seconds: float = 0.0
  """How long the stage took."""
