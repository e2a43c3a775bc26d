"""The ledger of a working directory: every private training ever started.

One JSON object a line: an identifier, the statement of what the training earns,
and a checksum of the two. A line is on disk before the training reads its first
record, so trials that were given up are in the ledger, too. Lines are only ever
added. A copy beside the ledger follows each of them, so that a line that is lost
or damaged later is missed, and can be put back.
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
"""Of the file."""

_BEGINS = b'{"checksum": "'
"""Every line that is written, and so one that a kill has torn."""
_NO_JOINT_CLAIM = (
  "no joint claim: nothing is claimed for whoever sees results of several of the"
  ' lines "alone"'
)


class _Content(NamedTuple):
  """What a file of entries holds."""

  statements: dict[str, statement_lib.PrivacyStatement]
  whole: bytes  # without a torn last line
  torn: int = 0  # the number of that line


def enter(
  path: str | os.PathLike,
  identifier: str,
  statement: statement_lib.PrivacyStatement,
) -> None:
  """Adds one training, unless it is there: a resumed one is the same release.

  Formal guarantee: when this returns, the entry is on disk, in the ledger and in
  its copy, whatever happens to the process or the machine afterwards. A kill
  before that may leave the entry without a training, never the reverse.
  Assumed: the file system keeps what it says it has written.

  Args:
    path: the ledger; made where it is missing.
    identifier: of the training.
    statement: what it earns.

  Raises:
    OSError: if it cannot be written.
    ValueError: if the ledger is damaged, lacks what its copy holds, or has
      another release under this identifier: nothing is written then.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  with _opened(path) as stream:
    content = _checked(path, stream.read())
    whole = content.whole
    known = content.statements.get(identifier, statement)
    if not _is_same(known, statement):
      raise ValueError(
        f"{path}: expected one release per identifier, got another one for"
        f" identifier={identifier!r}: give each training a name of its own (with"
        " a fixed secret, another working directory), or it would not be counted"
      )
    if whole and not copy.exists():  # it was lost
      artifacts.write_atomically(copy, whole)
    if whole and not whole.endswith(b"\n"):
      whole += b"\n"
    if identifier not in content.statements:
      whole += line(identifier, statement).encode()
    if content.torn:
      stream.truncate(len(content.whole))
    artifacts.append(path, stream, whole[len(content.whole) :])
    if not copy.exists() or copy.read_bytes() != whole:
      artifacts.write_atomically(copy, whole)


def _is_same(
  known: statement_lib.PrivacyStatement, other: statement_lib.PrivacyStatement
) -> bool:
  """Says whether two statements are of one training.

  Noise that is found anew for the same target may differ in its last digits on
  another processor.
  """
  first, second = (
    (one.unit, one.relation, len(one.ledger)) for one in (known, other)
  )
  return first == second and all(
    one == dataclasses.replace(two, noise_multiplier=one.noise_multiplier)
    and math.isclose(one.noise_multiplier, two.noise_multiplier, rel_tol=1e-3)
    for one, two in zip(known.ledger, other.ledger, strict=True)
  )


def mend(path: str | os.PathLike) -> None:
  """Makes the copy of a ledger again where it was lost or damaged.

  Args:
    path: of the ledger; where it is missing, or nothing may be written, nothing
      happens.

  Raises:
    ValueError: if the ledger is damaged.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  if not path.exists():
    return
  if copy.exists() and copy.read_bytes() == path.read_bytes():
    return
  with contextlib.suppress(OSError), _opened(path) as stream:
    content = _checked(path, stream.read())
    if content.statements and not content.torn:
      artifacts.write_atomically(copy, content.whole)


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Generator[FileIO]:
  """Opens a ledger to read and to append, for one process at a time."""
  path.parent.mkdir(parents=True, exist_ok=True)
  begun(path)  # an empty file must not stand for one that was lost
  with open(path, "ab+", buffering=0) as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.seek(0)
    yield stream


def line(identifier: str, statement: statement_lib.PrivacyStatement) -> str:
  """Returns the line of one training, for ledgers that lie in a bucket.

  Args:
    identifier: of the training.
    statement: what it earns.
  """
  entry = {"identifier": identifier, "statement": artifacts.to_json(statement)}
  return json.dumps(artifacts.sealed(entry), sort_keys=True) + "\n"


def copy_of(path: str | os.PathLike) -> pathlib.Path:
  """Returns where the copy of a ledger lies.

  >>> copy_of("private/ledger.jsonl").name
  'ledger_copy.jsonl'
  """
  path = pathlib.Path(path)
  return path.with_name(f"{path.stem}_copy{path.suffix}")


def begun(path: str | os.PathLike) -> bool:
  """Says whether there is a ledger.

  Args:
    path: of the ledger.

  Raises:
    ValueError: if there was one: its copy is there, and holds trainings.
  """
  path, copy = pathlib.Path(path), copy_of(path)
  if path.exists():
    return True
  if copy.exists() and copy.stat().st_size:
    raise ValueError(
      f"{path}: expected the ledger of which {copy.name} is a copy, got no file:"
      f" {_restore(path)}"
    )
  return False


def read(
  path: str | os.PathLike,
) -> dict[str, statement_lib.PrivacyStatement]:
  """Returns the statements of a ledger by identifier, in order.

  A last line that a kill has torn is left out: its training had not begun.

  Args:
    path: the ledger.

  Returns:
    Identifiers and statements.

  Raises:
    OSError: if there is no such file.
    ValueError: naming file and line, if a line is not an entry or has changed,
      or the file lacks entries that its copy holds.
  """
  return _read(pathlib.Path(path)).statements


def _read(path: pathlib.Path) -> _Content:
  begun(path)
  return _checked(path, path.read_bytes())


def _checked(path: pathlib.Path, data: bytes) -> _Content:
  """Reads entries, and refuses a ledger with fewer than its copy."""
  content, copy = _parsed(path, data), copy_of(path)
  if not copy.exists():
    if content.torn and content.statements:
      # Appending makes a copy first: this is damage, not a kill.
      raise _damage(path, content.torn, "a part of a line")
    return content
  # A damaged line of the copy is made anew by the next entry, but it stands for
  # a training: one that the ledger has lost would be forgotten for good.
  lines = copy.read_bytes().splitlines()
  kept = [one for one in map(_entry, lines) if not isinstance(one, Exception)]
  found = sum(content.statements.get(name) == one for name, one in kept)
  if found < len(kept) or len(content.statements) < len(lines):
    raise ValueError(
      f"{path}: expected the {len(lines)} trainings of {copy.name}, got"
      f" {len(content.statements)}, of which {found} are the same:"
      f" {_restore(path)}"
    )
  return content


@functools.lru_cache(maxsize=4096)  # every statement reads all lines again
def _entry(
  text: bytes,
) -> tuple[str, statement_lib.PrivacyStatement] | Exception:
  """Reads a line; returns what is wrong with it if it is no entry."""
  try:
    entry = artifacts.unsealed(text)
    kind = statement_lib.PrivacyStatement
    return entry["identifier"], artifacts.from_json(kind, entry["statement"])
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    return error


def _parsed(path: pathlib.Path, data: bytes) -> _Content:
  """Reads entries; the last line may be torn if nothing ends it."""
  statements: dict[str, statement_lib.PrivacyStatement] = {}
  lines = data.splitlines(keepends=True)
  for number, text in enumerate(lines, start=1):
    entry = _entry(text)
    if isinstance(entry, Exception):
      is_last = number == len(lines) and not text.endswith(b"\n")
      if is_last and _BEGINS.startswith(text[: len(_BEGINS)]):
        return _Content(statements, data[: -len(text)], torn=number)
      got = f"{type(entry).__name__}: {entry}"
      raise _damage(path, number, got) from entry
    statements.update([entry])
  return _Content(statements, data)


def _damage(path: pathlib.Path, number: int, got: str) -> ValueError:
  return ValueError(
    f"{path}:{number}: expected an entry of a privacy ledger, got {got};"
    f" {_restore(path)}"
  )


def _restore(path: pathlib.Path) -> str:
  copy = copy_of(path)
  if copy.exists():
    return f"put {copy} in its place, after a look at both"
  return "restore the file from a copy"


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
    A line for each training that was begun, finished or not, and one for all
    together; where units or relations differ one more for each, one where some
    claim nothing, and one for a last line that a kill has torn.

  Raises:
    OSError: if there is no such file.
    ValueError: if it is no ledger, or one identifier stands for two releases.
  """
  content = _read(pathlib.Path(path))
  found = content.statements
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
  if found:
    lines.append("counted: every training that was begun, finished or not")
  if content.torn:
    lines.append(
      f"line {content.torn} is torn: of a training whose process was killed"
      " before it had begun, and that read no record"
    )
  return "\n".join(lines) or "no private training was started"


def _line(name: str, one: statement_lib.PrivacyStatement) -> str:
  if one.epsilon == math.inf:
    return f"{name}: no claim"
  words = ""
  if len(one.ledger) == 1:
    release = one.ledger[0]
    words = ", noise multiplier "
    words += rounding.noise(release.noise_multiplier, digits=4)
    if release.part:
      words += f", of the part {release.part}"
  return f"{name}: {_numbers(one)}{words}"


def _sum(name: str, one: statement_lib.PrivacyStatement) -> str:
  return f"{name}: {_numbers(one)} for one {one.unit} ({one.relation})"


def _numbers(one: statement_lib.PrivacyStatement) -> str:
  return (
    f"epsilon {rounding.epsilon(one.epsilon)},"
    f" delta {rounding.delta(one.delta)}"
  )
