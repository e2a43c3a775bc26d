"""Encodes texts as means of their tokens' vectors: no layers, no attention.

What a small transformer costs for a text this costs for hundreds, and where
queries share words with what answers them it ranks better (docs/lab).
Its tables load in sentence-transformers as a StaticEmbedding.
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
  """Ids of the vocabulary, special ones among them."""
  emb_dim: int
  """Numbers of a vector."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of its vocabulary."""
  kind: str = dataclasses.field(default="static", init=False)
  """In config.json, where a T5's shape has no such field."""

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
  """Draws vectors whose cosines are those of weighted words, but for chance.

  Two texts have about the cosine of their weighted counts of tokens, with a
  standard deviation of at most 1 / sqrt(dim): a random projection (Achlioptas
  2003, Database-friendly random projections, which draws signs where this draws
  from a Gaussian).

  >>> config = StaticConfig(vocab_size=5, emb_dim=4096)
  >>> params = init(jax.random.key(0), config, jnp.array([0, 0, 1, 1, 2.0]))
  >>> texts = jnp.array([[2, 3, 1], [3, 1, 0], [4, 1, 0]])
  >>> vectors = encode(params, config, texts)
  >>> [f"{abs(x):.1f}" for x in vectors[0] @ vectors.T]
  ['1.0', '0.7', '0.0']

  Args:
    key: of the draws.
    config: the shape.
    weights: how much a token counts, such as its inverse document frequency; at
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

  EOS counts as little as padding. A row's vector depends on that row alone.

  Args:
    params: of `init`, and a projection (`dual_encoder.PROJECTION`) where there
      is one.
    config: the shape.
    tokens: 0 = padding at the end of a row.

  Returns:
    One float32 vector per row: of length 1, or 0 where there is no token.
  """
  table = params["token_embedder"]["embedding"].astype(jnp.float32)
  words = jnp.where(tokens != config.token_ids.eos, tokens, 0)
  return dual_encoder.projected(
    params, dual_encoder.pool(table[words], words, "mean")
  )
