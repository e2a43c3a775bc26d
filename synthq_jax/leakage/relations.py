"""How a query relates to a near-duplicate, by a plain rule on words.

References:
  Froebe et al., "How Train-Test Leakage Affects Zero-shot Retrieval", SPIRE
  2022: the kinds, which people told apart there.
"""

from synthq_jax.leakage import _words

__all__ = ["RELATIONS", "relation"]

RELATIONS = (
  "identical",
  "generalisation",
  "specialisation",
  "reformulation",
  "different topic",
)
"""The relations, the query seen from the target."""


def relation(query: str, target: str, *, stemmer: str = "english") -> str:
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
    stemmer: a Snowball algorithm, or "" for none.

  Returns:
    One of `RELATIONS`.
  """
  own, other = _words.stem_sets(
    [query, target], stemmer=stemmer, ignored=_words.FUNCTION_WORDS
  )
  if own == other and own:
    return "identical"
  if not own & other:
    return "different topic"
  if own < other:
    return "generalisation"
  return "specialisation" if own > other else "reformulation"
