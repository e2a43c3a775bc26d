"""The study's data: test queries, what leaks them, and what surely does not."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import sources
from synthq_jax.leakage import encoders, near_duplicates, relations, splits
from synthq_jax.pipeline import (
  _leakage_study_leaks,
  _leakage_study_results,
)
from synthq_jax.retrieval import bm25, trec

__all__ = ["Data", "build"]

_TRAIN = "train:"  # before ids of another collection that is trained on
_, _NEAR, _TEST = splits.NAMES

Drawn = tuple[splits.Instance, ...]


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
  facts: _leakage_study_results.Facts
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
    config: a `leakage_study.Config`.

  Raises:
    ValueError: if a source cannot be read, or has too few queries.
  """
  test, train, digests = _read(config)
  searched = train or test
  judged = test.judgements(config.test_split)
  trained = searched.judgements(config.train_split)
  pool = {query: searched.texts[query] for query in trained}
  near = _leakage_study_leaks.choose(
    config, test.texts, judged, test.all_judgements, pool
  )
  judged = {query: judged[query] for query in near}
  candidates = test.search(near, config.depth)
  leaks = _leaks(config, test, train, near, judged, candidates)
  texts = {test.texts[query] for query in near}
  texts |= {leak.query for leak in leaks[_NEAR]}
  kept = _leakage_study_leaks.surely_clean(config, pool, sorted(texts))
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
  name = "leakage_study.Config"
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
  near: _leakage_study_leaks.Found,
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
  return frozenset(_leakage_study_leaks.relevant(test.all_judgements, queries))


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
  near: _leakage_study_leaks.Found,
  judged: trec.Qrels,
  candidates: trec.Run,
  pool: Mapping[str, str],
  kept: Mapping[str, str],
) -> _leakage_study_results.Facts:
  pairs = [
    (text, test.texts[q]) for q, found in near.items() for _, text in found
  ]
  theirs, own = ([pair[side] for pair in pairs] for side in (0, 1))
  kinds = [relations.relation(*pair) for pair in pairs]
  return _leakage_study_results.Facts(
    source=sources.open(config.source).title,
    train_source=(
      sources.open(config.train_source).title if config.train_source else ""
    ),
    num_documents=len(test.data.documents),
    num_test_queries=len(near),
    num_found=sum(
      bool(_leakage_study_leaks.relevant(judged, [query]) & scores.keys())
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
