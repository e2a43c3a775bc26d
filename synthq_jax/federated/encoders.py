"""Two towers from one public T5 or BERT: for questions, and for sentences.

In `models.dual_encoder`, queries and documents share an encoder. Here the towers
diverge in training, so a client may keep a query tower of its own while the
sentences of all clients stay comparable.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.federated import clients
from synthq_jax.models import bert, t5_config
from synthq_jax.models import encoders as encoders_lib
from synthq_jax.retrieval import encode

__all__ = ["QUERY", "SENTENCE", "Encoders"]

QUERY = "query"
"""Key of the question tower's parameters."""

SENTENCE = "sentence"
"""Key of the sentence tower's parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoders:
  """Encodes questions and sentences as unit vectors.

  Parameters are a dict of two encoders, "query" and "sentence". `encode` serves
  traced code and differentiation; `encode_queries` and `encode_sentences` encode
  a whole collection on the host.

  Attributes:
    config: configuration of the T5 or BERT.
    query_pooling: pooling of questions, one of `dual_encoder.POOLINGS`.
    sentence_pooling: pooling of sentences, likewise.
  """

  config: t5_config.T5Config | bert.BertConfig
  query_pooling: str = "mean"
  sentence_pooling: str = "mean"

  def __post_init__(self):
    """Refuses an unknown pooling."""
    self.tower(QUERY), self.tower(SENTENCE)

  def tower(self, name: str) -> encoders_lib.Encoder:
    """Returns the encoder of a tower, `QUERY` or `SENTENCE`."""
    is_query = name == QUERY
    pooling = self.query_pooling if is_query else self.sentence_pooling
    return encoders_lib.of(self.config, pooling=pooling)

  def init(self, params: typing.Params) -> dict[str, typing.Params]:
    """Returns two equal towers.

    Args:
      params: parameters of a public T5 or BERT, or of its encoder.

    Returns:
      The encoder's parameters under "query" and under "sentence", as JAX arrays,
      which both towers share until they are trained.

    Raises:
      ValueError: if a part of the encoder is missing.
    """
    tower = jax.tree.map(jnp.asarray, self.tower(QUERY).select(params))
    return {QUERY: tower, SENTENCE: tower}

  def encode(
    self,
    params: typing.Params,
    part: str,
    tokens: Int[Array, "text length"],
  ) -> Float[Array, "text dim"]:
    """Encodes texts in traced code.

    Args:
      params: parameters from `init`, at least those of `part`.
      part: `QUERY` or `SENTENCE`.
      tokens: tokens, 0 = padding at the end of a row.

    Returns:
      Unit vectors, float32; 0 for a row that is all padding.
    """
    return self.tower(part).encode(params[part], tokens)

  def encode_queries(
    self, params: typing.Params, tokens: Int[np.ndarray, "query length"]
  ) -> Float[np.ndarray, "query dim"]:
    """Encodes any number of questions.

    Args:
      params: parameters from `init`.
      tokens: tokens, 0 = padding at the end of a row.

    Returns:
      The vectors of `encode`, on the host, up to rounding.
    """
    return encode.encode(params[QUERY], self.tower(QUERY), tokens)

  def encode_sentences(
    self, params: typing.Params, tokens: Int[np.ndarray, "sentence length"]
  ) -> Float[np.ndarray, "sentence dim"]:
    """Encodes any number of sentences, as `encode_queries` encodes questions.

    Equal sentences are encoded once; a quarter of MedQuAD's are repeats.
    """
    distinct, inverse = np.unique(
      clients.find_first_equal(tokens), return_inverse=True
    )
    vectors = encode.encode(
      params[SENTENCE], self.tower(SENTENCE), tokens[distinct]
    )
    return vectors[inverse]
