"""The demo set that every machine has: the documentation of Python and packages.

The first paragraph of a docstring plays the private query, the rest of it the
public document, and the package the client. What comes out depends on the
versions of Python and of the packages of a fixed list, which the digest names:
with the same versions it is the same on every machine.
"""

import contextlib
import dataclasses
import hashlib
import re

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import docstrings, splits

__all__ = [
  "PACKAGES",
  "EnvironmentDocs",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentDocs:
  """How the demo set is cut out of the installed packages."""

  packages: tuple[str, ...] = PACKAGES
  """Packages to read; one that is not installed is left out."""
  min_query_words: int = 3
  """Shorter first paragraphs say too little to search for."""
  max_query_words: int = 30
  """Longer first paragraphs are not queries."""
  min_document_words: int = 12
  """Shorter documents say too little to be found."""
  max_overlap: float = 0.5
  """Share of a document's 5-word shingles that an earlier one may hold."""
  seed: int = 0
  """Decides which documents go to train, dev and test."""


def build(config: EnvironmentDocs) -> collection_lib.Collection:
  """Reads the installed packages into queries, documents and judgements.

  Left out are first paragraphs that read like a signature, queries that stand
  verbatim in their own document, and documents most of which another document
  already said. Equal queries become one query with several documents, and
  queries with the same set of words stay on one side of the split.

  Args:
    config: what to read and to leave out.

  Returns:
    A collection with the splits train, dev and test, about 80/10/10.
  """
  pairs = _without_near_duplicates(
    [entry for entry in _entries(config) if _is_pair(entry, config)],
    config.max_overlap,
  )
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
  return _split(documents, queries, qrels_of, config.seed)


def digest(config: EnvironmentDocs) -> str:
  """Returns what the demo set depends on: names and versions of packages."""
  parts = []
  for package in config.packages:
    try:
      parts.append(f"{package}=={docstrings.version(package)}")
    except Exception:  # not installed: its absence is part of the digest
      parts.append(f"{package} absent")
  return ", ".join(parts)


def most_documents(config: EnvironmentDocs) -> int:
  """Returns how many documents the set may have; no package is parsed."""
  total = 0
  for package in config.packages:
    with contextlib.suppress(ValueError):  # not installed: `digest` says so
      total += docstrings.most(package)
  return total


def private_queries(config: EnvironmentDocs) -> list[str]:
  """Returns every first paragraph the demo set may hold as a query.

  Before the near-duplicates are dropped, so that what is held out of the
  public pre-training does not depend on which duplicate was kept.
  """
  return [e.first for e in _entries(config) if _is_pair(e, config)]


def _entries(config: EnvironmentDocs) -> list[docstrings.Docstring]:
  found = []
  for package in config.packages:
    try:
      found.extend(docstrings.read(package))
    except ValueError:
      continue  # not installed: `digest` says so
  return found


def _is_pair(entry: docstrings.Docstring, config: EnvironmentDocs) -> bool:
  """Whether first paragraph and rest make a query and its document."""
  query = docstrings.words(entry.first)
  document = docstrings.words(entry.rest)
  letters = sum(c.isalpha() or c.isspace() for c in entry.first)
  return (
    config.min_query_words <= len(query) <= config.max_query_words
    and len(document) >= config.min_document_words
    and letters >= 0.85 * len(entry.first)
    and not _SIGNATURE.search(entry.first)
    and f" {' '.join(query)} " not in f" {' '.join(document)} "
  )


def _without_near_duplicates(pairs, max_overlap: float):
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
    if max(shared.values(), default=0) > max_overlap * len(shingles):
      continue
    for shingle in shingles:
      owner.setdefault(shingle, len(kept))
    kept.append(entry)
  return kept


def _split(documents, queries, qrels_of, seed) -> collection_lib.Collection:
  """Cuts the pairs by document, near-duplicate queries on one side."""
  pairs = [(q, d) for q, ids in qrels_of.items() for d in ids]
  sides = splits.split_by_document(
    [(queries[q].text, d) for q, d in pairs],
    {"train": 0.8, "dev": 0.1, "test": 0.1},
    seed=seed,
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
