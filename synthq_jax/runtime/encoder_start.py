"""Opens the public encoder that retrievers start from, with its own tokenizer.

A folder of sentence-transformers, or a BERT, tokenizes texts with its own
tokenizer and prompts. Any other checkpoint (a T5, static vectors) reads the
tokens of the run's vocabulary.
"""

import dataclasses
import pathlib
from typing import Any

from synthq_jax.data import passages as passages_lib
from synthq_jax.data import sentence_tokens
from synthq_jax.models import (
  dual_encoder,
  encoders,
  sentence_encoder,
  t5_checkpoints,
)
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.runtime import (
  config_types,
  model_files,
  prepared_files,
  results,
  system_results,
  workspace,
)
from synthq_jax.storage import array_files

__all__ = [
  "EncoderStart",
  "load",
  "open_passages",
  "query_tokens",
  "replace_tokens",
  "tokens_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderStart:
  """The encoder that retrievers start from, and its tokenization."""

  folder: str = ""
  """A folder of sentence-transformers, a BERT, or a T5 of the generator's
  vocabulary, for static_encoder.Config.dim=0; empty: the generator's T5."""
  length: int = 0
  """Maximum tokens of a text, special ones included, where a folder's own
  tokenizer allows more; 0: the tokenizer's maximum, or 512 if it has none."""
  query_length: int = 64
  """Maximum tokens of a query, special ones included. Every row of private
  queries has this width, however long the queries are; a larger width makes
  training slower."""
  query_prompt: str | None = None
  """Text before each query, in place of the folder's own; None: its own."""
  document_prompt: str | None = None
  """Text before each document, in place of the folder's own; None: its own."""

  def __post_init__(self):
    config_types.at_least(self, 0, "length")
    config_types.at_least(self, 3, "query_length")

  @property
  def has_tokenizer(self) -> bool:
    """Whether the folder's own tokenizer reads the texts."""
    return bool(self.folder) and sentence_encoder.is_folder(self.folder)

  def tokens(self) -> sentence_tokens.SentenceTokens | None:
    """Loads the folder's own tokenizer; None: the run's vocabulary is used."""
    if not self.has_tokenizer:
      return None
    return sentence_tokens.load(
      self.folder,
      length=self.length,
      query_length=self.query_length,
      query_prompt=self.query_prompt,
      document_prompt=self.document_prompt,
    )

  def check(self) -> None:
    """Refuses a folder that cannot be loaded, before any work.

    Raises:
      ValueError: naming what is missing, damaged or not supported.
    """
    tokens = self.tokens()
    if tokens is not None:
      sentence_encoder.check_start(self.folder)  # every retriever is saved
      _, shape = sentence_encoder.load(self.folder)
      sentence_tokens.check(self.folder, tokens, shape)

  def load_public(
    self, prepared: results.PublicDocuments
  ) -> tuple[dict[str, Any], Any]:
    """Loads the public parameters and their shape; see `model_files.load_public`."""
    if not self.has_tokenizer:
      return model_files.load_public(pathlib.Path(self.folder), prepared)
    folder = pathlib.Path(self.folder)
    model_files.refuse_private(folder)
    params, shape = sentence_encoder.load(folder)
    t5_checkpoints.check_finite(folder, params)
    return params, shape

  def save(self, directory: pathlib.Path, params: Any, shape: Any) -> None:
    """Writes a retriever that started here, with its tokenizer and prompts.

    Args:
      directory: created if it is missing.
      params: nested dicts of arrays.
      shape: the shape of the parameters.
    """
    tokens = self.tokens()
    if tokens is None:
      t5_checkpoints.save(directory, params, shape)
      return
    sentence_encoder.save(
      directory, params, shape, start=self.folder, texts=tokens.texts
    )


def load(
  folders: workspace.Folders, retriever: results.Checkpoint, role: str
) -> tuple[dict[str, Any], Any]:
  """Loads the parameters and the shape of a retriever that a stage made.

  Args:
    folders: the working directory.
    retriever: the retriever.
    role: `sentence_folders.QUERY` or DOCUMENT.

  Raises:
    ValueError: if an adapter's encoder was trained anew since.
  """
  folder = folders.root / retriever.directory
  if isinstance(retriever, system_results.Adapter):
    retriever.find_base(folders.root)  # refuses one that was trained anew
    params, shape = load(folders, retriever.base, role)
    if role != sentence_folders.QUERY:
      return params, shape
    params = dual_encoder.with_projection(params, encoders.of(shape).dim)
    matrix = array_files.read(folder / retriever.FILE)
    own = params[dual_encoder.PROJECTION]["kernel"] @ matrix
    return {**params, dual_encoder.PROJECTION: {"kernel": own}}, shape
  if sentence_encoder.is_folder(folder):
    return sentence_encoder.load(folder, role)
  return t5_checkpoints.load(folder)


def tokens_of(
  folders: workspace.Folders, retriever: results.Checkpoint
) -> sentence_tokens.SentenceTokens | None:
  """Loads the tokenizer of a saved retriever; None: the run's vocabulary.

  Args:
    folders: the working directory.
    retriever: the retriever.
  """
  # An adapter has no tokenizer of its own; a folder holds its start's settings.
  saved = folders.root / retriever.document_encoder.directory
  has_tokenizer = sentence_encoder.is_folder(saved)
  return sentence_tokens.load(saved) if has_tokenizer else None


def open_passages(
  folders: workspace.Folders,
  documents: prepared_files.Documents,
  tokens: sentence_tokens.SentenceTokens | None,
) -> passages_lib.Passages:
  """Opens the documents with the tokens that a retriever reads.

  Args:
    folders: the working directory.
    documents: the collection.
    tokens: the retriever's tokenizer; None: the run's vocabulary.
  """
  stored = prepared_files.document_tokens(folders, documents)
  return replace_tokens(
    stored, prepared_files.corpus(folders, documents), tokens
  )


def replace_tokens(
  stored: passages_lib.Passages,
  corpus: pathlib.Path,
  tokens: sentence_tokens.SentenceTokens | None,
) -> passages_lib.Passages:
  """Returns a collection with the tokens of a retriever's own tokenizer.

  Args:
    stored: the collection, one passage a document.
    corpus: the texts of its documents.
    tokens: the retriever's tokenizer; None: the collection stays as it is.
  """
  if tokens is None:
    return stored
  assert stored.are_documents  # `plan` refuses passages
  rows = sentence_tokens.TextRows(
    prepared_files.texts(corpus), tokens, sentence_folders.DOCUMENT
  )
  return dataclasses.replace(stored, tokens=rows)


def query_tokens(
  tokens: sentence_tokens.SentenceTokens | None, texts: Any, own: Any
) -> Any:
  """Returns the tokens of queries as a retriever reads them.

  Args:
    tokens: the retriever's tokenizer; None: the run's vocabulary.
    texts: the queries.
    own: their tokens by the run's vocabulary.
  """
  if tokens is None:
    return own
  return tokens.rows(texts, sentence_folders.QUERY)
