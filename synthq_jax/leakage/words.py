"""Reads texts as detectors of near-duplicates see them: normalised, as sets.

Also how a query relates to a near-duplicate, by a plain rule on such sets, and
near-duplicates that are made by rule: fewer words, another order or inflection,
as people who ask the same thing again drop function words, turn the words
around and say "dog" for "dogs". The rules know no grammar and no synonyms: what
they make is nearer than what another person would write.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`: the relations, which people
  told apart there.
"""

import functools
import unicodedata
from collections.abc import Callable, Collection, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax import extras
from synthq_jax.leakage import set_search

with extras.required("run"):
  import Stemmer


__all__ = [
  "FUNCTION_WORDS",
  "RELATIONS",
  "Texts",
  "character_ngrams",
  "normalize",
  "normalized",
  "reformulations",
  "relation",
  "stems",
  "whole",
]

_APOSTROPHES = (
  "'`\u00b4\u02b9\u02bb\u02bc\u0384\u05f3\u1fbd\u1fbf\u1ffd\u2018\u2019\u201b"
  "\u2032\ua78c\uff07"
)
# By their category letters and marks.
_UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
_CACHED = 1 << 18  # words whose stems are kept: some 50 MiB
_TABLE = 16  # entries a code: a longer table costs more than sorting
_LARGEST = 1 << 62


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


class _Vanishing(dict):
  """What `str.translate` does to a character, worked out once for each.

  Nobody sees format characters, such as soft hyphens and joiners, and selectors
  of variants: a text copied out of a page may hold them within its words.
  """

  def __missing__(self, code: int) -> str:
    one = chr(code)
    is_unseen = unicodedata.category(one) == "Cf" or "VARIATION SELECTOR" in (
      unicodedata.name(one, "")
    )
    self[code] = kept = "" if is_unseen else self._seen(one)
    return kept

  def _seen(self, one: str) -> str:
    return one


class _Separators(_Vanishing):
  """The same, and a space for what separates."""

  def _seen(self, one: str) -> str:
    # Letters, numbers, and the marks that belong to letters of many scripts.
    return one if unicodedata.category(one)[0] in "LMN" else " "


_NOTHING = {ord(each): "" for each in _APOSTROPHES + _UNSEEN}
_VANISHING, _SEPARATORS = _Vanishing(_NOTHING), _Separators(_NOTHING)


def normalize(text: str) -> str:
  """Returns a text without case, punctuation and needless spaces, perhaps "".

  Unicode's compatible forms become one (NFKC), also after case folding.
  Whatever is no letter, number or mark becomes a space, but an apostrophe
  vanishes: logs spell "what's" without it. So "C++" and "C#" become one, too.
  What nobody sees, such as a soft hyphen, vanishes as well.

  >>> normalize("What\u2019s  a Stra\xdfe, ex-GDR\uff1f")
  'whats a strasse ex gdr'
  """
  if not text.isascii():
    # First of all: NFKC makes a space and a mark of one apostrophe.
    text = unicodedata.normalize("NFKC", text.translate(_VANISHING))
    text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.translate(_SEPARATORS).split())
  return " ".join(text.lower().translate(_SEPARATORS).split())


class Texts(list[str]):
  """Texts that are normalised once, whoever asks."""

  @functools.cached_property
  def normalized(self) -> list[str]:
    """The texts, normalised."""
    return [*map(normalize, self)]


def normalized(texts: Sequence[str]) -> list[str]:
  """Returns what `normalize` makes of each text."""
  return (texts if isinstance(texts, Texts) else Texts(texts)).normalized


def whole(texts: Sequence[str]) -> set_search.Bags:
  """Returns the normalised text as the only feature of each text.

  A text of signs alone, of which nothing is left, stands for itself.
  """
  made = zip(texts, normalized(texts), strict=True)
  return set_search.Bags.of(
    [(text,) if text else _of_signs(one) for one, text in made]
  )


def _of_signs(text: str) -> tuple[tuple[str, str], ...]:
  seen = unicodedata.normalize("NFKC", text.translate(_VANISHING)).casefold()
  left = " ".join(seen.split()) or text.strip()
  return (("signs", left),) if left else ()


@functools.cache
def _stems(stemmer: str) -> Callable[[str], str]:
  """Returns what stems a word, and remembers the last ones."""
  return functools.lru_cache(_CACHED)(Stemmer.Stemmer(stemmer, 0).stemWord)


def stems(
  texts: Sequence[str], *, stemmer: str, ignored: Collection[str] = ()
) -> set_search.Bags:
  """Returns the stemmed words of each text.

  >>> sorted(stems(["Measles outbreaks"], stemmer="english").sets()[0])
  ['measl', 'outbreak']

  Args:
    texts: as they were written.
    stemmer: a Snowball algorithm, or "" for none.
    ignored: words, normalised, that do not count, unless a text has no others.

  Returns:
    A bag per text, empty for an empty text.
  """
  rows = [text.split() for text in normalized(texts)]
  if ignored:
    ignored = frozenset(ignored)
    rows = [[w for w in row if w not in ignored] or row for row in rows]
  bags = set_search.Bags.of(rows)
  if not stemmer:
    return bags
  numbers = set_search.Numbers()
  ids = numbers.of(map(_stems(stemmer), bags.values))[bags.ids]
  return set_search.Bags([*numbers], ids, bags.sizes)


def character_ngrams(texts: Sequence[str], *, n: int) -> set_search.Bags:
  """Returns the n-grams of characters of each text.

  A text is normalised, and a space put before and behind it. One shorter than
  that is one n-gram.

  >>> sorted(character_ngrams(["A cat"], n=4).sets()[0])
  [' a c', ' cat', 'a ca', 'cat ']
  """
  # No normalised text has a NUL: it fills up what is too short.
  padded = [
    f" {text} ".ljust(n, "\0") if text else "" for text in normalized(texts)
  ]
  lengths = np.fromiter(map(len, padded), np.int64, len(padded))
  sizes = np.maximum(lengths - n + 1, 0)
  starts = np.cumsum(lengths) - lengths - (np.cumsum(sizes) - sizes)
  places = np.arange(sizes.sum()) + np.repeat(starts, sizes)
  text = "".join(padded)
  ids, where = _numbered(text, places, n)
  values = [text[i : i + n].rstrip("\0") for i in where.tolist()]
  return set_search.Bags(values, ids, sizes)


def _numbered(
  text: str, places: Int[np.ndarray, " place"], n: int
) -> tuple[Int[np.ndarray, " place"], Int[np.ndarray, " value"]]:
  """Numbers the n-grams at the places; also returns a place of each number."""
  points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
  points, first = _dense(points.astype(np.int64), points.max(initial=0) + 1)
  codes, size, width = points[places], len(first), len(first)
  for offset in range(1, n):
    if size * width > _LARGEST:
      codes, first = _dense(codes, size)
      size = len(first)
    codes = codes * width + points[places + offset]
    size *= width
  codes, first = _dense(codes, size)
  return codes, places[first]


def _dense(codes: Int[np.ndarray, " place"], size: int):
  """Numbers the different codes; also returns where each of them stands."""
  if size > _TABLE * len(codes):
    _, first, ids = np.unique(codes, return_index=True, return_inverse=True)
    return ids, first
  table = np.full(size, -1)
  table[codes] = np.arange(len(codes))
  seen = np.flatnonzero(table >= 0)
  first = table[seen]
  table[seen] = np.arange(len(seen))
  return table[codes], first


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
  bags = stems([query, target], stemmer="english", ignored=FUNCTION_WORDS)
  own, other = bags.sets()
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
