"""Splits texts into sentences and chooses the most representative sentence."""

import collections
import math
import re
from collections.abc import Sequence

from synthq_jax.data import docstrings

__all__ = ["choose", "compute_idf", "split"]

_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'])")


def split(text: str) -> list[str]:
  """Splits a text after [.!?:] if a capital letter or a quotation mark follows.

  >>> split("One is here. Two is not.")
  ['One is here.', 'Two is not.']
  """
  return _END.split(text)


def compute_idf(texts: Sequence[Sequence[str]]) -> dict[str, float]:
  """Computes log(texts / texts with the word) of each word.

  Args:
    texts: the sentences of each text.
  """
  frequency: collections.Counter = collections.Counter()
  for text in texts:
    frequency.update({w for s in text for w in docstrings.words(s)})
  return {w: math.log(len(texts) / n) for w, n in frequency.items()}


def choose(
  sentences: Sequence[str], idf: dict[str, float], *, min_share: float = 0.3
) -> int | None:
  """Chooses the sentence whose words the other sentences repeat most: PEGASUS's gap.

  Candidates have 4 to 20 words, end with a full stop, and leave at least 10 words to
  the other sentences. The choice has the largest share of words, weighted by `idf`,
  that occur there.

  Args:
    sentences: the sentences of one text.
    idf: weight of each word, from `compute_idf`.
    min_share: the share that the choice must exceed.

  Returns:
    The position of the sentence, or None if there is none.

  References:
    Zhang et al., PEGASUS, ICML 2020, section 3.1.
  """
  words = [docstrings.words(sentence) for sentence in sentences]
  best, best_share = None, min_share
  for position, sentence in enumerate(words):
    fits = 4 <= len(sentence) <= 20 and sentences[position].endswith(".")
    if not fits or sum(map(len, words)) - len(sentence) < 10:
      continue
    rest = {w for i, s in enumerate(words) if i != position for w in s}
    weights = {w: idf.get(w, 0.0) for w in sentence}
    share = sum(v for w, v in weights.items() if w in rest)
    share /= sum(weights.values()) + 1e-9
    if share > best_share:
      best, best_share = position, share
  return best
