"""Texts to vectors, for the detector of near-duplicates by cosine."""

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage import _embedding
from synthq_jax.models import t5_checkpoints
from synthq_jax.retrieval import encode as encode_lib

__all__ = ["own"]


def own(
  checkpoint: str | os.PathLike = shipped.DIRECTORY,
  vocabulary: str | os.PathLike = shipped.VOCABULARY,
  *,
  length: int = 64,
  batch_size: int = 256,
) -> _embedding.Encode:
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
