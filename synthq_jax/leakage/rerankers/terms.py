"""KNRM and PACRR: models of the cosines of a query's and a document's terms.

The papers' terms are words; here they are pieces of a SentencePiece vocabulary.
So no word is unknown, and a public model supplies the table of embeddings.

References:
  Xiong, Dai, Callan, Liu, Power: End-to-End Neural Ad-hoc Ranking with Kernel
  Pooling. SIGIR 2017, section 3.
  Hui, Yates, Berberich, de Melo: PACRR: A Position-Aware Neural IR Model for
  Relevance Matching. EMNLP 2017, section 3.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from synthq_jax import extras, typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage.rerankers import reranker

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "DEVIATIONS",
  "KNRM",
  "MEANS",
  "PACRR",
  "TermReranker",
  "best",
  "cosines",
  "initial",
  "inverse_document_frequencies",
  "ngrams",
  "pool",
]

_SMALLEST_SQUARED_NORM = 1e-12
_SMALLEST_COUNT = 1e-10
# The logarithms reach -23 for each term of a query. The scale keeps tanh from
# starting where its gradient is 0.
_SCALE = 0.01
_MASKED = -1e10
MEANS = (*(-0.9, -0.7, -0.5, -0.3, -0.1), *(0.1, 0.3, 0.5, 0.7, 0.9, 1.0))
"""Centre of each kernel of KNRM; the paper's 11 kernels."""
DEVIATIONS = (*(0.1,) * 10, 0.001)
"""Width of each kernel of KNRM; the last kernel counts exact matches."""
_LONGEST = 3  # terms of PACRR's longest n-gram
_FILTERS = 32  # of each n from 2 on
_K = 2  # positions that count for each term and n
_HIDDEN = 32  # width of PACRR's hidden layers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TermReranker(reranker.Reranker):
  """Base of the rerankers that read terms."""

  vocabulary: Any = dataclasses.field(repr=False)
  """A SentencePiece vocabulary, from `data.vocabulary.load`."""
  embeddings: Any = dataclasses.field(repr=False)
  """Initial vectors of terms [vocab, dim], such as a T5's
  `params["token_embedder"]["embedding"]`."""
  query_length: int
  """Terms of a query; longer queries are cut."""
  document_length: int
  """Terms of a document; longer documents are cut."""
  idf: Any = dataclasses.field(repr=False)
  """Inverse document frequency of each piece [vocab], from
  `inverse_document_frequencies`."""
  train_embeddings: ClassVar[bool] = True
  """Whether training changes the vectors of terms, as in the papers of KNRM and
  Duet; PACRR's paper keeps them fixed."""
  padded: ClassVar[tuple[str, ...]] = ("document",)

  def __post_init__(self):
    for name in ("embeddings", "idf"):
      rows = len(getattr(self, name))
      reranker.check_vocabulary(name, self.vocabulary, rows)

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> reranker.Features:
    """Returns the features "query" and "document" (terms) and "idf" (weights).

    The weights belong to the query's terms.
    """
    query = vocabulary_lib.pad(
      reranker.encode(self.vocabulary, queries), self.query_length
    )
    document = vocabulary_lib.pad(
      reranker.encode(self.vocabulary, documents), self.document_length
    )
    mask = (query != vocabulary_lib.PAD_ID).astype(np.float32)
    weights = np.asarray(self.idf)[query]
    return {
      "query": query,
      "document": document,
      "idf": (weights * mask).astype(np.float32),
    }

  def vectors(self, params: typing.Params) -> Float[Array, "vocab dim"]:
    """Returns the vectors of terms, without gradient if they are not trained."""
    embedding = params["embedding"]
    if self.train_embeddings:
      return embedding
    return jax.lax.stop_gradient(embedding)


@functools.partial(jax.jit, static_argnames="network")
def initial(key: jax.Array, *inputs: Any, network: nn.Module) -> typing.Params:
  """Returns random parameters of a network for inputs of these shapes."""
  return network.init(key, *inputs)["params"]


def cosines(
  embedding: Float[Array, "vocab dim"], batch: Mapping[str, Array]
) -> tuple[Float[Array, "batch query document"], Bool[Array, "..."]]:
  """Computes the cosine of every query term and every document term.

  Args:
    embedding: vectors of the terms.
    batch: features from `TermReranker.featurize`.

  Returns:
    The cosines, 0 at padding, and a mask that is False at padding of either side.
  """
  vectors = embedding[batch["query"]], embedding[batch["document"]]
  query, document = (_normalize(x) for x in vectors)
  # [batch, query, document]
  mask = (batch["query"] != 0)[:, :, None] & (batch["document"] != 0)[:, None]
  products = jnp.einsum("bqe,bde->bqd", query, document)
  return jnp.where(mask, products, 0.0), mask


def inverse_document_frequencies(
  vocabulary: Any, documents: Iterable[str]
) -> Float[np.ndarray, " vocab"]:
  """Computes ln((N + 1) / (n + 1)) of each piece that n of N documents hold.

  Args:
    vocabulary: vocabulary from `data.vocabulary.load`.
    documents: texts of the collection.
  """
  holding = np.zeros(vocabulary.vocab_size)
  total = 0
  for text in documents:
    holding[list(set(vocabulary.encode(text)))] += 1
    total += 1
  return np.log((total + 1) / (holding + 1)).astype(np.float32)


def _normalize(vectors: Float[Array, "... dim"]) -> Array:
  squared = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squared, _SMALLEST_SQUARED_NORM))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KNRM(TermReranker):
  """Scores a document by soft counts of its terms at levels of similarity.

  M being the cosines of terms, f(q, d) = tanh(w . phi(M) / 100 + b), phi = `pool`.
  Training minimises the hinge max(0, 1 - f(q, d+) + f(q, d-)), also with respect
  to the vectors of the terms. `score` leaves out the tanh, which changes no
  ranking but would make large scores equal.
  """

  name: ClassVar[str] = "KNRM"
  objective = staticmethod(reranker.hinge)

  def init(self, key: jax.Array) -> typing.Params:
    """Makes the vectors of terms and the layer that combines the kernels."""
    _, weights_key = jax.random.split(key)
    return {
      "embedding": jnp.asarray(self.embeddings, jnp.float32),
      "weights": 0.01 * jax.random.normal(weights_key, (len(MEANS),)),
      "bias": jnp.zeros(()),
    }

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 1"]:
    """Returns w . phi(M) / 100 + b of each row; there is no dropout."""
    del rngs
    similarity, mask = cosines(self.vectors(params), batch)
    is_term = batch["query"] != 0
    pooled = pool(similarity, mask, is_term)
    return (_SCALE * pooled @ params["weights"] + params["bias"])[:, None]


def pool(
  similarity: Float[Array, "batch query document"],
  mask: Bool[Array, "batch query document"],
  is_term: Bool[Array, "batch query"],
) -> Float[Array, "batch kernel"]:
  """Computes phi(M), the kernels' soft counts.

  phi_k(M) = sum_i log sum_j exp(-(M_ij - mu_k)^2 / (2 sigma_k^2)), over the
  terms i of the query and j of the document. The inner sum is at least 1e-10,
  its value for a document without terms.

  Args:
    similarity: M, the cosines.
    mask: False at padding of either side.
    is_term: False at padding of the query.
  """
  # [batch, query, document, kernel]
  centre = jnp.asarray(np.asarray(MEANS, np.float32))[None, None, None]
  width = jnp.asarray(np.asarray(DEVIATIONS, np.float32))[None, None, None]
  distance = (similarity[..., None] - centre) / width
  near = jnp.where(mask[..., None], jnp.exp(-0.5 * distance * distance), 0.0)
  counts = jnp.log(jnp.maximum(jnp.sum(near, axis=2), _SMALLEST_COUNT))
  return jnp.sum(jnp.where(is_term[..., None], counts, 0.0), axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PACRR(TermReranker):
  """Scores a document by its best matches of each term of the query.

  For every n up to 3, filters of n x n terms run over the matrix of
  cosines. The strongest filter counts at each position, and for each query term
  the two strongest positions of the document. (This is the "firstk" variant:
  documents are cut.) Two hidden layers combine these values and the softmax,
  over the query, of the terms' inverse document frequencies. Training minimises
  the cross-entropy of the softmax over the relevant and the other document.

  The paper's first version combines the terms with an LSTM. Its authors' later
  models and Capreolus use hidden layers. The default sizes are Capreolus':
  n-grams to 3, 32 filters, k = 2, layers of 32.
  """

  train_embeddings: ClassVar[bool] = False
  name: ClassVar[str] = "PACRR"
  objective = staticmethod(reranker.softmax)

  def init(self, key: jax.Array) -> typing.Params:
    """Makes the vectors of terms and the network's parameters."""
    _, network_key = jax.random.split(key)
    embedding = jnp.asarray(self.embeddings, jnp.float32)
    batch = self.featurize([""], [""])
    return {
      "embedding": embedding,
      "network": initial(network_key, embedding, batch, network=_Network()),
    }

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 1"]:
    """Returns the network's output for each row; there is no dropout."""
    del rngs
    return _Network().apply(
      {"params": params["network"]}, self.vectors(params), batch
    )


class _Network(nn.Module):
  """PACRR's network: the matrix of cosines, filters and hidden layers."""

  @nn.compact
  def __call__(
    self, embedding: Float[Array, "vocab dim"], batch: typing.Batch
  ) -> Float[Array, "batch 1"]:
    similarity, mask = cosines(embedding, batch)
    is_term = batch["query"] != 0
    # Finite, because rows that fill up a batch hold no term at all.
    weights = jax.nn.softmax(jnp.where(is_term, batch["idf"], _MASKED))
    weights = jnp.where(is_term, weights, 0.0)
    signals = [best(similarity, mask, _K), weights[..., None]]
    for n in range(2, _LONGEST + 1):
      # [batch, query, document, filters]
      matched = nn.relu(nn.Dense(_FILTERS)(ngrams(similarity, n)))
      signals.append(best(jnp.max(matched, axis=-1), mask, _K))
    # [batch, query, signal]
    x = jnp.concatenate(signals, axis=-1)
    x = x.reshape(x.shape[0], -1)
    for _ in range(2):
      x = nn.relu(nn.Dense(_HIDDEN)(x))
    return nn.Dense(1)(x)


def ngrams(
  similarity: Float[Array, "batch query document"], n: int
) -> Float[Array, "batch query document cells"]:
  """Returns the n x n cells that begin at each position, 0 past the end.

  >>> ngrams(jnp.array([[[1.0, 2.0], [3.0, 4.0]]]), 2)[0, 0].tolist()
  [[1.0, 2.0, 3.0, 4.0], [2.0, 0.0, 4.0, 0.0]]
  """
  _, rows, columns = similarity.shape
  wide = jnp.pad(similarity, ((0, 0), (0, n - 1), (0, n - 1)))
  cells = [
    wide[:, i : i + rows, j : j + columns] for i in range(n) for j in range(n)
  ]
  return jnp.stack(cells, axis=-1)


def best(
  values: Float[Array, "batch query document"],
  mask: Bool[Array, "batch query document"],
  k: int,
) -> Float[Array, "batch query k"]:
  """Returns the k largest values of each query term, filled up with 0.

  Args:
    values: one value for each pair of terms.
    mask: False at padding of either side.
    k: number of values, at least 1.
  """
  values = jnp.where(mask, values, -jnp.inf)
  values = jnp.pad(values, ((0, 0), (0, 0), (0, k)), constant_values=-jnp.inf)
  largest, _ = jax.lax.top_k(values, k)
  return jnp.where(jnp.isfinite(largest), largest, 0.0)
