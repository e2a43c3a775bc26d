"""Reads ids of documents, queries and users by one rule, and tells of its use.

The rule looks at one id alone, so that no record changes how another is read:

- A number is its decimal digits. Integral floats are the integer, also where a
  table spells them ("17.0"): pandas writes these once a value is missing.
- A float that cannot be the integer it was (2^53 and above, which is also what
  "1.8e+18" says) has lost digits, and is refused; so is one with a fraction.
- Space around an id is no part of it, and neither are characters that nobody
  sees: format characters (category Cf), such as zero-width spaces, byte order
  marks and soft hyphens, and variation selectors. Letters are composed (NFC).
- Leading zeros and letter case tell ids apart: "017" is not "17". Where two ids
  differ in nothing else, `count_torn` counts them.

Texts keep all their characters: joiners carry meaning there.
"""

import collections
import contextlib
import contextvars
import decimal
import math
import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from synthq_jax.data import files

__all__ = [
  "Tally",
  "check_whole",
  "count_torn",
  "describe",
  "get_field",
  "has_other_form",
  "noting",
  "read",
  "strip_invisible",
  "tell",
]

Tally = collections.Counter[tuple[str, str]]
"""How many ids of a kind, such as "user", were read by which part of the rule."""

DECIMALS = "written as decimals (17.0) are read as whole numbers (17)"
SPACES = "had spaces around them, which are left out"
INVISIBLE = "held characters that nobody sees, which are left out"
TORN = (
  "differ from another in leading zeros or letter case alone: each is its own"
)
OTHER_FORM = (
  "are unknown as written, but known with other leading zeros or letter case:"
  " write them as the corpus does"
)

_EXACT = 2**53
"""From here on, a float stands for several whole numbers."""
_PLAIN = re.compile(r"[!-\-/-~]+")
"""Visible ASCII without a dot: the rule changes nothing in it."""
_DECIMAL = re.compile(r"([+-]?[0-9]+)\.0+")
_EXPONENT = re.compile(r"[+-]?[0-9]\.[0-9]+[eE]\+[0-9]+")
_ZEROS = 12
"""Leading zeros that are tried before an unknown id."""
_VISIBLY_EMPTY = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
"""Marks and letters without a glyph; all others are told by their category."""

_tally: contextvars.ContextVar[Tally | None] = contextvars.ContextVar(
  "tally", default=None
)


def read(value: Any, kind: str, where: str = "") -> str:
  """Returns an id by the rule of this module; "" where there is none.

  >>> [read(value, "user") for value in (17, 17.0, "17.0", " 17", "1\\u200b7")]
  ['17', '17', '17', '17', '17']
  >>> read("017", "user"), read("", "user"), read(None, "user")
  ('017', '', '')

  Args:
    value: a text or a number; None and NaN are no id.
    kind: "user", "query" or "document", for the message and the tally.
    where: "file:line", for the message.

  Raises:
    ValueError: if it is of another type, has a fraction, or is a float that has
      lost digits.
  """
  if type(value) is str and _PLAIN.fullmatch(value):
    return value
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return ""
  if isinstance(value, str):
    return _read_text(value, kind, where)
  if isinstance(value, (float, decimal.Decimal)) or hasattr(value, "dtype"):
    return _read_number(value, kind, where)
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  raise ValueError(
    f"{_at(where)}expected a {kind} id that is a text or a number, got a"
    f" {type(value).__name__}: write one id"
  )


def _may_be_id(value: Any) -> bool:
  return isinstance(value, (str, int, float, decimal.Decimal)) or hasattr(
    value, "dtype"
  )


def _read_text(text: str, kind: str, where: str) -> str:
  visible = strip_invisible(text)
  if visible != text:
    tell(kind, INVISIBLE)
  name = unicodedata.normalize("NFC", visible).strip()
  if len(visible.strip()) < len(visible):
    tell(kind, SPACES)
  if match := _DECIMAL.fullmatch(name):
    _check_exact(int(match[1]), kind, where)
    tell(kind, DECIMALS)
    return match[1]
  if _EXPONENT.fullmatch(name):
    _check_exact(_EXACT, kind, where)
  return name


def _read_number(value: Any, kind: str, where: str) -> str:
  """Reads a float, a decimal, or a scalar of NumPy."""
  number = value.item() if hasattr(value, "item") else value
  if isinstance(number, bool) or not isinstance(
    number, (int, float, decimal.Decimal)
  ):
    return read(None if number is value else number, kind, where)
  if isinstance(number, int):
    return str(number)
  if not math.isfinite(number) or number != int(number):
    raise ValueError(
      f"{_at(where)}expected a {kind} id that is a whole number or a text, got"
      " another number: write ids as text"
    )
  if isinstance(number, float):
    _check_exact(int(number), kind, where)
    tell(kind, DECIMALS)
  return str(int(number))


def _check_exact(number: int, kind: str, where: str) -> None:
  if abs(number) >= _EXACT:
    raise ValueError(
      f"{_at(where)}expected a {kind} id with all its digits, got a float of 2^53"
      " or more, which several ids share: export the column as text or integers"
    )


def _at(where: str) -> str:
  return f"{where}: " if where else ""


def strip_invisible(text: str) -> str:
  """Returns an id without characters that nobody sees.

  >>> strip_invisible("\\ufeffan\\u00adn\\u200b")
  'ann'
  """
  if text.isascii():
    return text
  return "".join(one for one in text if not _is_invisible(one))


def _is_invisible(character: str) -> bool:
  return (
    unicodedata.category(character) == "Cf"
    or character in _VISIBLY_EMPTY
    or "VARIATION SELECTOR" in unicodedata.name(character, "")
  )


def get_field(
  where: str, line: Mapping[str, Any], key: str, kind: str, **default: Any
) -> str:
  """Returns the id under a key of a row.

  >>> get_field("log:1", {"user": 17.0}, "user", "user")
  '17'

  Args:
    where: "file:line", for the message.
    line: the row.
    key: its key.
    kind: as in `read`.
    **default: what stands for a missing key, null or NaN; without it these are
      refused.

  Raises:
    ValueError: if there is no id, or `read` refuses it.
  """
  value = line.get(key)
  if value is None or (isinstance(value, float) and math.isnan(value)):
    value = files.field(where, {**line, key: None}, key, (str, int), **default)
  elif isinstance(value, bool) or not _may_be_id(value):
    files.field(where, line, key, (str, int))
  return read(value, kind, where)


def count_torn(names: Iterable[str]) -> int:
  """Counts ids that differ from another in leading zeros or letter case alone.

  Width and style of letters (NFKC) are no difference either.

  >>> count_torn(["17", "017", "Ann", "ann", "bob"])
  4

  Args:
    names: ids, as `read` returns them.
  """
  forms = collections.defaultdict(set)
  for name in names:
    forms[_fold(name)].add(name)
  return sum(len(each) for each in forms.values() if len(each) > 1)


def _fold(name: str) -> str:
  folded = unicodedata.normalize("NFKC", name).casefold()
  return folded.lstrip("0") or "0" if folded.isdecimal() else folded


def check_whole(names: Iterable[str], what: str) -> None:
  """Refuses user ids of which one person may have several.

  Args:
    names: the ids of all users.
    what: the setting that needs whole users, for the message.

  Raises:
    ValueError: if `count_torn` finds any.
  """
  if count_torn(names):
    raise ValueError(
      f"expected each user under one id for {what}, got ids that differ in leading"
      " zeros or letter case alone, as 17 and 017: write one id for each person,"
      " or, where they are different people, a hexadecimal digest of each id"
    )


def has_other_form(name: str, known: Container[str]) -> bool:
  """Says whether an unknown id is known with other zeros or letter case."""
  forms = {name.lower(), name.upper(), name.casefold()}
  if name.isdecimal():
    bare = name.lstrip("0") or "0"
    forms |= {"0" * number + bare for number in range(_ZEROS)}
  return any(form in known for form in forms - {name})


@contextlib.contextmanager
def noting() -> Iterator[Tally]:
  """Counts what the rule changes while a source is read.

  Within another block, ids count in the inner one alone: each is told once.

  Yields:
    The counts, complete once the block ends.
  """
  tally: Tally = collections.Counter()
  token = _tally.set(tally)
  try:
    yield tally
  finally:
    _tally.reset(token)


def tell(kind: str, what: str, number: int = 1) -> None:
  """Counts ids of a kind for a note, inside of `noting`."""
  tally = _tally.get()
  if tally is not None and number:
    tally[kind, what] += number


def describe(tally: Tally) -> list[str]:
  """Returns a line for each part of the rule that was used, with its number.

  >>> describe(collections.Counter({("user", DECIMALS): 1200}))
  ['1,200 user ids written as decimals (17.0) are read as whole numbers (17)']
  """
  return [
    f"{number:,} {kind} ids {what}"
    for (kind, what), number in sorted(tally.items())
  ]
