"""Computes one claim about several results, also if their units differ.

A generator protects a query with its document, and a retriever may protect the
query's text alone. Their claims have different units. Composing each unit by
itself says nothing about an observer of both results; the claim here does.
"""

import dataclasses
import math
from collections.abc import Sequence

from synthq_jax.privacy import accounting
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import unit as unit_lib

__all__ = ["RELATION", "claim", "kinds"]

RELATION = "REPLACE_SPECIAL"
"""The neighbouring relation of a claim that covers different units or relations."""


def claim(
  statements: Sequence[statement_lib.PrivacyStatement],
  *,
  delta: float | None = None,
) -> statement_lib.PrivacyStatement | None:
  """Returns one claim about publishing all results together.

  If units and relations are equal, it is the claim of `statement.compose`. Users
  whose units differ in the number of queries alone count as one unit, the one with
  the most queries. Otherwise the unit of the claim is the unit that is a part of
  all others, and the relation is that this unit is replaced by an empty one.

  Formal guarantee:
    For different units or relations: REPLACE_SPECIAL for the unit of the returned
    statement, over all releases of all ledgers; later releases may depend on
    earlier ones. Neighbours: one unit x is emptied. Releases that protect a whole
    record leave out the record of x. There n, batch sizes and the draws of all
    other records stay. So the sum of a batch moves by at most the sensitivity, as
    under ADD_OR_REMOVE_ONE, and the sampling probability is the same. Releases
    that protect x alone keep the rest of its record, and are claimed for this
    relation. Both are the (sampled) Gaussian mechanism, which accounting computes
    from noise, sampler and steps; the epsilons of the single results do not enter.
    Assumed: the assumptions of the statements. Nothing is claimed for more than x,
    even if single results claim more.

    For equal units and relations: the guarantee of `statement.compose`. There, if a
    rule sends each record to one of several parts, a record pays for its part
    alone. An emptied unit pays for all parts, since the rule may send the rest of
    its record to another part.

  Args:
    statements: at least one.
    delta: delta of all results together; None: the largest of their deltas.

  Returns:
    The claim. None if no unit is a part of all others: then nothing is claimed
    for an observer of all results.

  Raises:
    ValueError: if there are none, or one identifier stands for two different
      releases.
  """
  statements = _unify_users(statements)
  pairs = kinds(statements)
  if len(pairs) <= 1:
    return statement_lib.compose(statements, delta=delta)
  part = _find_common_part({unit for unit, _ in pairs})
  if part is None:
    return None
  joint = statement_lib.compose(
    [x if x.is_public else _restate(x, part) for x in statements], delta=delta
  )
  replaces = tuple(dict.fromkeys((*joint.replaces, *pairs)))
  return dataclasses.replace(joint, replaces=replaces)


def kinds(
  statements: Sequence[statement_lib.PrivacyStatement],
) -> list[tuple[unit_lib.Unit, str]]:
  """Returns the distinct (unit, relation) pairs of the non-public statements."""
  pairs = ((x.unit, x.relation) for x in statements if not x.is_public)
  return list(dict.fromkeys(pairs))


def _unify_users(
  statements: Sequence[statement_lib.PrivacyStatement],
) -> Sequence[statement_lib.PrivacyStatement]:
  """Replaces units of users by the one with the most queries per user.

  The number of queries read per user is a rule of each mechanism that looks at one
  user alone. So the neighbours are the same: all queries of one user are added or
  removed. Users of another column stay apart, since one user there may be many
  here.
  """
  units = [unit for unit, _ in kinds(statements)]
  is_by_one = len({unit.user_field for unit in units}) == 1
  if not is_by_one or not all(unit.is_user for unit in units):
    return statements
  unit = max(units, key=lambda user: user.max_records)
  return [
    each if each.is_public else dataclasses.replace(each, unit=unit)
    for each in statements
  ]


def _find_common_part(units: set[unit_lib.Unit]) -> unit_lib.Unit | None:
  """Returns the unit that is a part of every other unit, or None."""
  for part in units:
    if units <= {part, part.whole}:
      return part
  return None


def _restate(
  statement: statement_lib.PrivacyStatement, unit: unit_lib.Unit
) -> statement_lib.PrivacyStatement:
  """Recomputes a claim for emptying one unit, over the same releases."""
  epsilon = statement.epsilon
  if epsilon < math.inf:
    runs = [release.run() for release in statement.ledger]
    epsilon = accounting.composed_epsilon(
      runs, delta=statement.delta, relation=RELATION
    )
  return dataclasses.replace(
    statement,
    unit=unit,
    relation=RELATION,
    epsilon=epsilon,
    accountant="pld",
  )
