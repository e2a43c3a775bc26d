"""Tunes prompts: trained vectors before the input of a frozen model.

During training the prompt is a collection of its own, which the encoder puts
before the embedded input. `Prompt.merge` writes it into the last rows of the
embedding, those of T5's sentinels, which no query and no document uses. The result
is a plain checkpoint, whose input begins with those tokens (`Prompt.tokens`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from synthq_jax import checks

__all__ = ["Prompt"]

_EMBEDDING = "token_embedder/embedding"
_FIRST = 3  # the id after padding, EOS and the unknown piece
_COMMON = 5000  # SentencePiece numbers frequent pieces first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """Initializes, applies and merges a prompt of `length` vectors.

  References:
    Lester et al. 2021, arXiv:2104.08691, section 2; initialised from common
    pieces of the vocabulary, section 3.2.
  """

  length: int = 20
  """Number of vectors, at most the number of vocabulary ids without a piece."""

  def __post_init__(self):
    checks.at_least(1, length=self.length)

  def init(
    self, params: Mapping[str, Any], key: Key[Array, ""]
  ) -> dict[str, Float[Array, "length dim"]]:
    """Initializes the prompt with embeddings of common pieces.

    Args:
      params: public parameters by path.
      key: key of the choice of pieces; public.

    Raises:
      ValueError: if the prompt takes about half of the first 5,000 ids.
    """
    rows = params[_EMBEDDING].shape[0]
    last = min(rows, _COMMON) - self.length
    if last - _FIRST < self.length:
      raise ValueError(
        f"Prompt.length must be at most {(min(rows, _COMMON) - _FIRST) // 2}, half"
        f" of the common ids, got length={self.length} for {rows} rows"
      )
    drawn = jax.random.choice(
      key, jnp.arange(_FIRST, last), (self.length,), replace=False
    )
    return {"embedding": jnp.asarray(params[_EMBEDDING])[drawn]}

  def variables(self, prompt: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the model's collection of variables, by path."""
    return {"prompt": dict(prompt)}

  def merge(
    self, params: Mapping[str, Any], prompt: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Writes the prompt into the embedding of the public parameters.

    If the logits reuse the embedding (T5 1.0), the logits of the prompt's tokens
    change, too; generation never produces these tokens.

    Args:
      params: public parameters by path.
      prompt: the trained vectors.

    Returns:
      Parameters by path, of the shapes of `params`.
    """
    embedding = np.array(params[_EMBEDDING])
    embedding[-self.length :] = np.asarray(prompt["embedding"])
    return {**params, _EMBEDDING: embedding}

  def tokens(self, vocab_size: int) -> np.ndarray:
    """Returns the ids of the prompt's tokens in a merged checkpoint.

    Args:
      vocab_size: number of rows of the embedding.

    >>> Prompt(length=2).tokens(100).tolist()
    [98, 99]
    """
    return np.arange(vocab_size - self.length, vocab_size, dtype=np.int32)
