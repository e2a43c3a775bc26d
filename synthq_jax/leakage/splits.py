"""Training sets that leak a chosen number of triples about test queries.

A triple is a query, a document relevant to it and a non-relevant document, from
BM25's best for the query. Fröbe et al. count a query with one document as an
instance, so a triple is two instances: their 1,000 leaked instances are 500
triples. Three kinds of sets have the same number of triples:

- "no leakage": only filler. Filler triples are random; their queries are no
  near-duplicates of a test query, and their documents neither are relevant to one
  nor have the text of such a document.
- "near leakage": a fixed number of triples (Fröbe et al.: 1,000 for Robust04
  and 200 for Common Core) whose queries are near-duplicates of test queries;
  the rest is filler.
- "test leakage": as many triples of the test queries themselves.

The number of leaked triples does not grow with the set, so the leaked share of
a larger set is smaller. Sets of one size and seed share their filler. With one
seed, a smaller filler is the beginning of a larger one.

References:
  Fröbe et al., SPIRE 2022, as in `leakage.study`.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from synthq_jax.retrieval import trec

__all__ = [
  "NAMES",
  "Triple",
  "Leak",
  "Manifest",
  "Pool",
  "draw_filler",
  "draw_leaked",
  "make_manifest",
  "get_negatives",
]

NAMES = ("no leakage", "near leakage", "test leakage")
"""The kinds of training sets."""

_BLOCK = 512  # queries searched at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triple:
  """A training example of a reranker: a query with two documents.

  Attributes:
    query_id: id of the query.
    query: text of the query.
    relevant_id: id of a document that is relevant to the query.
    non_relevant_id: id of a document that is not judged relevant.
    target: id of the test query that the triple leaks; "" for filler.
  """

  query_id: str
  query: str
  relevant_id: str
  non_relevant_id: str
  target: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  """Judged queries that filler is drawn from.

  Attributes:
    queries: query id -> text, without queries that leak.
    qrels: query id -> document id -> grade; above 0 is relevant.
    search: function from query ids to BM25's best documents for each.
    forbidden: ids of documents relevant to a test query, or with the text of one;
      no triple holds them.
    second: ids of queries of a second source, which supplies half of the filler.
  """

  queries: Mapping[str, str]
  qrels: trec.Qrels
  search: Callable[[Sequence[str]], trec.Run]
  forbidden: frozenset[str] = frozenset()
  second: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leak:
  """A query that leaks a test query, and its documents.

  Attributes:
    target: id of the test query.
    query_id: id of the leaked query, which may be the test query.
    query: text of the leaked query.
    relevant: ids of documents that are relevant to it.
    non_relevant: ids of BM25's best documents that are not judged relevant.
  """

  target: str
  query_id: str
  query: str
  relevant: tuple[str, ...]
  non_relevant: tuple[str, ...]


def draw_filler(pool: Pool, number: int, *, seed: int) -> tuple[Triple, ...]:
  """Draws triples that leak nothing.

  The draw uses every pair of a query and a relevant document once, in random
  order, before it repeats a pair with another non-relevant document. Queries of
  the two sources take turns while both last. With one seed, a smaller number of
  triples is the beginning of a larger one.

  Args:
    pool: judged queries.
    number: number of triples.
    seed: seed of the order and of the non-relevant documents.

  Returns:
    Different triples.

  Raises:
    ValueError: if the pool has too few judged queries for this number.
  """
  pairs = sorted(
    (query, document)
    for query in pool.queries
    for document, grade in pool.qrels.get(query, {}).items()
    if grade > 0 and document not in pool.forbidden
  )
  order = np.random.default_rng([seed, 0]).permutation(len(pairs))
  pairs = _alternate_sources([pairs[index] for index in order], pool.second)
  drawn: list[Triple] = []
  negatives: dict[tuple[str, str], list[str]] = {}
  for turn in range(number):
    before = len(drawn)
    for query, relevant in _search_negatives(pool, pairs, negatives, seed):
      if len(drawn) == number:
        return tuple(drawn)
      others = negatives[query, relevant]
      if turn < len(others):
        drawn.append(
          Triple(
            query_id=query,
            query=pool.queries[query],
            relevant_id=relevant,
            non_relevant_id=others[turn],
          )
        )
    if len(drawn) == before:
      break
  if len(drawn) < number:
    raise ValueError(
      f"expected judged queries for {number:,} triples without leakage, got"
      f" {len(drawn):,} from {len(pairs):,} relevant pairs: ask for smaller"
      " training sets, or give more judged queries"
    )
  return tuple(drawn)


def _alternate_sources(
  pairs: Sequence[tuple[str, str]], second: frozenset[str]
) -> list[tuple[str, str]]:
  """Orders pairs so that queries of the two sources take turns."""
  sides = [
    [pair for pair in pairs if (pair[0] in second) == is_second]
    for is_second in (False, True)
  ]
  turns = itertools.chain(*itertools.zip_longest(*sides))
  return [pair for pair in turns if pair is not None]


def _search_negatives(
  pool: Pool,
  pairs: Sequence[tuple[str, str]],
  negatives: dict[tuple[str, str], list[str]],
  seed: int,
) -> Iterator[tuple[str, str]]:
  """Yields pairs; searches and adds their `negatives` first, block by block."""
  for start in range(0, len(pairs), _BLOCK):
    block = pairs[start : start + _BLOCK]
    missing = list(
      dict.fromkeys(q for q, d in block if (q, d) not in negatives)
    )
    if missing:
      non_relevant = get_negatives(
        pool.search(missing),
        {query: pool.qrels[query] for query in missing},
        pool.forbidden,
      )
      for query, document in block:
        others = non_relevant.get(query, ())
        negatives[query, document] = _shuffle(others, seed, query, document)
    yield from block


def get_negatives(
  run: trec.Run, qrels: trec.Qrels, forbidden: frozenset[str] = frozenset()
) -> dict[str, tuple[str, ...]]:
  """Returns the documents of a run that may serve as non-relevant ones.

  A document must not be judged relevant and must not have the query's id.

  Args:
    run: BM25's best documents of each query.
    qrels: judgements of these queries.
    forbidden: ids of documents that are left out.

  Returns:
    Query id -> document ids, best first. Queries without such a document are
    left out; a query whose documents are all forbidden has none.
  """
  negatives = {}
  for query, grades in qrels.items():
    others = [
      document
      for document in trec.ranking(run.get(query, {}))
      if grades.get(document, 0) <= 0 and document != query
    ]
    if others:
      negatives[query] = tuple(id_ for id_ in others if id_ not in forbidden)
  return negatives


def draw_leaked(
  leaks: Sequence[Leak], number: int, *, seed: int, different: bool = False
) -> tuple[Triple, ...]:
  """Draws triples that leak test queries.

  Test queries take turns. Each turn takes the test query's next leak, the next
  relevant document and another non-relevant document. If the leaks of a test
  query share their documents, those of a turn do not depend on the leak. Without
  `different`, near and test leakage then differ only in the query's words.

  Args:
    leaks: one or more leaks for each test query.
    number: number of triples.
    seed: seed of the order of documents, and of leaks with `different`.
    different: whether to draw each leaked query once, at random, before test
      queries take turns and leaked queries repeat with other documents.

  Returns:
    Different triples.

  Raises:
    ValueError: if the leaks are too few for this number.
  """
  of_target: dict[str, list[Leak]] = {}
  for leak in leaks:
    of_target.setdefault(leak.target, []).append(leak)
  drawn: list[Triple] = []
  seen: set[Triple] = set()
  turns = max((len(leak.non_relevant) for leak in leaks), default=0)
  order = [
    (group[turn % len(group)], turn)
    for turn in range(turns)
    for group in of_target.values()
  ]
  if different:
    once = {leak.query_id: leak for leak in leaks}
    names = _shuffle(sorted(once), seed, "leaked queries")
    order = [*((once[name], 0) for name in names), *order]
  for leak, turn in order:
    if len(drawn) == number:
      break
    triple = _make_triple(leak, turn, seed)
    if triple is not None and triple not in seen:
      seen.add(triple)
      drawn.append(triple)
  if len(drawn) < number:
    raise ValueError(
      f"expected leaks for {number:,} triples, got {len(drawn):,} from"
      f" {len(leaks):,} leaked queries of {len(of_target):,} test queries: ask"
      " for fewer leaked triples, or give more leaks or test queries"
    )
  return tuple(drawn)


def _make_triple(leak: Leak, turn: int, seed: int) -> Triple | None:
  """Returns the triple of a leak in a turn, or None if documents are lacking."""
  if not leak.relevant or turn >= len(leak.non_relevant):
    return None
  relevant = _shuffle(leak.relevant, seed, leak.target, "relevant")
  others = _shuffle(leak.non_relevant, seed, leak.target, "non-relevant")
  return Triple(
    query_id=leak.query_id,
    query=leak.query,
    relevant_id=relevant[turn % len(relevant)],
    non_relevant_id=others[turn],
    target=leak.target,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """Counts and a digest of a training set, without its texts.

  Attributes:
    name: one of `NAMES`.
    size: instances, two for each triple.
    seed: seed of the draw.
    num_leaked: instances that leak a test query.
    num_queries: different queries, leaked ones included.
    num_leaked_queries: different queries among the leaked triples.
    num_targets: test queries that the set leaks.
    digest: SHA-256 of all triples, in order, with the texts of their documents.
  """

  name: str
  size: int
  seed: int
  num_leaked: int
  num_queries: int
  num_leaked_queries: int
  num_targets: int
  digest: str


def make_manifest(
  name: str,
  triples: Sequence[Triple],
  documents: Mapping[str, str],
  *,
  seed: int,
) -> Manifest:
  """Returns counts and a digest of a training set.

  Args:
    name: one of `NAMES`.
    triples: the training set, in the order of its training.
    documents: document id -> text, for all documents of the set.
    seed: seed of the draw.
  """
  leaked = [each for each in triples if each.target]
  return Manifest(
    name=name,
    size=2 * len(triples),
    seed=seed,
    num_leaked=2 * len(leaked),
    num_queries=len({each.query_id for each in triples}),
    num_leaked_queries=len({each.query_id for each in leaked}),
    num_targets=len({each.target for each in leaked}),
    digest=_compute_digest(triples, documents),
  )


def _compute_digest(
  triples: Iterable[Triple], documents: Mapping[str, str]
) -> str:
  state = hashlib.sha256()
  for each in triples:
    parts = [
      *dataclasses.astuple(each),
      documents[each.relevant_id],
      documents[each.non_relevant_id],
    ]
    state.update(json.dumps(parts).encode() + b"\n")
  return state.hexdigest()


def _shuffle(items: Sequence[str], seed: int, *key: str) -> list[str]:
  digest = hashlib.sha256("\n".join(key).encode()).digest()
  words = np.frombuffer(digest[:16], np.uint32).tolist()
  order = np.random.default_rng([seed, *words]).permutation(len(items))
  return [items[index] for index in order]
