"""Normalizes ids of documents, queries and users by one rule and counts its use.

The rule looks at one id alone, so that no record changes how another is read:

- A number becomes its decimal digits. An integral float becomes the integer, also
  if a table spells it ("17.0"): pandas writes such ids once a value is missing, and
  Spark 12,345,678 as "1.2345678E7".
- A float of 2^53 or above, or a text such as "1.8e+18", has lost digits and is
  refused. So are a float with a fraction, and "17.000", which may be 17,000.
- Space around an id is dropped, and so are invisible characters: format characters
  (category Cf), such as zero-width spaces, byte order marks and soft hyphens, and
  variation selectors. Letters are composed (NFC).
- Ids that differ in leading zeros or letter case are different: "017" is not "17".
  `count_torn` counts ids that differ in nothing else.

Texts of queries and documents keep all characters: joiners carry meaning there.
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

from synthq_jax import checks
from synthq_jax.data import files

__all__ = [
  "Tally",
  "check_whole",
  "count_null",
  "count_torn",
  "describe",
  "get_field",
  "has_other_form",
  "is_counted",
  "is_garbled",
  "is_invisible",
  "is_null",
  "noting",
  "read",
  "strip_invisible",
  "add_count",
]

Tally = collections.Counter[tuple[str, str]]
"""Number of ids by (kind, part of the rule); a kind is "user", for example."""

DECIMALS = "ids written as decimals (17.0) are read as whole numbers (17)"
SPACES = "ids had spaces around them, which are left out"
INVISIBLE = "ids held invisible characters, which are left out"
TORN = (
  "ids differ from another in leading zeros or letter case alone: each is its"
  " own"
)
OTHER_FORM = (
  "ids are unknown as written, but known with other leading zeros or letter case:"
  " write them as the corpus does"
)
NOTHING = (
  "texts are a word for nothing, such as NULL or nan: they are read as written;"
  " remove or empty them if nothing is meant"
)
LEFT_OUT = (
  "texts are a word for nothing, such as NULL or nan: their lines are left out;"
  " write more than the word if it was asked"
)
GARBLED = (
  "texts hold %20, &amp;, \u00c3\u00a9 or the like: if nobody typed that, decode the"
  " column and export it again"
)

_EXACT = 2**53
"""From this number on, one float stands for several whole numbers."""
_PLAIN = re.compile(r"[!-*,\-/-~]+")
"""Visible ASCII without a dot or a plus sign, which the rule leaves as it is."""
_DECIMAL = re.compile(r"([+-]?[0-9]+)\.0+")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{,2}\.000")
"""A number that spreadsheets of many countries write for thousands."""
_EXPONENT = re.compile(r"[+-]?[0-9](\.[0-9]+)?[eE]\+[0-9]+")
_OF_SPARK = re.compile(r"[+-]?[1-9]\.[0-9]+[eE][0-9]{1,2}")
"""A float from 1e7 on, as Java and Rust, so Spark and polars, spell it."""
_ZEROS = 12
"""Number of leading zeros that `has_other_form` tries before an unknown id."""
_NULLS = frozenset(
  (
    *("NULL", "null", "<NULL>", "<null>", "(null)", "\\N", "None", "undefined"),
    *("nan", "NaN", "<NA>", "NaT", "#N/A", "(not set)", "(not provided)"),
    "-",
  )
)
"""Texts that databases, pandas, browsers and logs such as AOL's write for
nothing."""
_GARBLED = re.compile(
  r"%[0-9A-Fa-f]{2}|^[^\s+]+(\+[^\s+]+){2,}$|\ufffd|&(#x?[0-9A-Fa-f]+|amp|quot|lt|gt"
  r"|nbsp|apos);|\u00c3[\u0080-\u00bf\u2018-\u2122]|\u00e2\u20ac"
)
"""URL encoding, entities of HTML, lost characters, UTF-8 read as Windows-1252."""
_VISIBLY_EMPTY = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
"""Marks and letters without a glyph; a category identifies all other ones."""

_tally: contextvars.ContextVar[Tally | None] = contextvars.ContextVar(
  "tally", default=None
)


def read(value: Any, kind: str, where: str = "") -> str:
  """Normalizes an id by the rule of this module; "" stands for no id.

  >>> [read(value, "user") for value in (17, 17.0, "17.0", " 17", "1\\u200b7")]
  ['17', '17', '17', '17', '17']
  >>> read("017", "user"), read("", "user"), read(None, "user")
  ('017', '', '')

  Args:
    value: a text or a number; None and NaN are no id.
    kind: "user", "query" or "document", for the message and the tally.
    where: "file:line", for the message.

  Raises:
    ValueError: if the value has another type or a fraction, or is a float that has
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
    f"{_format_position(where)}expected a {kind} id that is a text or a number, got a"
    f" {type(value).__name__}: write one id"
  )


def _may_be_id(value: Any) -> bool:
  return isinstance(value, (str, int, float, decimal.Decimal)) or hasattr(
    value, "dtype"
  )


def _read_text(text: str, kind: str, where: str) -> str:
  visible = strip_invisible(text)
  if visible != text:
    add_count(kind, INVISIBLE)
  name = unicodedata.normalize("NFC", visible).strip()
  if len(visible.strip()) < len(visible):
    add_count(kind, SPACES)
  if _THOUSANDS.fullmatch(name):
    raise ValueError(
      f"{_format_position(where)}expected a {kind} id without separators, got one"
      " that ends in .000, which may stand for thousands: export the column as"
      " integers"
    )
  if match := _DECIMAL.fullmatch(name):
    _check_exact(int(match[1]), kind, where)
    add_count(kind, DECIMALS)
    return match[1]
  if _OF_SPARK.fullmatch(name) and float(name).is_integer():
    return _read_number(float(name), kind, where)
  if _EXPONENT.fullmatch(name):
    _check_exact(_EXACT, kind, where)
  return name


def _read_number(value: Any, kind: str, where: str) -> str:
  """Normalizes a float, a decimal or a NumPy scalar."""
  number = value.item() if hasattr(value, "item") else value
  if isinstance(number, bool) or not isinstance(
    number, (int, float, decimal.Decimal)
  ):
    return read(None if number is value else number, kind, where)
  if isinstance(number, int):
    return str(number)
  if not math.isfinite(number) or number != int(number):
    raise ValueError(
      f"{_format_position(where)}expected a {kind} id that is a whole number or a text, got"
      " another number: write ids as text"
    )
  if isinstance(number, float):
    _check_exact(int(number), kind, where)
    add_count(kind, DECIMALS)
  return str(int(number))


def _check_exact(number: int, kind: str, where: str) -> None:
  if abs(number) >= _EXACT:
    raise ValueError(
      f"{_format_position(where)}expected a {kind} id with all its digits, got a float of 2^53"
      " or more, which several ids share: export the column as text or integers"
    )


def _format_position(where: str) -> str:
  return f"{where}: " if where else ""


def strip_invisible(text: str) -> str:
  """Removes invisible characters from an id.

  >>> strip_invisible("\\ufeffan\\u00adn\\u200b")
  'ann'
  """
  if text.isascii():
    return text
  return "".join(char for char in text if not is_invisible(char))


def is_invisible(character: str) -> bool:
  """Returns True for a format character, or a mark or letter without a glyph."""
  return (
    unicodedata.category(character) == "Cf"
    or character in _VISIBLY_EMPTY
    or "VARIATION SELECTOR" in unicodedata.name(character, "")
  )


def is_null(text: str) -> bool:
  """Returns True for a text that a database writes where there is none.

  Letter case counts, since people do ask for "none" or "NAN".

  >>> is_null("NULL"), is_null("null pointer"), is_null("none")
  (True, False, False)
  """
  return text.strip() in _NULLS


def is_garbled(text: str) -> bool:
  """Returns True for a text that an export left encoded.

  >>> is_garbled("boat+to+the+island%3F"), is_garbled("c++")
  (True, False)
  """
  return bool(_GARBLED.search(text))


def get_field(
  where: str, line: Mapping[str, Any], key: str, kind: str, **default: Any
) -> str:
  """Returns the normalized id under a key of a row.

  >>> get_field("log:1", {"user": 17.0}, "user", "user")
  '17'

  Args:
    where: "file:line", for the message.
    line: the row.
    key: the key of the id.
    kind: as in `read`.
    **default: `default=VALUE` replaces a missing key, null or NaN; without it
      these are refused.

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

  Width and style of letters (NFKC) do not count as a difference.

  >>> count_torn(["17", "017", "Ann", "ann", "bob"])
  4

  Args:
    names: ids that `read` has normalized.
  """
  forms = collections.defaultdict(set)
  for name in names:
    forms[_fold(name)].add(name)
  return sum(len(each) for each in forms.values() if len(each) > 1)


def _fold(name: str) -> str:
  folded = unicodedata.normalize("NFKC", name).casefold()
  return folded.lstrip("0") or "0" if folded.isdecimal() else folded


def check_whole(names: Iterable[str], setting: str) -> None:
  """Refuses user ids unless each stands for one person, and one for each.

  Args:
    names: the ids of all users.
    setting: the setting that needs one id per person, for the message.

  Raises:
    ValueError: if `count_torn` finds any, or an id is a word for a missing one.
  """
  names = set(names)
  if any(name.casefold() in checks.NO_ID for name in names):
    raise ValueError(
      f"expected the id of one person with each query for {setting}, got a word for"
      " a missing id, such as NULL or nan, which many people share: leave these"
      " rows out, or give each its own id"
    )
  if count_torn(names):
    raise ValueError(
      f"expected each user under one id for {setting}, got ids that differ in leading"
      " zeros or letter case alone, as 17 and 017: write one id for each person,"
      " or, where they are different people, a hexadecimal digest of each id"
    )


def has_other_form(name: str, known_ids: Container[str]) -> bool:
  """Returns True if an unknown id is known with other zeros or letter case."""
  forms = {name.lower(), name.upper(), name.casefold()}
  if name.isdecimal():
    bare = name.lstrip("0") or "0"
    forms |= {"0" * number + bare for number in range(_ZEROS)}
  return any(form in known_ids for form in forms - {name})


@contextlib.contextmanager
def noting() -> Iterator[Tally]:
  """Counts the ids that the rule changes within a `with` block.

  Within nested blocks, only the inner block counts an id.

  Yields:
    The counts, complete once the block ends.
  """
  tally: Tally = collections.Counter()
  token = _tally.set(tally)
  try:
    yield tally
  finally:
    _tally.reset(token)


def add_count(kind: str, rule: str, number: int = 1) -> None:
  """Adds ids to the counts of the innermost `noting` block, if there is one."""
  tally = _tally.get()
  if tally is not None and number:
    tally[kind, rule] += number


def count_null(kind: str, text: str, rule: str = NOTHING) -> bool:
  """Counts a text if a database writes it where there is none; see `is_null`.

  Args:
    kind: kind of the text, such as "query".
    text: the text.
    rule: what becomes of it.

  Returns:
    True if it is such a text.
  """
  is_nothing = is_null(text)
  add_count(kind, rule, int(is_nothing))
  return is_nothing


def is_counted(kind: str, rule: str) -> bool:
  """Returns True if the innermost `noting` block has counted such an id."""
  return bool((_tally.get() or {}).get((kind, rule)))


def describe(tally: Tally) -> list[str]:
  """Returns a line for each part of the rule that changed ids or texts, with
  their number.

  >>> describe(collections.Counter({("user", DECIMALS): 1200}))
  ['1,200 user ids written as decimals (17.0) are read as whole numbers (17)']
  """
  return [
    f"{number:,} {kind} {rule}"
    for (kind, rule), number in sorted(tally.items())
  ]
