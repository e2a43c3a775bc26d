"""Draws test queries, what leaks them, and what surely does not."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import query_pairs, sources
from synthq_jax.leakage import near_duplicates, splits, words
from synthq_jax.retrieval import bm25, text_encoders, trec
from synthq_jax.storage import artifacts

__all__ = ["ELSEWHERE", "NEAR", "NEGATIVES", "Data", "Facts", "build"]

ELSEWHERE = ("train_source", "verified")
"""Ways to near-duplicates that come from the collection that is trained on."""

NEAR = ("siblings", "reformulations", *ELSEWHERE)
"""Where near-duplicates of test queries come from.

"siblings": other judged queries with a relevant document in common, in other
people's words, which the detector takes for near-duplicates. "reformulations":
rules (`leakage.reformulations`), for collections with too few siblings.
"train_source": near-duplicates in the collection that is trained on, with that
collection's documents, as in Fröbe et al. "verified": the same, but by a list of
pairs that people looked at.
"""

NEGATIVES = ("bm25", "judged")
"""Documents of leaked instances that are not relevant."""

_TRAIN = "train:"  # before ids of another collection that is trained on
_REFORMULATIONS = 4  # of one test query, at most
_, _NEAR, _TEST = splits.NAMES

Drawn = tuple[splits.Triple, ...]
Found = dict[str, list[tuple[str, str]]]
"""Test query -> (id, text) of its near-duplicates."""
Near = Callable[[str], list[tuple[str, str]]]
"""Finds the near-duplicates of a test query."""


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
  """Leaked."""
  num_scored: int
  """Of these, scored."""
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
    leaking: test queries with a near-duplicate.
    facts: counts for the report.
    digest: of the sources and of what was drawn.
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

  def split(self, name: str, size: int, seed: int) -> splits.Split:
    """Returns one of the training sets, of `size` instances."""
    leaks = self.leaked[name][seed] if name in self.leaked else ()
    random = self.fillers[seed]
    return splits.build(name, random, leaks, size=size // 2, seed=seed)

  def ranked(self, seed: int) -> trec.Run:
    """Returns the candidates, and behind them what leaks and BM25 missed."""
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
    """Returns judgements of documents that are there, or of all that are judged.

    Nothing can be trained on the others, which count when a run is scored.
    """
    data = collection_lib.join_splits(self.data, split)
    found = (data if lacking else data.without_lacking([split])).judgements(
      split
    )
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


def _with_queries(
  first: collection_lib.Collection,
  second: collection_lib.Collection,
  split: str,
) -> collection_lib.Collection:
  """Adds the queries of a second collection about the documents of the first."""
  there = set(first.document_ids())
  added = {
    query: kept
    for query, grades in second.qrels.get(split, {}).items()
    if (kept := {id_: g for id_, g in grades.items() if id_ in there})
  }
  if not added:
    raise ValueError(
      "planted_leakage.Config.more_queries must name a source with judgements"
      f" ({split}) of the documents of train_source, got none"
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
  """The collections of tests and of training, and what is drawn from them."""

  def __init__(self, config: Any):
    self.config, name = config, "planted_leakage.Config"
    places = [sources.open(config.source, f"{name}.source", seed=config.seed)]
    if config.train_source is not None:
      places.append(sources.open(config.train_source, f"{name}.train_source"))
    if config.more_queries is not None:
      places.append(sources.open(config.more_queries, f"{name}.more_queries"))
    self.titles = [place.title for place in places]
    self.digests = [place.digest() for place in places]
    self.test = _Searchable(places[0].read())
    self.train = None
    self.more: frozenset[str] = frozenset()
    if len(places) > 1:
      read = places[1].read()
      if len(places) > 2:
        more = places[2].read()
        self.more = frozenset(query.id for query in more.queries)
        read = _with_queries(read, more, config.train_split)
      self.train = _Searchable(read, _TRAIN)
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
    kept = self.surely_clean(sorted(leaked_texts))
    if self.train is None:
      kept = {query: text for query, text in kept.items() if query not in near}
    # Documents relevant to a test query, or with the text of one.
    forbidden = _relevant(self.everything, near)
    if self.train is not None:
      relevant = set(self.test.contents(forbidden).values())
      forbidden = self.train.with_contents(relevant)
    drawn_from = splits.Pool(
      queries=kept,
      qrels=self.trained,
      search=lambda ids: self.searched.search(ids, config.depth),
      forbidden=frozenset(forbidden),
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
          e,
          config.num_leaked // 2,
          seed=seed,
          different=name == _NEAR and config.near in ELSEWHERE,
        )
        for seed in seeds
      )
      for name, e in leaks.items()
    }
    drawn = [*fillers, *leaked[_NEAR], *leaked[_TEST]]
    wanted = {id_ for scores in candidates.values() for id_ in scores}
    for each in itertools.chain(*drawn):
      wanted |= {each.relevant_id, each.non_relevant_id}
    documents = self.test.contents(wanted)
    if self.train is not None:
      documents |= self.train.contents(wanted)
    scored = self.test.judgements(config.test_split, lacking=True)
    return Data(
      queries={query: texts[query] for query in near},
      qrels={query: scored[query] for query in near},
      candidates=candidates,
      fillers=fillers,
      leaked=leaked,
      documents=documents,
      leaking=frozenset(query for query, others in near.items() if others),
      facts=self.facts(near, judged, candidates, kept),
      digest=artifacts.fingerprint(
        self.digests,
        candidates,
        *([dataclasses.astuple(each) for each in one] for one in drawn),
      ),
    )

  def choose(self) -> Found:
    """Draws test queries, with the near-duplicates of each.

    Where near-duplicates are siblings, two test queries have no relevant
    document in common: one might be the near-duplicate of the other.
    """
    config, judged = self.config, self.judged
    answerable = sorted(q for q in judged if _relevant(judged, [q]))
    order = np.random.default_rng([config.seed, 1]).permutation(len(answerable))
    drawn = [answerable[place] for place in order]
    near = getattr(self, f"from_{config.near}")(drawn)
    found: Found = {}
    taken: set[str] = set()
    for query in drawn:
      if len(found) == config.num_test_queries:
        break
      others = near(query)
      if not others and config.near not in ELSEWHERE:
        continue
      if config.near == "siblings":
        documents = _relevant(self.everything, [query])
        if documents & taken:
          continue
        taken |= documents
      found[query] = others
    if len(found) < (config.num_test_queries or 2):
      raise ValueError(
        f"expected {config.num_test_queries or 2} test queries with"
        f" near-duplicates ({config.near}), got"
        f" {len(found)} of {len(answerable)}: ask for fewer"
        " (planted_leakage.Config.num_test_queries), lower near_threshold, or"
        " set near to another way"
      )
    return found

  def from_reformulations(self, drawn: Sequence[str]) -> Near:
    """Makes near-duplicates of a test query by rule."""
    del drawn
    return lambda query: [
      (f"{query}.near{place}", text)
      for place, text in enumerate(
        words.make_reformulations(self.test.texts[query], _REFORMULATIONS),
        1,
      )
    ]

  def from_siblings(self, drawn: Sequence[str]) -> Near:
    """Finds queries that share a relevant document, and words."""
    del drawn
    everything, texts = self.everything, self.test.texts
    places = {query: place for place, query in enumerate(everything)}
    asking: dict[str, list[str]] = {}
    for query in everything:
      for document in _relevant(everything, [query]):
        asking.setdefault(document, []).append(query)
    threshold = self.config.near_threshold

    def near(query: str) -> list[tuple[str, str]]:
      own = _relevant(everything, [query])
      sharing = {other for document in own for other in asking[document]}
      others = [
        (other, texts[other])
        for other in sorted(sharing, key=places.__getitem__)
        if texts[other] != texts[query]
      ]
      scores = self.config.words(threshold).scores(
        [text for _, text in others], [texts[query]] * len(others)
      )
      scored = zip(others, scores, strict=True)
      return [other for other, score in scored if score >= threshold]

    return near

  def from_train_source(self, drawn: Sequence[str]) -> Near:
    """Finds near-duplicates among the queries that are trained on."""
    found: Found = {query: [] for query in drawn}
    text_of, variants = near_duplicates.Text, self.config.variants
    more = () if variants is None else query_pairs.variants(variants)
    texts = [(query, self.test.texts[query]) for query in drawn]
    for match in near_duplicates.find(
      (text_of(id=id_, text=text) for id_, text in self.pool.items()),
      [
        text_of(id=query, text=text)
        for query, text in dict.fromkeys([*texts, *more])
        if query in found
      ],
      self.config.words(self.config.near_threshold),
    ):
      pair = match.query_id, match.query
      if pair not in found[match.target_id]:
        found[match.target_id].append(pair)
    return found.__getitem__

  def from_verified(self, drawn: Sequence[str]) -> Near:
    """Takes the pairs that people looked at, as far as both sides are there."""
    found: Found = {query: [] for query in drawn}
    for topic, query in query_pairs.verified(self.config.verified):
      if topic in found and query in self.pool:
        found[topic].append((query, self.pool[query]))
    return found.__getitem__

  def leaks(
    self, near: Found, judged: trec.Qrels, candidates: trec.Run
  ) -> dict[str, list[splits.Leak]]:
    """Returns what leaks the test queries, with documents to train on.

    Where the near-duplicates come with no documents of their own, they are
    leaked with those of the test query: the two kinds then differ in the query
    alone.
    """
    forbidden = frozenset(_relevant(self.everything, near))
    others = self.negatives(candidates, judged, forbidden)
    own = [
      _leak(query, query, self.test.texts[query], judged, others, query)
      for query in near
    ]
    copies = [
      (query, id_, text) for query, found in near.items() for id_, text in found
    ]
    if self.train is None:
      near_leaks = [_leak(*copy, judged, others, copy[0]) for copy in copies]
    else:
      ids = sorted({id_ for _, id_, _ in copies})
      run = self.train.search(ids, self.config.depth)
      judged = {id_: self.trained[id_] for id_ in ids}
      theirs = self.negatives(run, {id_: judged[id_] for id_ in run})
      near_leaks = [_leak(*copy, judged, theirs, copy[1]) for copy in copies]
    return {_NEAR: near_leaks, _TEST: own}

  def negatives(
    self,
    run: trec.Run,
    judged: trec.Qrels,
    forbidden: frozenset[str] = frozenset(),
  ) -> dict[str, tuple[str, ...]]:
    """Returns documents that are not relevant, of a kind of `NEGATIVES`."""
    found = splits.get_negatives(run, judged, forbidden)
    if self.config.negatives == "judged":
      for query, grades in judged.items():
        others = [id_ for id_, grade in grades.items() if grade <= 0]
        if kept := [id_ for id_ in others if id_ not in forbidden]:
          found[query] = tuple(kept)
    return found

  def surely_clean(self, leaked: Sequence[str]) -> dict[str, str]:
    """Leaves out the queries that any detector matches with one that leaks."""
    texts = list(self.pool.values())
    marked = np.zeros(len(texts), bool)
    for detector in (
      near_duplicates.Exact(),
      self.config.words(self.config.filler_threshold),
      near_duplicates.Containment(threshold=self.config.filler_containment),
    ):
      marked |= near_duplicates.share_with_match(texts, leaked, detector)
    items = zip(self.pool.items(), marked, strict=True)
    return {query: text for (query, text), is_near in items if not is_near}

  def facts(
    self,
    near: Found,
    judged: trec.Qrels,
    candidates: trec.Run,
    kept: Mapping[str, str],
  ) -> Facts:
    config, texts = self.config, self.test.texts
    pairs = [(text, texts[q]) for q, found in near.items() for _, text in found]
    theirs, own = ([pair[side] for pair in pairs] for side in (0, 1))
    kinds = [words.relation(*pair) for pair in pairs]
    similarities = {}
    for detector in (
      near_duplicates.Exact(),
      config.words(config.near_threshold),
      near_duplicates.Containment(),
      near_duplicates.Embedding(encode=text_encoders.load().encode),
    ):
      scores = detector.scores(theirs, own)
      ends = scores.min(), scores.mean(), scores.max()
      similarities[detector.name] = [float(score) for score in ends]
    return Facts(
      source=self.titles[0],
      train_source=self.titles[1] if self.train is not None else "",
      num_documents=len(self.test.data.documents),
      num_test_queries=len(near),
      num_scored=(
        sum(map(bool, near.values())) if config.leaked_only else len(near)
      ),
      num_found=sum(
        bool(_relevant(judged, [query]) & scores.keys())
        for query, scores in candidates.items()
      ),
      num_pool=len(self.pool),
      num_left_out=len(self.pool) - len(kept),
      near=config.near,
      num_near=len(pairs),
      num_near_targets=sum(bool(found) for found in near.values()),
      num_leaked=config.num_leaked,
      relations={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
      similarities=similarities,
    )


def _leak(
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


def _relevant(qrels: trec.Qrels, queries: Iterable[str]) -> set[str]:
  return {
    document
    for query in queries
    for document, grade in qrels.get(query, {}).items()
    if grade > 0
  }
