"""One claim about several results, also where they protect different things.

A generator that hides a query with its document and a retriever that hides a
query's text alone make claims for different units. To add up each unit by
itself says nothing about whoever sees both results; the claim here does.
"""

import dataclasses
import math
from collections.abc import Sequence

from synthq_jax.privacy import accounting
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import unit as unit_lib

__all__ = ["RELATION", "claim", "kinds"]

RELATION = "REPLACE_SPECIAL"
"""Of a claim that covers different units or relations."""


def claim(
  statements: Sequence[statement_lib.PrivacyStatement],
  *,
  delta: float | None = None,
) -> statement_lib.PrivacyStatement | None:
  """Returns one claim about publishing all results together.

  Where units and relations are equal it is that of `statement.compose`; users of
  whom more queries are read here than there are one unit, that with the most.
  Elsewhere its unit is the one that is a part of all others, and its relation
  that this unit is replaced by an empty one.

  Formal guarantee:
    REPLACE_SPECIAL for the unit of the returned statement, over all releases of
    all ledgers, later ones depending on earlier ones. Neighbours: one unit x is
    emptied. Releases that protect a whole record add nothing for the record of
    x; n, batch sizes and the draws of all others stay, so a batch's sum moves
    as under ADD_OR_REMOVE_ONE, by at most the sensitivity, and is sampled with
    the same probability. Releases that protect x alone keep the rest of its
    record, and are claimed for this relation. Either is the (sampled) Gaussian
    that accounting knows from noise, sampler and steps; no epsilon of a part
    enters. Assumed: what the statements assume. Nothing is claimed for more
    than x, though a part does. Where units and relations are equal: that of
    `statement.compose`, by which a record that a rule of its own sends to one
    of several parts pays for that one; an emptied unit pays for all of them,
    since a rule may send what is left of its record elsewhere.

  Args:
    statements: at least one.
    delta: of the whole; None: the largest of their deltas.

  Returns:
    The claim; None where no unit is a part of all others: then nothing is
    claimed for whoever sees all results.

  Raises:
    ValueError: if there are none, or one identifier stands for two different
      releases.
  """
  statements = _same_users(statements)
  found = kinds(statements)
  if len(found) <= 1:
    return statement_lib.compose(statements, delta=delta)
  part = _common_part({unit for unit, _ in found})
  if part is None:
    return None
  private = [one for one in statements if not one.is_public]
  made = statement_lib.compose(
    [_restated(one, part) for one in private], delta=delta
  )
  replaces = tuple(dict.fromkeys((*made.replaces, *found)))
  return dataclasses.replace(made, replaces=replaces)


def kinds(
  statements: Sequence[statement_lib.PrivacyStatement],
) -> list[tuple[unit_lib.Unit, str]]:
  """Returns the units and relations of what is not public, each pair once."""
  pairs = ((x.unit, x.relation) for x in statements if not x.is_public)
  return list(dict.fromkeys(pairs))


def _same_users(
  statements: Sequence[statement_lib.PrivacyStatement],
) -> Sequence[statement_lib.PrivacyStatement]:
  """Returns claims for users as claims for those with the most queries.

  How many are read is a rule of each mechanism that looks at one user alone: the
  neighbours, all queries of one user more or less, are the same ones. Users by
  another column are not: what is one user there may be many here.
  """
  units = [unit for unit, _ in kinds(statements)]
  is_by_one = len({unit.user_field for unit in units}) == 1
  if not is_by_one or not all(unit.is_user for unit in units):
    return statements
  unit = max(units, key=lambda one: one.max_records)
  return [
    one if one.is_public else dataclasses.replace(one, unit=unit)
    for one in statements
  ]


def _common_part(units: set[unit_lib.Unit]) -> unit_lib.Unit | None:
  """Returns the unit that every other one has as a part."""
  for part in units:
    if units <= {part, part.whole}:
      return part
  return None


def _restated(
  one: statement_lib.PrivacyStatement, unit: unit_lib.Unit
) -> statement_lib.PrivacyStatement:
  """Returns what the same releases earn where one unit is emptied."""
  epsilon = one.epsilon
  if epsilon < math.inf:
    runs = [release.run() for release in one.ledger]
    epsilon = accounting.composed_epsilon(
      runs, delta=one.delta, relation=RELATION
    )
  return dataclasses.replace(
    one,
    unit=unit,
    relation=RELATION,
    epsilon=epsilon,
    accountant="pld",
  )
