"""Splits that keep equal documents and equal queries on one side.

A document (or a query) in both train and test would let a retriever pass by
memory. There are two ways to keep them apart:

- `split_by_document` keeps every pair: pairs that share a document or a set of
  query words, directly or through other pairs, form a group, and a group goes to
  one side as a whole. One pair that links two groups moves all of their pairs,
  so this way is for public queries.
- `split_by_own_document` sends a pair to the side of its document, whatever the
  other pairs are, and leaves out pairs whose words are on an earlier side.

Where a person is what is protected, `by_user` sends all queries of one to one side.

Where a source declares one split for all queries, `where_none` sends each query
to the side of its words, or of its id, with all of its documents: these may be on
several sides then, as in MS MARCO.
"""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from synthq_jax.data import collection, ids, word_patterns

__all__ = [
  "FRACTIONS",
  "by_user",
  "choose_document",
  "split_by_document",
  "split_by_own_document",
  "with_several_documents",
  "token_set",
  "where_none",
]

FRACTIONS = {"train": 0.8, "dev": 0.1, "test": 0.1}
"""The usual shares of train, dev and test."""

_WORD = re.compile(word_patterns.WORD)


def token_set(text: str) -> frozenset[str]:
  """Returns the words of a text in lower case, without order and repetition.

  A text without any word counts as one word of its own. Letters that Unicode
  writes in two ways are the same (NFC).

  >>> sorted(token_set("To be, or not to be?"))
  ['be', 'not', 'or', 'to']
  """
  text = word_patterns.compose(text)
  return frozenset(_WORD.findall(text.lower())) or frozenset([text.strip()])


def split_by_document(
  pairs: Sequence[tuple[str, str]],
  fractions: Mapping[str, float] = FRACTIONS,
  *,
  seed: int = 0,
) -> list[str]:
  """Assigns every (query, document) pair to the side of its group.

  Two pairs of the same document, or whose queries have the same `token_set`,
  always land on the same side. Sides are drawn by a hash of the group's
  documents and the seed: neither the order of the pairs nor Python's hash seed
  matter. The shares hold in expectation, over groups.

  >>> pairs = [("red apple", "a"), ("Apple, red", "b"), ("sour", "b")]
  >>> len(set(split_by_document(pairs)))
  1

  Args:
    pairs: query text and document (its text or id).
    fractions: split name -> share; the shares are positive and add to 1.
    seed: another seed gives other splits.

  Returns:
    One split name per pair.

  Raises:
    ValueError: if the shares are not positive or do not add to 1.
  """
  side_of = _sides(fractions, seed)
  if not pairs:
    return []
  group = _groups(pairs)
  key: dict[int, str] = {}
  for label, (_, document) in zip(group, pairs, strict=True):
    key[label] = min(key.get(label, document), document)
  side = {label: side_of(text) for label, text in key.items()}
  return [side[label] for label in group]


def split_by_own_document(
  pairs: Sequence[tuple[str, str]],
  fractions: Mapping[str, float] = FRACTIONS,
  *,
  seed: int = 0,
) -> list[str | None]:
  """Assigns every (query, document) pair to the side of its document.

  A side is drawn by a hash of the document and the seed. A pair whose query has
  the `token_set` of one on an earlier side is left out, so that no query of a
  later side was seen on an earlier one.

  Formal guarantee:
    Whether a pair is on the first side is a function of its own document, the
    fractions and the seed: a query that is added, removed or replaced moves no
    other query to the first side or away from it. The later sides depend on the
    queries of earlier ones, and are as private as those.

  >>> pairs = [("red apple", "a"), ("Apple, red", "b"), ("sour", "b")]
  >>> split_by_own_document(pairs, seed=3)
  ['train', None, 'test']

  Args:
    pairs: query text and document (its text or id).
    fractions: split name -> share; the shares are positive and add to 1. The
      first is the one that is trained on.
    seed: another seed gives other splits.

  Returns:
    One split name per pair, None where the pair is left out.

  Raises:
    ValueError: if the shares are not positive or do not add to 1.
  """
  side_of = _sides(fractions, seed)
  sides = [side_of(document) for _, document in pairs]
  words = [token_set(query) for query, _ in pairs]
  place = {name: number for number, name in enumerate(fractions)}
  first: dict[frozenset[str], int] = {}
  for own, side in zip(words, sides, strict=True):
    first[own] = min(first.get(own, place[side]), place[side])
  return [
    side if place[side] == first[own] else None
    for own, side in zip(words, sides, strict=True)
  ]


def with_several_documents(pairs: Sequence[tuple[str, str]]) -> list[bool]:
  """Says which pairs' queries have the words of one for another document.

  `split_by_own_document` keeps them on the first of the sides of all these
  documents, so that they are no even draw of who is trained on.

  >>> with_several_documents([("red apple", "a"), ("Apple, red", "b"), ("x", "b")])
  [True, True, False]

  Args:
    pairs: query text and document.
  """
  documents: dict[frozenset[str], set[str]] = {}
  for query, document in pairs:
    documents.setdefault(token_set(query), set()).add(document)
  return [len(documents[token_set(query)]) > 1 for query, _ in pairs]


def where_none(
  data: collection.Collection,
  *,
  seed: int = 0,
  secret: str = "",
) -> collection.Collection:
  """Splits the queries of a source that declares one split for all of them.

  Says so on standard error. A collection with several splits stays as it is, and
  so does one whose records name theirs: one record with another name would
  otherwise decide for all whether they are divided.

  Formal guarantee: whether queries are divided is a function of the names of the
  source's files and of whether it has a column of splits; a query's side then is
  one of its own words, of the fractions and of the seed. No other query moves
  it. With a secret it is a keyed hash of the query's id: sides of different ids
  are independent draws by the fractions, whatever the texts are.

  Args:
    data: the collection.
    seed: another seed gives other splits.
    secret: for splits of which something is published; then equal words may
      stand on two sides. Empty: words and seed decide.

  Returns:
    The collection, with a split for each of the fractions, and the name of
    this rule as its `division`.
  """
  if data.split_by_record or len(data.qrels) != 1:
    return data
  [(name, judged)] = data.qrels.items()
  side_of = _sides(FRACTIONS, f"{secret} id" if secret else seed)
  what = "ids" if secret else "words"
  sides: dict[str, collection.Qrels] = {side: {} for side in FRACTIONS}
  for query in data.queries:
    if query.id in judged:
      words = " ".join(sorted(token_set(query.text)))
      side = side_of(query.id if secret else words)
      sides[side][query.id] = judged[query.id]
  shares = ", ".join(f"{side} {share:.0%}" for side, share in FRACTIONS.items())
  print(
    f"synthq: note: all judgements are of one split, {name!r}: queries are"
    f" divided ({shares}) by a hash of their {what}",
    file=sys.stderr,
  )
  known_by = _key(secret) if secret else f"seed {seed}"
  return dataclasses.replace(
    data, qrels=sides, division=f"{what}, {known_by}, {_rule()}"
  )


def by_user(
  data: collection.Collection,
  *,
  most: int,
  secret: str,
) -> collection.Collection:
  """Keeps so many queries of each user, all on one side of a split of users.

  The source's own splits are joined first; queries without a relevant document
  are left out. Equal words of two users may then be on two sides.

  Formal guarantee: which queries of a user are kept, and on which side, is a
  function of that user's own queries and judgements, of `most`, the fractions and
  the secret. All queries of one user more or less leave every other query where
  it is.

  Args:
    data: whose queries name who asked (`Query.client`).
    most: K, how many queries of a user are kept at most: those whose keyed hash
      is least.
    secret: keys the hashes.

  Returns:
    The collection, with a split for each of the fractions, and a `division` that
    names the rule and, by a digest, the secret.

  Raises:
    ValueError: if a query names nobody, or two user ids differ in leading zeros
      or letter case alone.
  """
  side_of = _sides(FRACTIONS, f"{secret} user")
  judged: collection.Qrels = {}
  for split in data.qrels.values():
    for query, grades in split.items():
      judged[query] = judged.get(query, {}) | grades
  asked: dict[str, list[collection.Query]] = {}
  everyone = tuple(
    dataclasses.replace(query, client=ids.read(query.client, "user"))
    for query in data.queries
  )
  ids.check_whole((query.client for query in everyone), "UNIT='user'")
  for query in everyone:
    grades = judged.get(query.id, {})
    if any(g > 0 and d not in data.lacking for d, g in grades.items()):
      asked.setdefault(query.client, []).append(query)
  if "" in asked:
    raise ValueError(
      "expected a user id with every query for UNIT='user', got some without:"
      ' add a column "user" to a log, or name its own in'
      ' prepare_data.Config.user_field, or "metadata": {"user_id": ...} to'
      " queries.jsonl"
    )
  kept = {
    query.id
    for queries in asked.values()
    for query in sorted(
      queries, key=lambda one: (_uniform(f"{secret} query", one.id), one.id)
    )[:most]
  }
  queries = tuple(query for query in everyone if query.id in kept)
  sides: dict[str, collection.Qrels] = {side: {} for side in FRACTIONS}
  for query in queries:
    sides[side_of(query.client)][query.id] = judged[query.id]
  return dataclasses.replace(
    data,
    queries=queries,
    qrels=sides,
    split_by_record=False,
    gathered=frozenset(),
    division=f"users, {_key(secret)}, {_rule()}",
  )


def choose_document(
  relevant: Iterable[str], query: str, *, seed: int = 0, by_text: bool = False
) -> str:
  """Picks one of a query's documents by a hash of a key of the query alone.

  A stream of random numbers would tie a query's choice to the queries before
  it, and one query more would change many records.

  >>> choose_document({"d1", "d2"}, "q1")
  'd1'

  Args:
    relevant: the documents' ids.
    query: its id.
    seed: another seed gives other choices.
    by_text: whether the id is a digest of the text: a text that chooses its
      document would move what protects texts alone, so the documents choose.
  """
  ordered = sorted(relevant)
  key = " ".join(ordered) if by_text else query
  digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
  return ordered[int.from_bytes(digest[:8], "big") % len(ordered)]


def _key(secret: str) -> str:
  """Names a secret by a digest, in a division."""
  digest = hashlib.sha256(f"division {secret}".encode()).hexdigest()
  return f"key {digest[:12]}"


def _rule() -> str:
  return " ".join(f"{side} {share:g}" for side, share in FRACTIONS.items())


def _sides(
  fractions: Mapping[str, float], seed: int | str
) -> Callable[[str], str]:
  _check_fractions(fractions)
  names = list(fractions)
  bounds = np.cumsum(list(fractions.values()))[:-1]
  return lambda text: names[
    np.searchsorted(bounds, _uniform(seed, text), "right")
  ]


def _groups(pairs: Sequence[tuple[str, str]]) -> list[int]:
  """Returns the group of each pair: a connected component."""
  queries = _codes([token_set(query) for query, _ in pairs])
  documents = _codes([document for _, document in pairs])
  num_queries, num_documents = queries.max() + 1, documents.max() + 1
  size = num_queries + num_documents
  edges = sparse.coo_array(
    (np.ones(len(pairs), bool), (queries, documents + num_queries)),
    shape=(size, size),
  )
  _, labels = csgraph.connected_components(edges, directed=False)
  return labels[queries].tolist()


def _codes(values: Sequence[Hashable]) -> np.ndarray:
  """Numbers the distinct values by first appearance."""
  number: dict[Hashable, int] = {}
  return np.array([number.setdefault(value, len(number)) for value in values])


def _uniform(seed: int | str, text: str) -> float:
  """Returns a number in [0, 1) that depends on the arguments alone."""
  digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48


def _check_fractions(fractions: Mapping[str, float]) -> None:
  shares = list(fractions.values())
  if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-9:
    raise ValueError(
      "expected positive shares that add to 1, got "
      f"fractions={dict(fractions)}; change them"
    )
