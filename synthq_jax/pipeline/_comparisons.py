"""Real and synthetic queries for the same held-out documents: private."""

import dataclasses
import pathlib
import random
from collections.abc import Iterable, Sequence

from synthq_jax.data import files
from synthq_jax.generation import mauve, text_measures
from synthq_jax.pipeline import inputs, results
from synthq_jax.retrieval import text_encoders

__all__ = ["Comparison", "Side", "Similarity", "read", "similarity"]

_Pair = tuple[str, str]  # a query, and the id of its document
_CLUSTERINGS = 5
"""Behind each MAUVE: with 500 queries, one alone is off by 0.05."""


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
class Side:
  """What queries are like, whoever wrote them."""

  words: float
  """Mean length."""
  distinct: float
  """Share of different 2-grams among all."""
  copied: float
  """Share of the 4-grams that stand in the query's document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
  """How near a generator's queries come to the real ones."""

  name: str
  """Of the generator."""
  num_queries: int
  """Synthetic queries for documents of held-out pairs."""
  bleu: text_measures.Bleu
  """Of all of these, against the real queries of the same documents."""
  num_compared: int
  """Queries of each side behind what follows: as many real as synthetic."""
  mauve: tuple[mauve.Mauve, ...]
  """Of real and synthetic queries, a few clusterings; empty without queries or
  a featurizer."""
  real: Side
  """The real queries."""
  synthetic: Side
  """The generator's."""


def similarity(
  workdir: pathlib.Path,
  prepared: results.PreparedData,
  synthetic: Sequence[results.SyntheticQueries],
  *,
  split: str,
  featurizer: text_encoders.TextEncoder | None,
  limit: int,
  seed: int,
) -> list[Similarity]:
  """Compares synthetic queries for the documents of a held-out split.

  Args:
    workdir: what the paths of the results are relative to.
    prepared: the collection.
    synthetic: the generators' queries.
    split: a split that no generator was trained on, e.g. "test".
    featurizer: makes MAUVE's vectors; None: no MAUVE.
    limit: queries of each side, at most, behind all but BLEU.
    seed: of the draw, and of MAUVE's clustering.

  Returns:
    One for each generator.
  """
  private = workdir / prepared.private_directory
  asked = _asked(private, split)
  ids = {query for queries in asked.values() for query in queries}
  texts = _texts(files.find(private, "queries.jsonl"), ids)
  real = {
    document: [texts[query] for query in queries]
    for document, queries in asked.items()
  }
  corpus = files.find(workdir / prepared.directory, "corpus.jsonl")
  documents = _texts(corpus, set(asked))
  pairs, drawn = [], []
  for one in synthetic:
    written = _written(workdir / one.directory, asked)
    pairs.append(_pairs(written, written))
    drawn.append(_draw(_pairs(real, written), pairs[-1], limit, seed))
  scores = _mauve(drawn, featurizer, seed)
  return [
    Similarity(
      name=one.name,
      num_queries=len(own),
      bleu=text_measures.signed_bleu(
        [query for query, _ in own], [real[document] for _, document in own]
      ),
      num_compared=len(sides[0]),
      mauve=score,
      real=_side(sides[0], documents),
      synthetic=_side(sides[1], documents),
    )
    for one, own, sides, score in zip(
      synthetic, pairs, drawn, scores, strict=True
    )
  ]


def _pairs(
  queries: dict[str, list[str]], documents: Iterable[str]
) -> list[_Pair]:
  """Returns the queries of these documents, each with its document."""
  return [
    (query, document)
    for document in sorted(documents)
    for query in queries[document]
  ]


def _draw(
  real: list[_Pair], synthetic: list[_Pair], limit: int, seed: int
) -> tuple[list[_Pair], list[_Pair]]:
  """Draws as many of one side as of the other.

  Distinct n-grams and MAUVE depend on how many texts there are.
  """
  number = min(len(real), len(synthetic), limit)
  sample = random.Random(seed).sample
  return sample(real, number), sample(synthetic, number)


def _mauve(
  drawn: Sequence[tuple[list[_Pair], list[_Pair]]],
  featurizer: text_encoders.TextEncoder | None,
  seed: int,
) -> list[tuple[mauve.Mauve, ...]]:
  """Compares both sides of each draw; every text is featurized once."""
  if featurizer is None or not any(real for real, _ in drawn):
    return [()] * len(drawn)
  texts = sorted({q for sides in drawn for side in sides for q, _ in side})
  vectors = featurizer.encode(texts)
  row = {text: number for number, text in enumerate(texts)}
  found = []
  for sides in drawn:
    first, second = (vectors[[row[q] for q, _ in side]] for side in sides)
    found.append(
      tuple(
        mauve.from_vectors(
          first,
          second,
          config=mauve.Config(seed=seed + number),
          featurizer=featurizer.description,
        )
        for number in range(_CLUSTERINGS if len(first) else 0)
      )
    )
  return found


def _side(pairs: list[_Pair], documents: dict[str, str]) -> Side:
  queries = [query for query, _ in pairs]
  owners = [documents[document] for _, document in pairs]
  return Side(
    words=text_measures.mean_length(queries),
    distinct=text_measures.distinct_n(queries, 2),
    copied=text_measures.copy_rate(queries, owners, 4),
  )


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
