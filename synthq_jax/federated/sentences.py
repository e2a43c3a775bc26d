"""Sentences of a passage, by rule, with their places in it.

A sentence ends at a blank line, or at a mark that no lower-case word follows:
not behind an abbreviation, an initial, the number of a list's item or inside of
a decimal. Items of a list (" - ") begin sentences only behind such a mark: an
item such as "fever" alone says nothing. A sentence with too many words is cut,
where possible before an item, else behind a semicolon or a comma.

The rules are for English. They know no headings: one without a mark at its end
stays in front of the sentence that follows.
"""

import re

__all__ = ["MAX_WORDS", "spans", "split"]

MAX_WORDS = 60
"""The words of the longest sentence: about 100 tokens of a small vocabulary."""

_END = re.compile(r"""[.!?\u2026]+["'\u201d\u2019)\]]*(?=\s)|\n\s*\n""")
_NEXT = re.compile(r"""\s*([-*\u2022]\s+)?["'\u201c\u2018(\[]*(\w+|\S)?""")
_BULLET = re.compile(r"(?:[-*\u2022]\s+)+")
_BULLETS = {"-", "*", "\u2022"}
_WORD = re.compile(r"\S+")
_LAST_WORD = re.compile(r"[\w.]*$")
_ITEM_NUMBER = re.compile(r"\(?(?:\d{1,3}|[A-Za-z])")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]|[A-Z]")

_ABBREVIATIONS = frozenset(
  "al approx cf dept dr e.g eds eqs esp figs fig ft i.e inc jr ltd mr mrs ms "
  "pp prof sr st vol vs".split()
)
_BEFORE_NUMBERS = frozenset(
  "ed eq no nos p sec jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
"""Abbreviations in front of a number alone: "No. 5", but "She said no."."""
_TITLES = frozenset("capt col gen gov lt mt rep rev sen sgt".split())
"""Abbreviations where they begin with a capital: "Rep. Doe", but "a rep."."""

_STARTERS = frozenset(
  "a although an and are as at because but by each for from he her his how "
  "however if in is it its many most no not on or our she since some such that "
  "the their then there these they this those to we what when where which who "
  "with you your".split()
)
"""Words that begin a sentence: behind them, initials end the one before."""


def spans(text: str, *, max_words: int = MAX_WORDS) -> list[tuple[int, int]]:
  """Returns where each sentence begins and ends.

  >>> text = "Dr. J. Doe took 2.5 mg. - Fever. - A rash."
  >>> [text[start:end] for start, end in spans(text)]
  ['Dr. J. Doe took 2.5 mg.', 'Fever.', 'A rash.']

  Args:
    text: a passage.
    max_words: the words of the longest sentence, >= 1.

  Returns:
    Beginnings and ends (exclusive) in order. They leave out white space, the
    dash of an item, and pieces without a letter or digit.

  Raises:
    ValueError: if max_words < 1.
  """
  if max_words < 1:
    raise ValueError(
      f"expected max_words >= 1, got max_words={max_words}; raise it"
    )
  found, start = [], 0
  for match in _END.finditer(text):
    if _ends(text, start, match):
      found += _cut(text, start, match.end(), max_words)
      start = match.end()
  return found + _cut(text, start, len(text), max_words)


def split(text: str, *, max_words: int = MAX_WORDS) -> list[str]:
  """Returns the sentences of a text.

  >>> split("It is sold in the U.S. The U.S. Army buys it, e.g. in Ft. Knox.")
  ['It is sold in the U.S.', 'The U.S. Army buys it, e.g. in Ft. Knox.']
  >>> split("one two, three four five", max_words=3)
  ['one two,', 'three four five']

  Args:
    text: a passage.
    max_words: as in `spans`.

  Returns:
    Sentences in order, white space inside them as it was.
  """
  return [text[start:end] for start, end in spans(text, max_words=max_words)]


def _ends(text: str, start: int, match: re.Match) -> bool:
  """Whether a sentence ends where one could."""
  mark = match.group()
  if not mark.strip():
    return True  # a blank line
  bullet, following = _NEXT.match(text, match.end()).groups()
  if following is None or bullet:
    return True
  if following[0].islower():
    return False
  return mark[0] != "." or not _is_abbreviation(
    text[start : match.start()], following
  )


def _is_abbreviation(sentence: str, following: str) -> bool:
  """Whether a full stop belongs to the last word of what stands before it."""
  if _ITEM_NUMBER.fullmatch(sentence.strip()):
    return True
  word = _LAST_WORD.search(sentence).group()
  if _INITIALS.fullmatch(word) and word.lower() not in _ABBREVIATIONS:
    return following.lower() not in _STARTERS
  return (
    word.lower() in _ABBREVIATIONS
    or (word.lower() in _BEFORE_NUMBERS and following[0].isdigit())
    or (word.lower() in _TITLES and word[0].isupper())
  )


def _cut(
  text: str, start: int, end: int, max_words: int
) -> list[tuple[int, int]]:
  """Returns a sentence, or the pieces of a long one, without what is around."""
  words = [
    (match.start(), match.end()) for match in _WORD.finditer(text, start, end)
  ]
  pieces = []
  while words:
    size = _size(text, words, max_words)
    pieces.append(_bare(text, words[0][0], words[size - 1][1]))
    words = words[size:]
  return [piece for piece in pieces if piece]


def _size(text: str, words: list[tuple[int, int]], max_words: int) -> int:
  """Returns how many words the first piece has."""
  if len(words) <= max_words:
    return len(words)
  places = range(max_words, max_words // 2, -1)
  tests = (
    lambda place: text[slice(*words[place])] in _BULLETS,
    lambda place: text[words[place - 1][1] - 1] in ";:",
    lambda place: text[words[place - 1][1] - 1] == ",",
  )
  for test in tests:
    for place in places:
      if test(place):
        return place
  return max_words


def _bare(text: str, start: int, end: int) -> tuple[int, int] | None:
  """Takes the dash of an item away; None where nothing is left to read."""
  bullet = _BULLET.match(text, start, end)
  start = bullet.end() if bullet else start
  if not any(character.isalnum() for character in text[start:end]):
    return None
  return start, end
