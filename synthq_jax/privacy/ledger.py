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
from synthq_jax.privacy import statement as statement_lib

__all__ = ["describe", "enter", "line", "read"]


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

  Formal guarantee: that of `statement.compose` for whoever sees the results of
  all listed trainings that claim anything. Those without privacy are counted,
  not composed: publishing one of them voids every claim. Claims for different
  units, such as a query and a client, do not add up to one: each unit and
  relation has a line of its own, which says nothing of the others' trainings.

  Args:
    path: the ledger.
    delta: of the whole; None: the largest of the deltas.

  Returns:
    A line for each training, and one for each unit; one more where
    units differ, and where some claim nothing.

  Raises:
    OSError: if there is no such file.
    ValueError: if it is no ledger, or one identifier stands for two releases.
  """
  found = read(path)
  lines = [_line(name, one) for name, one in found.items()]
  claims = [one for one in found.values() if one.epsilon < math.inf]
  kinds = dict.fromkeys((one.unit, one.relation) for one in claims)
  for unit, relation in kinds:
    alike = [
      one for one in claims if (one.unit, one.relation) == (unit, relation)
    ]
    whole = statement_lib.compose(alike, delta=delta)
    lines.append(
      f"together ({len(alike)}): epsilon {_up(whole.epsilon)}, delta"
      f" {whole.delta:.4g} for one {unit} ({relation})"
    )
  if len(kinds) > 1:
    lines.append("claims for different units are not added up")
  if len(claims) < len(found):
    lines.append(
      f"not counted: {len(found) - len(claims)} without privacy, which must not"
      " be published"
    )
  return "\n".join(lines) or "no private training was started"


def _line(name: str, one: statement_lib.PrivacyStatement) -> str:
  if one.epsilon == math.inf:
    return f"{name}: no claim"
  noise = one.noise_multiplier
  words = "" if noise is None else f", noise multiplier {noise:.4g}"
  return f"{name}: epsilon {_up(one.epsilon)}, delta {one.delta:.4g}{words}"


def _up(epsilon: float) -> str:
  """Rounds up: the text never claims more than the number."""
  return f"{math.ceil(epsilon * 1e3) / 1e3:g}"
