"""Builds the demo set from the documentation of Python and installed packages.

The first paragraph of a docstring plays the private query, the rest of it the
public document, and the package the client. The set is a function of the versions
of Python and of the packages of a fixed list, which the digest names.
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
"""Python itself, and packages that the pipeline needs or that come with
them."""

_SIGNATURE = re.compile(r"\w\(.*\)|->|::|[={}\\]|^\W")
_SHINGLE = 5

_QUERY_WORDS = (3, 30)
"""Smallest and largest number of words of a query, so that one can search for
it."""

_MIN_DOCUMENT_WORDS = 12
"""Smallest number of words of a document, so that a search can find it."""

_MAX_OVERLAP = 0.5
"""Largest share of a document's shingles that one earlier document may hold."""


def build(
  packages: Sequence[str] = PACKAGES, *, seed: int = 0
) -> collection_lib.Collection:
  """Builds queries, documents and judgements from the installed packages.

  It leaves out first paragraphs that look like a signature, queries that occur
  verbatim in their own document, and documents that share most shingles with an
  earlier one. Equal queries become one query with several documents, and queries
  with the same set of words are on one side of the split.

  Args:
    packages: names of the packages; those that are not installed are left out.
    seed: another seed gives other splits.

  Returns:
    A collection with the splits train, dev and test, about 80/10/10.
  """
  pairs = _drop_near_duplicates(_read_pairs(packages))
  documents, queries, qrels_of = [], {}, {}
  for entry in pairs:
    document = collection_lib.Document(
      id=_make_id("d", f"{entry.name} {entry.rest}"),
      text=entry.rest,
      client=entry.package,
    )
    documents.append(document)
    key = " ".join(docstrings.words(entry.first))
    query = collection_lib.Query(
      id=_make_id("q", key), text=entry.first, client=entry.package
    )
    queries.setdefault(query.id, query)
    qrels_of.setdefault(query.id, []).append(document.id)
  return _split(documents, queries, qrels_of, seed)


def digest(packages: Sequence[str] = PACKAGES) -> str:
  """Returns the names and versions of the packages, which determine the demo
  set."""
  parts = []
  for package in packages:
    try:
      parts.append(f"{package}=={docstrings.version(package)}")
    except Exception:  # not installed: its absence is part of the digest
      parts.append(f"{package} absent")
  return ", ".join(parts)


def most_documents(packages: Sequence[str] = PACKAGES) -> int:
  """Returns an upper bound of the number of documents without parsing a
  package."""
  total = 0
  for package in packages:
    with contextlib.suppress(ValueError):  # not installed: `digest` says so
      total += docstrings.get_max_count(package)
  return total


def private_queries(packages: Sequence[str] = PACKAGES) -> list[str]:
  """Returns every first paragraph that the demo set may hold as a query.

  It includes near-duplicates, so that the texts held out of the public pre-training
  do not depend on which duplicate the set keeps.
  """
  return [entry.first for entry in _read_pairs(packages)]


def _read_pairs(packages: Sequence[str]) -> list[docstrings.Docstring]:
  pairs = []
  for package in packages:
    try:
      pairs.extend(filter(_is_pair, docstrings.read(package)))
    except ValueError:
      continue  # not installed: `digest` says so
  return pairs


def _is_pair(entry: docstrings.Docstring) -> bool:
  """Returns True if first paragraph and rest can be a query and its
  document."""
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


def _drop_near_duplicates(pairs):
  """Drops documents that share most of their shingles with an earlier one."""
  owner: dict[int, int] = {}
  distinct = []
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
      owner.setdefault(shingle, len(distinct))
    distinct.append(entry)
  return distinct


def _split(documents, queries, qrels_of, seed) -> collection_lib.Collection:
  """Splits the pairs by document, with queries of equal words on one side."""
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
  """Hashes a text to 64 bits that are the same in every process."""
  return int.from_bytes(
    hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"
  )


def _make_id(kind: str, text: str) -> str:
  return f"{kind}{hash_text(text):016x}"
