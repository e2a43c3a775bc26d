"""What is promised to whom: one record that every result carries.

A statement is made by the training that earns it (`claim.Claim.statement`),
passed on by what only post-processes (`inherit`), and added up by what uses
several private results (`compose`). Its ledger lists every noisy release behind the claim, so
that adding up is exact and counts a release once however often it is inherited.
`in_words` turns it into text.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from synthq_jax import checks, field_kinds
from synthq_jax.privacy import accounting, reasons, releases, rounding, terms

__all__ = [
  "PrivacyStatement",
  "change",
  "compose",
  "for_two",
  "group",
  "in_words",
  "inherit",
  "non_private",
  "none",
]

_RELATIONS = {
  "ADD_OR_REMOVE_ONE": "one {unit} is added or removed",
  "REPLACE_ONE": "one {unit} is replaced by any other",
  "REPLACE_SPECIAL": "one {unit} is replaced by an empty record",
}
_SAMPLINGS = {
  "poisson": (
    "each step drew every record independently with probability "
    "{expected_batch_size}/{num_examples} (Poisson sampling; batches over "
    "{max_batch_size} records were cut at random, which is accounted for)"
  ),
  "cyclic_poisson": (
    "each record belongs to one of {cycle_length} groups, drawn at random, and "
    "each step drew every record of the next group independently with "
    "probability {cycle_length} x {expected_batch_size}/{num_examples} (cyclic "
    "Poisson sampling; batches over {max_batch_size} records were cut at "
    "random, which is accounted for)"
  ),
  "fixed_order": (
    "the {num_examples} records were read in shuffled epochs of full "
    "batches of {max_batch_size}, and nothing is claimed from the order"
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
  """A differential privacy claim with everything needed to read it.

  Made by `claim.Claim`, `compose`, `inherit`, `none` and `non_private`, not by
  hand: they compute epsilon from the ledger.
  """

  unit: str
  """What one record is, e.g. "query"."""
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
  """What the analysis treats as known to everybody, as sentences."""
  assumptions: tuple[str, ...] = ()
  """What must hold for the claim to hold, as sentences."""
  not_protected: tuple[str, ...] = ()
  """What the claim says nothing about, as sentences."""
  notes: tuple[str, ...] = ()
  """How the result was derived, in order."""
  secret_is_fixed: bool = field_kinds.later(False)
  """Whether anybody can recompute the noise of a release behind the claim."""

  def __post_init__(self):
    """Refuses a claim that nothing in the ledger backs."""
    # Statements of earlier versions say it in a sentence alone.
    if not {*map(terms.fixed_secret, ("run", "study"))}.isdisjoint(
      self.assumptions
    ):
      object.__setattr__(self, "secret_is_fixed", True)
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
    return not self.ledger and self.epsilon < math.inf


def none(
  *,
  unit: str = "query",
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
  note = "Made from public data alone; no private record was read."
  if not_protected:
    note = "Made from what is treated as public; nothing else was read."
  return PrivacyStatement(
    unit=unit,
    relation=checks.relation(relation),
    epsilon=0.0,
    delta=0.0,
    public=public,
    not_protected=not_protected,
    notes=(note,),
  )


def non_private(
  note: str = "Private records were read without differential privacy.",
  *,
  unit: str = "query",
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


_DIVIDED = (
  "Which part of the records one is in depends on that record and on public"
  " values alone: it pays for the releases that read its own part."
)


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
    assumed = _union(merged.assumptions, (_DIVIDED,))
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


def change(statement: PrivacyStatement) -> str:
  """Says what differs between two data sets that the claim is about."""
  return _RELATIONS[statement.relation].format(unit=statement.unit)


def for_two(statement: PrivacyStatement) -> str:
  """Says what the releases of a statement promise for two records together.

  Formal guarantee: that of `accounting.group_epsilon` for the ledger, at the
  statement's delta; where that knows none, that of `group`.

  Args:
    statement: with a ledger and a finite epsilon.
  """
  epsilon, delta = group(statement, 2)
  found = accounting.group_epsilon(
    [release.run() for release in statement.ledger],
    delta=statement.delta,
    relation=statement.relation,
    size=2,
  )
  if found < math.inf:
    epsilon, delta = found, statement.delta
  if delta >= 1:
    return (
      "what these numbers alone say of two records together is empty (delta"
      " would be 1)"
    )
  return (
    f"two records together have only ({rounding.epsilon(epsilon)},"
    f" {rounding.delta(delta)})"
  )


def in_words(statement: PrivacyStatement) -> str:
  """Returns the claim as plain English, in paragraphs.

  Epsilon and delta are rounded up, so the text never claims more than the
  numbers.

  Args:
    statement: any statement.

  Returns:
    Paragraphs separated by empty lines, without markup.
  """
  paragraphs = [
    _claim(statement),
    *(_release(one) for one in statement.ledger),
  ]
  if statement.ledger and statement.epsilon < math.inf:
    paragraphs.append(
      "Several records of one person. A person behind several units"
      f" (unit: {statement.unit}) is protected less: {for_two(statement)}, and"
      " for more of them less still."
    )
  for title, sentences in (
    ("Treated as public", statement.public),
    ("Assumed", statement.assumptions),
    ("Not protected", statement.not_protected),
    ("How this result was made", statement.notes),
  ):
    if sentences:
      paragraphs.append(f"{title}. " + " ".join(sentences))
  return "\n\n".join(paragraphs)


def _check_alike(statements: Sequence[PrivacyStatement]) -> None:
  """Refuses claims that do not add up to one."""
  for name in ("unit", "relation"):
    found = sorted({getattr(one, name) for one in statements})
    if len(found) > 1:
      raise ValueError(
        f"expected statements with one {name}, got {name}={found}; "
        "joint.claim finds one that covers them, if there is one"
      )


def _merged(statements: Sequence[PrivacyStatement]) -> PrivacyStatement:
  """Joins everything but the numbers."""
  names = ("ledger", "public", "assumptions", "not_protected", "notes")
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


def _claim(statement: PrivacyStatement) -> str:
  if statement.is_public and statement.not_protected:
    return (
      "Privacy. This result was made from what is treated as public alone, but"
      f" that may itself depend on private records: of each {statement.unit} it"
      " may tell what is listed as not protected."
    )
  if statement.is_public:
    return (
      "Privacy. No private record went into this result: it says nothing "
      f"about any {statement.unit}."
    )
  if statement.epsilon == math.inf:
    return (
      "Privacy. NO differential privacy is claimed (epsilon is infinite): "
      f"this result may reveal any {statement.unit} it was made from."
      f"{_reason(statement)}"
    )
  epsilon = rounding.epsilon(statement.epsilon)
  delta = rounding.delta(statement.delta)
  return (
    f"Privacy. The unit of protection is one {statement.unit}. This result "
    f"is ({epsilon}, {delta})-differentially "
    f"private: when {change(statement)}, the probability of any outcome changes by a "
    f"factor of at most e^{epsilon}, apart from a slack of "
    f"{delta} (delta). Relation: {statement.relation}. "
    f"Accountant: {statement.accountant.upper()}, an upper bound."
  )


def _reason(statement: PrivacyStatement) -> str:
  """Says why epsilon is infinite although there is noise, or "" for no noise."""
  runs = [release.run() for release in statement.ledger]
  if not runs or any(run.noise_multiplier == 0 for run in runs):
    return ""
  reason = reasons.explain_infinite(
    runs, delta=statement.delta, relation=statement.relation
  )
  return f" The reason: {reason}." if reason else ""


def _release(one: releases.Release) -> str:
  drawn = _SAMPLINGS[one.sampling].format(
    num_examples=one.num_examples,
    expected_batch_size=one.expected_batch_size,
    max_batch_size=one.max_batch_size,
    cycle_length=one.cycle_length,
  )
  noise = ""
  if one.noise_bands > 1:
    noise = f", correlated over {one.noise_bands} steps (banded matrix)"
  part = f" It read the part {one.part} of the records." if one.part else ""
  group = ""
  if one.group_size > 1:
    moved = "mixture of Gaussians"
    if one.expected_batch_size == one.num_examples:
      moved = f"every step has them all: {one.group_size} times the sensitivity"
    group = (
      f" One unit has at most {one.group_size} records, each drawn by itself,"
      f" and the noise is for all of them together ({moved})."
    )
  return (
    f"Mechanism ({one.identifier}). {one.mechanism}: {one.steps} steps, clip "
    f"norm {one.l2_clip_norm:g}, noise of standard deviation "
    f"{rounding.noise(one.noise_multiplier, digits=6)} x"
    f" {one.l2_sensitivity:g} (noise multiplier "
    f"x sensitivity) on each sum{noise}; {drawn}.{group}{part}"
  )
