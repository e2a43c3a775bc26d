"""What is promised to whom: one record that every result carries.

A statement is made by the training that earns it (`claim.Claim.statement`),
passed on by what only post-processes (`inherit`), and added up by what uses
several private results (`compose`). Its ledger lists every noisy release behind the claim, so
that adding up is exact and counts a release once however often it is inherited.
It holds numbers, flags and names; `wording` turns them into text.
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
  """A differential privacy claim with everything needed to read it.

  Made by `claim.Claim`, `compose`, `inherit`, `none` and `non_private`, not by
  hand: they compute epsilon from the ledger.
  """

  unit: unit_lib.Unit
  """Whose change the claim hides."""
  relation: str
  """The neighbouring relation, a name of `dp_accounting`'s."""
  epsilon: float
  """Infinite where private data was read without protection."""
  delta: float
  """The probability-like slack that belongs to epsilon."""
  accountant: str = "pld"
  """How epsilon was computed from the ledger."""
  ledger: tuple[releases.Release, ...] = ()
  """Every noisy release behind the claim."""
  public: tuple[str, ...] = ()
  """What the analysis treats as known to everybody: names of
  sentences.toml, or sentences, as in the next three."""
  assumptions: tuple[str, ...] = ()
  """What must hold for the claim to hold."""
  not_protected: tuple[str, ...] = ()
  """What the claim says nothing about."""
  notes: tuple[str, ...] = ()
  """How the result was derived, in order."""
  secret_is_fixed: bool = field_kinds.later(False)
  """Whether anybody can recompute the noise of a release behind the claim."""
  replaces: tuple[tuple[unit_lib.Unit, str], ...] = field_kinds.later(())
  """Units and relations of the single results that a joint claim covers."""

  def __post_init__(self):
    """Refuses a claim that nothing in the ledger backs."""
    for name in wording.SECTIONS:
      for one in getattr(self, name):
        if not wording.is_known(one):
          raise ValueError(
            f"expected a sentence or a name of sentences.toml in {name}, got"
            f" {one!r}: use the version that wrote it"
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
    """Whether no private record went in: no release, at whatever epsilon.

    A release with much noise has epsilon 0 at its delta, and is none the less
    one: many of them add up.
    """
    return not self.ledger and self.is_finite

  @property
  def is_finite(self) -> bool:
    """Whether anything is claimed."""
    return self.epsilon < math.inf

  @property
  def of_two(self) -> tuple[float, float]:
    """Epsilon and delta for two records that change together.

    Formal guarantee: that of `accounting.group_epsilon` for the ledger, at the
    statement's delta; where that knows none, that of `group`.
    """
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
  """Returns the statement of what was made from public data alone.

  Args:
    unit: what one record is.
    relation: the neighbouring relation.
    public: what is treated as public, as sentences.
    not_protected: what it tells of private records all the same, as sentences;
      then the statement does not say that it tells nothing.

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
  """Returns the statement of what read private data without protection.

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
  """Returns the statement of what was computed from a result and public data.

  Formal guarantee: differential privacy is closed under post-processing, so
  the claim is unchanged, PROVIDED the computation reads no private record again
  and its other inputs do not depend on private records.

  Args:
    statement: of the result that was read.
    note: what was done, one sentence.

  Returns:
    The same claim with the note at its end.
  """
  return dataclasses.replace(statement, notes=_union(statement.notes, (note,)))


def compose(
  statements: Sequence[PrivacyStatement], *, delta: float | None = None
) -> PrivacyStatement:
  """Returns the statement of publishing several results together.

  Releases that several statements inherit count once; different releases are
  composed by their privacy loss distributions over the same records.

  Formal guarantee:
    Adaptive composition of all releases of all ledgers, those of epsilon 0
    included. Under ADD_OR_REMOVE_ONE, of releases that read different parts of
    one division (`Release.part`) a record pays for one part alone, and epsilon
    is the largest over the parts: the other parts hold the same records with it
    and without it, so that what they release depends on it through earlier
    releases alone. Assumed: a record's part is a function of that record and of
    public values. Under other relations a record may be replaced by one of
    another part, and pays for all of them. What is public adds nothing but what
    it does not protect; what is not private makes all not private.

  Args:
    statements: at least one; all that read private data with the same unit
      and relation.
    delta: of the whole; by default the largest of the statements' deltas, at
      which epsilon is recomputed.

  Returns:
    One claim; the only one that is not public, if there is only one.

  Raises:
    ValueError: if units or relations differ, or one identifier stands for two
      different releases.
  """
  if not statements:
    raise ValueError("expected at least one statement, got none")
  private = [one for one in statements if not one.is_public]
  told = _union(*(one.not_protected for one in [*private, *statements]))
  if not private:
    first = max(statements, key=lambda one: bool(one.not_protected))
    return dataclasses.replace(first, not_protected=told)
  _check_alike(private)
  merged = dataclasses.replace(_merged(private), not_protected=told)
  releases.check_identifiers(merged.ledger)
  if any(one.epsilon == math.inf for one in private):
    largest = max(one.delta for one in private)
    return dataclasses.replace(merged, epsilon=math.inf, delta=largest)
  kept = _not_contained(private)
  if len(kept) == 1 and delta is None:
    names = ("epsilon", "delta", "accountant")
    values = {name: getattr(kept[0], name) for name in names}
    return dataclasses.replace(merged, **values)
  total = max(one.delta for one in kept) if delta is None else delta
  together = [merged.ledger]
  if merged.relation == "ADD_OR_REMOVE_ONE":
    together = releases.of_one_record(merged.ledger)
  if len(together) > 1:
    assumed = _union(merged.assumptions, ("divided",))
    merged = dataclasses.replace(merged, assumptions=assumed)
  value = max(
    accounting.composed_epsilon(
      [release.run() for release in chosen],
      delta=total,
      relation=merged.relation,
    )
    for chosen in together
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
  delta * (1 + e^epsilon + ... + e^((size - 1) epsilon)); delta >= 1 says
  nothing at all.

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
  """Refuses claims that do not add up to one."""
  for name in ("unit", "relation"):
    found = sorted({str(getattr(one, name)) for one in statements})
    if len(found) > 1:
      raise ValueError(
        f"expected statements with one {name}, got {name}={found}; "
        "joint.claim finds one that covers them, if there is one"
      )


def _merged(statements: Sequence[PrivacyStatement]) -> PrivacyStatement:
  """Joins everything but the numbers."""
  names = ("ledger", "replaces", *wording.SECTIONS)
  joined: dict[str, Any] = {
    name: _union(*(getattr(one, name) for one in statements)) for name in names
  }
  is_fixed = any(one.secret_is_fixed for one in statements)
  return dataclasses.replace(statements[0], secret_is_fixed=is_fixed, **joined)


def _not_contained(
  statements: Sequence[PrivacyStatement],
) -> list[PrivacyStatement]:
  """Leaves out statements whose releases another one's claim covers."""
  kept: list[PrivacyStatement] = []
  for one in sorted(statements, key=lambda each: -len(each.ledger)):
    found = set(one.ledger)
    if not any(found <= set(each.ledger) for each in kept):
      kept.append(one)
  return kept


def _union(*parts: tuple[Any, ...]) -> tuple[Any, ...]:
  """Joins tuples, each element once, in order of first appearance."""
  return tuple(dict.fromkeys(item for part in parts for item in part))
