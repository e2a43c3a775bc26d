"""Encodes texts as means of their tokens' vectors, without layers or attention.

Encoding hundreds of texts costs as much as one text in a small transformer. If
queries share words with their documents, it ranks better (docs/lab). Its tables
load in sentence-transformers as a StaticEmbedding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax import checks, field_kinds, typing
from synthq_jax.models import dual_encoder
from synthq_jax.models import token_ids as token_ids_lib

__all__ = ["StaticConfig", "encode", "init", "shapes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticConfig:
  """The shape of a table of vectors, one for each token."""

  vocab_size: int
  """Number of ids of the vocabulary, including special ones."""
  emb_dim: int
  """Length of a vector."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of the vocabulary."""
  kind: str = dataclasses.field(default="static", init=False)
  """Marker in config.json; the shape of a T5 has no such field."""

  def __post_init__(self):
    checks.sizes(vocab_size=self.vocab_size, emb_dim=self.emb_dim)


def shapes(config: StaticConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each parameter by its path."""
  return {"token_embedder/embedding": (config.vocab_size, config.emb_dim)}


def init(
  key: Key[Array, ""],
  config: StaticConfig,
  weights: Float[Array | np.ndarray, " vocab"],
) -> dict[str, dict[str, Float[Array, "vocab dim"]]]:
  """Draws random vectors that approximate the cosines of weighted token counts.

  The cosine of two texts is about that of their weighted counts of tokens, with a
  standard deviation of at most 1 / sqrt(dim): a random projection (Achlioptas
  2003, Database-friendly random projections, with Gaussian entries instead of
  signs).

  >>> config = StaticConfig(vocab_size=5, emb_dim=4096)
  >>> params = init(jax.random.key(0), config, jnp.array([0, 0, 1, 1, 2.0]))
  >>> texts = jnp.array([[2, 3, 1], [3, 1, 0], [4, 1, 0]])
  >>> vectors = encode(params, config, texts)
  >>> [f"{abs(x):.1f}" for x in vectors[0] @ vectors.T]
  ['1.0', '0.7', '0.0']

  Args:
    key: key of the draws.
    config: the shape of the table.
    weights: weight of each token, such as its inverse document frequency; at
      least 0.
  """
  shape = (config.vocab_size, config.emb_dim)
  drawn = jax.random.normal(key, shape) / jnp.sqrt(config.emb_dim)
  return {"token_embedder": {"embedding": drawn * weights[:, None]}}


def encode(
  params: typing.Params,
  config: StaticConfig,
  tokens: Int[Array, "batch length"],
) -> Float[Array, "batch dim"]:
  """Returns the direction of the mean of a text's vectors.

  EOS and padding do not count. A row's vector depends on that row alone.

  Args:
    params: parameters of `init`, with a projection (`dual_encoder.PROJECTION`) if
      there is one.
    config: the shape of the table.
    tokens: tokens of the texts, 0 = padding at the end of a row.

  Returns:
    One float32 vector per row: of length 1, or 0 for a row without tokens.
  """
  table = params["token_embedder"]["embedding"].astype(jnp.float32)
  words = jnp.where(tokens != config.token_ids.eos, tokens, 0)
  return dual_encoder.project(
    params, dual_encoder.pool(table[words], words, "mean")
  )
