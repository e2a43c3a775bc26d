"""Texts as parts of seeds."""

import hashlib

import numpy as np

__all__ = ["words"]


def words(text: str | bytes) -> list[int]:
  """Returns a digest of a text as four numbers of 32 bits.

  Unlike `hash` it is the same in every process.

  >>> len(words("NINDS")), words("NINDS") == words(b"NINDS")
  (4, True)

  Args:
    text: such as the name of a client.
  """
  text = text.encode() if isinstance(text, str) else text
  digest = hashlib.sha256(text).digest()[:16]
  return np.frombuffer(digest, "<u4").tolist()
