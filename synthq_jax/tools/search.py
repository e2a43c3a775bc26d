"""Searches the documents of a finished run with one of its systems.

Document vectors are those that `encode_documents` wrote; none is computed here.
"""

import dataclasses
import functools
import json
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from synthq_jax import text_tables
from synthq_jax.data import files
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import (
  encode,
  index,
  ranking,
  trec,
  vector_files,
)
from synthq_jax.runtime import (
  encoder_start,
  prepared_files,
  results,
  system_results,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = ["Hit", "Searcher", "describe", "open_run", "read_systems"]

_SNIPPET = 240
"""Length of a snippet in characters."""


@dataclasses.dataclass(frozen=True)
class Hit:
  """A document in the answer to a query."""

  id: str
  """Id of the document."""
  score: float
  """Score that the system gives the document."""
  title: str
  """Title of the document, or ""."""
  snippet: str
  """The beginning of its text."""


_Search = Callable[[str, int], dict[str, float]]
"""(query, k) -> scores of at most k documents by their positions, best first."""


@dataclasses.dataclass(frozen=True)
class Searcher:
  """A system of a run, ready to answer."""

  row: rows_lib.Row
  """Row of the system."""
  find: _Search
  """Search function of the system."""
  documents: Sequence[dict[str, str]]
  """Lines of corpus.jsonl by position."""

  def search(self, query: str, k: int = 10) -> list[Hit]:
    """Returns the best documents, best first.

    Args:
      query: text of the query; an empty one finds no document.
      k: largest number of documents, at least 1.

    Raises:
      ValueError: if k < 1.
    """
    if k < 1:
      raise ValueError(f"expected k >= 1, got k={k}")
    if not query.strip():
      return []
    return [
      self._hit(score, position)
      for position, score in self.find(query, k).items()
    ]

  def _hit(self, score: float, position: str) -> Hit:
    document = self.documents[int(position)]
    text = textwrap.shorten(document["text"], _SNIPPET, placeholder=" ...")
    return Hit(document["_id"], float(score), document["title"], text)


def open_run(
  workdir: str, name: str | None = None, *, private: bool = False
) -> Searcher:
  """Opens a system of a finished run for searches.

  Formal guarantee: post-processing of a system and public documents. Files of
  private queries are read for their checksums alone.

  Args:
    workdir: working directory of the run.
    name: "bm25" or another row. None: the retriever of the synthetic queries with
      the most epsilon, in its learning-to-rank system, else in its fusion, else
      alone; BM25 if there is no such retriever.
    private: whether systems under `private/` can be opened, too.

  Raises:
    ValueError: if the run is not finished, has no such row, or one of the row's
      results is damaged or of an earlier training.
  """
  folders = workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="run")
  artifacts.check(folders.private("prepare_data"))
  systems = read_systems(folders, private=private)
  by_name = {str(row): row for row in systems}
  row = _choose_row(systems) if name is None else by_name.get(name)
  if row is None:
    hint = "" if private else "; --private adds the private ones"
    raise ValueError(
      f"{workdir}: expected --system among {', '.join(by_name)}, got {name}{hint}"
    )
  _check_row(folders, systems, row)
  corpus = prepared_files.corpus(folders, prepared)
  find = _open_system(folders, prepared, systems, row)
  return Searcher(row, find, files.Lines(corpus, json.loads))


def _choose_row(finished: Collection[rows_lib.Row]) -> rows_lib.Row:
  """Chooses the best-equipped system of the synthetic queries with the most
  epsilon."""
  pairs = [
    row.retriever
    for row in finished
    if row.pairs == rows_lib.SYNTHETIC and not row.is_without_privacy
  ]
  best = max(pairs, key=_get_epsilon, default=rows_lib.BM25)
  systems = (rows_lib.RANKED, rows_lib.FUSED, rows_lib.DENSE)
  usual = (*map(best.of_system, systems), rows_lib.BM25)
  return next(row for row in usual if row in finished)


def _get_epsilon(row: rows_lib.Row) -> float:
  """Returns the target epsilon of a row that has one."""
  assert row.epsilon is not None, row
  return row.epsilon


def describe(row: rows_lib.Row, hits: Sequence[Hit]) -> str:
  """Returns the hits of a system as text for a terminal."""
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
  """Reads the records of the finished systems, shareable ones first.

  Args:
    folders: the working directory.
    private: whether to read systems under `private/`, too.

  Returns:
    The record of each row; BM25 has the record None.
  """
  kinds = {
    "train_retriever": results.Checkpoint,
    "learn_adapter": system_results.Adapter,
    "fuse": system_results.Fusion,
    "learn_to_rank": system_results.Ranking,
  }
  systems: dict[rows_lib.Row, Any] = {rows_lib.BM25: None}
  for get_folder in (folders.public, folders.private)[: 1 + private]:
    for stage, kind in kinds.items():
      for folder in sorted(get_folder(stage).glob("*")):
        if artifacts.read_fingerprint(folder) is not None:
          system = artifacts.load(folder, kind)
          systems.setdefault(system.row, system)
  return systems


def _check_row(
  folders: workspace.Folders,
  systems: dict[rows_lib.Row, Any],
  row: rows_lib.Row,
) -> None:
  """Refuses damaged or outdated results of a row and of its retriever.

  Raises:
    ValueError: if files changed, the data were prepared anew, or weights belong to
      another training of the retriever.
  """
  retriever = row.retriever
  system_results.find_retriever(folders.root, retriever)  # refuses two of a row
  for row_to_check in dict.fromkeys((row, retriever)):
    if system := systems.get(row_to_check):
      folder = folders.root / system.directory
      artifacts.check(folder)
      artifacts.check_data(folder, folders.private("prepare_data"))
  is_whole = row in (retriever, rows_lib.BM25) or (
    retriever in systems
    and system_results.stands_on(systems[row], systems[retriever], folders.root)
  )
  if not is_whole:
    raise ValueError(
      f"{folders.root / systems[row].directory}: expected weights of the"
      f" retriever {retriever} as it is, got those of another training of it:"
      " run `synthq run` again, which makes them anew"
    )


def _open_system(
  folders: workspace.Folders,
  prepared: results.PreparedData,
  systems: dict[rows_lib.Row, Any],
  row: rows_lib.Row,
) -> _Search:
  """Returns the search function of a system."""
  system, corpus = systems[row], prepared_files.corpus(folders, prepared)
  positions = [str(n) for n in range(prepared.num_documents)]
  if isinstance(system, results.Checkpoint):
    return _open_retriever(folders, prepared, system, positions)
  lexical = queries_lib.index_of(positions, corpus)

  def search_lexical(query: str, k: int) -> dict[str, float]:
    return lexical.search_run([""], [query], k)[""]

  if system is None:
    return search_lexical
  search_dense = _open_system(folders, prepared, systems, system.retriever)

  @functools.cache
  def build_features() -> ranking.Features:
    texts = prepared_files.document_texts(corpus)
    return ranking.Features.build(positions, texts)

  def find(query: str, k: int) -> dict[str, float]:
    def make_candidates(*runs: trec.Run) -> dict[str, ranking.Candidates]:
      [candidates] = build_features().of([query], *([run[""]] for run in runs))
      return {"": candidates}

    first, second = (
      {"": search_part(query, system.depth)}
      for search_part in (search_lexical, search_dense)
    )
    return system.combine(first, second, make_candidates, k)[""]

  return find


def _open_retriever(
  folders: workspace.Folders,
  prepared: results.PreparedData,
  retriever: results.Checkpoint,
  positions: Sequence[str],
) -> _Search:
  """Returns the exact search of a retriever by its document vectors."""
  role = sentence_folders.QUERY
  params, shape = encoder_start.load(folders, retriever, role)
  reads = encoder_start.tokens_of(folders, retriever)
  vocabulary = prepared_files.vocabulary(folders, prepared)
  owners = prepared_files.document_tokens(folders, prepared).owners
  stored = _read_vectors(folders, retriever.document_encoder).vectors
  vectors = vector_files.open_vectors(folders.root / stored, len(owners))
  vector_index = index.exact(np.asarray(vectors))

  def find(query: str, k: int) -> dict[str, float]:
    own_tokens = vocabulary_lib.tokenize(
      vocabulary, [query], length=prepared.query_length
    )
    tokens = encoder_start.query_tokens(reads, [query], own_tokens)
    encoded = encode.encode(params, shape, tokens, batch_size=1)
    best = index.search_documents(vector_index, encoded, owners, k)
    return trec.to_run([""], positions, *best)[""]

  return find


def _read_vectors(
  folders: workspace.Folders, retriever: results.Checkpoint
) -> system_results.Vectors:
  """Reads the record of a retriever's document vectors.

  Raises:
    ValueError: if they are missing, damaged or of an earlier training.
  """
  name = retriever.name
  private = results.is_private_path(retriever.directory)
  get_folder = folders.private if private else folders.public
  source = get_folder("encode_documents", name)
  advice = "run `synthq run` again with the run's settings, which makes "
  if artifacts.read_fingerprint(source) is None:
    raise ValueError(
      f"{source}: expected the vectors of {name}, got none: {advice}"
      "what is missing"
    )
  artifacts.check(source)
  vectors = artifacts.load(source, system_results.Vectors)
  trained = artifacts.read_fingerprint(folders.root / retriever.directory)
  is_same_release = vectors.statement.ledger == retriever.statement.ledger
  if not is_same_release or vectors.retriever != trained:
    raise ValueError(
      f"{source}: expected the vectors of {name}, got those of an"
      f" earlier training of it: {advice}them anew"
    )
  return vectors
