"""What several stages read of prepared data and checkpoints."""

import contextlib
import json
import pathlib
import zipfile
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from synthq_jax import artifacts
from synthq_jax.data import beir, blocks, files
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import prompt as prompt_lib
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.pipeline import _documents, results, workspace
from synthq_jax.privacy import rounding

__all__ = [
  "VOCABULARY_NAME",
  "arrays",
  "check_prompt",
  "check_shape",
  "check_vocabulary",
  "corpus",
  "document_text",
  "document_texts",
  "document_tokens",
  "load_public",
  "pairs",
  "qrels",
  "real_pairs",
  "refuse_other_data",
  "vocabulary",
  "vocabulary_beside",
  "with_documents",
  "with_prefix",
  "with_prompt",
]


Documents = results.PreparedData | results.PublicDocuments | results.TestSet
"""What knows where the public documents are."""
VOCABULARY_NAME = "vocabulary.model"
"""Beside a public checkpoint: the vocabulary it was trained with."""
_OTHER_NAMES = ("spiece.model", "sentencepiece.model")  # Hugging Face's, T5's


def document_tokens(
  space: workspace.Folders, prepared: Documents
) -> tuple[np.ndarray, blocks.Rows]:
  """Returns the ids of the documents, and their tokens, which stay on disk."""
  folder = space.root / prepared.directory
  with _damage_explained(space, prepared, folder):
    return _documents.read(folder)


def arrays(
  space: workspace.Folders,
  made: Documents | results.SyntheticQueries,
  path: pathlib.Path,
) -> dict[str, np.ndarray]:
  """Reads a file of arrays that a stage wrote.

  Raises:
    ValueError: if it is damaged; the message says how it is made again.
  """
  with _damage_explained(space, made, path), np.load(path) as stored:
    return {name: stored[name] for name in stored.files}


@contextlib.contextmanager
def _damage_explained(
  space, made, path: pathlib.Path
) -> Iterator[pathlib.Path]:
  """Says which result has to go when one of its files cannot be read."""
  try:
    yield path
  except (ValueError, EOFError, FileNotFoundError, zipfile.BadZipFile) as error:
    place = made.directory
    if not isinstance(made, (results.SyntheticQueries, results.TestSet)):
      # What prepare_data made is finished when its private part is.
      place = f"{results.PRIVATE}/prepare_data"
    raise ValueError(
      f"{path}: expected the arrays that an earlier stage wrote, got"
      f" {type(error).__name__}: delete {space.root / place}, and they are made"
      " again"
    ) from error


def pairs(
  folders: workspace.Folders,
  prepared: Documents,
  synthetic: results.SyntheticQueries,
) -> dict[str, np.ndarray]:
  """Returns synthetic queries with the documents they were written for.

  Args:
    folders: the working directory.
    prepared: the documents.
    synthetic: the queries.

  Returns:
    "queries" and "documents", tokens of each pair, and "rows", the positions
    of the documents.
  """
  path = folders.root / synthetic.directory / "tokens.npz"
  return with_documents(folders, prepared, arrays(folders, synthetic, path))


def real_pairs(
  space: workspace.Workspace, prepared: results.PreparedData
) -> dict[str, np.ndarray]:
  """Returns the private train queries with their documents, as `pairs` does."""
  path = space.root / prepared.private_directory / "train.npz"
  return with_documents(space, prepared, arrays(space, prepared, path))


def with_documents(
  folders: workspace.Folders,
  prepared: Documents,
  stored: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Turns stored "tokens" and "documents" into pairs, see `pairs`."""
  _, documents = document_tokens(folders, prepared)
  rows = stored["documents"]
  return {
    "queries": stored["tokens"],
    "documents": documents[rows],
    "rows": rows.astype(np.int32),
  }


def corpus(space: workspace.Folders, prepared: Documents) -> pathlib.Path:
  """Returns the file of the public documents."""
  return space.root / prepared.directory / _documents.CORPUS_NAME


def document_texts(path: pathlib.Path) -> Iterator[str]:
  """Yields title and text of each line of a corpus.jsonl."""
  with open(path, encoding="utf-8") as stream:
    for line in stream:
      yield document_text(line)


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


def load_public(directory: pathlib.Path, prepared: Documents):
  """Loads the public T5 that a training starts from.

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
    ValueError: if it is missing, damaged or too small for the vocabulary, or
      the result of a training on private queries.
  """
  _refuse_private(directory)
  params, model_config = t5_checkpoints.load(directory)
  if model_config.vocab_size < prepared.vocab_size:
    raise ValueError(
      f"{directory}: expected a checkpoint for {prepared.vocab_size} ids, the"
      f" size of the vocabulary, got vocab_size={model_config.vocab_size}:"
      " give the vocabulary that belongs to it"
    )
  return params, model_config


def _refuse_private(directory: pathlib.Path) -> None:
  """Refuses a checkpoint whose own statement says that it is not public."""
  try:
    made = artifacts.load(directory, results.Checkpoint)
  except (KeyError, ValueError):
    return  # not the result of a stage
  if not made.statement.is_public:
    epsilon = rounding.epsilon(made.statement.epsilon)
    raise ValueError(
      f"{directory}: expected a public checkpoint, got one that was trained on"
      f" private queries ({epsilon=!s}), which no later statement would count:"
      " start from a public one"
    )


def check_shape(
  directory: pathlib.Path, model: t5_config.T5Config | None
) -> None:
  """Refuses a checkpoint of another shape than the settings name.

  Raises:
    ValueError: naming the first field that differs.
  """
  if model is None:
    return
  found = t5_checkpoints.load_config(directory)
  for field in t5_config.SHAPE:
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
    ValueError: if the working directory holds a public pre-training, or data
      of another source.
  """
  if artifacts.read_fingerprint(space.root):
    raise ValueError(
      f"{space.root}: expected the working directory of a run, got one that"
      " `synthq pretrain` filled: give another --workdir"
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
      f" data tokenized with {used}: leave prepare_data.vocabulary empty, or"
      " pre-train from scratch (pretrain.from_scratch)"
    )
