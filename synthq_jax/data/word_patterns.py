"""Defines the regular expression of a word in any script.

Python's `\\w` matches letters and digits, but not combining marks: it splits
Hindi, Tamil or Thai words at their vowel signs. A word begins with a letter, a
digit or "_" and continues with these and with marks (Unicode categories Mn and
Mc). In a text without marks the words are those of `\\w+`.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterable

__all__ = ["JOINERS", "WORD", "compose"]

_CODES = range(0x300, 0x20000)
"""Code points that include all marks except variation selectors, as tests
check."""


def _is_mark(code: int) -> bool:
  character = chr(code)
  return unicodedata.category(character) in ("Mn", "Mc") and (
    character != "\u034f"
    and "VARIATION SELECTOR" not in unicodedata.name(character, "")
  )


def _make_ranges(codes: Iterable[int]) -> str:
  """Converts ascending code points to ranges of a pattern's character class."""
  runs = itertools.groupby(enumerate(codes), lambda pair: pair[1] - pair[0])
  ends = [[code for _, code in run] for _, run in runs]
  return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in ends)


_MARKS = _make_ranges(filter(_is_mark, _CODES))
JOINERS = f"(?<=[{_MARKS}])[\u200c\u200d]+"
"""Pattern of the joiners that `compose` removes."""
_JOINERS = re.compile(JOINERS)

WORD = rf"\w+(?:[{_MARKS}]\w*)*"
"""Pattern of one word, in a text from `compose`."""


def compose(text: str) -> str:
  """Composes the letters of a text (NFC) and removes joiners behind marks.

  Such a joiner selects a form of the letters, as in Hindi, not another word.

  >>> compose("e\\u0301"), len(compose("\\u0915\\u094d\\u200d\\u092f"))
  ('é', 3)
  """
  if text.isascii():
    return text
  return _JOINERS.sub("", unicodedata.normalize("NFC", text))
