"""Searches the documents of a finished run with its systems, side by side.

The vectors of the documents are made once for each retriever, and kept as a
faiss index with the fingerprint of what they depend on: `search/ROW` beside the
retriever, below `private/` where that is private.
"""

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import _parts, inputs, results, workspace
from synthq_jax.retrieval import bm25, encode, index, vector_files

__all__ = ["BM25", "Hit", "SavedIndex", "Searcher", "describe", "open_run"]

BM25 = "bm25"
"""The name of the system that reads words."""

_INDEX = "documents.faiss"
_SNIPPET = 240
"""Characters of a document that are shown."""
_DOCUMENTS = 8192
"""Encoded between two saves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedIndex:
  """The vectors of all documents, by one retriever."""

  directory: str
  """Holds documents.faiss: inner products, in the order of corpus.jsonl."""
  name: str
  """The row of the retriever."""
  num_documents: int
  """Vectors in it."""
  dim: int
  """Numbers of a vector."""


@dataclasses.dataclass(frozen=True)
class Hit:
  """A document that was found."""

  id: str
  """Of the document."""
  score: float
  """By the system that found it."""
  title: str
  """Of the document, or ""."""
  snippet: str
  """The part of its text where the query's words stand."""


_Search = Callable[[str, int], tuple[Sequence[float], Sequence[int]]]
"""From a query and a count to scores and positions of documents."""


@dataclasses.dataclass(frozen=True)
class Searcher:
  """The systems of a run, ready to answer."""

  systems: dict[str, _Search]
  """By name, in the order in which they are shown."""
  documents: Sequence[dict[str, str]]
  """Lines of corpus.jsonl by position."""

  def search(self, query: str, k: int = 10) -> dict[str, list[Hit]]:
    """Returns the best documents of each system, best first.

    Args:
      query: what is asked; an empty one finds nothing.
      k: documents of a system at most, at least 1.

    Raises:
      ValueError: if k < 1.
    """
    if k < 1:
      raise ValueError(f"expected k >= 1, got k={k}")
    if not query.strip():
      return {name: [] for name in self.systems}
    return {
      name: [
        self._hit(query, score, position)
        for score, position in zip(*find(query, k), strict=True)
      ]
      for name, find in self.systems.items()
    }

  def _hit(self, query: str, score: float, position: int) -> Hit:
    found = self.documents[int(position)]
    text = _snippet(found["text"], query)
    return Hit(found["_id"], float(score), found["title"], text)


def open_run(
  workdir: str,
  names: Sequence[str] = (),
  *,
  private: bool = False,
  progress: bool = True,
) -> Searcher:
  """Opens the systems of a finished run; what has no vectors gets them.

  Formal guarantee: post-processing of retrievers and public documents: an index
  is as private as its retriever. Private queries are never read.

  Args:
    workdir: of the run.
    names: `BM25` and rows of retrievers; none: BM25, and the first retriever
      that was trained on synthetic queries of a private generator.
    private: whether retrievers under `private/` are taken, too.
    progress: whether bars are shown.

  Raises:
    ValueError: if the run is not finished, or has no such row.
  """
  folders = workspace.Folders(workdir)
  data = folders.private("prepare_data")
  if artifacts.read_fingerprint(data) is None:
    raise ValueError(
      f"{workdir}: expected the working directory of a run, got one without"
      " prepared data: run `synthq run` first, or check --workdir"
    )
  prepared = artifacts.load(data, results.PreparedData)
  known = _retrievers(folders, private=private)
  chosen = tuple(names) or (BM25, *_first(known))
  unknown = [name for name in chosen if name not in {BM25, *known}]
  if unknown:
    hint = "" if private else "; --private adds the private ones"
    raise ValueError(
      f"{workdir}: expected --system among {', '.join((BM25, *known))}, got"
      f" {unknown[0]}{hint}"
    )
  systems = {
    name: _words(folders, prepared)
    if name == BM25
    else _vectors(folders, prepared, known[name], progress)
    for name in dict.fromkeys(chosen)
  }
  return Searcher(systems, _Lines(inputs.corpus(folders, prepared)))


def describe(found: dict[str, list[Hit]]) -> str:
  """Returns what was found as text for a terminal."""
  parts = []
  for name, hits in found.items():
    lines = [f"{name}:" if hits else f"{name}: nothing"]
    for rank, hit in enumerate(hits, 1):
      title = hit.title or hit.id
      lines.append(f"{rank:3}. {title}  ({hit.score:.3f})\n     {hit.snippet}")
    parts.append("\n".join(lines))
  return "\n\n".join(parts)


def _retrievers(
  folders: workspace.Folders, *, private: bool
) -> dict[str, results.Checkpoint]:
  """Returns the finished retrievers by row, those that may be shared first."""
  places = [folders.public("train_retriever")]
  if private:
    places.append(folders.private("train_retriever"))
  found = {}
  for folder in (one for place in places for one in sorted(place.glob("*"))):
    if artifacts.read_fingerprint(folder) is not None:
      made = artifacts.load(folder, results.Checkpoint)
      found.setdefault(made.name, made)
  return found


def _first(known: Sequence[str]) -> list[str]:
  return [name for name in known if name.startswith("synthetic")][:1]


def _words(folders, prepared) -> _Search:
  """Returns the search by BM25; it is built each time."""
  texts = inputs.document_texts(inputs.corpus(folders, prepared))
  positions = [str(n) for n in range(prepared.num_documents)]
  built = bm25.BM25().build(positions, texts)

  def find(query: str, k: int):
    [scores], [places] = built.search([query], k)
    return scores.tolist(), list(map(int, places))

  return find


def _vectors(
  folders: workspace.Folders,
  prepared: results.PreparedData,
  retriever: results.Checkpoint,
  progress: bool,
) -> _Search:
  """Returns the search by a retriever's vectors."""
  params, shape = t5_checkpoints.load(folders.root / retriever.directory)
  vocabulary = inputs.vocabulary(folders, prepared)
  built = _index(folders, prepared, retriever, params, shape, progress)

  def find(query: str, k: int):
    tokens = vocabulary_lib.tokenize(
      vocabulary, [query], length=prepared.query_length
    )
    asked = encode.encode(params, shape, tokens, batch_size=1)
    scores, places = built.search(asked, k)
    return scores[0].tolist(), places[0].tolist()

  return find


def _index(
  folders, prepared, retriever, params: Any, shape: Any, progress: bool
) -> index.Index:
  """Reads the index of a retriever, or makes and saves it."""
  private = results.is_private_path(retriever.directory)
  place = folders.private if private else folders.public
  folder = place("search", retriever.name)
  digest = artifacts.fingerprint(
    artifacts.read_fingerprint(folders.root / retriever.directory),
    artifacts.read_fingerprint(folders.private("prepare_data")),
  )
  if artifacts.read_fingerprint(folder) == digest:
    return index.load_exact(folder / _INDEX)
  shutil.rmtree(folder, ignore_errors=True)  # of an earlier retriever
  _, tokens = inputs.document_tokens(folders, prepared)
  state = folder / "vectors"
  with _parts.bar(f"search {retriever.name}", len(tokens), progress) as bar:
    encode.to_files(
      params,
      shape,
      tokens,
      state,
      fingerprint=digest,
      block_rows=_DOCUMENTS,
      progress=bar.update,
    )
  built = index.exact(np.asarray(vector_files.open_vectors(state)))
  built.save(folder / _INDEX)
  saved = SavedIndex(
    directory=folders.relative(folder),
    name=retriever.name,
    num_documents=len(tokens),
    dim=built.vectors.shape[1],
  )
  artifacts.save(folder, saved, digest)
  shutil.rmtree(state)
  return built


class _Lines(Sequence):
  """Lines of a corpus.jsonl by position, read where they are asked for."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    with open(path, "rb") as stream:
      lengths = np.fromiter(map(len, stream), np.int64)
    self._starts = np.concatenate([[0], np.cumsum(lengths)])

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, position: int) -> dict[str, str]:
    with open(self._path, "rb") as stream:
      stream.seek(int(self._starts[position]))
      return json.loads(stream.readline())


def _snippet(text: str, query: str) -> str:
  """Returns the part of a text where most of a query's words stand close.

  >>> _snippet("a " * 200 + "red apple", "apples, red")[-9:]
  'red apple'
  """
  text = " ".join(text.split())
  stems = {word[:5] for word in re.findall(r"\w{3,}", query.lower())}
  places = [
    word.start()
    for word in re.finditer(r"\w{3,}", text.lower())
    if word.group()[:5] in stems
  ]
  start = max(
    places,
    key=lambda first: sum(first <= one < first + _SNIPPET for one in places),
    default=0,
  )
  start = max(0, min(start - 40, len(text) - _SNIPPET))
  start = text.find(" ", start) + 1 if start else 0
  part = text[start : start + _SNIPPET]
  ahead = "... " if start else ""
  behind = " ..." if start + _SNIPPET < len(text) else ""
  return f"{ahead}{part}{behind}"
