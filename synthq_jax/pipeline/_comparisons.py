"""Real and synthetic queries for the same held-out documents: private."""

import dataclasses
import pathlib
import random
from collections.abc import Sequence

from synthq_jax.data import files
from synthq_jax.generation import text_measures
from synthq_jax.pipeline import inputs, results

__all__ = ["Comparison", "Similarity", "read", "similarity"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """What was asked about a document, and what generators wrote about it."""

  document: str
  """Title and text."""
  real: tuple[str, ...]
  """Private queries that it answers."""
  synthetic: dict[str, tuple[str, ...]]
  """Queries by generator; none where it did not write for the document."""


def read(
  workdir: pathlib.Path,
  prepared: results.PreparedData,
  synthetic: Sequence[results.SyntheticQueries],
  *,
  split: str,
  number: int,
  seed: int,
) -> list[Comparison]:
  """Reads a few documents of a private split with all that was asked of them.

  Documents that most generators wrote for come first; among equals, chance
  decides.

  Args:
    workdir: what the paths of the results are relative to.
    prepared: the collection.
    synthetic: the generators' queries.
    split: the private split, e.g. "test".
    number: documents at most.
    seed: of the draw.

  Returns:
    At most `number` documents that some generator wrote for.
  """
  private = workdir / prepared.private_directory
  asked = _asked(private, split)
  written = {
    one.name: _written(workdir / one.directory, asked) for one in synthetic
  }
  chosen = _choose(asked, written, number, seed)
  ids = {query for document in chosen for query in asked[document]}
  queries = _texts(files.find(private, "queries.jsonl"), ids)
  corpus = files.find(workdir / prepared.directory, "corpus.jsonl")
  documents = _texts(corpus, set(chosen))
  return [
    Comparison(
      document=documents[document],
      real=tuple(queries[query] for query in asked[document]),
      synthetic={
        name: tuple(by_document.get(document, ()))
        for name, by_document in written.items()
      },
    )
    for document in chosen
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
  """How near a generator's queries come to the real ones."""

  name: str
  """Of the generator."""
  num_queries: int
  """Synthetic queries for documents of held-out pairs."""
  bleu: float
  """Against the real queries of the same documents, 0 to 100."""


def similarity(
  workdir: pathlib.Path,
  prepared: results.PreparedData,
  synthetic: Sequence[results.SyntheticQueries],
  *,
  split: str,
) -> list[Similarity]:
  """Compares all synthetic queries for the documents of a held-out split.

  Args:
    workdir: what the paths of the results are relative to.
    prepared: the collection.
    synthetic: the generators' queries.
    split: a split that no generator was trained on, e.g. "test".

  Returns:
    One for each generator.
  """
  private = workdir / prepared.private_directory
  asked = _asked(private, split)
  ids = {query for queries in asked.values() for query in queries}
  real = _texts(files.find(private, "queries.jsonl"), ids)
  found = []
  for one in synthetic:
    written = _written(workdir / one.directory, asked)
    pairs = [
      (query, [real[i] for i in asked[document]])
      for document, queries in sorted(written.items())
      for query in queries
    ]
    score = text_measures.bleu([q for q, _ in pairs], [r for _, r in pairs])
    found.append(Similarity(name=one.name, num_queries=len(pairs), bleu=score))
  return found


def _asked(private: pathlib.Path, split: str) -> dict[str, list[str]]:
  """Returns the ids of the queries that each document answers."""
  asked: dict[str, list[str]] = {}
  for query, grades in inputs.qrels(private, split).items():
    for document, grade in grades.items():
      if grade > 0:
        asked.setdefault(document, []).append(query)
  return asked


def _written(
  directory: pathlib.Path, documents: dict[str, list[str]]
) -> dict[str, list[str]]:
  """Returns the synthetic queries for the documents that matter."""
  written: dict[str, list[str]] = {}
  for _, line in files.json_lines(files.find(directory, "queries.jsonl")):
    if line["document"] in documents:
      written.setdefault(line["document"], []).append(line["text"])
  return written


def _choose(
  asked: dict[str, list[str]],
  written: dict[str, dict[str, list[str]]],
  number: int,
  seed: int,
) -> list[str]:
  """Draws documents, those that most generators wrote for first."""
  counts = {
    document: sum(document in one for one in written.values())
    for document in sorted(asked)
  }
  there = [document for document, count in counts.items() if count]
  random.Random(seed).shuffle(there)
  there.sort(key=lambda document: -counts[document])
  return there[:number]


def _texts(path: pathlib.Path, ids: set[str]) -> dict[str, str]:
  """Returns title and text of the lines with these ids."""
  found: dict[str, str] = {}
  for _, line in files.json_lines(path):
    if line["_id"] in ids:
      title = line.get("title") or ""
      found[line["_id"]] = f"{title} {line['text']}".strip()
  return found
