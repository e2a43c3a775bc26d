"""How much of a query was copied from its document, word by word.

Applied to synthetic queries and public documents it is post-processing;
applied to real queries, what it returns is private.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool

from synthq_jax.generation import text_measures

__all__ = ["are_copies", "longest_run"]


def are_copies(
  queries: Sequence[str],
  documents: Iterable[str],
  *,
  share: float,
  min_words: int,
) -> Bool[np.ndarray, " query"]:
  """Says which queries are, for the most part, one run of their document.

  A query is a copy if the longest run of consecutive words that stands in its
  document, too, has at least `min_words` words and makes up at least `share` of
  the query. Words are those of `text_measures.words`: case and punctuation do
  not count. A copy teaches a retriever to look for equal words, and a query of
  a few words (a name, a title) is none, however it came about.

  Args:
    queries: the queries.
    documents: the text that each was written for; read once.
    share: in (0, 1]; 1 names the queries that were copied as a whole.
    min_words: of the run, >= 1.

  Returns:
    One value per query; False for a query without words.

  Raises:
    ValueError: if there are more of one than of the other, or a setting is out
      of range.

  >>> are_copies(
  ...   ["all red apples rot", "why do apples rot"],
  ...   ["All red apples rot."] * 2, share=0.75, min_words=3,
  ... ).tolist()
  [True, False]
  """
  if not 0 < share <= 1 or min_words < 1:
    raise ValueError(
      "expected share in (0, 1] and min_words >= 1, got"
      f" share={share} and min_words={min_words}"
    )
  found = []
  for query, document in zip(queries, documents, strict=True):
    own = text_measures.words(query)
    run = longest_run(own, text_measures.words(document))
    found.append(run >= min_words and run >= share * len(own))
  return np.array(found, bool)


def longest_run(query: Sequence[str], document: Iterable[str]) -> int:
  """Returns the length of the longest run of words that both have.

  Exact, in time and memory linear in the two lengths: a suffix automaton of
  the query reads the document once.

  Args:
    query: its words.
    document: its words.

  Returns:
    Words of the longest common run of consecutive words.

  References:
    Blumer et al. 1985, The smallest automaton recognizing the subwords of a
    text.

  >>> longest_run("the red apples".split(), "all the red pears".split())
  2
  """
  states = _automaton(query)
  state = run = longest = 0
  for word in document:
    while state and word not in states[state].after:
      state = states[state].suffix
      run = states[state].length
    if word in states[state].after:
      state = states[state].after[word]
      run += 1
      longest = max(longest, run)
  return longest


class _State:
  """The runs of the query that end at the same of its positions."""

  __slots__ = ("after", "length", "suffix")

  def __init__(self, length: int, suffix: int, after: dict[str, int]):
    self.length = length  # of its longest run
    self.suffix = suffix  # the state of the longest suffix that ends elsewhere
    self.after = after  # word -> state


def _automaton(words: Sequence[str]) -> list[_State]:
  """Builds the suffix automaton; state 0 is the empty run."""
  states = [_State(0, -1, {})]
  last = 0
  for word in words:
    new = len(states)
    states.append(_State(states[last].length + 1, 0, {}))
    at = last
    while at >= 0 and word not in states[at].after:
      states[at].after[word] = new
      at = states[at].suffix
    if at >= 0:
      states[new].suffix = _split(states, at, word)
    last = new
  return states


def _split(states: list[_State], at: int, word: str) -> int:
  """Returns the state of exactly the runs of `at` and the word after them."""
  target = states[at].after[word]
  length = states[at].length + 1
  if states[target].length == length:
    return target
  clone = len(states)
  states.append(
    _State(length, states[target].suffix, dict(states[target].after))
  )
  states[target].suffix = clone
  while at >= 0 and states[at].after.get(word) == target:
    states[at].after[word] = clone
    at = states[at].suffix
  return clone
