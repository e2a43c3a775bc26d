"""Public text for pre-training: the bodies of installed packages' docstrings.

First paragraphs never enter: they play the private queries of the demo set.
Other packages repeat them word for word in their bodies, so passages that
hold too much of a held-out query are dropped and counted.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator

from synthq_jax.data import docstrings

__all__ = [
  "HeldOut",
  "PublicText",
  "containment",
  "digest",
  "passages",
  "read",
  "split_sentences",
]

_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'])")
_NGRAM = 8


@dataclasses.dataclass(frozen=True)
class PublicText:
  """Passages for pre-training, each a tuple of sentences."""

  passages: tuple[tuple[str, ...], ...]
  """Public passages, none of which gives a held-out query away."""
  dropped: int
  """Sentences left out because they repeat a held-out query."""
  packages: tuple[str, ...]
  """Name and version of every package that was read."""


class HeldOut:
  """Finds text that repeats held-out queries.

  A query counts as repeated where half or more of its 8-grams of words stand
  in the text; a query of fewer than 8 words where it stands there whole. One
  or two words are nobody's secret and do not count.
  """

  def __init__(self, queries: Iterable[str]):
    self._grams = {gram for query in queries for gram in grams(query)}
    self._lengths = {len(gram) for gram in self._grams}

  def grams_in(self, text: str) -> Iterator[tuple[str, ...]]:
    """Yields the n-grams of held-out queries that stand in the text."""
    words = docstrings.words(text)
    for length in self._lengths:
      for i in range(len(words) - length + 1):
        if (gram := tuple(words[i : i + length])) in self._grams:
          yield gram

  def repeats(self, text: str) -> bool:
    """Whether the text holds any n-gram of a held-out query."""
    return next(self.grams_in(text), None) is not None


def grams(query: str) -> list[tuple[str, ...]]:
  """Returns the 8-grams of a query, or the whole of a shorter one.

  >>> grams("one two three")
  [('one', 'two', 'three')]
  >>> len(grams("a b c d e f g h i"))
  2
  """
  words = tuple(docstrings.words(query))
  if len(words) < 3:
    return []
  if len(words) <= _NGRAM:
    return [words]
  return [words[i : i + _NGRAM] for i in range(len(words) - _NGRAM + 1)]


def read(
  packages: Iterable[str], held_out: HeldOut, *, max_words: int = 90
) -> PublicText:
  """Reads the docstring bodies of packages as passages of sentences.

  Args:
    packages: top-level names; one that is not installed is left out.
    held_out: what must not come through.
    max_words: length at which a passage is closed.

  Returns:
    The passages, in the order of packages and files, without repetitions.
  """
  found, dropped, versions = [], 0, []
  seen: set[str] = set()
  for package in packages:
    try:
      entries = list(docstrings.read(package))
    except ValueError:
      continue
    versions.append(f"{package}=={docstrings.version(package)}")
    for entry in entries:
      kept = []
      for sentence in split_sentences(entry.rest):
        if held_out.repeats(sentence):
          dropped += 1
        elif sentence not in seen:
          seen.add(sentence)
          kept.append(sentence)
      found.extend(passages(kept, max_words))
  clean = tuple(p for p in found if not held_out.repeats(" ".join(p)))
  dropped += sum(len(p) for p in found) - sum(len(p) for p in clean)
  return PublicText(clean, dropped, tuple(versions))


def split_sentences(text: str) -> list[str]:
  """Cuts a text behind full stops and colons that a capital follows.

  >>> split_sentences("One is here. Two is not.")
  ['One is here.', 'Two is not.']
  """
  return _SENTENCE.split(text)


def passages(sentences: Iterable[str], max_words: int) -> list[tuple[str, ...]]:
  """Joins consecutive sentences into passages of about `max_words` words.

  >>> passages(["one two", "three", "four five six"], 3)
  [('one two', 'three'), ('four five six',)]
  """
  done, current, length = [], [], 0
  for sentence in sentences:
    words = sentence.split()[:max_words]
    if current and length + len(words) > max_words:
      done.append(tuple(current))
      current, length = [], 0
    current.append(" ".join(words))
    length += len(words)
  if current:
    done.append(tuple(current))
  return [
    p for p in done if sum(len(s.split()) for s in p) >= min(8, max_words)
  ]


def digest(text: PublicText) -> str:
  """Returns the SHA-256 of all passages, in order."""
  state = hashlib.sha256()
  for passage in text.passages:
    state.update("\n".join(passage).encode() + b"\n\n")
  return state.hexdigest()


def containment(queries: Iterable[str], text: PublicText) -> list[float]:
  """Returns for each query the share of its n-grams that stand in the text.

  The measure behind the promise that no held-out query is in the pre-training
  text: over the whole text, not passage by passage.
  """
  queries = list(queries)
  held_out = HeldOut(queries)
  present = {
    gram
    for passage in text.passages
    for gram in held_out.grams_in(" ".join(passage))
  }
  shares = []
  for query in queries:
    own = grams(query)
    shares.append(sum(g in present for g in own) / len(own) if own else 0.0)
  return shares
