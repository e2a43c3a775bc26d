"""Reads and writes what stages share: documents, arrays, checkpoints."""

import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import (
  Callable,
  Generator,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from synthq_jax.data import beir, collection, files, passages, token_cache
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import prompt as prompt_lib
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.privacy import rounding
from synthq_jax.runtime import results, workspace
from synthq_jax.storage import array_files, artifacts
from synthq_jax.training import distributed

__all__ = [
  "VOCABULARY_NAME",
  "WrittenDocuments",
  "arrays",
  "check_prompt",
  "check_t5",
  "check_vocabulary",
  "corpus",
  "document_text",
  "document_texts",
  "document_tokens",
  "load_public",
  "owners",
  "qrels",
  "read_documents",
  "refuse_other_data",
  "refuse_private",
  "save_checkpoint",
  "split_parameters",
  "texts",
  "texts_of",
  "vocabulary",
  "vocabulary_beside",
  "with_prefix",
  "with_prompt",
  "write_documents",
]


Documents = results.PreparedData | results.PublicDocuments | results.TestSet
"""What knows where the public documents are."""
VOCABULARY_NAME = "vocabulary.model"
"""Beside a public checkpoint: the vocabulary it was trained with."""
_CORPUS_NAME = "corpus.jsonl"
_CACHE = "documents"
_NAMES = 1 << 18
_CHUNK = 4096
"""Documents in memory at the same time."""
_OTHER_NAMES = ("spiece.model", "sentencepiece.model")  # Hugging Face's, T5's


def document_tokens(
  space: workspace.Folders, prepared: Documents
) -> passages.Passages:
  """Returns the documents' ids, and as much of them as retrievers read, on disk."""
  folder = space.root / prepared.directory
  with _damage_explained(space, prepared, folder):
    return read_documents(folder)


def arrays(
  space: workspace.Folders,
  made: Documents | results.SyntheticQueries,
  path: pathlib.Path,
) -> dict[str, np.ndarray]:
  """Reads a file of arrays that a stage wrote.

  Raises:
    ValueError: if it is damaged; the message says how it is made again.
  """
  with _damage_explained(space, made, path):
    return array_files.read_npz(path)


def owners(
  space: workspace.Folders, prepared: results.PreparedData, test_set: str
) -> dict[str, int] | None:
  """Returns query id -> user of private test queries, where users are the unit."""
  if test_set != "test" or not prepared.queries_per_user:
    return None
  folder = space.root / prepared.private_directory
  asked = judged_queries(space, prepared, folder / f"{prepared.test_split}.npz")
  return dict(zip(asked["ids"].tolist(), asked["users"].tolist(), strict=True))


def judged_queries(
  space: workspace.Folders, made: Documents, path: pathlib.Path
) -> dict[str, np.ndarray]:
  """Reads all judged queries of a file of pairs: those without a pair come last.

  Returns:
    "ids" and "tokens", and "users" where they are the unit.
  """
  parts = [arrays(space, made, path)]
  if (rest := unanswered(path)).exists():
    parts.append(arrays(space, made, rest))
  names = parts[0].keys() & {"ids", "tokens", "users"}
  return {name: np.concatenate([one[name] for one in parts]) for name in names}


def unanswered(path: pathlib.Path) -> pathlib.Path:
  """Returns the file of queries whose relevant documents are all lacking."""
  return path.with_name(f"{path.stem}_unanswered.npz")


@contextlib.contextmanager
def _damage_explained(
  space: workspace.Folders,
  made: Documents | results.SyntheticQueries,
  path: pathlib.Path,
) -> Generator[pathlib.Path]:
  """Says which result has to go when one of its files cannot be read."""
  try:
    yield path
  except (ValueError, FileNotFoundError) as error:
    place = made.directory
    if not isinstance(made, (results.SyntheticQueries, results.TestSet)):
      # What prepare_data made is finished when its private part is.
      place = f"{results.PRIVATE}/prepare_data"
    raise ValueError(
      f"{path}: expected the arrays that an earlier stage wrote, got"
      f" {type(error).__name__}: delete {space.root / place}, and they are made"
      " again"
    ) from error


def corpus(space: workspace.Folders, prepared: Documents) -> pathlib.Path:
  """Returns the file of the public documents."""
  return space.root / prepared.directory / _CORPUS_NAME


def document_texts(path: pathlib.Path) -> Iterator[str]:
  """Yields title and text of each line of a corpus.jsonl."""
  with open(path, encoding="utf-8") as stream:
    for line in stream:
      yield document_text(line)


def texts(path: pathlib.Path) -> files.Lines:
  """Returns title and text of each line of a corpus.jsonl by position."""
  return files.Lines(path, document_text)


def texts_of(path: pathlib.Path, ids: set[str]) -> dict[str, str]:
  """Returns title and text of the lines of a JSONL file with these ids."""
  return {
    line["_id"]: f"{line.get('title') or ''} {line['text']}".strip()
    for _, line in files.json_lines(path)
    if line["_id"] in ids
  }


def document_text(line: str | bytes) -> str:
  """Returns title and text of a line of the run's own corpus.jsonl."""
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


def with_prefix(
  tokens: Int[np.ndarray, "row length"], vocabulary, prefix: str
) -> Int[np.ndarray, "row longer"]:
  """Puts the ids of the prefix before every row; rows grow by that much."""
  return _with_head(tokens, np.array(vocabulary.encode(prefix), np.int32))


def with_prompt(
  tokens: Int[np.ndarray, "row length"], prompt_tokens: int, vocab_size: int
) -> Int[np.ndarray, "row longer"]:
  """Puts the ids of a merged prompt before every row, prefix included.

  Args:
    tokens: inputs as the generator reads them.
    prompt_tokens: `results.Checkpoint.prompt_tokens`; 0 changes nothing.
    vocab_size: rows of the checkpoint's embedding.

  Returns:
    The longer rows.
  """
  if not prompt_tokens:
    return tokens
  head = prompt_lib.Prompt(length=prompt_tokens).tokens(vocab_size)
  return _with_head(tokens, head)


def check_prompt(
  prompt: prompt_lib.Prompt, vocab_size: int, prepared: results.PreparedData
) -> None:
  """Refuses a prompt that would overwrite pieces of the vocabulary.

  Raises:
    ValueError: if it is longer than the ids that have no piece.
  """
  free = vocab_size - (prepared.vocab_size - prepared.extra_ids)
  if prompt.length > free:
    raise ValueError(
      f"prompt.Prompt.length must be at most {free}, the ids of the checkpoint"
      f" that no piece of the vocabulary uses, got length={prompt.length}"
    )


def _with_head(
  tokens: Int[np.ndarray, "row length"], head: Int[np.ndarray, " head"]
) -> Int[np.ndarray, "row longer"]:
  head = np.broadcast_to(head, (len(tokens), len(head)))
  return np.concatenate([head, tokens], axis=1)


def vocabulary_beside(directory: pathlib.Path) -> pathlib.Path:
  """Returns the vocabulary that lies beside a checkpoint, or where it would."""
  names = (VOCABULARY_NAME, *_OTHER_NAMES)
  places = [directory / name for name in names]
  return next((place for place in places if place.is_file()), places[0])


def load_public(
  directory: pathlib.Path, prepared: results.PublicDocuments
) -> tuple[dict[str, Any], t5_checkpoints.Shape]:
  """Loads the public model that a training starts from.

  Formal guarantee:
    What is trained from it is private only if the checkpoint is public. Where
    a stage of this library says otherwise, it is refused; the code cannot know
    what other checkpoints were trained on.

  Args:
    directory: where it lies, in any format that `t5_checkpoints.load` reads.
    prepared: whose vocabulary it must have room for.

  Returns:
    Parameters and shape.

  Raises:
    ValueError: if it is missing, damaged, not finite or too small for the
      vocabulary, or the result of a training on private queries.
  """
  refuse_private(directory)
  params, model_config = t5_checkpoints.load(
    directory, token_ids=prepared.token_ids
  )
  t5_checkpoints.check_finite(directory, params)
  if model_config.vocab_size < prepared.vocab_size:
    raise ValueError(
      f"{directory}: expected a checkpoint for {prepared.vocab_size} ids, the"
      f" size of the vocabulary, got vocab_size={model_config.vocab_size}: give"
      " its own vocabulary, or a smaller prepare_data.Config.extra_ids"
    )
  return params, model_config


def refuse_private(directory: pathlib.Path) -> None:
  """Refuses a checkpoint whose own statement says that it is not public."""
  result = artifacts.load_kind(directory)
  if result == results.Checkpoint.__name__:
    claim = artifacts.load(directory, results.Checkpoint).statement
  else:  # not the result of a stage
    claim = t5_checkpoints.claim(directory)
  if claim is not None and not claim.is_public:
    epsilon = rounding.epsilon(claim.epsilon)
    raise ValueError(
      f"{directory}: expected a public checkpoint, got one that was trained on"
      f" private queries ({epsilon=!s}), which no later statement would count:"
      " start from a public one"
    )


def check_t5(
  directory: pathlib.Path, model: t5_config.T5Config | None = None
) -> None:
  """Refuses static vectors in a T5's place, and another shape than `model`."""
  try:
    found = t5_checkpoints.load_config(directory)
  except ValueError:
    if model is None:  # who reads it says more
      return
    raise
  found = t5_config.require(found, directory)
  for field in t5_config.SHAPE if model else ():
    ours, theirs = getattr(model, field), getattr(found, field)
    if ours != theirs:
      raise ValueError(
        f"{directory}: expected a checkpoint of RunConfig.model with"
        f" {field}={ours}, got {field}={theirs}: give another CHECKPOINT, or"
        " the gin file of its size"
      )


def qrels(folder: pathlib.Path, split: str) -> dict[str, dict[str, int]]:
  """Reads judgements that prepare_data wrote: query -> document -> grade."""
  return beir.read_judgements(files.find(folder / "qrels", f"{split}.tsv"))


def refuse_other_data(space: workspace.Workspace, source: str) -> None:
  """Refuses to write over the results of something else.

  Raises:
    ValueError: if the working directory holds a study or a checkpoint, or data
      of another source.
  """
  if artifacts.read_fingerprint(space.root):
    raise ValueError(
      f"{space.root}: expected the working directory of a run, got that of a"
      " study, or a checkpoint: give another --workdir"
    )
  place = space.private("prepare_data")
  if artifacts.read_fingerprint(place):
    held = artifacts.load(place, results.PreparedData).source
    if held != source:
      raise ValueError(
        f"{space.root}: expected a working directory for SOURCE={source}, got"
        f" one with results of SOURCE={held}: give another --workdir, or"
        " delete it"
      )


def check_vocabulary(
  directory: pathlib.Path,
  space: workspace.Workspace,
  prepared: results.PreparedData,
) -> None:
  """Refuses a checkpoint that was trained with another vocabulary.

  Raises:
    ValueError: if a vocabulary lies beside the checkpoint, and it is not the
      one that the data was tokenized with.
  """
  beside = vocabulary_beside(directory)
  used = space.root / prepared.vocabulary
  if beside.is_file() and beside.read_bytes() != used.read_bytes():
    raise ValueError(
      f"{directory}: this checkpoint belongs to {beside.name} beside it, got"
      f" data tokenized with {used}: leave prepare_data.vocabulary empty"
    )


class WrittenDocuments(NamedTuple):
  """What was seen while the documents were written."""

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
  """Writes texts, tokens and ids, in the order of the documents.

  Args:
    documents: read once.
    folder: gets corpus.jsonl and a token cache, which `read_documents` opens.
    vocabulary: from `vocabulary.load`.
    length: tokens of a document, or of a passage, EOS included.
    stride: of passages, see `passages.windows`; 0: documents are cut at the
      length.
    choose: positions of the documents that are handed back.
    digest: called with the content of each document.

  Returns:
    What was seen on the way.
  """
  positions = [int(position) for position in choose]
  wanted, chosen = frozenset(positions), {}
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
        if position in wanted:
          chosen[position] = document
      first += len(chunk)
  return WrittenDocuments(
    cut / first, num_passages, [chosen[position] for position in positions]
  )


def read_documents(folder: pathlib.Path) -> passages.Passages:
  """Opens what `write_documents` wrote.

  Raises:
    ValueError: if it is missing or damaged.
  """
  cache = token_cache.load(folder / _CACHE)
  ids: list[np.ndarray] = []
  owners = np.zeros(len(cache), np.int32)
  last, count = None, 0
  for start in range(0, len(cache), _NAMES):  # a name stands at each passage
    # As long as they are: one of 2,000 characters would widen all of them.
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


def split_parameters(
  params: Mapping[str, Any], pattern: str, name: str, hint: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Parts parameters by path into what is trained and what stays.

  Args:
    params: by path.
    pattern: regular expression that the paths of the first match in full.
    name: of the setting, for the message.
    hint: ends the message.

  Raises:
    ValueError: if nothing matches.
  """
  trained = {k: v for k, v in params.items() if re.fullmatch(pattern, k)}
  if not trained:
    raise ValueError(
      f"{name} must match a parameter, got trained={pattern!r}; there are"
      f" {', '.join(sorted(params)[:3])}, ...{hint}"
    )
  return trained, {k: v for k, v in params.items() if k not in trained}


def save_checkpoint(
  task: Any,
  directory: pathlib.Path,
  params: Any,
  model_config: t5_checkpoints.Shape,
  *,
  kind: str,
  save: Callable[..., None] = t5_checkpoints.save,
  **fields: Any,
) -> results.Checkpoint:
  """Writes a trained model; its unfinished states go once its result is saved.

  Of several processes that trained it together process 0 does so.

  Args:
    task: a `stage.Task`.
    directory: where it goes, private or not.
    params: nested dicts of arrays.
    model_config: the shape they belong to.
    kind: "generator" or "retriever".
    save: writes parameters and shape into the directory.
    **fields: the other fields of the result.
  """
  if distributed.is_main():
    save(directory, params, model_config)
  return results.Checkpoint(
    directory=task.folders.relative(directory),
    kind=kind,
    row=task.get_row(),
    **fields,
  )
