"""Terms of queries and documents, as Duet, KNRM and PACRR read them.

The terms are pieces of a SentencePiece vocabulary, where the papers have words:
no word is unknown, and the table of embeddings is a public model's.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from synthq_jax import typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage.rerankers import _tokens, interface

__all__ = ["OfTerms", "Terms", "cosines", "inverse_document_frequencies"]

_SMALLEST_SQUARED_NORM = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
  """How texts become terms, and terms vectors."""

  vocabulary: Any = dataclasses.field(repr=False)
  """A SentencePiece vocabulary, from `data.vocabulary.load`."""
  embeddings: Any = dataclasses.field(default=None, repr=False)
  """Vectors that training starts from [vocab, dim], such as a T5's
  `params["token_embedder"]["embedding"]`; random ones if not given."""
  dim: int = 300
  """The width of random vectors; 300 as in KNRM's paper."""
  query_length: int = 16
  """Terms of a query that are read."""
  document_length: int = 256
  """Terms of a document that are read."""
  idf: Any = dataclasses.field(default=None, repr=False)
  """The inverse document frequency of each piece [vocab], such as
  `inverse_document_frequencies` returns; 1 for all if not given."""

  def __post_init__(self):
    if min(self.dim, self.query_length, self.document_length) < 1:
      raise ValueError(
        "expected dim, query_length and document_length of at least 1, got"
        f" dim={self.dim}, query_length={self.query_length},"
        f" document_length={self.document_length}"
      )
    for name in ("embeddings", "idf"):
      if (table := getattr(self, name)) is not None:
        _tokens.check_vocabulary(name, self.vocabulary, len(table))

  def init(self, key: jax.Array) -> Float[Array, "vocab dim"]:
    """Returns the vectors before training."""
    if self.embeddings is not None:
      return jnp.asarray(self.embeddings, jnp.float32)
    return jax.random.normal(key, (self.vocabulary.vocab_size, self.dim))

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> interface.Features:
    """Returns "query" and "document", terms, and "idf", of the query's terms."""
    query = vocabulary_lib.pad(
      _tokens.encode(self.vocabulary, queries), self.query_length
    )
    document = vocabulary_lib.pad(
      _tokens.encode(self.vocabulary, documents), self.document_length
    )
    stands = (query != vocabulary_lib.PAD_ID).astype(np.float32)
    idf = np.ones(1) if self.idf is None else np.asarray(self.idf)
    weights = idf[np.zeros_like(query) if self.idf is None else query]
    return {
      "query": query,
      "document": document,
      "idf": (weights * stands).astype(np.float32),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OfTerms:
  """What rerankers share that read terms; subclasses say `train_embeddings`."""

  terms: Terms
  """What is read, and the vectors of terms."""
  padded: ClassVar[tuple[str, ...]] = ("document",)

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> interface.Features:
    """Returns terms and their inverse document frequencies."""
    return self.terms.featurize(queries, documents)

  def vectors(self, params: typing.Params) -> Float[Array, "vocab dim"]:
    """Returns the vectors of terms, which may be held fixed."""
    embedding = params["embedding"]
    if self.train_embeddings:
      return embedding
    return jax.lax.stop_gradient(embedding)

  def check_sizes(self, *fields: str) -> None:
    """Refuses fields below 1."""
    for field in fields:
      if getattr(self, field) < 1:
        raise ValueError(
          f"expected {field} of at least 1, got {field}={getattr(self, field)}"
        )


def cosines(
  embedding: Float[Array, "vocab dim"], batch: Mapping[str, Array]
) -> tuple[Float[Array, "batch query document"], Bool[Array, "..."]]:
  """Returns the cosine of every term of a query and every one of a document.

  Args:
    embedding: the vectors of the terms.
    batch: features from `Terms.featurize`.

  Returns:
    The cosines, 0 where either side is padding, and where neither is.
  """
  vectors = embedding[batch["query"]], embedding[batch["document"]]
  query, document = (_unit(x) for x in vectors)
  # [batch, query, document]
  stands = (batch["query"] != 0)[:, :, None] & (batch["document"] != 0)[:, None]
  found = jnp.einsum("bqe,bde->bqd", query, document)
  return jnp.where(stands, found, 0.0), stands


def inverse_document_frequencies(
  vocabulary: Any, documents: Iterable[str]
) -> Float[np.ndarray, " vocab"]:
  """Returns ln((N + 1) / (n + 1)) of each piece, n of N documents holding it.

  Args:
    vocabulary: from `data.vocabulary.load`.
    documents: texts of the collection.
  """
  holding = np.zeros(vocabulary.vocab_size)
  total = 0
  for text in documents:
    holding[list(set(vocabulary.encode(text)))] += 1
    total += 1
  return np.log((total + 1) / (holding + 1)).astype(np.float32)


def _unit(vectors: Float[Array, "... dim"]) -> Array:
  squared = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))
