"""Opens the public encoder that retrievers start from, with its own tokenizer.

A folder of sentence-transformers, or a BERT, reads texts by its own tokenizer and
prompts. Any other checkpoint (a T5, static vectors) reads the tokens of the run.
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
  inputs,
  results,
  system_results,
  workspace,
)
from synthq_jax.storage import array_files

__all__ = [
  "EncoderStart",
  "load",
  "passages",
  "query_tokens",
  "read_by",
  "tokens_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderStart:
  """Where retrievers start, and how they read texts."""

  folder: str = ""
  """A folder of sentence-transformers, a BERT, or a T5 of the generator's
  vocabulary, for static_encoder.Config.dim=0; empty: the generator's T5."""
  length: int = 0
  """Tokens of a text, special ones included, where a folder's own tokenizer allows
  more; 0: as many as it does, 512 where nothing ends them."""
  query_length: int = 64
  """Tokens of a query at most, special ones included. Rows of private queries are
  so wide, whatever these are: wider ones cost time in training."""
  query_prompt: str | None = None
  """Before queries, in place of the folder's own; None: its own."""
  document_prompt: str | None = None
  """Before documents, in place of the folder's own; None: its own."""

  def __post_init__(self):
    config_types.at_least(self, 0, "length")
    config_types.at_least(self, 3, "query_length")

  @property
  def has_tokenizer(self) -> bool:
    """Whether texts are read by the folder's own tokenizer."""
    return bool(self.folder) and sentence_encoder.is_folder(self.folder)

  def tokens(self) -> sentence_tokens.SentenceTokens | None:
    """Returns how texts are read; None: as the run's vocabulary has them."""
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
    """Refuses a folder that cannot be read, before any work.

    Raises:
      ValueError: naming what is missing, damaged or not computed here.
    """
    tokens = self.tokens()
    if tokens is not None:
      _, shape = sentence_encoder.load(self.folder)
      sentence_tokens.check(self.folder, tokens, shape)

  def load_public(
    self, prepared: results.PublicDocuments
  ) -> tuple[dict[str, Any], Any]:
    """Loads parameters and shape, see `inputs.load_public`."""
    if not self.has_tokenizer:
      return inputs.load_public(pathlib.Path(self.folder), prepared)
    place = pathlib.Path(self.folder)
    inputs.refuse_private(place)
    params, shape = sentence_encoder.load(place)
    t5_checkpoints.check_finite(place, params)
    return params, shape

  def save(self, directory: pathlib.Path, params: Any, shape: Any) -> None:
    """Writes a retriever that started here, its tokenizer and prompts with it.

    Args:
      directory: made where it is missing.
      params: nested dicts of arrays.
      shape: the shape they belong to.
    """
    tokens = self.tokens()
    if tokens is None:
      t5_checkpoints.save(directory, params, shape)
      return
    sentence_encoder.save(
      directory, params, shape, start=self.folder, texts=tokens.texts
    )


def load(
  folders: workspace.Folders, made: results.Checkpoint, role: str
) -> tuple[dict[str, Any], Any]:
  """Loads a retriever that a stage made: parameters and shape.

  Args:
    folders: the working directory.
    made: the retriever.
    role: `sentence_folders.QUERY` or DOCUMENT.
  """
  place = folders.root / made.directory
  if isinstance(made, system_results.Adapter):
    params, shape = load(folders, made.base, role)
    if role != sentence_folders.QUERY:
      return params, shape
    params = dual_encoder.with_projection(params, encoders.of(shape).dim)
    matrix = array_files.read(place / made.FILE)
    own = params[dual_encoder.PROJECTION]["kernel"] @ matrix
    return {**params, dual_encoder.PROJECTION: {"kernel": own}}, shape
  if sentence_encoder.is_folder(place):
    return sentence_encoder.load(place, role)
  return t5_checkpoints.load(place)


def tokens_of(
  folders: workspace.Folders, made: results.Checkpoint
) -> sentence_tokens.SentenceTokens | None:
  """Returns how a saved retriever reads texts; None: by the run's vocabulary.

  Args:
    folders: the working directory.
    made: the retriever.
  """
  if isinstance(made, system_results.Adapter):
    return tokens_of(folders, made.base)
  saved = folders.root / made.directory  # it says what its start was set to
  has_tokenizer = sentence_encoder.is_folder(saved)
  return sentence_tokens.load(saved) if has_tokenizer else None


def passages(
  folders: workspace.Folders,
  documents: inputs.Documents,
  tokens: sentence_tokens.SentenceTokens | None,
) -> passages_lib.Passages:
  """Opens documents as a retriever reads them.

  Args:
    folders: the working directory.
    documents: the collection.
    tokens: how the retriever reads texts; None: by the run's vocabulary.
  """
  found = inputs.document_tokens(folders, documents)
  return read_by(found, inputs.corpus(folders, documents), tokens)


def read_by(
  found: passages_lib.Passages,
  corpus: pathlib.Path,
  tokens: sentence_tokens.SentenceTokens | None,
) -> passages_lib.Passages:
  """Returns a collection with the tokens of a retriever's own tokenizer.

  Args:
    found: the collection, one passage a document.
    corpus: the texts of its documents.
    tokens: how the retriever reads texts; None: as they are.
  """
  if tokens is None:
    return found
  assert found.are_documents  # `plan` refuses passages
  rows = sentence_tokens.TextRows(
    inputs.texts(corpus), tokens, sentence_folders.DOCUMENT
  )
  return dataclasses.replace(found, tokens=rows)


def query_tokens(
  tokens: sentence_tokens.SentenceTokens | None, texts: Any, own: Any
) -> Any:
  """Returns the tokens of queries as a retriever reads them.

  Args:
    tokens: how it reads texts; None: by the run's vocabulary.
    texts: the queries.
    own: their tokens by the run's vocabulary.
  """
  if tokens is None:
    return own
  return tokens.rows(texts, sentence_folders.QUERY)
