"""The ledger of a working directory: every private training ever started.

One JSON object a line: an identifier, and the statement of what the training
earns. It is written before a training reads its first record, so trials that
were given up are in it, too.
"""

import json
import math
import os
import pathlib

from synthq_jax import artifacts
from synthq_jax.privacy import joint, rounding
from synthq_jax.privacy import statement as statement_lib

__all__ = ["NAME", "describe", "enter", "line", "read"]

NAME = "ledger.jsonl"
"""Of the file."""

_NO_JOINT_CLAIM = (
  "no joint claim: nothing is claimed for whoever sees results of several of the"
  ' lines "alone"'
)


def enter(
  path: str | os.PathLike,
  identifier: str,
  statement: statement_lib.PrivacyStatement,
) -> None:
  """Adds one training, unless it is there: a resumed one is the same release.

  Args:
    path: the ledger; made where it is missing.
    identifier: of the training.
    statement: what it earns.
  """
  path = pathlib.Path(path)
  if path.exists() and identifier in read(path):
    return
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  lines.append(line(identifier, statement))
  artifacts.write_atomically(path, "".join(lines))


def line(identifier: str, statement: statement_lib.PrivacyStatement) -> str:
  """Returns the line of one training, for ledgers that lie in a bucket.

  Args:
    identifier: of the training.
    statement: what it earns.
  """
  entry = {"identifier": identifier, "statement": artifacts.to_json(statement)}
  return json.dumps(entry, sort_keys=True) + "\n"


def read(
  path: str | os.PathLike,
) -> dict[str, statement_lib.PrivacyStatement]:
  """Returns the statements of a ledger by identifier, in order.

  Args:
    path: the ledger.

  Returns:
    Identifiers and statements.

  Raises:
    OSError: if there is no such file.
    ValueError: naming file and line, if a line is not an entry.
  """
  found = {}
  for number, line in enumerate(pathlib.Path(path).open(), start=1):
    try:
      entry = json.loads(line)
      found[entry["identifier"]] = artifacts.from_json(
        statement_lib.PrivacyStatement, entry["statement"]
      )
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f"{path}:{number}: expected an entry of a privacy ledger, got"
        f" {type(error).__name__}: {error}; restore the file from a copy"
      ) from error
  return found


def describe(path: str | os.PathLike, *, delta: float | None = None) -> str:
  """Says what a ledger's trainings cost one by one, and all together.

  Formal guarantee: the line "together" is that of `joint.claim`, for whoever
  sees the results of all listed trainings that claim anything. Those without
  privacy are counted, not composed: publishing one of them voids every claim.
  Where units or relations differ, a line "alone" for each of them is that of
  `statement.compose`, for whoever sees results of those trainings and of no
  other; where no claim covers all units, a line says so.

  Args:
    path: the ledger.
    delta: of the whole; None: the largest of the deltas.

  Returns:
    A line for each training, and one for all together; where units or
    relations differ one more for each, and one where some claim nothing.

  Raises:
    OSError: if there is no such file.
    ValueError: if it is no ledger, or one identifier stands for two releases.
  """
  found = read(path)
  lines = [_line(name, one) for name, one in found.items()]
  claims = [one for one in found.values() if one.epsilon < math.inf]
  kinds = joint.kinds(claims)
  if len(kinds) > 1:
    for kind in kinds:
      alike = [one for one in claims if (one.unit, one.relation) == kind]
      whole = statement_lib.compose(alike, delta=delta)
      lines.append(_sum(f"alone ({len(alike)})", whole))
  if claims:
    whole = joint.claim(claims, delta=delta)
    lines.append(
      _NO_JOINT_CLAIM
      if whole is None
      else _sum(f"together ({len(claims)})", whole)
    )
  if len(claims) < len(found):
    lines.append(
      f"not counted: {len(found) - len(claims)} without privacy, which must not"
      " be published"
    )
  return "\n".join(lines) or "no private training was started"


def _line(name: str, one: statement_lib.PrivacyStatement) -> str:
  if one.epsilon == math.inf:
    return f"{name}: no claim"
  words = ""
  if len(one.ledger) == 1:
    words = f", noise multiplier {one.ledger[0].noise_multiplier:.4g}"
  return f"{name}: {_numbers(one)}{words}"


def _sum(name: str, one: statement_lib.PrivacyStatement) -> str:
  return f"{name}: {_numbers(one)} for one {one.unit} ({one.relation})"


def _numbers(one: statement_lib.PrivacyStatement) -> str:
  return (
    f"epsilon {rounding.epsilon(one.epsilon)},"
    f" delta {rounding.delta(one.delta)}"
  )
