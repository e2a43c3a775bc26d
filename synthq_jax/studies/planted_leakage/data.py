"""Draws test queries, instances that leak them, and filler that does not."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import query_pairs, sources
from synthq_jax.leakage import near_duplicates, splits, words
from synthq_jax.retrieval import bm25, trec
from synthq_jax.storage import artifacts

__all__ = ["NEAR", "NEGATIVES", "Data", "Facts", "build"]

NEAR = ("siblings", "reformulations", "verified")
"""Origins of near-duplicates of test queries.

- "siblings": other judged queries, in other people's words, that share a relevant
  document and that the detector reports as near-duplicates.
- "reformulations": near-duplicates by rule (`words.make_reformulations`), for
  collections with too few siblings.
- "verified": near-duplicates in the collection to train on, with that collection's
  documents, as in Fröbe et al.: a list of pairs that people judged.
"""

NEGATIVES = ("bm25", "judged")
"""Kinds of non-relevant documents of leaked instances."""

_WORDS, _FILLER_WORDS = (
  near_duplicates.TokenSet(
    threshold=threshold, ignored=near_duplicates.FUNCTION_WORDS
  )
  for threshold in (0.6, 0.5)
)
"""Detectors of near-duplicates, and of queries that are no filler: the latter finds
more, so that no filler is a near-duplicate."""
_TRAIN = "train:"  # prefix of document ids of another collection to train on
_REFORMULATIONS = 4  # maximum number for a test query
_, _NEAR, _TEST = splits.NAMES

Drawn = tuple[splits.Triple, ...]
Found = dict[str, list[tuple[str, str]]]
"""Test query -> (id, text) of its near-duplicates."""
Near = Callable[[str], list[tuple[str, str]]]
"""Function that finds the near-duplicates, (id, text), of a test query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data."""

  source: str
  """Title of the source of test queries and documents."""
  train_source: str
  """Title of the source of the other training instances, "" for `source`."""
  num_documents: int
  """Documents of the test collection."""
  num_test_queries: int
  """Test queries, all of which are leaked."""
  num_scored: int
  """Test queries that are scored."""
  num_found: int
  """Test queries with a relevant document among BM25's candidates."""
  num_pool: int
  """Judged queries available for training instances."""
  num_left_out: int
  """Judged queries that are never filler: test queries, and queries that a
  detector matched with a test query or one of its near-duplicates."""
  near: str
  """Origin of near-duplicates, one of `NEAR`."""
  num_near: int
  """Near-duplicates of test queries that may be leaked."""
  num_near_targets: int
  """Test queries that have a near-duplicate."""
  num_leaked: int
  """Leaked instances of a training set with leakage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """The data of all trainings.

  Attributes:
    queries: test query id -> text.
    qrels: judgements of the test queries.
    candidates: BM25's best documents for each test query.
    fillers: filler of each seed, as long as the largest training set.
    leaked: kind of leakage -> leaked triples of each seed.
    documents: document id -> text, for all documents named above.
    leaking: ids of test queries with a near-duplicate.
    facts: counts for the report.
    digest: fingerprint of the sources, candidates and drawn triples.
  """

  queries: Mapping[str, str]
  qrels: trec.Qrels
  candidates: trec.Run
  fillers: tuple[Drawn, ...]
  leaked: Mapping[str, tuple[Drawn, ...]]
  documents: Mapping[str, str]
  leaking: frozenset[str]
  facts: Facts
  digest: str

  def triples(self, name: str, size: int, seed: int) -> Drawn:
    """Returns one of the training sets, of `size` instances, filler first."""
    leaks = self.leaked[name][seed] if name in self.leaked else ()
    return (*self.fillers[seed][: size // 2 - len(leaks)], *leaks)

  def ranked(self, seed: int) -> trec.Run:
    """Returns the candidates, followed by leaked documents that BM25 missed."""
    run = {query: dict(scores) for query, scores in self.candidates.items()}
    for each in itertools.chain(
      *(drawn[seed] for drawn in self.leaked.values())
    ):
      for document in (each.relevant_id, each.non_relevant_id):
        run.setdefault(each.target, {}).setdefault(document, -1.0)
    return run


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

  def judgements(self, split: str, *, lacking: bool = False) -> trec.Qrels:
    """Returns judgements of the collection's documents.

    With `lacking`, judgements of missing documents are included. Training cannot
    use these, but the scores of a run count them.
    """
    data = collection_lib.join_splits(self.data, split)
    qrels = (data if lacking else data.without_lacking([split])).judgements(
      split
    )
    return {
      query: {f"{self._prefix}{id_}": grade for id_, grade in grades.items()}
      for query, grades in qrels.items()
    }

  def search(self, queries: Iterable[str], depth: int) -> trec.Run:
    ids = list(queries)
    texts = [self.texts[query] for query in ids]
    return self._index.search_run(ids, texts, depth)

  def contents(self, ids: set[str]) -> dict[str, str]:
    return {
      name: document.contents
      for document in self.data.documents
      if (name := f"{self._prefix}{document.id}") in ids
    }

  def with_contents(self, texts: set[str]) -> set[str]:
    return {
      f"{self._prefix}{document.id}"
      for document in self.data.documents
      if document.contents in texts
    }


def build(config: Any) -> Data:
  """Reads the sources, chooses test queries and draws all instances.

  Args:
    config: a `planted_leakage.Config`.

  Raises:
    ValueError: if a source cannot be read, or has too few queries.
  """
  return _Sampler(config).data()


def _add_queries(
  first: collection_lib.Collection,
  second: collection_lib.Collection,
  split: str,
) -> collection_lib.Collection:
  """Adds the queries of a second collection about the documents of the first."""
  ids = set(first.document_ids())
  added = {
    query: judged
    for query, grades in second.qrels.get(split, {}).items()
    if (judged := {id_: g for id_, g in grades.items() if id_ in ids})
  }
  if not added:
    raise ValueError(
      "planted_leakage.Config.more_queries must name a source with judgements"
      f" ({split}) of the documents of train_source, got none: give another"
      " source or train_split"
    )
  return dataclasses.replace(
    first,
    queries=(
      *first.queries,
      *(query for query in second.queries if query.id in added),
    ),
    qrels=first.qrels | {split: first.qrels.get(split, {}) | added},
  )


class _Sampler:
  """The test collection and the collection to train on, and draws from them."""

  def __init__(self, config: Any):
    self.config, name = config, "planted_leakage.Config"
    opened = [sources.open(config.source, f"{name}.source", seed=config.seed)]
    if config.train_source is not None:
      opened.append(sources.open(config.train_source, f"{name}.train_source"))
    if config.more_queries is not None:
      opened.append(sources.open(config.more_queries, f"{name}.more_queries"))
    self.titles = [source.title for source in opened]
    self.digests = [source.digest() for source in opened]
    self.test = _Searchable(opened[0].read())
    self.train = None
    self.more: frozenset[str] = frozenset()
    if len(opened) > 1:
      collection = opened[1].read()
      if len(opened) > 2:
        more = opened[2].read()
        self.more = frozenset(query.id for query in more.queries)
        collection = _add_queries(collection, more, config.train_split)
      self.train = _Searchable(collection, _TRAIN)
    self.searched = self.train or self.test
    self.judged = self.test.judgements(config.test_split)
    self.everything = self.test.judgements("+".join(self.test.data.qrels))
    self.trained = self.searched.judgements(config.train_split)
    self.pool = {query: self.searched.texts[query] for query in self.trained}

  def data(self) -> Data:
    config, texts = self.config, self.test.texts
    near = self.choose()
    judged = {query: self.judged[query] for query in near}
    candidates = self.test.search(near, config.depth)
    leaks = self.leaks(near, judged, candidates)
    leaked_texts = {texts[query] for query in near}
    leaked_texts |= {leak.query for leak in leaks[_NEAR]}
    clean = self.find_clean(sorted(leaked_texts))
    if self.train is None:
      clean = {
        query: text for query, text in clean.items() if query not in near
      }
    drawn_from = splits.Pool(
      queries=clean,
      qrels=self.trained,
      search=lambda ids: self.searched.search(ids, config.depth),
      forbidden=self.find_forbidden(near, self.searched),
      second=self.more,
    )
    seeds = range(max(model.seeds for model in config.models))
    fillers = tuple(
      splits.draw_filler(drawn_from, max(config.sizes) // 2, seed=seed)
      for seed in seeds
    )
    leaked = {
      name: tuple(
        splits.draw_leaked(
          leaks_of_kind,
          config.num_leaked // 2,
          seed=seed,
          different=name == _NEAR and config.near == "verified",
        )
        for seed in seeds
      )
      for name, leaks_of_kind in leaks.items()
    }
    drawn = [*fillers, *leaked[_NEAR], *leaked[_TEST]]
    ids = {id_ for scores in candidates.values() for id_ in scores}
    for each in itertools.chain(*drawn):
      ids |= {each.relevant_id, each.non_relevant_id}
    documents = self.test.contents(ids)
    if self.train is not None:
      documents |= self.train.contents(ids)
    scored = self.test.judgements(config.test_split, lacking=True)
    return Data(
      queries={query: texts[query] for query in near},
      qrels={query: scored[query] for query in near},
      candidates=candidates,
      fillers=fillers,
      leaked=leaked,
      documents=documents,
      leaking=frozenset(query for query, others in near.items() if others),
      facts=self.facts(near, judged, candidates, clean),
      digest=artifacts.fingerprint(
        self.digests,
        candidates,
        *([dataclasses.astuple(each) for each in triples] for triples in drawn),
      ),
    )

  def choose(self) -> Found:
    """Draws test queries, with the near-duplicates of each.

    If near-duplicates are siblings, two test queries share no relevant document:
    one might be the near-duplicate of the other.
    """
    config, judged = self.config, self.judged
    answerable = sorted(q for q in judged if _get_relevant(judged, [q]))
    order = np.random.default_rng([config.seed, 1]).permutation(len(answerable))
    drawn = [answerable[index] for index in order]
    near = getattr(self, f"from_{config.near}")(drawn)
    chosen: Found = {}
    taken: set[str] = set()
    for query in drawn:
      if len(chosen) == config.num_test_queries:
        break
      others = near(query)
      if not others and config.near != "verified":
        continue
      if config.near == "siblings":
        documents = _get_relevant(self.everything, [query])
        if documents & taken:
          continue
        taken |= documents
      chosen[query] = others
    if len(chosen) < (config.num_test_queries or 2):
      raise ValueError(
        f"expected {config.num_test_queries or 2} test queries with"
        f" near-duplicates ({config.near}), got"
        f" {len(chosen)} of {len(answerable)}: ask for fewer"
        " (planted_leakage.Config.num_test_queries), or set near to another way"
      )
    return chosen

  def from_reformulations(self, drawn: Sequence[str]) -> Near:
    """Makes near-duplicates of a test query by rule."""
    del drawn
    return lambda query: [
      (f"{query}.near{number}", text)
      for number, text in enumerate(
        words.make_reformulations(self.test.texts[query], _REFORMULATIONS),
        1,
      )
    ]

  def from_siblings(self, drawn: Sequence[str]) -> Near:
    """Finds queries that share a relevant document, and words."""
    del drawn
    everything, texts = self.everything, self.test.texts
    positions = {query: index for index, query in enumerate(everything)}
    asking: dict[str, list[str]] = {}
    for query in everything:
      for document in _get_relevant(everything, [query]):
        asking.setdefault(document, []).append(query)

    def near(query: str) -> list[tuple[str, str]]:
      own = _get_relevant(everything, [query])
      sharing = {other for document in own for other in asking[document]}
      others = [
        (other, texts[other])
        for other in sorted(sharing, key=positions.__getitem__)
        if texts[other] != texts[query]
      ]
      scores = _WORDS.scores(
        [text for _, text in others], [texts[query]] * len(others)
      )
      scored = zip(others, scores, strict=True)
      return [other for other, score in scored if score >= _WORDS.threshold]

    return near

  def from_verified(self, drawn: Sequence[str]) -> Near:
    """Reads the verified pairs whose test query and other query exist."""
    pairs: Found = {query: [] for query in drawn}
    for topic, query in query_pairs.verified(self.config.verified):
      if topic in pairs and query in self.pool:
        pairs[topic].append((query, self.pool[query]))
    return pairs.__getitem__

  def leaks(
    self, near: Found, judged: trec.Qrels, candidates: trec.Run
  ) -> dict[str, list[splits.Leak]]:
    """Returns the leaks of the test queries, with documents to train on.

    Near-duplicates of the test collection are leaked with the documents of the
    test query, so both kinds of leakage differ only in the query's words.
    """
    others = self.negatives(
      candidates, judged, self.find_forbidden(near, self.test)
    )
    own = [
      _make_leak(query, query, self.test.texts[query], judged, others, query)
      for query in near
    ]
    copies = [
      (query, id_, text)
      for query, others_of in near.items()
      for id_, text in others_of
    ]
    if self.train is None:
      near_leaks = [
        _make_leak(*copy, judged, others, copy[0]) for copy in copies
      ]
    else:
      ids = sorted({id_ for _, id_, _ in copies})
      run = self.train.search(ids, self.config.depth)
      judged = {id_: self.trained[id_] for id_ in ids}
      negatives = self.negatives(run, {id_: judged[id_] for id_ in run})
      near_leaks = [
        _make_leak(*copy, judged, negatives, copy[1]) for copy in copies
      ]
    return {_NEAR: near_leaks, _TEST: own}

  def find_forbidden(self, near: Found, among: _Searchable) -> frozenset[str]:
    """Finds the documents with the text of one relevant to a test query.

    A collection may hold a text under several ids, of which one is judged.
    """
    relevant = self.test.contents(_get_relevant(self.everything, near))
    return frozenset(among.with_contents(set(relevant.values())))

  def negatives(
    self,
    run: trec.Run,
    judged: trec.Qrels,
    forbidden: frozenset[str] = frozenset(),
  ) -> dict[str, tuple[str, ...]]:
    """Returns non-relevant documents of each query, of `config.negatives`' kind."""
    documents = splits.get_negatives(run, judged, forbidden)
    if self.config.negatives == "judged":
      for query, grades in judged.items():
        others = [id_ for id_, grade in grades.items() if grade <= 0]
        if allowed := [id_ for id_ in others if id_ not in forbidden]:
          documents[query] = tuple(allowed)
    return documents

  def find_clean(self, leaked: Sequence[str]) -> dict[str, str]:
    """Returns the pool without queries that a detector matches with a leaked one."""
    texts = list(self.pool.values())
    marked = np.zeros(len(texts), bool)
    for detector in (
      near_duplicates.Exact(),
      _FILLER_WORDS,
      near_duplicates.Containment(threshold=0.8),
    ):
      marked |= near_duplicates.share_with_match(texts, leaked, detector)
    items = zip(self.pool.items(), marked, strict=True)
    return {query: text for (query, text), is_near in items if not is_near}

  def facts(
    self,
    near: Found,
    judged: trec.Qrels,
    candidates: trec.Run,
    clean: Mapping[str, str],
  ) -> Facts:
    config = self.config
    return Facts(
      source=self.titles[0],
      train_source=self.titles[1] if self.train is not None else "",
      num_documents=len(self.test.data.documents),
      num_test_queries=len(near),
      num_scored=(
        sum(map(bool, near.values())) if config.leaked_only else len(near)
      ),
      num_found=sum(
        bool(_get_relevant(judged, [query]) & scores.keys())
        for query, scores in candidates.items()
      ),
      num_pool=len(self.pool),
      num_left_out=len(self.pool) - len(clean),
      near=config.near,
      num_near=sum(map(len, near.values())),
      num_near_targets=sum(bool(copies) for copies in near.values()),
      num_leaked=config.num_leaked,
    )


def _make_leak(
  target: str,
  query_id: str,
  query: str,
  judged: trec.Qrels,
  negatives: Mapping[str, Sequence[str]],
  documents_of: str,
) -> splits.Leak:
  grades = judged[documents_of]
  return splits.Leak(
    target=target,
    query_id=query_id,
    query=query,
    relevant=tuple(id_ for id_, grade in grades.items() if grade > 0),
    non_relevant=tuple(negatives.get(documents_of, ())),
  )


def _get_relevant(qrels: trec.Qrels, queries: Iterable[str]) -> set[str]:
  return {
    document
    for query in queries
    for document, grade in qrels.get(query, {}).items()
    if grade > 0
  }
