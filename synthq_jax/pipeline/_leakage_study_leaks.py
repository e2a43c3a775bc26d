"""Which test queries a study has, and the near-duplicates that leak them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.leakage import near_duplicates, words
from synthq_jax.retrieval import trec

__all__ = ["NEAR", "choose", "relevant", "surely_clean"]

NEAR = ("siblings", "reformulations", "train_source")
"""Where near-duplicates of test queries come from.

"siblings": other judged queries with a relevant document in common, in other
people's words, which the detector takes for near-duplicates. "reformulations":
rules (`leakage.reformulations`), for collections with too few siblings.
"train_source": near-duplicates in the collection that is trained on, with that
collection's documents, as in Fröbe et al.
"""

_REFORMULATIONS = 4  # of one test query, at most

Found = dict[str, list[tuple[str, str]]]
"""Test query -> (id, text) of its near-duplicates."""


def choose(
  config: Any,
  texts: Mapping[str, str],
  judged: trec.Qrels,
  everything: trec.Qrels,
  pool: Mapping[str, str],
) -> Found:
  """Draws test queries, with the near-duplicates of each.

  Where near-duplicates are siblings, two test queries have no relevant document
  in common: one might be the near-duplicate of the other.

  Args:
    config: a `leakage_study.Config`.
    texts: query id -> text, of the test collection.
    judged: judgements of the split that test queries are drawn from.
    everything: judgements of all its splits.
    pool: query id -> text, of the queries that are trained on.

  Returns:
    As many test queries as the settings say, in random order.

  Raises:
    ValueError: if too few test queries can be drawn.
  """
  answerable = [query for query in judged if relevant(judged, [query])]
  order = np.random.default_rng([config.seed, 1]).permutation(len(answerable))
  drawn = [sorted(answerable)[place] for place in order]
  near = _finder(config, texts, everything, pool, drawn)
  found: Found = {}
  taken: set[str] = set()
  for query in drawn:
    if len(found) == config.num_test_queries:
      break
    others = near(query)
    if not others and config.near != "train_source":
      continue
    if config.near == "siblings":
      documents = relevant(everything, [query])
      if documents & taken:
        continue
      taken |= documents
    found[query] = others
  if len(found) < (config.num_test_queries or 2):
    raise ValueError(
      f"expected {config.num_test_queries or 2} test queries with"
      f" near-duplicates ({config.near}), got"
      f" {len(found)} of {len(answerable)}: ask for fewer"
      " (leakage_study.Config.num_test_queries), lower near_threshold, or set"
      " near to another way"
    )
  return found


def relevant(qrels: trec.Qrels, queries: Iterable[str]) -> set[str]:
  """Returns the documents that are relevant to any of the queries."""
  return {
    document
    for query in queries
    for document, grade in qrels.get(query, {}).items()
    if grade > 0
  }


def surely_clean(
  config: Any, pool: Mapping[str, str], leaked: Sequence[str]
) -> dict[str, str]:
  """Leaves out the queries that any detector matches with one that is leaked.

  Args:
    config: with the thresholds, lower than those of near-duplicates.
    pool: query id -> text.
    leaked: texts of test queries and their near-duplicates.
  """
  marked = np.zeros(len(pool), bool)
  for detector in (
    near_duplicates.Exact(),
    config.words(config.filler_threshold),
    near_duplicates.Containment(threshold=config.filler_containment),
  ):
    marked |= near_duplicates.share_with_match(
      list(pool.values()), leaked, detector
    )
  return {
    query: text
    for (query, text), is_near in zip(pool.items(), marked, strict=True)
    if not is_near
  }


def _finder(
  config: Any,
  texts: Mapping[str, str],
  everything: trec.Qrels,
  pool: Mapping[str, str],
  drawn: Sequence[str],
) -> Callable[[str], list[tuple[str, str]]]:
  """Returns what finds the near-duplicates of a test query."""
  if config.near == "reformulations":
    return lambda query: [
      (f"{query}.near{place}", text)
      for place, text in enumerate(
        words.reformulations(texts[query], _REFORMULATIONS), 1
      )
    ]
  if config.near == "siblings":
    return _siblings(config, texts, everything)
  return _in_pool(config, texts, pool, drawn).__getitem__


def _siblings(
  config: Any, texts: Mapping[str, str], everything: trec.Qrels
) -> Callable[[str], list[tuple[str, str]]]:
  """Returns what finds queries that share a relevant document, and words."""
  places = {query: place for place, query in enumerate(everything)}
  asking: dict[str, list[str]] = {}
  for query in everything:
    for document in relevant(everything, [query]):
      asking.setdefault(document, []).append(query)

  def near(query: str) -> list[tuple[str, str]]:
    own = relevant(everything, [query])
    sharing = {other for document in own for other in asking[document]}
    others = [
      other
      for other in sorted(sharing, key=places.__getitem__)
      if texts[other] != texts[query]
    ]
    scores = config.words(config.near_threshold).scores(
      [texts[other] for other in others], [texts[query]] * len(others)
    )
    return [
      (other, texts[other])
      for other, score in zip(others, scores, strict=True)
      if score >= config.near_threshold
    ]

  return near


def _in_pool(
  config: Any,
  texts: Mapping[str, str],
  pool: Mapping[str, str],
  drawn: Sequence[str],
) -> Found:
  found: Found = {query: [] for query in drawn}
  matches = near_duplicates.find(
    (near_duplicates.Text(id=id_, text=text) for id_, text in pool.items()),
    [near_duplicates.Text(id=query, text=texts[query]) for query in drawn],
    config.words(config.near_threshold),
  )
  for match in matches:
    found[match.target_id].append((match.query_id, match.query))
  return found
