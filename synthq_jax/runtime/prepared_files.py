"""Writes and reads the texts, tokens and judgements of a run."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from synthq_jax.data import (
  beir,
  collection,
  files,
  passages,
  token_cache,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.runtime import results, workspace
from synthq_jax.storage import array_files, artifacts

__all__ = [
  "WrittenDocuments",
  "add_prefix",
  "arrays",
  "corpus",
  "document_texts",
  "document_tokens",
  "parse_document_text",
  "read_documents",
  "read_owners",
  "read_qrels",
  "read_texts",
  "refuse_other_data",
  "texts",
  "vocabulary",
  "write_documents",
]

Documents = results.PreparedData | results.PublicDocuments | results.TestSet
"""Results that know the folder of public documents."""
_CORPUS_NAME = "corpus.jsonl"
_CACHE = "documents"
_NAMES = 1 << 18
_CHUNK = 4096
"""Documents in memory at the same time."""


def document_tokens(
  space: workspace.Folders, prepared: Documents
) -> passages.Passages:
  """Opens the documents' ids and the tokens that retrievers read, on disk."""
  folder = space.root / prepared.directory
  with _explain_damage(space, prepared, folder):
    return read_documents(folder)


def arrays(
  space: workspace.Folders,
  result: Documents | results.SyntheticQueries,
  path: pathlib.Path,
) -> dict[str, np.ndarray]:
  """Reads a file of arrays that a stage wrote.

  Raises:
    ValueError: if the file is damaged; the message says which folder to delete.
  """
  with _explain_damage(space, result, path):
    return array_files.read_npz(path)


def read_owners(
  space: workspace.Folders, prepared: results.PreparedData, test_set: str
) -> dict[str, int] | None:
  """Reads query id -> user of private test queries, if users are the unit."""
  if test_set != "test" or not prepared.queries_per_user:
    return None
  folder = space.root / prepared.private_directory
  judged = read_judged_queries(
    space, prepared, folder / f"{prepared.test_split}.npz"
  )
  return dict(
    zip(judged["ids"].tolist(), judged["users"].tolist(), strict=True)
  )


def read_judged_queries(
  space: workspace.Folders, result: Documents, path: pathlib.Path
) -> dict[str, np.ndarray]:
  """Reads all judged queries of a file of pairs; those without a pair come
  last.

  Returns:
    Arrays "ids" and "tokens", and "users" if users are the unit.
  """
  parts = [arrays(space, result, path)]
  if (rest := get_unanswered_path(path)).exists():
    parts.append(arrays(space, result, rest))
  names = parts[0].keys() & {"ids", "tokens", "users"}
  return {
    name: np.concatenate([part[name] for part in parts]) for name in names
  }


def get_unanswered_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the file of queries whose relevant documents are all missing."""
  return path.with_name(f"{path.stem}_unanswered.npz")


@contextlib.contextmanager
def _explain_damage(
  space: workspace.Folders,
  result: Documents | results.SyntheticQueries,
  path: pathlib.Path,
) -> Generator[pathlib.Path]:
  """Names the result to delete when one of its files cannot be read."""
  try:
    yield path
  except (ValueError, FileNotFoundError) as error:
    folder = result.directory
    if not isinstance(result, (results.SyntheticQueries, results.TestSet)):
      # prepare_data counts as finished by its private part.
      folder = f"{results.PRIVATE}/prepare_data"
    raise ValueError(
      f"{path}: expected the arrays that an earlier stage wrote, got"
      f" {type(error).__name__}: delete {space.root / folder}, and they are made"
      " again"
    ) from error


def corpus(space: workspace.Folders, prepared: Documents) -> pathlib.Path:
  """Returns the file of the public documents."""
  return space.root / prepared.directory / _CORPUS_NAME


def document_texts(path: pathlib.Path) -> Iterator[str]:
  """Yields title and text of each line of a corpus.jsonl."""
  with open(path, encoding="utf-8") as stream:
    for line in stream:
      yield parse_document_text(line)


def texts(path: pathlib.Path) -> files.Lines:
  """Opens title and text of each line of a corpus.jsonl by position."""
  return files.Lines(path, parse_document_text)


def read_texts(path: pathlib.Path, ids: set[str]) -> dict[str, str]:
  """Reads title and text of the lines of a JSONL file with these ids."""
  return {
    line["_id"]: f"{line.get('title') or ''} {line['text']}".strip()
    for _, line in files.json_lines(path)
    if line["_id"] in ids
  }


def parse_document_text(line: str | bytes) -> str:
  """Returns title and text of one line of the run's own corpus.jsonl."""
  entry = json.loads(line)
  return f"{entry['title']} {entry['text']}".strip()


def vocabulary(
  space: workspace.Folders,
  prepared: results.PreparedData | results.PublicDocuments,
):
  """Loads the vocabulary of the run."""
  return vocabulary_lib.load(
    space.root / prepared.vocabulary, extra_ids=prepared.extra_ids
  )


def add_prefix(
  tokens: Int[np.ndarray, "row length"], vocabulary, prefix: str
) -> Int[np.ndarray, "row longer"]:
  """Prepends the ids of the prefix to every row; rows grow by their number."""
  head = np.array(vocabulary.encode(prefix), np.int32)
  head = np.broadcast_to(head, (len(tokens), len(head)))
  return np.concatenate([head, tokens], axis=1)


def read_qrels(folder: pathlib.Path, split: str) -> dict[str, dict[str, int]]:
  """Reads judgements that prepare_data wrote: query -> document -> grade."""
  return beir.read_judgements(files.find(folder / "qrels", f"{split}.tsv"))


def refuse_other_data(space: workspace.Workspace, source: str) -> None:
  """Refuses to overwrite results of other data.

  Raises:
    ValueError: if the working directory holds a study or a checkpoint, or data
      of another source.
  """
  if artifacts.read_fingerprint(space.root):
    raise ValueError(
      f"{space.root}: expected the working directory of a run, got that of a"
      " study, or a checkpoint: give another --workdir"
    )
  folder = space.private("prepare_data")
  if artifacts.read_fingerprint(folder):
    held = artifacts.load(folder, results.PreparedData).source
    if held != source:
      raise ValueError(
        f"{space.root}: expected a working directory for SOURCE={source}, got"
        f" one with results of SOURCE={held}: give another --workdir, or"
        " delete it"
      )


class WrittenDocuments(NamedTuple):
  """Statistics of the documents that were written, and chosen documents."""

  cut: float  # share of the documents that are longer than `length`
  num_passages: int
  chosen: list[collection.Document]  # in the order they were asked for


def write_documents(
  documents: Iterable[collection.Document],
  folder: pathlib.Path,
  vocabulary,
  *,
  length: int,
  stride: int = 0,
  choose: Sequence[int] | np.ndarray = (),
  digest: Callable[[bytes], object] = lambda content: None,
) -> WrittenDocuments:
  """Writes texts, tokens and ids in the order of the documents.

  Args:
    documents: read once.
    folder: receives corpus.jsonl and a token cache, which `read_documents`
      opens.
    vocabulary: from `vocabulary.load`.
    length: tokens of a document, or of a passage, EOS included.
    stride: tokens between the beginnings of passages, see `passages.windows`;
      0: documents are cut at the length.
    choose: positions of the documents to return.
    digest: called with the content of each document.

  Returns:
    Statistics and the chosen documents.
  """
  positions = [int(position) for position in choose]
  selected, chosen = frozenset(positions), {}
  documents, first, cut, num_passages = iter(documents), 0, 0, 0
  with (
    artifacts.replacing(folder / _CORPUS_NAME) as corpus,
    token_cache.writing(
      folder / _CACHE, length, vocab_size=vocabulary.vocab_size
    ) as cache,
  ):
    while chunk := list(itertools.islice(documents, _CHUNK)):
      corpus.writelines(map(_line, chunk))
      ids = [d.id for d in chunk]
      if stride:
        rows, counts = passages.cut(
          vocabulary, chunk, length=length, stride=stride
        )
        ids = np.repeat(ids, counts).tolist()
        cut += int(np.sum(counts > 1))
      else:
        rows, num_cut = vocabulary_lib.tokenize_and_count(
          vocabulary, [d.contents for d in chunk], length=length
        )
        cut += num_cut
      num_passages += len(rows)
      cache.append(rows, ids)
      for position, document in enumerate(chunk, first):
        digest(f"{document.id}\0{document.contents}\0".encode())
        if position in selected:
          chosen[position] = document
      first += len(chunk)
  return WrittenDocuments(
    cut / first, num_passages, [chosen[position] for position in positions]
  )


def read_documents(folder: pathlib.Path) -> passages.Passages:
  """Opens the documents that `write_documents` wrote.

  Raises:
    ValueError: if a file is missing or damaged.
  """
  cache = token_cache.load(folder / _CACHE)
  ids: list[np.ndarray] = []
  owners = np.zeros(len(cache), np.int32)
  last, count = None, 0
  # The cache repeats a document's id at each of its passages.
  for start in range(0, len(cache), _NAMES):
    # Texts of variable width: one of 2,000 characters must not widen them all.
    names = array_files.as_texts(cache.ids[start : start + _NAMES])
    begins = np.concatenate([[names[0] != last], names[1:] != names[:-1]])
    ids.append(names[begins])
    owners[start : start + _NAMES] = count + np.cumsum(begins) - 1
    last, count = names[-1], count + int(begins.sum())
  return passages.Passages(np.concatenate(ids), cache.tokens, owners)


def _line(document: collection.Document) -> bytes:
  fields = {
    "_id": document.id, "title": document.title, "text": document.text
  }  # fmt: skip
  return f"{json.dumps(fields)}\n".encode()
