"""The demo set that every machine has: the documentation of Python and packages.

The first paragraph of a docstring plays the private query, the rest of it the
public document, and the package the client. What comes out depends on the
versions of Python and of the packages of a fixed list, which the digest names:
with the same versions it is the same on every machine.
"""

import contextlib
import hashlib
import re
from collections.abc import Sequence

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import docstrings, splits

__all__ = [
  "PACKAGES",
  "build",
  "digest",
  "most_documents",
  "private_queries",
]

PACKAGES = (
    docstrings.STANDARD_LIBRARY, "absl", "attr", "bm25s", "chex", "dateutil",
    "dp_accounting", "etils", "faiss", "flax", "fontTools", "ir_measures", "jax",
    "jax_privacy", "jaxtyping", "jinja2", "matplotlib", "mpmath", "numpy", "optax",
    "orbax", "PIL", "pydantic", "pygments", "pyparsing", "rich", "sacrebleu",
    "safetensors", "scipy", "sentencepiece", "tensorstore", "tqdm",
)  # fmt: skip
"""Python itself, and what a run of the pipeline needs and brings along."""

_SIGNATURE = re.compile(r"\w\(.*\)|->|::|[={}\\]|^\W")
_SHINGLE = 5

_QUERY_WORDS = (3, 30)
"""Of a query; shorter first paragraphs say too little to search for."""

_MIN_DOCUMENT_WORDS = 12
"""Shorter documents say too little to be found."""

_MAX_OVERLAP = 0.5
"""Share of a document's shingles that an earlier one may hold."""


def build(
  packages: Sequence[str] = PACKAGES, *, seed: int = 0
) -> collection_lib.Collection:
  """Reads the installed packages into queries, documents and judgements.

  Left out are first paragraphs that read like a signature, queries that stand
  verbatim in their own document, and documents most of which another document
  already said. Equal queries become one query with several documents, and
  queries with the same set of words stay on one side of the split.

  Args:
    packages: what to read; one that is not installed is left out.
    seed: decides which documents go to train, dev and test.

  Returns:
    A collection with the splits train, dev and test, about 80/10/10.
  """
  pairs = _without_near_duplicates(_pairs(packages))
  documents, queries, qrels_of = [], {}, {}
  for entry in pairs:
    document = collection_lib.Document(
      id=_identifier("d", f"{entry.name} {entry.rest}"),
      text=entry.rest,
      client=entry.package,
    )
    documents.append(document)
    key = " ".join(docstrings.words(entry.first))
    query = collection_lib.Query(
      id=_identifier("q", key), text=entry.first, client=entry.package
    )
    queries.setdefault(query.id, query)
    qrels_of.setdefault(query.id, []).append(document.id)
  return _split(documents, queries, qrels_of, seed)


def digest(packages: Sequence[str] = PACKAGES) -> str:
  """Returns what the demo set depends on: names and versions of packages."""
  parts = []
  for package in packages:
    try:
      parts.append(f"{package}=={docstrings.version(package)}")
    except Exception:  # not installed: its absence is part of the digest
      parts.append(f"{package} absent")
  return ", ".join(parts)


def most_documents(packages: Sequence[str] = PACKAGES) -> int:
  """Returns how many documents the set may have; no package is parsed."""
  total = 0
  for package in packages:
    with contextlib.suppress(ValueError):  # not installed: `digest` says so
      total += docstrings.most(package)
  return total


def private_queries(packages: Sequence[str] = PACKAGES) -> list[str]:
  """Returns every first paragraph the demo set may hold as a query.

  Before the near-duplicates are dropped, so that what is held out of the
  public pre-training does not depend on which duplicate was kept.
  """
  return [entry.first for entry in _pairs(packages)]


def _pairs(packages: Sequence[str]) -> list[docstrings.Docstring]:
  found = []
  for package in packages:
    try:
      found.extend(filter(_is_pair, docstrings.read(package)))
    except ValueError:
      continue  # not installed: `digest` says so
  return found


def _is_pair(entry: docstrings.Docstring) -> bool:
  """Whether first paragraph and rest make a query and its document."""
  query = docstrings.words(entry.first)
  document = docstrings.words(entry.rest)
  letters = sum(c.isalpha() or c.isspace() for c in entry.first)
  return (
    _QUERY_WORDS[0] <= len(query) <= _QUERY_WORDS[1]
    and len(document) >= _MIN_DOCUMENT_WORDS
    and letters >= 0.85 * len(entry.first)
    and not _SIGNATURE.search(entry.first)
    and f" {' '.join(query)} " not in f" {' '.join(document)} "
  )


def _without_near_duplicates(pairs):
  """Keeps the first of documents that share most of their shingles."""
  owner: dict[int, int] = {}
  kept = []
  for entry in pairs:
    words = docstrings.words(entry.rest)
    shingles = {
      hash_text(" ".join(words[i : i + _SHINGLE]))
      for i in range(max(1, len(words) - _SHINGLE + 1))
    }
    shared: dict[int, int] = {}
    for shingle in shingles:
      if shingle in owner:
        shared[owner[shingle]] = shared.get(owner[shingle], 0) + 1
    if max(shared.values(), default=0) > _MAX_OVERLAP * len(shingles):
      continue
    for shingle in shingles:
      owner.setdefault(shingle, len(kept))
    kept.append(entry)
  return kept


def _split(documents, queries, qrels_of, seed) -> collection_lib.Collection:
  """Cuts the pairs by document, near-duplicate queries on one side."""
  pairs = [(q, d) for q, ids in qrels_of.items() for d in ids]
  sides = splits.split_by_document(
    [(queries[q].text, d) for q, d in pairs], seed=seed
  )
  qrels: dict[str, dict[str, dict[str, int]]] = {}
  for (query, document), side in zip(pairs, sides, strict=True):
    qrels.setdefault(side, {}).setdefault(query, {})[document] = 1
  return collection_lib.Collection(
    documents=tuple(documents),
    queries=tuple(queries.values()),
    qrels=qrels,
  )


def hash_text(text: str) -> int:
  """Returns 64 bits of a digest: the same in every process."""
  return int.from_bytes(
    hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"
  )


def _identifier(kind: str, text: str) -> str:
  return f"{kind}{hash_text(text):016x}"
