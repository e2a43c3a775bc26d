"""Draws test queries, what leaks them, and what surely does not."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import sources
from synthq_jax.leakage import (
  encoders,
  near_duplicates,
  reformulations,
  relations,
  splits,
)
from synthq_jax.retrieval import bm25, trec

__all__ = ["NEAR", "Data", "Facts", "build"]

NEAR = ("siblings", "reformulations", "train_source")
"""Where near-duplicates of test queries come from.

"siblings": other judged queries with a relevant document in common, in other
people's words, which the detector takes for near-duplicates. "reformulations":
rules (`leakage.reformulations`), for collections with too few siblings.
"train_source": near-duplicates in the collection that is trained on, with that
collection's documents, as in Fröbe et al.
"""

_TRAIN = "train:"  # before ids of another collection that is trained on
_REFORMULATIONS = 4  # of one test query, at most
_, _NEAR, _TEST = splits.NAMES

Drawn = tuple[splits.Instance, ...]
Found = dict[str, list[tuple[str, str]]]
"""Test query -> (id, text) of its near-duplicates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data, and how near the near-duplicates are."""

  source: str
  """Of test queries and documents."""
  train_source: str
  """Of the other training instances, "" if the same."""
  num_documents: int
  """Of the test collection."""
  num_test_queries: int
  """Scored."""
  num_found: int
  """Test queries of which BM25 finds a relevant document."""
  num_pool: int
  """Judged queries that training instances may be of."""
  num_left_out: int
  """Of these, queries that a detector matched with a test query or one of its
  near-duplicates, or that are test queries: never trained on as filler."""
  near: str
  """Where near-duplicates come from, one of `NEAR`."""
  num_near: int
  """Near-duplicates that were leaked."""
  num_near_targets: int
  """Test queries that have one."""
  num_leaked: int
  """Leaked instances of a training set with leakage."""
  relations: dict[str, int]
  """Near-duplicates by their relation to their test query."""
  similarities: dict[str, list[float]]
  """Detector -> smallest, mean and largest score of near-duplicate and test
  query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """All that trainings read.

  Attributes:
    queries: test query id -> text.
    qrels: their judgements.
    candidates: BM25's best documents for each.
    fillers: one for each seed, as long as the largest set.
    leaked: kind of leakage -> leaked instances of each seed.
    documents: document id -> text, of all that anything above names.
    facts: counts for the report.
    digest: of the sources and of what was drawn.
  """

  queries: Mapping[str, str]
  qrels: trec.Qrels
  candidates: trec.Run
  fillers: tuple[Drawn, ...]
  leaked: Mapping[str, tuple[Drawn, ...]]
  documents: Mapping[str, str]
  facts: Facts
  digest: str

  def split(self, name: str, size: int, seed: int) -> splits.Split:
    """Returns one of the training sets."""
    leaks = self.leaked[name][seed] if name in self.leaked else ()
    return splits.build(name, self.fillers[seed], leaks, size=size, seed=seed)


class _Searchable:
  """A collection and BM25 on it; document ids get a prefix."""

  def __init__(self, data: collection_lib.Collection, prefix: str = ""):
    self.data, self._prefix = data, prefix
    self.texts = {query.id: query.text for query in data.queries}

  @functools.cached_property
  def _index(self) -> bm25.Index:
    return bm25.BM25().build(
      [f"{self._prefix}{id_}" for id_ in self.data.document_ids()],
      (document.contents for document in self.data.documents),
    )

  @functools.cached_property
  def all_judgements(self) -> trec.Qrels:
    return self.judgements("+".join(self.data.qrels))

  def judgements(self, split: str) -> trec.Qrels:
    found = collection_lib.join_splits(self.data, split).judgements(split)
    return {
      query: {f"{self._prefix}{id_}": grade for id_, grade in grades.items()}
      for query, grades in found.items()
    }

  def search(self, queries: Iterable[str], depth: int) -> trec.Run:
    ids = list(queries)
    texts = [self.texts[query] for query in ids]
    return self._index.search_run(ids, texts, depth)

  def contents(self, wanted: set[str]) -> dict[str, str]:
    return {
      name: document.contents
      for document in self.data.documents
      if (name := f"{self._prefix}{document.id}") in wanted
    }


def build(config: Any) -> Data:
  """Reads the sources, chooses test queries and draws all instances.

  Args:
    config: a `planted_leakage.Config`.

  Raises:
    ValueError: if a source cannot be read, or has too few queries.
  """
  test, train, digests = _read(config)
  searched = train or test
  judged = test.judgements(config.test_split)
  trained = searched.judgements(config.train_split)
  pool = {query: searched.texts[query] for query in trained}
  near = _choose(config, test.texts, judged, test.all_judgements, pool)
  judged = {query: judged[query] for query in near}
  candidates = test.search(near, config.depth)
  leaks = _leaks(config, test, train, near, judged, candidates)
  texts = {test.texts[query] for query in near}
  texts |= {leak.query for leak in leaks[_NEAR]}
  kept = _surely_clean(config, pool, sorted(texts))
  if train is None:
    kept = {query: text for query, text in kept.items() if query not in near}
  drawn_from = splits.Pool(
    queries=kept,
    qrels=trained,
    search=lambda ids: searched.search(ids, config.depth),
    forbidden=_forbidden(train, test, near),
  )
  seeds = range(max(model.seeds for model in config.models))
  fillers = tuple(
    splits.filler(drawn_from, max(config.sizes), seed=seed) for seed in seeds
  )
  leaked = {
    name: tuple(
      splits.leaked(e, config.num_leaked, seed=seed) for seed in seeds
    )
    for name, e in leaks.items()
  }
  wanted = _named(candidates, [*fillers, *leaked[_NEAR], *leaked[_TEST]])
  return Data(
    queries={query: test.texts[query] for query in near},
    qrels=judged,
    candidates=candidates,
    fillers=fillers,
    leaked=leaked,
    documents=test.contents(wanted)
    | ({} if train is None else train.contents(wanted)),
    facts=_facts(config, test, near, judged, candidates, pool, kept),
    digest=artifacts.fingerprint(
      digests,
      candidates,
      *map(_key, [*fillers, *leaked[_NEAR], *leaked[_TEST]]),
    ),
  )


def _read(config: Any) -> tuple[_Searchable, _Searchable | None, list[str]]:
  """Reads the collections of tests and, if it is another, of training."""
  name = "planted_leakage.Config"
  places = [sources.open(config.source, f"{name}.source", seed=config.seed)]
  if config.train_source is not None:
    places.append(sources.open(config.train_source, f"{name}.train_source"))
  read = [
    _Searchable(place.read(), prefix)
    for place, prefix in zip(places, ("", _TRAIN), strict=False)
  ]
  train = read[1] if len(read) > 1 else None
  return read[0], train, [place.digest() for place in places]


def _leaks(
  config: Any,
  test: _Searchable,
  train: _Searchable | None,
  near: Found,
  judged: trec.Qrels,
  candidates: trec.Run,
) -> dict[str, list[splits.Leak]]:
  """Returns what leaks the test queries, with documents to train on.

  Where the near-duplicates come with no documents of their own, they are leaked
  with those of the test query: the two kinds then differ in the query alone.
  """
  forbidden = _forbidden(None, test, near)
  others = splits.negatives_of(candidates, judged, forbidden)
  own = [
    _leak(query, query, test.texts[query], judged[query], others.get(query, ()))
    for query in near
  ]
  if train is None:
    copies = [
      _leak(query, id_, text, judged[query], others.get(query, ()))
      for query, found in near.items()
      for id_, text in found
    ]
    return {_NEAR: copies, _TEST: own}
  qrels = train.judgements(config.train_split)
  ids = {id_ for found in near.values() for id_, _ in found}
  run = train.search(sorted(ids), config.depth)
  theirs = splits.negatives_of(run, {id_: qrels[id_] for id_ in run})
  foreign = [
    _leak(query, id_, text, qrels[id_], theirs.get(id_, ()))
    for query, found in near.items()
    for id_, text in found
  ]
  return {_NEAR: foreign, _TEST: own}


def _leak(
  target: str,
  query_id: str,
  query: str,
  grades: Mapping[str, int],
  non_relevant: Sequence[str],
) -> splits.Leak:
  return splits.Leak(
    target=target,
    query_id=query_id,
    query=query,
    relevant=tuple(id_ for id_, grade in grades.items() if grade > 0),
    non_relevant=tuple(non_relevant),
  )


def _forbidden(
  train: _Searchable | None, test: _Searchable, queries: Iterable[str]
) -> frozenset[str]:
  """Returns documents relevant to a test query, if they can be trained on."""
  if train is not None:
    return frozenset()
  return frozenset(_relevant(test.all_judgements, queries))


def _named(candidates: trec.Run, drawn: Iterable[Drawn]) -> set[str]:
  """Returns the documents whose text is needed."""
  found = {id_ for scores in candidates.values() for id_ in scores}
  for instances in drawn:
    found |= {each.relevant_id for each in instances}
    found |= {each.non_relevant_id for each in instances}
  return found


def _key(instances: Drawn) -> list[tuple[str, ...]]:
  return [dataclasses.astuple(each) for each in instances]


def _facts(
  config: Any,
  test: _Searchable,
  near: Found,
  judged: trec.Qrels,
  candidates: trec.Run,
  pool: Mapping[str, str],
  kept: Mapping[str, str],
) -> Facts:
  pairs = [
    (text, test.texts[q]) for q, found in near.items() for _, text in found
  ]
  theirs, own = ([pair[side] for pair in pairs] for side in (0, 1))
  kinds = [relations.relation(*pair) for pair in pairs]
  return Facts(
    source=sources.open(config.source).title,
    train_source=(
      sources.open(config.train_source).title if config.train_source else ""
    ),
    num_documents=len(test.data.documents),
    num_test_queries=len(near),
    num_found=sum(
      bool(_relevant(judged, [query]) & scores.keys())
      for query, scores in candidates.items()
    ),
    num_pool=len(pool),
    num_left_out=len(pool) - len(kept),
    near=config.near,
    num_near=len(pairs),
    num_near_targets=sum(bool(found) for found in near.values()),
    num_leaked=config.num_leaked,
    relations={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    similarities={
      detector.name: _spread(detector.scores(theirs, own))
      for detector in (
        near_duplicates.Exact(),
        config.words(config.near_threshold),
        near_duplicates.Containment(),
        near_duplicates.Embedding(encode=encoders.own()),
      )
    },
  )


def _spread(scores: np.ndarray) -> list[float]:
  return [float(scores.min()), float(scores.mean()), float(scores.max())]


# Which test queries there are, and the near-duplicates that leak them.


def _choose(
  config: Any,
  texts: Mapping[str, str],
  judged: trec.Qrels,
  everything: trec.Qrels,
  pool: Mapping[str, str],
) -> Found:
  """Draws test queries, with the near-duplicates of each.

  Where near-duplicates are siblings, two test queries have no relevant document
  in common: one might be the near-duplicate of the other.
  """
  answerable = [query for query in judged if _relevant(judged, [query])]
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
      documents = _relevant(everything, [query])
      if documents & taken:
        continue
      taken |= documents
    found[query] = others
  if len(found) < (config.num_test_queries or 2):
    raise ValueError(
      f"expected {config.num_test_queries or 2} test queries with"
      f" near-duplicates ({config.near}), got"
      f" {len(found)} of {len(answerable)}: ask for fewer"
      " (planted_leakage.Config.num_test_queries), lower near_threshold, or set"
      " near to another way"
    )
  return found


def _relevant(qrels: trec.Qrels, queries: Iterable[str]) -> set[str]:
  """Returns the documents that are relevant to any of the queries."""
  return {
    document
    for query in queries
    for document, grade in qrels.get(query, {}).items()
    if grade > 0
  }


def _surely_clean(
  config: Any, pool: Mapping[str, str], leaked: Sequence[str]
) -> dict[str, str]:
  """Leaves out the queries that any detector matches with one that is leaked."""
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
        reformulations.reformulations(texts[query], _REFORMULATIONS), 1
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
    for document in _relevant(everything, [query]):
      asking.setdefault(document, []).append(query)

  def near(query: str) -> list[tuple[str, str]]:
    own = _relevant(everything, [query])
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
