"""Texts to vectors, for the detector of near-duplicates by cosine."""

import functools
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from synthq_jax.data import shipped, wordpiece
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage import near_duplicates
from synthq_jax.models import bert, length_batches, t5_checkpoints
from synthq_jax.retrieval import encode as encode_lib

__all__ = ["from_bert", "own"]


def own(
  checkpoint: str | os.PathLike = shipped.DIRECTORY,
  vocabulary: str | os.PathLike = shipped.VOCABULARY,
  *,
  length: int = 64,
  batch_size: int = 256,
) -> near_duplicates.Encode:
  """Loads a dual encoder of this library; by default the shipped one.

  Formal guarantee:
    None of its own: vectors of private texts are private, and so are those of
    an encoder that was trained on them without noise.

  Args:
    checkpoint: a T5, in any format that `t5_checkpoints.load` reads.
    vocabulary: the SentencePiece model that belongs to it.
    length: tokens of a text, EOS included; the rest is cut off.
    batch_size: texts at a time; changes the speed only.

  Returns:
    A function from texts to one float32 vector each, of length 1.

  Raises:
    ValueError: if checkpoint or vocabulary is missing, or they do not go
      together.
  """
  params, config = t5_checkpoints.load(checkpoint)
  pieces = vocabulary_lib.load(vocabulary)
  if pieces.vocab_size > config.vocab_size:
    raise ValueError(
      f"{vocabulary}: expected at most vocab_size={config.vocab_size} pieces, as"
      f" {checkpoint} has, got {pieces.vocab_size}: give its own vocabulary"
    )

  def encode(texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    tokens = vocabulary_lib.tokenize(pieces, texts, length=length)
    return encode_lib.encode(params, config, tokens, batch_size=batch_size)

  return encode


def from_bert(
  folder: str | os.PathLike, *, length: int = 64, batch_size: int = 256
) -> near_duplicates.Encode:
  """Loads a BERT of Hugging Face or sentence-transformers, and runs it in Flax.

  A vector is the mean of the outputs, as Sentence-BERT's are; a folder that asks
  for another is refused.

  Formal guarantee:
    None of its own, as `own`.

  References:
    Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, section 3.

  Args:
    folder: with config.json, model.safetensors and the vocabulary.
    length: tokens of a text, [CLS] and [SEP] included, from 3 to the model's
      positions; the rest is cut off.
    batch_size: texts at a time; changes the speed only.

  Returns:
    A function from texts to one float32 vector each, of length 1.

  Raises:
    ValueError: if a file is missing, damaged or of another kind of model, the
      library tokenizers is not installed, or `length` is out of range.
  """
  params, config = bert.load_encoder(folder)
  pieces = wordpiece.load(_with_vocabulary(pathlib.Path(folder)))
  if pieces.vocab_size > config.vocab_size:
    raise ValueError(
      f"{folder}: expected at most vocab_size={config.vocab_size} pieces, got"
      f" {pieces.vocab_size}: give the model its own vocabulary"
    )
  if not 3 <= length <= config.max_length:
    raise ValueError(
      f"expected length from 3 to {config.max_length}, as many positions as"
      f" {folder} has, got length={length}; change it"
    )
  apply = jax.jit(functools.partial(bert.encode, config=config))
  params = jax.device_put(params)

  def encode(texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    tokens = pieces.rows(texts, length=length)
    vectors = np.zeros((len(texts), config.emb_dim), np.float32)
    for batch in length_batches.split(tokens, batch_size):
      encoded = np.asarray(apply(params, tokens=batch.tokens))
      vectors[batch.rows] = encoded[: len(batch.rows)]
    return vectors

  return encode


def _with_vocabulary(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder, or that of its first module where the pieces lie."""
  names = ("tokenizer.json", "vocab.txt")
  for place in (folder, *sorted(folder.glob("0_*"))):
    if any((place / name).is_file() for name in names):
      return place
  return folder
