"""Near-duplicates of a query by rule: fewer words, another order or inflection.

People who ask the same thing again drop function words, turn the words around
and say "dog" for "dogs". The rules do just that, so that what comes out asks
for the same and is not the same text. They know no grammar and no synonyms:
what they make is nearer than what another person would write.
"""

from collections.abc import Sequence

from synthq_jax.leakage import _words

__all__ = ["reformulations"]


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
  words = _words.normalize(query).split()
  keywords = [word for word in words if word not in _words.FUNCTION_WORDS]
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
  texts = dict.fromkeys(" ".join(each) for each in made)
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
