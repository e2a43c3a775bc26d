"""Training sets that give a known number of test queries away.

A triple is a query, a document relevant to it and one that is not, from
BM25's best for the query. Fröbe et al. count queries with one document each as
instances, so that a triple is two of theirs: their 1,000 leaked instances are 500
triples. Three kinds of sets have the same number of them:

- "no leakage": random triples whose queries are no near-duplicates of a test
  query, and whose documents are not relevant to one (in another collection: do
  not have the text of one that is): the filler.
- "near leakage": a fixed number of triples (Fröbe et al.: 1,000 for Robust04
  and 200 for Common Core) whose queries are near-duplicates of test queries;
  the rest is filler.
- "test leakage": as many triples of the test queries themselves.

The number of leaked triples does not grow with the set, so that a larger set
leaks less of itself. Sets of one size and seed share their filler, and of one
seed a smaller filler begins a larger one: they differ in nothing else.

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
  "Split",
  "build",
  "filler",
  "leaked",
  "manifest",
  "negatives_of",
]

NAMES = ("no leakage", "near leakage", "test leakage")
"""The kinds of training sets."""

_BLOCK = 512  # queries searched at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triple:
  """What a reranker learns from once: two instances, a query with one document.

  Attributes:
    query_id: of the query.
    query: its text.
    relevant_id: of a document that is relevant to it.
    non_relevant_id: of one that is not judged relevant.
    target: id of the test query that it gives away; "" for filler.
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
    queries: query id -> text; those that leak are left out already.
    qrels: query id -> document id -> grade; above 0 is relevant.
    search: query ids -> BM25's best documents for each.
    forbidden: documents no triple may hold: those relevant to a test query.
    second: ids of queries of a second source, of which half of the filler is.
  """

  queries: Mapping[str, str]
  qrels: trec.Qrels
  search: Callable[[Sequence[str]], trec.Run]
  forbidden: frozenset[str] = frozenset()
  second: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leak:
  """A query that gives a test query away, and its documents.

  Attributes:
    target: id of the test query.
    query_id: of the leaked query, which may be the test query.
    query: its text.
    relevant: ids of documents that are relevant to it.
    non_relevant: ids of BM25's best that are not judged relevant.
  """

  target: str
  query_id: str
  query: str
  relevant: tuple[str, ...]
  non_relevant: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """A training set.

  Attributes:
    name: one of `NAMES`.
    size: the number of triples.
    seed: of the filler and of the non-relevant documents.
    triples: filler first, then what is leaked.
    num_leaked: how many triples at the end are leaked.
  """

  name: str
  size: int
  seed: int
  triples: tuple[Triple, ...]
  num_leaked: int

  @property
  def leaked(self) -> tuple[Triple, ...]:
    """The triples that give a test query away."""
    return self.triples[self.size - self.num_leaked :]


def filler(pool: Pool, number: int, *, seed: int) -> tuple[Triple, ...]:
  """Draws triples that leak nothing.

  Every pair of a query and a relevant document is used once, in random order,
  before any is used again with another non-relevant document. Queries of the
  two sources take turns while both last. Fewer triples of the same seed are the
  beginning of more.

  Args:
    pool: where from.
    number: how many.
    seed: of the order and of the non-relevant documents.

  Returns:
    Different triples.

  Raises:
    ValueError: if the pool has too few judged queries for so many.
  """
  pairs = sorted(
    (query, document)
    for query in pool.queries
    for document, grade in pool.qrels.get(query, {}).items()
    if grade > 0 and document not in pool.forbidden
  )
  order = np.random.default_rng([seed, 0]).permutation(len(pairs))
  pairs = _in_turn([pairs[place] for place in order], pool.second)
  drawn: list[Triple] = []
  negatives: dict[tuple[str, str], list[str]] = {}
  for turn in range(number):
    before = len(drawn)
    for query, relevant in _searched(pool, pairs, negatives, seed):
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


def _in_turn(
  pairs: Sequence[tuple[str, str]], second: frozenset[str]
) -> list[tuple[str, str]]:
  """Orders pairs so that queries of the two sources take turns."""
  sides = [
    [pair for pair in pairs if (pair[0] in second) == is_second]
    for is_second in (False, True)
  ]
  turns = itertools.chain(*itertools.zip_longest(*sides))
  return [pair for pair in turns if pair is not None]


def _searched(
  pool: Pool,
  pairs: Sequence[tuple[str, str]],
  negatives: dict[tuple[str, str], list[str]],
  seed: int,
) -> Iterator[tuple[str, str]]:
  """Yields the pairs after their `negatives` are known, block by block."""
  for start in range(0, len(pairs), _BLOCK):
    block = pairs[start : start + _BLOCK]
    missing = list(
      dict.fromkeys(q for q, d in block if (q, d) not in negatives)
    )
    if missing:
      found = negatives_of(
        pool.search(missing),
        {query: pool.qrels[query] for query in missing},
        pool.forbidden,
      )
      for query, document in block:
        others = found.get(query, ())
        negatives[query, document] = _shuffled(others, seed, query, document)
    yield from block


def negatives_of(
  run: trec.Run, qrels: trec.Qrels, forbidden: frozenset[str] = frozenset()
) -> dict[str, tuple[str, ...]]:
  """Returns the documents of a run that may stand as not relevant.

  Args:
    run: BM25's best documents of each query.
    qrels: judgements of these queries.
    forbidden: documents that are left out.

  Returns:
    Query id -> document ids, best first; queries without any are left out.
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


def leaked(
  leaks: Sequence[Leak], number: int, *, seed: int, different: bool = False
) -> tuple[Triple, ...]:
  """Draws triples that give test queries away.

  Test queries take turns; in each turn the next of a test query's leaks, the
  next of its relevant documents and another non-relevant one are taken. Leaks
  of other queries with the same documents therefore make triples with the
  same documents: near and test leakage differ in the query's words alone.

  Args:
    leaks: one or more for each test query.
    number: how many triples.
    seed: of the order of documents, and of leaks with `different`.
    different: whether leaked queries are drawn at random, each once, before test
      queries take turns and leaked queries repeat with other documents.

  Returns:
    Different triples.

  Raises:
    ValueError: if the leaks are too few for so many.
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
    names = _shuffled(sorted(once), seed, "leaked queries")
    order = [*((once[name], 0) for name in names), *order]
  for leak, turn in order:
    if len(drawn) == number:
      break
    made = _triple(leak, turn, seed)
    if made is not None and made not in seen:
      seen.add(made)
      drawn.append(made)
  if len(drawn) < number:
    raise ValueError(
      f"expected leaks for {number:,} triples, got {len(drawn):,} from"
      f" {len(leaks):,} leaked queries of {len(of_target):,} test queries: ask"
      " for fewer leaked triples, or give more leaks or test queries"
    )
  return tuple(drawn)


def _triple(leak: Leak, turn: int, seed: int) -> Triple | None:
  """Returns the triple of a leak in one turn, if it has documents for it."""
  if not leak.relevant or turn >= len(leak.non_relevant):
    return None
  relevant = _shuffled(leak.relevant, seed, leak.target, "relevant")
  others = _shuffled(leak.non_relevant, seed, leak.target, "non-relevant")
  return Triple(
    query_id=leak.query_id,
    query=leak.query,
    relevant_id=relevant[turn % len(relevant)],
    non_relevant_id=others[turn],
    target=leak.target,
  )


def build(
  name: str,
  random: Sequence[Triple],
  leaks: Sequence[Triple],
  *,
  size: int,
  seed: int,
) -> Split:
  """Puts a training set together.

  Args:
    name: one of `NAMES`.
    random: from `filler`, at least `size`.
    leaks: from `leaked`; all are used, except without leakage.
    size: the number of triples.
    seed: that `random` and `leaks` were drawn with.

  Raises:
    ValueError: if the name is unknown, the filler is too short, or more leaks
      than the set has triples.
  """
  if name not in NAMES:
    raise ValueError(f"expected one of {', '.join(NAMES)}, got name={name!r}")
  taken = () if name == NAMES[0] else tuple(leaks)
  if (name != NAMES[0] and not taken) or len(taken) > size:
    raise ValueError(
      f"expected 1 to {size:,} leaked triples in a set of {size:,} with"
      f" {name}, got {len(taken):,}: change their number, or the size"
    )
  if len(random) < size:
    raise ValueError(
      f"expected filler of at least {size:,} triples, got {len(random):,}:"
      " draw more, or build a smaller set"
    )
  return Split(
    name=name,
    size=size,
    seed=seed,
    triples=(*random[: size - len(taken)], *taken),
    num_leaked=len(taken),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a training set holds, without its texts.

  Attributes:
    name: one of `NAMES`.
    size: instances, two for each triple.
    seed: of the draw.
    num_leaked: instances that give a test query away.
    num_queries: different queries, leaked ones included.
    num_leaked_queries: different queries among the leaked triples.
    num_targets: test queries that are given away.
    digest: of all triples in their order, with the texts of their documents.
  """

  name: str
  size: int
  seed: int
  num_leaked: int
  num_queries: int
  num_leaked_queries: int
  num_targets: int
  digest: str


def manifest(split: Split, documents: Mapping[str, str]) -> Manifest:
  """Returns counts and digests of a training set.

  Args:
    split: the set.
    documents: document id -> text, of all that it holds.
  """
  return Manifest(
    name=split.name,
    size=2 * split.size,
    seed=split.seed,
    num_leaked=2 * split.num_leaked,
    num_queries=len({each.query_id for each in split.triples}),
    num_leaked_queries=len({each.query_id for each in split.leaked}),
    num_targets=len({each.target for each in split.leaked}),
    digest=_digest(split.triples, documents),
  )


def _digest(triples: Iterable[Triple], documents: Mapping[str, str]) -> str:
  state = hashlib.sha256()
  for each in triples:
    parts = [
      *dataclasses.astuple(each),
      documents[each.relevant_id],
      documents[each.non_relevant_id],
    ]
    state.update(json.dumps(parts).encode() + b"\n")
  return state.hexdigest()


def _shuffled(items: Sequence[str], seed: int, *key: str) -> list[str]:
  digest = hashlib.sha256("\n".join(key).encode()).digest()
  words = np.frombuffer(digest[:16], np.uint32).tolist()
  order = np.random.default_rng([seed, *words]).permutation(len(items))
  return [items[place] for place in order]
