"""Reads texts as detectors of near-duplicates see them: normalised, as sets.

Also how a query relates to a near-duplicate, by a plain rule on such sets, and
near-duplicates that are made by rule: fewer words, another order or inflection,
as people who ask the same thing again drop function words, turn the words
around and say "dog" for "dogs". The rules know no grammar and no synonyms: what
they make is nearer than what another person would write.

References:
  Froebe et al., "How Train-Test Leakage Affects Zero-shot Retrieval", SPIRE
  2022: the relations, which people told apart there.
"""

import functools
import sys
import unicodedata
from collections.abc import Collection, Hashable, Sequence

from synthq_jax import extras

with extras.required("run"):
  import Stemmer


__all__ = [
  "FUNCTION_WORDS",
  "RELATIONS",
  "character_ngrams",
  "normalize",
  "reformulations",
  "relation",
  "stem_sets",
  "whole",
]

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

RELATIONS = (
  "identical",
  "generalisation",
  "specialisation",
  "reformulation",
  "different topic",
)
"""The relations, the query seen from the target."""


class _Separators(dict):
  """What `str.translate` does to a character, worked out once for each."""

  def __missing__(self, code: int) -> str:
    kind = unicodedata.category(chr(code))[0]
    # Letters, numbers, and the marks that belong to letters of many scripts.
    self[code] = kept = chr(code) if kind in "LMN" else " "
    return kept


_SEPARATORS = _Separators({ord(each): "" for each in _APOSTROPHES})


def normalize(text: str) -> str:
  """Returns a text without case, punctuation and needless spaces, perhaps "".

  Unicode's compatible forms become one (NFKC), also after case folding.
  Whatever is no letter, number or mark becomes a space, but an apostrophe
  vanishes: logs spell "what's" without it. So "C++" and "C#" become one, too.

  >>> normalize("What\u2019s  a Stra\xdfe, ex-GDR\uff1f")
  'whats a strasse ex gdr'
  """
  if not text.isascii():
    text = unicodedata.normalize("NFKC", text)
    text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.translate(_SEPARATORS).split())
  return " ".join(text.lower().translate(_SEPARATORS).split())


def whole(texts: Sequence[str]) -> list[Collection[Hashable]]:
  """Returns the normalised text as the only feature of each text."""
  return [(text,) if text else () for text in map(normalize, texts)]


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
  """
  sets = []
  for text in map(normalize, texts):
    padded = f" {text} " if text else ""
    places = range(max(1, len(padded) - n + 1))
    sets.append({padded[i : i + n] for i in places} if text else set())
  return sets


def relation(query: str, target: str) -> str:
  """Returns how a query relates to a target.

  Compared are the sets of stemmed words without the commonest English words of
  grammar and question. The same words: identical. The query lacks some: a
  generalisation. It has more: a specialisation. Some of both: a reformulation.
  None in common: a different topic. The rule knows no synonym.

  >>> relation("solar panel makers", "solar panel makers in Europe")
  'generalisation'
  >>> relation("what is measles", "Measles")
  'identical'

  Args:
    query: a text.
    target: the text it is compared with.

  Returns:
    One of `RELATIONS`.
  """
  own, other = stem_sets(
    [query, target], stemmer="english", ignored=FUNCTION_WORDS
  )
  if own == other and own:
    return "identical"
  if not own & other:
    return "different topic"
  if own < other:
    return "generalisation"
  return "specialisation" if own > other else "reformulation"


def reformulations(query: str, number: int) -> list[str]:
  """Returns near-duplicates of a query, none of them the query itself.

  In this order: its words without function words (the keywords); the keywords
  with the first half behind the second; the keywords with the longest one in
  the other number (an "s" more or less); these backwards; and all words, with
  that change, in their own order. What came before is left out: a query of one
  word has few.

  >>> reformulations("are the dogs of the queen terriers", 3)
  ['dogs queen terriers', 'queen terriers dogs', 'dogs queen terrier']

  Args:
    query: its text.
    number: how many at most.

  Returns:
    Different texts, normalised, possibly fewer than `number`.
  """
  words = normalize(query).split()
  keywords = [word for word in words if word not in FUNCTION_WORDS]
  keywords = keywords or words
  if not keywords:
    return []
  inflected = _inflected(keywords, keywords)
  half = len(keywords) // 2
  made = (
    keywords,
    [*keywords[half:], *keywords[:half]],
    inflected,
    inflected[::-1],
    _inflected(words, keywords),
  )
  own = " ".join(words)
  texts = dict.fromkeys(map(" ".join, made))
  return [text for text in texts if text != own][:number]


def _inflected(words: Sequence[str], keywords: Sequence[str]) -> list[str]:
  """Puts the longest keyword, the last of equals, into the other number."""
  chosen = max(reversed(keywords), key=len)
  return [_other_number(word) if word == chosen else word for word in words]


def _other_number(word: str) -> str:
  """Takes an "s" from the end of a word, or puts one there.

  >>> [_other_number(word) for word in ("dogs", "dog", "class", "virus")]
  ['dog', 'dogs', 'class', 'virus']
  """
  if word.endswith(("ss", "us", "is")) or not word[-1].isalpha():
    return word
  if word.endswith("s") and len(word) > 3:
    return word[:-1]
  return word if word.endswith("s") else f"{word}s"
