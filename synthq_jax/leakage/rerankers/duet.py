"""Duet: the sum of a network on exact matches and a network on vectors.

References:
  Mitra, Diaz, Craswell: Learning to Match Using Local and Distributed
  Representations of Text for Web Search. WWW 2017, sections 3 and 4.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from synthq_jax import extras, typing
from synthq_jax.leakage.rerankers import reranker
from synthq_jax.leakage.rerankers import terms as terms_lib

with extras.required("run"):
  from flax import linen as nn

__all__ = ["Duet", "matches", "windows", "window_max"]

_BY_INPUTS = nn.initializers.lecun_normal()
_DROPOUT = 0.2  # before the last layer of each part
_FILTERS = 10  # of both parts
_HIDDEN = 30  # width of the layers that combine the filters
_WIDTH = 3  # terms under a filter of the distributed part
_WINDOW = 100  # positions of the document under each maximum


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Duet(terms_lib.TermReranker):
  """Scores a document by the sum f_l + f_d of a local and a distributed part.

  The local part reads the matrix of exact matches; every position of the
  document has its own weights. The distributed part runs filters of 3
  terms over the vectors of both texts. It takes the maximum over the query and
  over each window of the document, and multiplies the two elementwise.
  Training maximises the softmax of the relevant document over two documents;
  the paper has five.

  The paper's distributed part reads words as bags of n-graphs; this one reads
  the vectors of word pieces. Capreolus supplies the sizes: 10 filters, 30 hidden
  units, matches weighted by inverse document frequency. The paper supplies tanh,
  the window and dropout; its layers are 300 wide.
  """

  name: ClassVar[str] = "Duet"
  objective = staticmethod(reranker.softmax)

  def init(self, key: jax.Array) -> typing.Params:
    """Makes the vectors of terms and the parameters of both parts."""
    _, local_key, distributed_key = jax.random.split(key, 3)
    embedding = jnp.asarray(self.embeddings, jnp.float32)
    batch = self.featurize([""], [""])
    return {
      "embedding": embedding,
      "local": terms_lib.initial(local_key, batch, network=self._local()),
      "distributed": terms_lib.initial(
        distributed_key, embedding, batch, network=self._distributed()
      ),
    }

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 1"]:
    """Returns f_l + f_d of each row."""
    embedding = self.vectors(params)
    drop, own = rngs is not None, [None, None]
    if drop:
      own = [{"dropout": key} for key in jax.random.split(rngs["dropout"])]
    local = self._local().apply(
      {"params": params["local"]}, batch, drop, rngs=own[0]
    )
    distributed = self._distributed().apply(
      {"params": params["distributed"]}, embedding, batch, drop, rngs=own[1]
    )
    return local + distributed

  def _local(self) -> "_Local":
    return _Local(self.document_length)

  def _distributed(self) -> "_Distributed":
    return _Distributed(self.document_length)


class _Local(nn.Module):
  """The local part: scores the positions of exact matches."""

  length: int

  @nn.compact
  def __call__(
    self, batch: typing.Batch, drop: bool = False
  ) -> Float[Array, "batch 1"]:
    matched = matches(batch)
    kernel = self.param("kernel", _BY_INPUTS, (self.length, _FILTERS))
    # [batch, query, filters]; 0 at padding: it matches nothing, without bias.
    x = jnp.tanh(matched @ kernel[: matched.shape[2]])
    x = x.reshape(x.shape[0], -1)
    for _ in range(2):
      x = jnp.tanh(nn.Dense(_HIDDEN)(x))
    x = nn.Dropout(_DROPOUT, deterministic=not drop)(x)
    return nn.Dense(1)(x)


class _Distributed(nn.Module):
  """The distributed part: compares the texts' vectors by learned filters."""

  length: int

  @nn.compact
  def __call__(
    self,
    embedding: Float[Array, "vocab dim"],
    batch: typing.Batch,
    drop: bool = False,
  ) -> Float[Array, "batch 1"]:
    query, document = batch["query"], batch["document"]
    # [batch, filters]
    q = self._maxima(embedding, query, query.shape[1], name="query_filters")
    q = jnp.tanh(nn.Dense(_FILTERS, name="query")(q[:, 0]))
    # [batch, document, filters]
    d = self._maxima(embedding, document, _WINDOW, name="document_filters")
    d = jnp.tanh(nn.Dense(_FILTERS, name="document")(d))
    product = jnp.where((document != 0)[..., None], q[:, None] * d, 0.0)
    shape = (self.length * _FILTERS, _HIDDEN)
    kernel = self.param("kernel", _BY_INPUTS, shape)
    kernel = kernel[: d.shape[1] * _FILTERS]
    bias = self.param("bias", nn.initializers.zeros, (_HIDDEN,))
    x = jnp.tanh(product.reshape(len(product), -1) @ kernel + bias[None])
    x = jnp.tanh(nn.Dense(_HIDDEN, name="hidden")(x))
    x = nn.Dropout(_DROPOUT, deterministic=not drop)(x)
    return nn.Dense(1, name="score")(x)

  def _maxima(self, embedding, terms, window: int, *, name: str) -> Array:
    """Runs filters over the vectors of terms and takes their windows' maxima."""
    mask = terms != 0
    vectors = jnp.where(mask[..., None], embedding[terms], 0.0)
    x = nn.Dense(_FILTERS, name=name)(windows(vectors, _WIDTH))
    return window_max(jnp.tanh(x), mask, window)


def matches(
  batch: Mapping[str, Array],
) -> Float[Array, "batch query document"]:
  """Returns the matrix of exact matches, weighted by the terms' idf.

  Args:
    batch: features from `TermReranker.featurize`.
  """
  query, document = batch["query"][:, :, None], batch["document"][:, None]
  return jnp.where(
    (query == document) & (query != 0), batch["idf"][:, :, None], 0.0
  )


def windows(
  vectors: Float[Array, "batch length dim"], width: int
) -> Float[Array, "batch length cells"]:
  """Concatenates the vectors under the window that begins at each position.

  >>> windows(jnp.array([[[1.0], [2.0], [3.0]]]), 2)[0].tolist()
  [[1.0, 2.0], [2.0, 3.0], [3.0, 0.0]]
  """
  length = vectors.shape[1]
  wide = jnp.pad(vectors, ((0, 0), (0, width - 1), (0, 0)))
  parts = [wide[:, i : i + length] for i in range(width)]
  return jnp.concatenate(parts, axis=-1)


def window_max(
  values: Float[Array, "batch length filter"],
  mask: Bool[Array, "batch length"],
  window: int,
) -> Float[Array, "batch length filter"]:
  """Returns the maximum of the window that begins at each position.

  Args:
    values: values of each position.
    mask: False at padding, which counts for no maximum; 0 if all is padding.
    window: positions under each maximum.
  """
  # Doubles the window by maxima of two neighbouring ones: log2(window) steps.
  # XLA's pooling reads every position of a window, and twice for gradients.
  pooled = jnp.where(mask[..., None], values, -jnp.inf)
  span = 1
  while span < window:
    step = min(span, window - span)
    later = jnp.pad(
      pooled[:, step:],
      ((0, 0), (0, min(step, pooled.shape[1])), (0, 0)),
      constant_values=-jnp.inf,
    )
    pooled = jnp.maximum(pooled, later)
    span += step
  return jnp.where(jnp.isfinite(pooled), pooled, 0.0)
