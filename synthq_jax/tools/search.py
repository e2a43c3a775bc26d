"""Searches the documents of a finished run with one of its systems.

What `encode_documents` kept is searched as it is.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from synthq_jax import text_tables
from synthq_jax.data import files, passages
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import (
  best_passages,
  encode,
  fusion,
  index,
  ranking,
  trec,
  vector_files,
)
from synthq_jax.runtime import (
  encoder_start,
  inputs,
  results,
  system_results,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = ["Hit", "Searcher", "describe", "open_run", "read_systems"]

_SNIPPET = 240
"""Characters of a document that are shown."""
_LEAD = 40
"""Characters shown before the first word of the query."""


@dataclasses.dataclass(frozen=True)
class Hit:
  """A document that was found."""

  id: str
  """Id of the document."""
  score: float
  """Score by the system that found it."""
  title: str
  """Title of the document, or ""."""
  snippet: str
  """The part of its text where the query's words stand."""


_Search = Callable[[str, int], dict[str, float]]
"""From a query and a count to scores by the documents' positions, best first."""
_Run = dict[str, float]
_Joined = Callable[[str, Sequence[_Run], int], _Run]
"""From a query, what BM25 and a retriever find, and a count to one run of both."""


@dataclasses.dataclass(frozen=True)
class Searcher:
  """A system of a run, ready to answer."""

  row: rows_lib.Row
  """Its row."""
  find: _Search
  """Its search."""
  documents: Sequence[dict[str, str]]
  """Lines of corpus.jsonl by position."""

  def search(self, query: str, k: int = 10) -> list[Hit]:
    """Returns the best documents, best first.

    Args:
      query: what is asked; an empty one finds nothing.
      k: documents at most, at least 1.

    Raises:
      ValueError: if k < 1.
    """
    if k < 1:
      raise ValueError(f"expected k >= 1, got k={k}")
    if not query.strip():
      return []
    return [
      self._hit(query, score, position)
      for position, score in self.find(query, k).items()
    ]

  def _hit(self, query: str, score: float, position: str) -> Hit:
    found = self.documents[int(position)]
    text = _snippet(found["text"], query)
    return Hit(found["_id"], float(score), found["title"], text)


def open_run(
  workdir: str, name: str | None = None, *, private: bool = False
) -> Searcher:
  """Opens a system of a finished run.

  Formal guarantee: post-processing of a system and public documents. Private
  queries are never read.

  Args:
    workdir: of the run.
    name: "bm25" or another row; None: the first retriever that was trained on
      synthetic queries, in the last system that is made of it; else BM25.
    private: whether a system under `private/` is taken, too.

  Raises:
    ValueError: if the run is not finished, or has no such row.
  """
  folders = workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="run")
  artifacts.check(folders.private("prepare_data"))
  known = read_systems(folders, private=private)
  by_name = {str(row): row for row in known}
  row = _choose(known) if name is None else by_name.get(name)
  if row is None:
    hint = "" if private else "; --private adds the private ones"
    raise ValueError(
      f"{workdir}: expected --system among {', '.join(by_name)}, got {name}{hint}"
    )
  _check(folders, known, row)
  opened = _Opened(folders, prepared, known)
  documents = files.Lines(opened.corpus, json.loads)
  return Searcher(row, opened.system(row), documents)


def _choose(finished: Collection[rows_lib.Row]) -> rows_lib.Row:
  """Chooses the system that stands on the first synthetic queries, else BM25."""
  pairs = (row.retriever for row in finished if row.pairs == rows_lib.SYNTHETIC)
  first = next(pairs, rows_lib.BM25)
  systems = (rows_lib.RANKED, rows_lib.FUSED, rows_lib.DENSE)
  usual = (*map(first.of_system, systems), rows_lib.BM25)
  return next(row for row in usual if row in finished)


def describe(row: rows_lib.Row, hits: Sequence[Hit]) -> str:
  """Writes the hits of a system as text for a terminal."""
  lines = [f"{row}:" if hits else f"{row}: nothing"]
  for rank, hit in enumerate(hits, 1):
    title, snippet = map(
      text_tables.printable, (hit.title or hit.id, hit.snippet)
    )
    lines.append(f"{rank:3}. {title}  ({hit.score:.3f})\n     {snippet}")
  return "\n".join(lines)


def read_systems(
  folders: workspace.Folders, *, private: bool
) -> dict[rows_lib.Row, Any]:
  """Reads the finished systems by row, shareable ones first; None is BM25.

  Args:
    folders: the working directory.
    private: whether systems under `private/` are taken, too.
  """
  kinds = {
    "train_retriever": results.Checkpoint,
    "learn_adapter": system_results.Adapter,
    "fuse": system_results.Fusion,
    "learn_to_rank": system_results.Ranking,
  }
  found: dict[rows_lib.Row, Any] = {rows_lib.BM25: None}
  for place in (folders.public, folders.private)[: 1 + private]:
    for stage, kind in kinds.items():
      for folder in sorted(place(stage).glob("*")):
        if artifacts.read_fingerprint(folder) is not None:
          made = artifacts.load(folder, kind)
          found.setdefault(made.row, made)
  return found


def _check(
  folders: workspace.Folders, known: dict[rows_lib.Row, Any], row: rows_lib.Row
) -> None:
  """Refuses a row, or a retriever in it, that was damaged or made otherwise."""
  part = row.retriever
  for one in dict.fromkeys((row, part)):
    if made := known.get(one):
      place = folders.root / made.directory
      artifacts.check(place)
      artifacts.check_data(place, folders.private("prepare_data"))
  is_whole = row in (part, rows_lib.BM25) or (
    part in known and system_results.stands_on(known[row], known[part])
  )
  if not is_whole:
    raise ValueError(
      f"{folders.root / known[row].directory}: expected weights of"
      f" train_retriever/{part} as it is, got those of another training of it:"
      " run `synthq run` again, which makes them anew"
    )


class _Opened:
  """The parts of a system of a run."""

  def __init__(
    self,
    folders: workspace.Folders,
    prepared: results.PreparedData,
    known: dict[rows_lib.Row, Any],
  ):
    self._folders, self._prepared, self._known = folders, prepared, known
    self._positions = [str(n) for n in range(prepared.num_documents)]
    self.corpus = inputs.corpus(folders, prepared)

  def system(self, row: rows_lib.Row) -> _Search:
    made = self._known[row]
    if isinstance(made, results.Checkpoint):
      return self._vectors(row, self._index(row))
    if isinstance(made, (system_results.Fusion, system_results.Ranking)):
      return self._beside_bm25(made)
    built = queries_lib.index_of(self._positions, self.corpus)
    return lambda query, k: built.search_run([""], [query], k)[""]

  @functools.cached_property
  def _passages(self) -> passages.Passages:
    return inputs.document_tokens(self._folders, self._prepared)

  @functools.cached_property
  def _features(self) -> ranking.Features:
    texts = inputs.document_texts(self.corpus)
    return ranking.Features.build(self._positions, texts)

  def _beside_bm25(
    self, made: system_results.Fusion | system_results.Ranking
  ) -> _Search:
    parts = (rows_lib.BM25, made.retriever)
    lexical, dense = map(self.system, parts)
    is_ranking = isinstance(made, system_results.Ranking)
    joined = self._ranked(made) if is_ranking else self._fused(made)

    def find(query: str, k: int) -> dict[str, float]:
      runs = [one(query, made.depth) for one in (lexical, dense)]
      return joined(query, runs, k)

    return find

  def _fused(self, made: system_results.Fusion) -> _Joined:
    def joined(query: str, runs: Sequence[_Run], k: int) -> _Run:
      del query
      each = ({"": run} for run in runs)
      return fusion.fuse(made.method, *each, weight=made.weight, depth=k)[""]

    return joined

  def _ranked(self, made: system_results.Ranking) -> _Joined:
    def joined(query: str, runs: Sequence[_Run], k: int) -> _Run:
      [found] = self._features.of([query], *([run] for run in runs))
      return ranking.rank({"": found}, made.weights, k)[""]

    return joined

  def _vectors(self, row: rows_lib.Row, built: index.Index) -> _Search:
    """Returns the search by a retriever's vectors."""
    encoded = self._encoder(row)
    owners = self._passages.owners

    def find(query: str, k: int) -> dict[str, float]:
      found = best_passages.documents(built, encoded(query), owners, k)
      return trec.to_run([""], self._positions, *found)[""]

    return find

  def _encoder(self, row: rows_lib.Row) -> Callable[[str], np.ndarray]:
    """Returns the retriever's vector of one query, [1, dim]."""
    made, role = self._known[row], sentence_folders.QUERY
    params, shape = encoder_start.load(self._folders, made, role)
    reads = encoder_start.tokens_of(self._folders, made)
    vocabulary = inputs.vocabulary(self._folders, self._prepared)

    def encoded(query: str) -> np.ndarray:
      own = vocabulary_lib.tokenize(
        vocabulary, [query], length=self._prepared.query_length
      )
      tokens = encoder_start.query_tokens(reads, [query], own)
      return encode.encode(params, shape, tokens, batch_size=1)

    return encoded

  @functools.cache  # noqa: B019  (lives as long as its search)
  def _index(self, row: rows_lib.Row) -> index.Index:
    """Indexes a retriever's vectors."""
    made = self._known[row]
    if isinstance(made, system_results.Adapter):
      made.find_base(self._folders.root)
      made = made.base
    place = self._encoded(made).vectors
    total = len(self._passages.owners)
    vectors = vector_files.open_vectors(self._folders.root / place, total)
    return index.exact(np.asarray(vectors))

  def _encoded(self, retriever: results.Checkpoint) -> system_results.Vectors:
    """Reads which vectors a run made with a retriever as it is."""
    name = retriever.name
    folders = self._folders
    private = results.is_private_path(retriever.directory)
    place = folders.private if private else folders.public
    source = place("encode_documents", name)
    again = "run `synthq run` again with the run's settings, which makes "
    if artifacts.read_fingerprint(source) is None:
      raise ValueError(
        f"{source}: expected the vectors of {name}, got none: {again}"
        "what is missing"
      )
    artifacts.check(source)
    made = artifacts.load(source, system_results.Vectors)
    trained = artifacts.read_fingerprint(folders.root / retriever.directory)
    is_same_release = made.statement.ledger == retriever.statement.ledger
    if not is_same_release or made.retriever != trained:
      raise ValueError(
        f"{source}: expected the vectors of {name}, got those of an"
        f" earlier training of it: {again}them anew"
      )
    return made


def _snippet(text: str, query: str) -> str:
  """Returns the part of a text where most of a query's words stand close.

  >>> _snippet("a " * 200 + "red apple", "apples, red")[-9:]
  'red apple'
  """
  text = " ".join(text.split())
  stems = {word[:5] for word in re.findall(r"\w{3,}", query.lower())}
  places = [
    word.start()
    for word in re.finditer(r"\w{3,}", text)
    if word.group().lower()[:5] in stems
  ]
  ends = np.searchsorted(places, np.add(places, _SNIPPET - _LEAD))
  start = places[np.argmax(ends - np.arange(len(places)))] if places else 0
  start = max(0, min(start - _LEAD, len(text) - _SNIPPET))
  start = text.find(" ", start) + 1 if start else 0
  part = text[start : start + _SNIPPET]
  ahead = "... " if start else ""
  behind = " ..." if start + _SNIPPET < len(text) else ""
  return f"{ahead}{part}{behind}"
