"""Keeps the ledger of a working directory: every private training ever started.

The ledger has one JSON object a line: the identifier of a training, its statement,
and a checksum of the two. A line is on disk before the training reads its first
record, so the ledger also lists trials that were given up. Lines are only ever
added. A copy beside the ledger gets each line, too, so that a lost or damaged line
is noticed and can be restored.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import pathlib
from collections.abc import Generator
from io import FileIO
from typing import NamedTuple

from synthq_jax.privacy import joint, rounding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.storage import artifacts

__all__ = [
  "NAME",
  "begun",
  "copy_of",
  "describe",
  "enter",
  "line",
  "mend",
  "read",
]

NAME = "ledger.jsonl"
"""Name of the ledger file."""

_LINE_START = b'{"checksum": "'
"""The first bytes of every written line, and so of a torn line."""
_NO_JOINT_CLAIM = (
  "no joint claim: nothing is claimed for an observer of results from several of"
  ' the lines "alone"'
)


class _Content(NamedTuple):
  """The entries of a ledger file and its intact bytes."""

  statements: dict[str, statement_lib.PrivacyStatement]
  intact: bytes  # the file without a torn last line
  torn: int = 0  # the number of the torn line, from 1; 0: none


def enter(
  path: str | os.PathLike,
  identifier: str,
  statement: statement_lib.PrivacyStatement,
) -> None:
  """Adds one training, unless its entry exists, as for a resumed training.

  Formal guarantee: when this returns, the entry is on disk, in the ledger and in
  its copy, whatever happens to the process or the machine afterwards. A kill
  before that may leave the entry without a training, never the reverse.
  Assumed: the file system keeps all data that it reports as written.

  Args:
    path: the ledger; created if missing.
    identifier: the name of the training.
    statement: the statement of the training.

  Raises:
    OSError: if the entry cannot be written.
    ValueError: if the ledger is damaged, lacks entries of its copy, or has
      another release under this identifier. Then nothing is written.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  with _open_locked(path) as stream:
    content = _parse_and_compare(path, stream.read())
    data = content.intact
    present = content.statements.get(identifier, statement)
    if not _is_same(present, statement):
      raise ValueError(
        f"{path}: expected one release per identifier, got another one for"
        f" identifier={identifier!r}: give each training a name of its own (with"
        " a fixed secret, another working directory), or it would not be counted"
      )
    if data and not copy.exists():  # restore a lost copy before appending
      artifacts.write_atomically(copy, data)
    if data and not data.endswith(b"\n"):
      data += b"\n"
    if identifier not in content.statements:
      data += line(identifier, statement).encode()
    if content.torn:
      stream.truncate(len(content.intact))
    artifacts.append(path, stream, data[len(content.intact) :])
    if not copy.exists() or copy.read_bytes() != data:
      artifacts.write_atomically(copy, data)


def _is_same(
  first: statement_lib.PrivacyStatement, second: statement_lib.PrivacyStatement
) -> bool:
  """Compares unit, relation and releases of two statements.

  Noise multipliers may differ by a thousandth: calibrated again on another
  processor, they may differ in their last digits.
  """
  kind, other_kind = (
    (each.unit, each.relation, len(each.ledger)) for each in (first, second)
  )
  return kind == other_kind and all(
    a == dataclasses.replace(b, noise_multiplier=a.noise_multiplier)
    and math.isclose(a.noise_multiplier, b.noise_multiplier, rel_tol=1e-3)
    for a, b in zip(first.ledger, second.ledger, strict=True)
  )


def mend(path: str | os.PathLike) -> None:
  """Writes the copy of a ledger again if it is lost or damaged.

  Args:
    path: the ledger. If it is missing, or if nothing can be written, nothing
      happens.

  Raises:
    ValueError: if the ledger is damaged, or lacks entries of its copy.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  if not path.exists():
    return
  if copy.exists() and copy.read_bytes() == path.read_bytes():
    return
  with contextlib.suppress(OSError), _open_locked(path) as stream:
    content = _parse_and_compare(path, stream.read())
    if content.statements and not content.torn:
      artifacts.write_atomically(copy, content.intact)


@contextlib.contextmanager
def _open_locked(path: pathlib.Path) -> Generator[FileIO]:
  """Opens a ledger to read and append, under an exclusive lock."""
  path.parent.mkdir(parents=True, exist_ok=True)
  begun(path)  # a new empty file must not replace a lost ledger
  with open(path, "ab+", buffering=0) as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.seek(0)
    yield stream


def line(identifier: str, statement: statement_lib.PrivacyStatement) -> str:
  """Returns the ledger line of one training, for ledgers in a bucket.

  Args:
    identifier: the name of the training.
    statement: the statement of the training.
  """
  entry = {"identifier": identifier, "statement": artifacts.to_json(statement)}
  return json.dumps(artifacts.sealed(entry), sort_keys=True) + "\n"


def copy_of(path: str | os.PathLike) -> pathlib.Path:
  """Returns the path of the copy of a ledger.

  >>> copy_of("private/ledger.jsonl").name
  'ledger_copy.jsonl'
  """
  path = pathlib.Path(path)
  return path.with_name(f"{path.stem}_copy{path.suffix}")


def begun(path: str | os.PathLike) -> bool:
  """Checks whether a ledger exists.

  Args:
    path: the ledger.

  Raises:
    ValueError: if the ledger is lost: it is missing, but its copy is not empty.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  if path.exists():
    return True
  if copy.exists() and copy.stat().st_size:
    raise ValueError(
      f"{path}: expected the ledger of which {copy.name} is a copy, got no file:"
      f" {_advise_restore(path)}"
    )
  return False


def read(
  path: str | os.PathLike,
) -> dict[str, statement_lib.PrivacyStatement]:
  """Reads the statements of a ledger by identifier, in order.

  A last line that a kill has torn is left out, since its training had not begun.

  Args:
    path: the ledger.

  Returns:
    The statement of each identifier.

  Raises:
    OSError: if there is no such file.
    ValueError: naming file and line, if a line is not an entry or has changed.
      Naming the file, if it lacks entries of its copy.
  """
  return _read(pathlib.Path(path)).statements


def _read(path: pathlib.Path) -> _Content:
  begun(path)
  return _parse_and_compare(path, path.read_bytes())


def _parse_and_compare(path: pathlib.Path, data: bytes) -> _Content:
  """Parses entries, and refuses a ledger that lacks entries of its copy."""
  content, copy = _parse(path, data), copy_of(path)
  if not copy.exists():
    if content.torn and content.statements:
      # Appending makes a copy first: this is damage, not a kill.
      raise _make_damage_error(path, content.torn, "a part of a line")
    return content
  # A damaged line of the copy counts as a training, too. The next entry rewrites
  # the copy, and a training that the ledger lacks would be forgotten for good.
  lines = copy.read_bytes().splitlines()
  entries = [e for e in map(_parse_line, lines) if not isinstance(e, Exception)]
  same = sum(content.statements.get(name) == entry for name, entry in entries)
  if same < len(entries) or len(content.statements) < len(lines):
    raise ValueError(
      f"{path}: expected the {len(lines)} trainings of {copy.name}, got"
      f" {len(content.statements)}, of which {same} are the same:"
      f" {_advise_restore(path)}"
    )
  return content


@functools.lru_cache(maxsize=4096)  # every statement reads all lines again
def _parse_line(
  text: bytes,
) -> tuple[str, statement_lib.PrivacyStatement] | Exception:
  """Parses a line; returns the error if the line is not an entry."""
  try:
    entry = artifacts.unsealed(text)
    kind = statement_lib.PrivacyStatement
    return entry["identifier"], artifacts.from_json(kind, entry["statement"])
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    return error


def _parse(path: pathlib.Path, data: bytes) -> _Content:
  """Parses all entries; a last line without a line end may be torn."""
  statements: dict[str, statement_lib.PrivacyStatement] = {}
  lines = data.splitlines(keepends=True)
  for number, text in enumerate(lines, start=1):
    entry = _parse_line(text)
    if isinstance(entry, Exception):
      is_last = number == len(lines) and not text.endswith(b"\n")
      if is_last and _LINE_START.startswith(text[: len(_LINE_START)]):
        return _Content(statements, data[: -len(text)], torn=number)
      got = f"{type(entry).__name__}: {entry}"
      raise _make_damage_error(path, number, got) from entry
    statements.update([entry])
  return _Content(statements, data)


def _make_damage_error(path: pathlib.Path, number: int, got: str) -> ValueError:
  return ValueError(
    f"{path}:{number}: expected an entry of a privacy ledger, got {got};"
    f" {_advise_restore(path)}"
  )


def _advise_restore(path: pathlib.Path) -> str:
  copy = copy_of(path)
  if copy.exists():
    return f"put {copy} in its place, after a look at both"
  return "restore the file from a copy"


def describe(path: str | os.PathLike, *, delta: float | None = None) -> str:
  """Describes the cost of a ledger's trainings, one by one and all together.

  Formal guarantee: the line "together" is the claim of `joint.claim`, for an
  observer of the results of all listed trainings that claim anything. Trainings
  without privacy are counted but not composed: publishing one of them voids every
  claim. If units or relations differ, each pair of them gets a line "alone". It is
  the claim of `statement.compose`, for an observer of those trainings and no
  other. If no claim covers all units, a line states this.

  Args:
    path: the ledger.
    delta: delta of all trainings together; None: the largest of the deltas.

  Returns:
    A line for each training that was begun, finished or not, and one for all
    together. There are further lines if units or relations differ, if some
    trainings claim nothing, and for a torn last line.

  Raises:
    OSError: if there is no such file.
    ValueError: if it is no ledger, or one identifier stands for two releases.
  """
  content = _read(pathlib.Path(path))
  statements = content.statements
  lines = [_describe_training(*item) for item in statements.items()]
  claims = [each for each in statements.values() if each.epsilon < math.inf]
  kinds = joint.kinds(claims)
  if len(kinds) > 1:
    for kind in kinds:
      alike = [each for each in claims if (each.unit, each.relation) == kind]
      composed = statement_lib.compose(alike, delta=delta)
      lines.append(_describe_sum(f"alone ({len(alike)})", composed))
  if claims:
    together = joint.claim(claims, delta=delta)
    lines.append(
      _NO_JOINT_CLAIM
      if together is None
      else _describe_sum(f"together ({len(claims)})", together)
    )
  if len(claims) < len(statements):
    lines.append(
      f"not counted: {len(statements) - len(claims)} without privacy, which must"
      " not be published"
    )
  if statements:
    lines.append("counted: every training that was begun, finished or not")
  if content.torn:
    lines.append(
      f"line {content.torn} is torn: the process of this training was killed"
      " before it had begun, and it read no record"
    )
  return "\n".join(lines) or "no private training was started"


def _describe_training(
  name: str, statement: statement_lib.PrivacyStatement
) -> str:
  if statement.epsilon == math.inf:
    return f"{name}: no claim"
  words = ""
  if len(statement.ledger) == 1:
    release = statement.ledger[0]
    words = ", noise multiplier "
    words += rounding.noise(release.noise_multiplier, digits=4)
    if release.part:
      words += f", of the part {release.part}"
  return f"{name}: {_write_numbers(statement)}{words}"


def _describe_sum(name: str, claim: statement_lib.PrivacyStatement) -> str:
  numbers = _write_numbers(claim)
  return f"{name}: {numbers} for one {claim.unit} ({claim.relation})"


def _write_numbers(statement: statement_lib.PrivacyStatement) -> str:
  return (
    f"epsilon {rounding.epsilon(statement.epsilon)},"
    f" delta {rounding.delta(statement.delta)}"
  )
