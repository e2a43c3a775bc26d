"""Defines the privacy statement that every result carries.

A private training makes a statement (`claim.Claim.statement`). Post-processing
passes it on (`inherit`), and a result of several private results composes theirs
(`compose`). The ledger of a statement lists every noisy release behind the claim.
So composition is exact and counts a release once, however often it is inherited.
A statement holds numbers, flags and names; `wording` turns them into text.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from synthq_jax import checks, field_kinds
from synthq_jax.privacy import accounting, releases, wording
from synthq_jax.privacy import unit as unit_lib

__all__ = [
  "PrivacyStatement",
  "compose",
  "group",
  "in_words",
  "inherit",
  "non_private",
  "none",
]

in_words = wording.in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
  """A differential privacy claim with the words and releases behind it.

  Make one with `claim.Claim`, `compose`, `inherit`, `none` or `non_private`, so that
  epsilon and ledger belong together.
  """

  unit: unit_lib.Unit
  """The unit of privacy."""
  relation: str
  """The neighbouring relation, a name in `dp_accounting.NeighboringRelation`."""
  epsilon: float
  """Epsilon of the claim; infinite if private data was read without protection."""
  delta: float
  """Delta of the claim, in [0, 1]."""
  accountant: str = "pld"
  """The accountant that computed epsilon from the ledger, "pld" or "rdp"."""
  ledger: tuple[releases.Release, ...] = ()
  """All noisy releases behind the claim."""
  public: tuple[str, ...] = ()
  """Facts that the analysis treats as public: names of sentences.toml, or
  sentences, as in the next three fields."""
  assumptions: tuple[str, ...] = ()
  """Assumptions of the claim."""
  not_protected: tuple[str, ...] = ()
  """Facts that the claim does not protect."""
  notes: tuple[str, ...] = ()
  """Steps by which the result was derived, in order."""
  secret_is_fixed: bool = field_kinds.later(False)
  """Whether anybody can recompute the noise of a release behind the claim."""
  replaces: tuple[tuple[unit_lib.Unit, str], ...] = field_kinds.later(())
  """Units and relations of the single results that a joint claim covers."""

  def __post_init__(self):
    """Refuses unknown names, and a claim without a ledger behind it."""
    for section in wording.SECTIONS:
      for name in getattr(self, section):
        if not wording.is_known(name):
          raise ValueError(
            f"expected a sentence or a name of sentences.toml in {section}, got"
            f" {name!r}: use the version that wrote it"
          )
    if not isinstance(self.unit, unit_lib.Unit):
      raise ValueError(
        f"expected a privacy.unit.Unit, got unit={self.unit!r}: take"
        " one of that module, or Unit(kind=...)"
      )
    checks.relation(self.relation)
    if not self.epsilon >= 0 or not 0 <= self.delta <= 1:
      raise ValueError(
        "expected epsilon >= 0 and delta in [0, 1], "
        f"got epsilon={self.epsilon}, delta={self.delta}"
      )
    if self.ledger or self.epsilon == math.inf:
      return
    if self.epsilon > 0 or self.delta > 0:
      raise ValueError(
        f"expected a ledger behind epsilon={self.epsilon}, delta={self.delta},"
        " got none; make the statement with claim.Claim"
      )

  @property
  def is_public(self) -> bool:
    """Whether no private record was read: an empty ledger and a finite epsilon.

    A release with much noise may have epsilon 0 at its delta. It still counts as
    a release, since many of them add up.
    """
    return not self.ledger and self.is_finite

  @property
  def is_finite(self) -> bool:
    """Whether epsilon is finite, so that something is claimed."""
    return self.epsilon < math.inf

  @property
  def for_two_records(self) -> tuple[float, float]:
    """Epsilon and delta for two records that change together.

    Formal guarantee: the guarantee of `accounting.group_epsilon` for the ledger,
    at the statement's delta. If that is infinite, the guarantee of `group`. If the
    statement claims nothing, epsilon is infinite.
    """
    if math.isinf(self.epsilon):
      return math.inf, self.delta
    epsilon = accounting.group_epsilon(
      [release.run() for release in self.ledger],
      delta=self.delta,
      relation=self.relation,
      size=2,
    )
    return (epsilon, self.delta) if epsilon < math.inf else group(self, 2)


def none(
  *,
  unit: unit_lib.Unit = unit_lib.QUERY,
  relation: Any = "ADD_OR_REMOVE_ONE",
  public: tuple[str, ...] = (),
  not_protected: tuple[str, ...] = (),
) -> PrivacyStatement:
  """Returns the statement of a result made from public data alone.

  Args:
    unit: the unit of privacy.
    relation: the neighbouring relation.
    public: facts that are treated as public, as sentences.
    not_protected: facts about private records that the result may reveal all the
      same, as sentences. If there are any, the statement does not say that no
      private record went into the result.

  >>> none().epsilon
  0.0
  """
  return PrivacyStatement(
    unit=unit,
    relation=checks.relation(relation),
    epsilon=0.0,
    delta=0.0,
    public=public,
    not_protected=not_protected,
    notes=("made_of_documents" if not_protected else "made_of_public",),
  )


def non_private(
  note: str = "read_in_the_clear",
  *,
  unit: unit_lib.Unit = unit_lib.QUERY,
  relation: Any = "ADD_OR_REMOVE_ONE",
) -> PrivacyStatement:
  """Returns the statement of a result that read private data unprotected.

  >>> non_private().epsilon
  inf
  """
  return PrivacyStatement(
    unit=unit,
    relation=checks.relation(relation),
    epsilon=math.inf,
    delta=0.0,
    notes=(note,),
  )


def inherit(statement: PrivacyStatement, note: str) -> PrivacyStatement:
  """Returns the statement of a result computed from a result and public data.

  Formal guarantee: differential privacy is closed under post-processing, so
  the claim is unchanged, PROVIDED the computation reads no private record again
  and its other inputs do not depend on private records.

  Args:
    statement: the statement of the result that was read.
    note: one sentence about the computation, or a name of sentences.toml.

  Returns:
    The same claim with the note at its end.
  """
  return dataclasses.replace(statement, notes=_join(statement.notes, (note,)))


def compose(
  statements: Sequence[PrivacyStatement], *, delta: float | None = None
) -> PrivacyStatement:
  """Returns the statement of publishing several results together.

  Releases that several statements inherit count once; different releases are
  composed by their privacy loss distributions over the same records.

  Formal guarantee:
    Adaptive composition of all releases of all ledgers, those of epsilon 0
    included. Assumed: each release drew batches and noise of its own. Models that
    share their batches are one release, whose sums are theirs together.
    Releases may read different parts of one division (`Release.part`). Then,
    under ADD_OR_REMOVE_ONE, a record pays for the releases of one part alone,
    and epsilon is the largest over the parts. The other parts hold the same
    records with it and without it, so their releases depend on it through earlier
    releases alone. Assumed: a record's part is a function of that record and of
    public values. Under other relations a record may be replaced by one of
    another part, and pays for all parts. A public statement adds only its facts
    that are not protected. A non-private statement makes the result non-private.

  Args:
    statements: at least one. All non-public ones must have one unit and relation.
    delta: delta of all results together; None: the largest of the statements'
      deltas. Epsilon is recomputed at this delta.

  Returns:
    One claim. It keeps the numbers of a statement whose ledger contains all other
    ledgers, unless `delta` is given.

  Raises:
    ValueError: if units or relations differ, or one identifier stands for two
      different releases.
  """
  if not statements:
    raise ValueError("expected at least one statement, got none")
  private = [each for each in statements if not each.is_public]
  unprotected = _join(*(each.not_protected for each in [*private, *statements]))
  if not private:
    first = max(statements, key=lambda each: bool(each.not_protected))
    return dataclasses.replace(first, not_protected=unprotected)
  _check_alike(private)
  merged = dataclasses.replace(_merge(private), not_protected=unprotected)
  releases.check_identifiers(merged.ledger)
  if any(each.epsilon == math.inf for each in private):
    largest = max(each.delta for each in private)
    return dataclasses.replace(merged, epsilon=math.inf, delta=largest)
  maximal = _drop_contained(private)
  if len(maximal) == 1 and delta is None:
    names = ("epsilon", "delta", "accountant")
    values = {name: getattr(maximal[0], name) for name in names}
    return dataclasses.replace(merged, **values)
  total = max(each.delta for each in maximal) if delta is None else delta
  together = [merged.ledger]
  if merged.relation == "ADD_OR_REMOVE_ONE":
    together = releases.group_by_part(merged.ledger)
  if len(together) > 1:
    assumed = _join(merged.assumptions, ("divided",))
    merged = dataclasses.replace(merged, assumptions=assumed)
  value = max(
    accounting.composed_epsilon(
      [release.run() for release in group_releases],
      delta=total,
      relation=merged.relation,
    )
    for group_releases in together
  )
  return dataclasses.replace(
    merged,
    epsilon=value,
    delta=total,
    accountant="pld",
  )


def group(statement: PrivacyStatement, size: int) -> tuple[float, float]:
  """Returns (epsilon, delta) for `size` records that change together.

  Formal guarantee: a chain of `size` neighbours gives size * epsilon and
  delta * (1 + e^epsilon + ... + e^((size - 1) epsilon)). A delta of 1 claims
  nothing.

  References:
    Dwork and Roth, The Algorithmic Foundations of Differential Privacy,
    Theorem 2.2 and its extension to delta > 0.

  Args:
    statement: the claim for one record.
    size: the number of records, at least 1.

  Returns:
    The epsilon and the delta, at most 1, of the group.
  """
  checks.count("size", size, 1)
  if statement.delta == 0 or statement.epsilon == math.inf:
    return size * statement.epsilon, statement.delta
  largest = (size - 1) * statement.epsilon
  if largest > 700:  # beyond the range of floats, and far beyond 1
    return size * statement.epsilon, 1.0
  total = sum(math.exp(i * statement.epsilon) for i in range(size))
  return size * statement.epsilon, min(1.0, statement.delta * total)


def _check_alike(statements: Sequence[PrivacyStatement]) -> None:
  """Refuses statements that differ in unit or relation."""
  for name in ("unit", "relation"):
    values = sorted({str(getattr(each, name)) for each in statements})
    if len(values) > 1:
      raise ValueError(
        f"expected statements with one {name}, got {name}={values}; "
        "joint.claim finds one that covers them, if there is one"
      )


def _merge(statements: Sequence[PrivacyStatement]) -> PrivacyStatement:
  """Joins ledgers, words and flags; keeps the numbers of the first statement."""
  names = ("ledger", "replaces", *wording.SECTIONS)
  joined: dict[str, Any] = {
    name: _join(*(getattr(each, name) for each in statements)) for name in names
  }
  is_fixed = any(each.secret_is_fixed for each in statements)
  return dataclasses.replace(statements[0], secret_is_fixed=is_fixed, **joined)


def _drop_contained(
  statements: Sequence[PrivacyStatement],
) -> list[PrivacyStatement]:
  """Drops statements whose releases are all in another statement's ledger."""
  maximal: list[PrivacyStatement] = []
  for statement in sorted(statements, key=lambda each: -len(each.ledger)):
    ledger = set(statement.ledger)
    if not any(ledger <= set(each.ledger) for each in maximal):
      maximal.append(statement)
  return maximal


def _join(*parts: tuple[Any, ...]) -> tuple[Any, ...]:
  """Joins tuples, each element once, in order of first appearance."""
  return tuple(dict.fromkeys(item for part in parts for item in part))
