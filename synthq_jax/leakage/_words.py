"""Texts as detectors of near-duplicates see them: normalised, as sets."""

import functools
import sys
import unicodedata
from collections.abc import Callable, Collection, Hashable, Sequence

import Stemmer

__all__ = [
  "FUNCTION_WORDS",
  "Features",
  "character_ngrams",
  "check_ngrams",
  "check_stemmer",
  "normalize",
  "stem_sets",
  "whole",
]

Features = Callable[[Sequence[str]], list[Collection[Hashable]]]
"""From texts to the distinct features of each; none for an empty text."""

_APOSTROPHES = "'\u2018\u2019\u02bc\uff07`\u00b4"
_CACHED = 1 << 18  # words whose stems are kept: some 50 MiB


FUNCTION_WORDS = tuple(
  "a about all am an and any are as at be been being but by can could did do"
  " does for from had has have how i if in into is it its me my of on or our"
  " should so some such than that the their them then there these they this"
  " those to was we were what whats when where which who whom whose why will"
  " with would you your".split()
)
"""English words of grammar and question, as `normalize` leaves them."""


class _Separators(dict):
  """What `str.translate` does to a character, worked out once for each."""

  def __missing__(self, code: int) -> str:
    kind = unicodedata.category(chr(code))[0]
    # Letters, numbers, and the marks that belong to letters of many scripts.
    self[code] = kept = chr(code) if kind in "LMN" else " "
    return kept


_SEPARATORS = _Separators({ord(each): "" for each in _APOSTROPHES})


def normalize(text: str) -> str:
  """Returns a text without case, punctuation and needless spaces.

  Unicode's compatible forms become one (NFKC), also after case folding.
  Whatever is no letter, number or mark becomes a space, but an apostrophe
  vanishes: logs spell "what's" without it. So "C++" and "C#" become one, too.

  >>> normalize("What\u2019s  a Stra\xdfe, ex-GDR\uff1f")
  'whats a strasse ex gdr'

  Args:
    text: any text.

  Returns:
    The text; "" where it has neither a letter nor a number.
  """
  if not text.isascii():
    text = unicodedata.normalize("NFKC", text)
    text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.translate(_SEPARATORS).split())
  return " ".join(text.lower().translate(_SEPARATORS).split())


def whole(texts: Sequence[str]) -> list[Collection[Hashable]]:
  """Returns the normalised text as the only feature of each text."""
  return [(text,) if text else () for text in map(normalize, texts)]


def check_stemmer(stemmer: str) -> None:
  """Refuses what is no algorithm of Snowball's.

  Args:
    stemmer: its name, or "" for none.

  Raises:
    ValueError: if there is none of that name.
  """
  if stemmer and stemmer not in Stemmer.algorithms():
    raise ValueError(
      f"expected a stemmer of {Stemmer.algorithms()}, got "
      f"stemmer={stemmer!r}; choose one, or '' for none"
    )


@functools.cache
def _stems(stemmer: str) -> "_Stems":
  return _Stems(stemmer)


class _Stems(dict):
  """Stems by word; forgets all when there are too many."""

  def __init__(self, stemmer: str):
    self._stem = Stemmer.Stemmer(stemmer, 0).stemWord

  def __missing__(self, word: str) -> str:
    if len(self) >= _CACHED:
      self.clear()
    self[word] = stem = sys.intern(self._stem(word))
    return stem


def stem_sets(
  texts: Sequence[str], *, stemmer: str, ignored: Collection[str] = ()
) -> list[set[str]]:
  """Returns the stemmed words of each text.

  >>> sorted(stem_sets(["Measles outbreaks"], stemmer="english")[0])
  ['measl', 'outbreak']

  Args:
    texts: as they were written.
    stemmer: a Snowball algorithm, or "" for none.
    ignored: words, normalised, that do not count, unless a text has no others.

  Returns:
    One set per text, empty for an empty text.
  """
  rows = [normalize(text).split(" ") for text in texts]
  if ignored:
    ignored = frozenset(ignored)
    rows = [[w for w in row if w not in ignored] or row for row in rows]
  if stemmer:
    stem = _stems(stemmer).__getitem__
    sets = [set(map(stem, row)) for row in rows]
  else:
    sets = [set(row) for row in rows]
  for each in sets:
    each.discard("")
  return sets


def character_ngrams(texts: Sequence[str], *, n: int) -> list[set[str]]:
  """Returns the n-grams of characters of each text.

  A text is normalised, and a space put before and behind it. One shorter than
  that is one n-gram.

  >>> sorted(character_ngrams(["A cat"], n=4)[0])
  [' a c', ' cat', 'a ca', 'cat ']

  Args:
    texts: as they were written.
    n: characters of an n-gram, at least 1.

  Returns:
    One set per text, empty for an empty text.
  """
  return [
    _ngrams(f" {text} ", n) if text else set() for text in map(normalize, texts)
  ]


def check_ngrams(n: int) -> None:
  """Refuses n-grams of nothing.

  Args:
    n: characters of an n-gram.

  Raises:
    ValueError: if it is below 1.
  """
  if n < 1:
    raise ValueError(
      f"expected n-grams of n >= 1 characters, got n={n}; change it"
    )


def _ngrams(text: str, n: int) -> set[str]:
  return {text[i : i + n] for i in range(max(1, len(text) - n + 1))}
