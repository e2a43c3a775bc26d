"""Normalises texts and extracts their features for near-duplicate detectors.

`relation` names the relation of a query to a near-duplicate, by a plain rule.
`make_reformulations` makes near-duplicates by rule: people who ask the same thing
again drop function words, change the order and say "dog" for "dogs". The rules
know no grammar and no synonyms, so their output is nearer to the query than
another person's words.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`: the relations, which people
  labelled there.
"""

import functools
import html
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax import extras
from synthq_jax.data import ids as ids_lib
from synthq_jax.leakage import set_search

with extras.required("run"):
  import Stemmer


__all__ = [
  "FUNCTION_WORDS",
  "RELATIONS",
  "Texts",
  "extract_character_ngrams",
  "normalize",
  "normalize_all",
  "make_reformulations",
  "relation",
  "extract_stems",
  "extract_whole_text",
]

_APOSTROPHES = (
  "'`\u00b4\u02b9\u02bb\u02bc\u0384\u05f3\u1fbd\u1fbf\u1ffd\u2018\u2019\u201b"
  "\u2032\ua78c\uff07"
)
_ENTITY = re.compile(r"&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z][A-Za-z\d]*);")
_CACHED = 1 << 18  # words in the cache of stems: some 50 MiB
_TABLE = (
  16  # table entries for each code: a longer table is slower than sorting
)
_LARGEST = 1 << 62


FUNCTION_WORDS = tuple(
  "a about all am an and any are as at be been being but by can could did do"
  " does for from had has have how i if in into is it its me my of on or our"
  " should so some such than that the their them then there these they this"
  " those to was we were what whats when where which who whom whose why will"
  " with would you your".split()
)
"""English function words and question words, as `normalize` returns them."""

RELATIONS = (
  "identical",
  "generalisation",
  "specialisation",
  "reformulation",
  "different topic",
)
"""Relations of a query to a target."""


class _Vanishing(dict):
  """A table for `str.translate` that deletes invisible characters.

  Format characters, such as soft hyphens and joiners, and variation selectors
  are invisible; words copied from a page may hold them. The table computes each
  character's entry once.
  """

  def __missing__(self, code: int) -> str:
    char = chr(code)
    is_unseen = ids_lib.is_invisible(char)
    self[code] = entry = "" if is_unseen else self._replace_visible(char)
    return entry

  def _replace_visible(self, char: str) -> str:
    return char


class _Separators(_Vanishing):
  """A table that also replaces separators by spaces."""

  def _replace_visible(self, char: str) -> str:
    # Letters, numbers, and the marks that belong to letters of many scripts.
    return char if unicodedata.category(char)[0] in "LMN" else " "


_NOTHING = {ord(each): "" for each in _APOSTROPHES}
_VANISHING, _SEPARATORS = _Vanishing(_NOTHING), _Separators(_NOTHING)


def normalize(text: str) -> str:
  """Removes case, punctuation and needless spaces; may return "".

  Unicode's compatibility forms become equal (NFKC), also after case folding. A
  character that is no letter, number or mark becomes a space, so "C++" and "C#"
  become equal. Apostrophes vanish, because logs spell "what's" without it.
  Invisible characters, such as soft hyphens, vanish as well. HTML's entities are
  read as their characters, because forms escape what people type. A capital I with
  a dot equals "i".

  >>> normalize("What\u2019s  a Stra\xdfe, ex-GDR\uff1f")
  'whats a strasse ex gdr'
  """
  if "&" in text:
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
  if not text.isascii():
    # Before NFKC, which turns one apostrophe into a space and a mark.
    text = unicodedata.normalize("NFKC", text.translate(_VANISHING))
    # Python folds Turkish capital I with a dot to "i" and a mark.
    folded = text.casefold().replace("i\u0307", "i")
    text = unicodedata.normalize("NFKC", folded)
    return " ".join(text.translate(_SEPARATORS).split())
  return " ".join(text.lower().translate(_SEPARATORS).split())


class Texts(list[str]):
  """Texts with a cache of their normalised forms."""

  @functools.cached_property
  def normalized(self) -> list[str]:
    """The texts, normalised."""
    return [*map(normalize, self)]


def normalize_all(texts: Sequence[str]) -> list[str]:
  """Normalises each text; uses the cache of `Texts`."""
  return (texts if isinstance(texts, Texts) else Texts(texts)).normalized


def extract_whole_text(texts: Sequence[str]) -> set_search.Bags:
  """Returns the normalised text as the only feature of each text.

  A text of signs alone, which normalises to "", keeps its signs as the feature.
  """
  both = zip(texts, normalize_all(texts), strict=True)
  return set_search.Bags.of(
    [(text,) if text else _get_signs(written) for written, text in both]
  )


def _get_signs(text: str) -> tuple[tuple[str, str], ...]:
  visible = unicodedata.normalize("NFKC", text.translate(_VANISHING)).casefold()
  signs = " ".join(visible.split()) or text.strip()
  return (("signs", signs),) if signs else ()


@functools.cache
def _make_stemmer() -> Callable[[str], str]:
  """Returns a function that stems an English word, with an LRU cache."""
  return functools.lru_cache(_CACHED)(Stemmer.Stemmer("english", 0).stemWord)


def extract_stems(
  texts: Sequence[str], *, ignored: Collection[str] = ()
) -> set_search.Bags:
  """Returns the stemmed words of each text.

  >>> sorted(extract_stems(["Measles outbreaks"]).sets()[0])
  ['measl', 'outbreak']

  Args:
    texts: texts, normalised or not.
    ignored: normalised words that do not count, unless a text has no others.

  Returns:
    A bag of each text, empty for an empty text.
  """
  rows = [text.split() for text in normalize_all(texts)]
  if ignored:
    ignored = frozenset(ignored)
    rows = [[w for w in row if w not in ignored] or row for row in rows]
  bags = set_search.Bags.of(rows)
  numbers = set_search.Numbers()
  ids = numbers.of(map(_make_stemmer(), bags.values))[bags.ids]
  return set_search.Bags([*numbers], ids, bags.sizes)


def extract_character_ngrams(
  texts: Sequence[str], *, n: int
) -> set_search.Bags:
  """Returns the n-grams of characters of each text.

  Each text is normalised and gets a space before and after it. If it is then
  shorter than n, it is one n-gram.

  >>> sorted(extract_character_ngrams(["A cat"], n=4).sets()[0])
  [' a c', ' cat', 'a ca', 'cat ']
  """
  # No normalised text has a NUL, so NULs can fill up short texts.
  padded = [
    f" {text} ".ljust(n, "\0") if text else "" for text in normalize_all(texts)
  ]
  lengths = np.fromiter(map(len, padded), np.int64, len(padded))
  sizes = np.maximum(lengths - n + 1, 0)
  starts = np.cumsum(lengths) - lengths - (np.cumsum(sizes) - sizes)
  positions = np.arange(sizes.sum()) + np.repeat(starts, sizes)
  text = "".join(padded)
  ids, starts_of_values = _number_ngrams(text, positions, n)
  values = [text[i : i + n].rstrip("\0") for i in starts_of_values.tolist()]
  return set_search.Bags(values, ids, sizes)


def _number_ngrams(
  text: str, positions: Int[np.ndarray, " position"], n: int
) -> tuple[Int[np.ndarray, " position"], Int[np.ndarray, " value"]]:
  """Numbers the n-grams at positions; also returns a position of each number."""
  points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
  points, first = _number_codes(
    points.astype(np.int64), points.max(initial=0) + 1
  )
  codes, size, width = points[positions], len(first), len(first)
  for offset in range(1, n):
    if size * width > _LARGEST:
      codes, first = _number_codes(codes, size)
      size = len(first)
    codes = codes * width + points[positions + offset]
    size *= width
  codes, first = _number_codes(codes, size)
  return codes, positions[first]


def _number_codes(codes: Int[np.ndarray, " position"], size: int):
  """Numbers the distinct codes below `size`; also returns an index of each."""
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
  """Returns the relation of a query to a target.

  The rule compares the sets of stemmed words, without function words. Equal
  sets are "identical". A query that only lacks words is a "generalisation", one
  that only adds words a "specialisation", one that does both a "reformulation".
  Without common words it is a "different topic". The rule knows no synonyms.

  >>> relation("solar panel makers", "solar panel makers in Europe")
  'generalisation'
  >>> relation("what is measles", "Measles")
  'identical'

  Args:
    query: text of the query.
    target: text of the target.

  Returns:
    One of `RELATIONS`.
  """
  bags = extract_stems([query, target], ignored=FUNCTION_WORDS)
  own, other = bags.sets()
  if own == other and own:
    return "identical"
  if not own & other:
    return "different topic"
  if own < other:
    return "generalisation"
  return "specialisation" if own > other else "reformulation"


def make_reformulations(query: str, number: int) -> list[str]:
  """Makes near-duplicates of a query, none of them the query itself.

  They come in this order: the keywords, which are its words without function
  words; the keywords with their halves swapped; the keywords with the longest
  one in the other number (an "s" more or less); these backwards; and all words
  with that change. Duplicates are left out, so a query of one word has few.

  >>> make_reformulations("are the dogs of the queen terriers", 3)
  ['dogs queen terriers', 'queen terriers dogs', 'dogs queen terrier']

  Args:
    query: text of the query.
    number: maximum number of texts.

  Returns:
    Different texts, normalised, possibly fewer than `number`.
  """
  words = normalize(query).split()
  keywords = [word for word in words if word not in FUNCTION_WORDS]
  keywords = keywords or words
  if not keywords:
    return []
  inflected = _inflect_longest(keywords, keywords)
  half = len(keywords) // 2
  variants = (
    keywords,
    [*keywords[half:], *keywords[:half]],
    inflected,
    inflected[::-1],
    _inflect_longest(words, keywords),
  )
  own = " ".join(words)
  texts = dict.fromkeys(map(" ".join, variants))
  return [text for text in texts if text != own][:number]


def _inflect_longest(
  words: Sequence[str], keywords: Sequence[str]
) -> list[str]:
  """Changes the number of the longest keyword, the last of equally long ones."""
  chosen = max(reversed(keywords), key=len)
  return [_change_number(word) if word == chosen else word for word in words]


def _change_number(word: str) -> str:
  """Removes an "s" from the end of a word, or adds one.

  >>> [_change_number(word) for word in ("dogs", "dog", "class", "virus")]
  ['dog', 'dogs', 'class', 'virus']
  """
  if word.endswith(("ss", "us", "is")) or not word[-1].isalpha():
    return word
  if word.endswith("s") and len(word) > 3:
    return word[:-1]
  return word if word.endswith("s") else f"{word}s"
