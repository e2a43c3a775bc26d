"""Encodes texts: encoders of this library, of sentence-transformers, GPT-2.

MAUVE takes vectors of any of them. Each is a small frozen dataclass with one method, `encode`, and a `description`. The
description goes into results, since vectors of different encoders are not
comparable. All encoders read local folders; nothing is ever downloaded.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from synthq_jax import extras
from synthq_jax.data import sentence_tokens, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import sentence_encoder, t5_checkpoints
from synthq_jax.retrieval import encode as encode_lib

__all__ = [
  "FolderEncoder",
  "Gpt2",
  "OwnEncoder",
  "TextEncoder",
  "given",
  "load",
]


class TextEncoder(Protocol):
  """An encoder of texts, with a description for reports.

  Formal guarantee:
    None of its own: vectors of private texts are private, and so are the vectors
    of an encoder that was trained on private texts without noise.
  """

  @property
  def description(self) -> str:
    """A short description, without paths of this machine."""

  def encode(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes each text as one float32 vector.

    Raises:
      ValueError: if a folder or a library is missing, or files do not fit
        together.
    """


class _Flax:
  """Base of Flax encoders; `_read` holds parameters, shape and tokenizer."""

  def encode(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes each text as one float32 vector of norm 1."""
    params, config, tokenize = self._read
    return encode_lib.encode(params, config, tokenize(texts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnEncoder(_Flax):
  """The dual encoder of a T5 checkpoint; by default of the shipped checkpoint.

  Its vectors have norm 1.

  Formal guarantee:
    None of its own, see `TextEncoder`. To grade queries, give it a public
    checkpoint: one that was fine-tuned on the private queries would grade itself.
  """

  checkpoint: str | os.PathLike = shipped.DIRECTORY
  """A T5 checkpoint, in any format that `t5_checkpoints.load` reads."""
  vocabulary: str | os.PathLike = shipped.VOCABULARY
  """The SentencePiece model of the checkpoint."""
  length: int = 128
  """The most tokens of a text, EOS included; longer texts are cut."""

  @property
  def description(self) -> str:
    """A description with the name of the checkpoint's folder."""
    return f"dual encoder of {pathlib.Path(self.checkpoint).resolve().name}"

  @functools.cached_property
  def _read(self) -> tuple[Any, Any, Callable[[Sequence[str]], np.ndarray]]:
    pieces = vocabulary_lib.load(self.vocabulary)
    params, config = t5_checkpoints.load(
      self.checkpoint, token_ids=pieces.token_ids
    )
    _check_pieces(self.vocabulary, pieces, self.checkpoint, config)
    tokenize = functools.partial(
      vocabulary_lib.tokenize, pieces, length=self.length
    )
    return params, config, tokenize


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderEncoder(_Flax):
  """An encoder of sentence-transformers, or a plain BERT, run in Flax.

  Its vectors have norm 1. Texts get the folder's default prompt and letter case, as
  in sentence-transformers' `encode`.

  References:
    Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, section 3.
  """

  folder: str | os.PathLike
  """A folder that `models.sentence_encoder.load` reads, with its tokenizer."""
  length: int = 64
  """The most tokens of a text, special tokens included, unless the folder allows
  fewer; longer texts are cut."""

  @property
  def description(self) -> str:
    """A description with the name of the folder."""
    return f"vectors of {pathlib.Path(self.folder).resolve().name}"

  @functools.cached_property
  def _read(self) -> tuple[Any, Any, Callable[[Sequence[str]], np.ndarray]]:
    tokens = sentence_tokens.load(self.folder, length=self.length)
    params, config = sentence_encoder.load(self.folder)
    sentence_tokens.check(self.folder, tokens, config)
    return params, config, tokens.rows


def given(
  bert: str | None, checkpoint: str | None, vocabulary: str | None
) -> OwnEncoder | FolderEncoder | None:
  """Makes the encoder that a user names, for short texts such as queries.

  Args:
    bert: a folder for `FolderEncoder`, or None.
    checkpoint: without `bert`, a checkpoint for `OwnEncoder`, or None.
    vocabulary: the vocabulary of the checkpoint.

  Returns:
    The encoder, or None for the shipped one.
  """
  if bert:
    return FolderEncoder(folder=bert)
  if checkpoint:
    return OwnEncoder(checkpoint=checkpoint, vocabulary=vocabulary, length=64)
  return None


def load(encoder: OwnEncoder | FolderEncoder) -> None:
  """Reads the files of an encoder, so that errors show at once.

  Args:
    encoder: the encoder, which keeps what it reads.

  Raises:
    ValueError: if a file is missing or damaged, or files do not fit together.
  """
  encoder._read  # noqa: B018  cached for `encode`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2:
  """Encodes a text as GPT-2's last hidden state at the last token, as in MAUVE.

  MAUVE's authors use gpt2-large with up to 1,024 tokens; another size gives other
  scores. Any causal language model that transformers reads works.

  References:
    Pillutla et al. 2021, MAUVE, section 4 and appendix A.
  """

  folder: str | os.PathLike
  """A Hugging Face folder with config.json, weights and tokenizer."""
  max_length: int = 1024
  """The most tokens of a text; longer texts are cut."""
  batch_size: int = 8
  """The number of texts at a time; changes vectors by rounding alone."""

  @property
  def description(self) -> str:
    """A description with the name of the folder."""
    return f"last hidden state of {pathlib.Path(self.folder).resolve().name}"

  def check(self) -> None:
    """Refuses a missing folder or library; `encode` does so before it reads.

    Raises:
      ValueError: if there is no such folder.
      MissingExtraError: if a library is not installed.
    """
    extras.check("transformers", "torch", "transformers")
    if not os.path.isdir(self.folder):
      raise ValueError(
        "expected a folder with a model, got"
        f" folder={os.fspath(self.folder)!r}: no such folder; nothing is"
        " downloaded, so save the model there first"
      )

  def encode(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes each text as one float32 vector; an empty text is read as an EOS."""
    self.check()
    folder = os.fspath(self.folder)
    with extras.required("transformers"):
      import torch
      import transformers

    local = {"local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
    with _disable_bars():
      model = transformers.AutoModel.from_pretrained(folder, **local)
    model = model.float().eval()
    end = tokenizer.eos_token_id or 0
    rows = [
      tokenizer.encode(text, truncation=True, max_length=self.max_length)
      or [end]
      for text in texts
    ]
    vectors = np.zeros((len(rows), model.config.hidden_size), np.float32)
    for chosen in _batch_by_length(rows, self.batch_size):
      lengths = np.array([len(rows[i]) for i in chosen])
      ids = vocabulary_lib.pad([rows[i] for i in chosen], lengths.max())
      mask = np.arange(ids.shape[1]) < lengths[:, None]
      with torch.no_grad():
        states = model(
          input_ids=torch.tensor(ids, dtype=torch.int64),
          attention_mask=torch.tensor(mask, dtype=torch.int64),
        ).last_hidden_state
      vectors[chosen] = states[np.arange(len(ids)), lengths - 1]
    return vectors


def _check_pieces(vocabulary, pieces, checkpoint, config) -> None:
  """Refuses a vocabulary with more pieces than the model has embeddings."""
  if pieces.vocab_size > config.vocab_size:
    raise ValueError(
      f"{vocabulary}: expected at most vocab_size={config.vocab_size} pieces, as"
      f" {checkpoint} has, got {pieces.vocab_size}: give its own vocabulary"
    )


@contextlib.contextmanager
def _disable_bars() -> Iterator[None]:
  """Turns off the progress bars of transformers, inside."""
  with extras.required("transformers"):
    from transformers.utils import logging

  shown = logging.is_progress_bar_enabled()
  logging.disable_progress_bar()
  try:
    yield
  finally:
    if shown:
      logging.enable_progress_bar()


def _batch_by_length(
  rows: Sequence[Sequence[int]], batch_size: int
) -> Iterator[list[int]]:
  """Yields positions in batches of similar length, to save padding."""
  order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
  for start in range(0, len(order), batch_size):
    yield order[start : start + batch_size]
