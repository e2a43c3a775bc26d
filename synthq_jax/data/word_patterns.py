"""Holds the regular expression of a word in any script.

Python's `\\w` has letters and digits, not the marks that are written over, under
and beside them: it cuts Hindi, Tamil or Thai words at their vowel signs. Here a
word begins with a letter, a digit or "_", and goes on with these and with marks
(Unicode categories Mn and Mc). In a text without marks the words are those of `\\w+`.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterable

__all__ = ["JOINERS", "WORD", "compose"]

_CODES = range(0x300, 0x20000)
"""All marks but variation selectors; the tests say so of this Python's Unicode."""


def _is_mark(code: int) -> bool:
  character = chr(code)
  return unicodedata.category(character) in ("Mn", "Mc") and (
    character != "\u034f"
    and "VARIATION SELECTOR" not in unicodedata.name(character, "")
  )


def _as_ranges(codes: Iterable[int]) -> str:
  """Returns ascending code points as what stands within [ ] of a pattern."""
  runs = itertools.groupby(enumerate(codes), lambda pair: pair[1] - pair[0])
  ends = [[code for _, code in run] for _, run in runs]
  return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in ends)


_MARKS = _as_ranges(filter(_is_mark, _CODES))
JOINERS = f"(?<=[{_MARKS}])[\u200c\u200d]+"
"""What `compose` leaves out, for `re`."""
_JOINERS = re.compile(JOINERS)

WORD = rf"\w+(?:[{_MARKS}]\w*)*"
"""One word, for `re`, in a text as `compose` returns it."""


def compose(text: str) -> str:
  """Returns a text whose letters are whole (NFC), without joiners behind marks.

  Joiners there choose a form of the letters, as in Hindi, and not another word.

  >>> compose("e\\u0301"), len(compose("\\u0915\\u094d\\u200d\\u092f"))
  ('é', 3)
  """
  if text.isascii():
    return text
  return _JOINERS.sub("", unicodedata.normalize("NFC", text))
