"""Whether written texts tell the secrets of canaries."""

import dataclasses
import re
from collections.abc import Iterable

from synthq_jax.audit import canaries as canaries_lib

__all__ = ["Written", "stands_in"]

_RUN = re.compile(r"[0-9](?:[\W_]*[0-9])*")
_SIGNS = re.compile(r"[\W_]+")


@dataclasses.dataclass(frozen=True)
class Written:
  """Texts, prepared once for the search of many secrets."""

  digits: str
  """Digits between which nothing but spaces and signs stands, run by run."""
  words: str
  """Words with one space between them, text by text."""

  @classmethod
  def of(cls, texts: Iterable[str]) -> "Written":
    """Reads texts, each by itself: no secret goes on in the next.

    Args:
      texts: read once.
    """
    digits, words = [], []
    for text in texts:
      found = _RUN.findall(text)
      digits += [_SIGNS.sub("", run) for run in found]
      words.append(" ".join(text.split()))
    return cls("\n".join(digits), " " + " \n ".join(words) + " ")

  def tell(self, canary: canaries_lib.Canary) -> bool:
    """Says whether a text tells the secret, see `stands_in`."""
    symbols = canaries_lib.KINDS[canary.kind].symbols
    if symbols == "new tokens":
      return False
    if symbols == "words":
      return f" {canary.spelled} " in self.words
    return canary.spelled in self.digits


def stands_in(canary: canaries_lib.Canary, text: str) -> bool:
  """Says whether a text tells the secret, however its symbols are spaced.

  False for new tokens, which no text can tell.

  >>> canary = canaries_lib.Canary(
  ...     kind="own_query", document="", query="", secret=(5, 4), spelled="21",
  ...     repetitions=1, inserted=True)
  >>> stands_in(canary, "code: 2-1"), stands_in(canary, "code: 2 of 1")
  (True, False)
  """
  return Written.of([text]).tell(canary)
