"""KNRM and PACRR: models of the cosines of a query's and a document's terms.

The terms are pieces of a SentencePiece vocabulary, where the papers have words:
no word is unknown, and the table of embeddings is a public model's.

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

from synthq_jax import checks, extras, typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage.rerankers import reranker

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "KNRM",
  "PACRR",
  "OfTerms",
  "Terms",
  "best",
  "cosines",
  "initial",
  "inverse_document_frequencies",
  "ngrams",
  "pool",
]

_SMALLEST_SQUARED_NORM = 1e-12
_SMALLEST_COUNT = 1e-10
# The logarithms reach -23 for each term of a query: scaled, tanh does not begin
# where its gradient is 0.
_SCALE = 0.01
_MASKED = -1e10


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
    checks.at_least(
      1,
      dim=self.dim,
      query_length=self.query_length,
      document_length=self.document_length,
    )
    for name in ("embeddings", "idf"):
      if (table := getattr(self, name)) is not None:
        reranker.check_vocabulary(name, self.vocabulary, len(table))

  def init(self, key: jax.Array) -> Float[Array, "vocab dim"]:
    """Returns the vectors before training."""
    if self.embeddings is not None:
      return jnp.asarray(self.embeddings, jnp.float32)
    return jax.random.normal(key, (self.vocabulary.vocab_size, self.dim))

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> reranker.Features:
    """Returns "query" and "document", terms, and "idf", of the query's terms."""
    query = vocabulary_lib.pad(
      reranker.encode(self.vocabulary, queries), self.query_length
    )
    document = vocabulary_lib.pad(
      reranker.encode(self.vocabulary, documents), self.document_length
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
class OfTerms(reranker.Reranker):
  """What rerankers of terms share."""

  terms: Terms
  """What is read, and the vectors of terms."""
  train_embeddings: bool = True
  """Whether the vectors of terms are trained, as in the papers of KNRM and Duet;
  in PACRR's they are not."""
  padded: ClassVar[tuple[str, ...]] = ("document",)

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> reranker.Features:
    """Returns terms and their inverse document frequencies."""
    return self.terms.featurize(queries, documents)

  def vectors(self, params: typing.Params) -> Float[Array, "vocab dim"]:
    """Returns the vectors of terms, which may be held fixed."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KNRM(OfTerms):
  """Scores a document by how many of its terms are how similar to the query's.

  With M the cosines of terms, f(q, d) = tanh(w . phi(M) + b), where phi is
  `pool`. Training minimises the hinge max(0, 1 - f(q, d+) + f(q, d-)), also
  with respect to the vectors of the terms. `score` leaves out the tanh, which
  changes no ranking and would make large scores equal.
  """

  means: tuple[float, ...] = (
    *(-0.9, -0.7, -0.5, -0.3, -0.1),
    *(0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
  )
  """The centre of each kernel: the paper's 11."""
  deviations: tuple[float, ...] = (*(0.1,) * 10, 0.001)
  """The width of each kernel; the last counts exact matches."""
  name: ClassVar[str] = "KNRM"
  objective = staticmethod(reranker.hinge)

  def __post_init__(self):
    if len(self.means) != len(self.deviations) or not self.means:
      raise ValueError(
        "expected a deviation for each mean, got"
        f" {len(self.means)} means and {len(self.deviations)} deviations"
      )
    checks.within("(0, inf]", deviations=min(self.deviations))

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the vectors of terms and the layer that combines the kernels."""
    of_terms, of_weights = jax.random.split(key)
    return {
      "embedding": self.terms.init(of_terms),
      "weights": 0.01 * jax.random.normal(of_weights, (len(self.means),)),
      "bias": jnp.zeros(()),
    }

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 1"]:
    """Returns w . phi(M) + b of each row; there is no dropout."""
    del rngs
    similarity, stands = cosines(self.vectors(params), batch)
    is_term = batch["query"] != 0
    pooled = pool(similarity, stands, is_term, self.means, self.deviations)
    return (_SCALE * pooled @ params["weights"] + params["bias"])[:, None]


def pool(
  similarity: Float[Array, "batch query document"],
  stands: Bool[Array, "batch query document"],
  is_term: Bool[Array, "batch query"],
  means: Sequence[float],
  deviations: Sequence[float],
) -> Float[Array, "batch kernel"]:
  """Returns phi(M), the kernels' soft counts.

  phi_k(M) = sum_i log sum_j exp(-(M_ij - mu_k)^2 / (2 sigma_k^2)), over the
  terms i of the query and j of the document; a sum counts 1e-10 at least, as
  all of them do for a document without terms.

  Args:
    similarity: M, cosines.
    stands: where neither term is padding.
    is_term: where the term of the query is no padding.
    means: mu.
    deviations: sigma.
  """
  # [batch, query, document, kernel]
  centre = jnp.asarray(np.asarray(means, np.float32))[None, None, None]
  width = jnp.asarray(np.asarray(deviations, np.float32))[None, None, None]
  distance = (similarity[..., None] - centre) / width
  near = jnp.where(stands[..., None], jnp.exp(-0.5 * distance * distance), 0.0)
  counts = jnp.log(jnp.maximum(jnp.sum(near, axis=2), _SMALLEST_COUNT))
  return jnp.sum(jnp.where(is_term[..., None], counts, 0.0), axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PACRR(OfTerms):
  """Scores a document by its best matches of each term of the query.

  For every n up to `longest`, filters of n x n terms go over the matrix of
  cosines; the strongest filter counts at each place, and of each query term the
  k strongest places of the document (the "firstk" variant: documents are cut).
  These values and the term's share of inverse document frequency, a softmax
  over the query, are combined by two hidden layers. Training minimises the
  cross-entropy of the softmax over the relevant and the other document.

  The paper's first version combines the terms with an LSTM; the hidden layers
  are those of its authors' later models and of Capreolus, whose sizes are the
  defaults here: n-grams to 3, 32 filters, k = 2, layers of 32.
  """

  longest: int = 3
  """The longest n-gram, at least 1."""
  filters: int = 32
  """Filters of each n from 2 on."""
  k: int = 2
  """Places that count for each term and n."""
  hidden: int = 32
  """The width of the hidden layers."""
  train_embeddings: bool = False
  name: ClassVar[str] = "PACRR"
  objective = staticmethod(reranker.softmax)

  def __post_init__(self):
    checks.at_least(
      1,
      longest=self.longest,
      filters=self.filters,
      k=self.k,
      hidden=self.hidden,
    )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the vectors of terms and the network's parameters."""
    of_terms, of_network = jax.random.split(key)
    embedding, batch = self.terms.init(of_terms), self.featurize([""], [""])
    return {
      "embedding": embedding,
      "network": initial(of_network, embedding, batch, network=self._network()),
    }

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 1"]:
    """Returns the network's output for each row; there is no dropout."""
    del rngs
    return self._network().apply(
      {"params": params["network"]}, self.vectors(params), batch
    )

  def _network(self) -> "_Network":
    return _Network(self.longest, self.filters, self.k, self.hidden)


class _Network(nn.Module):
  """The matrix of cosines, and the layers after it."""

  longest: int
  filters: int
  k: int
  hidden: int

  @nn.compact
  def __call__(
    self, embedding: Float[Array, "vocab dim"], batch: typing.Batch
  ) -> Float[Array, "batch 1"]:
    similarity, stands = cosines(embedding, batch)
    is_term = batch["query"] != 0
    # Not infinite: rows that fill a batch up hold no term at all.
    weights = jax.nn.softmax(jnp.where(is_term, batch["idf"], _MASKED))
    weights = jnp.where(is_term, weights, 0.0)
    signals = [best(similarity, stands, self.k), weights[..., None]]
    for n in range(2, self.longest + 1):
      # [batch, query, document, filters]
      matched = nn.relu(nn.Dense(self.filters)(ngrams(similarity, n)))
      signals.append(best(jnp.max(matched, axis=-1), stands, self.k))
    # [batch, query, signal]
    x = jnp.concatenate(signals, axis=-1)
    x = x.reshape(x.shape[0], -1)
    for _ in range(2):
      x = nn.relu(nn.Dense(self.hidden)(x))
    return nn.Dense(1)(x)


def ngrams(
  similarity: Float[Array, "batch query document"], n: int
) -> Float[Array, "batch query document cells"]:
  """Returns the n x n cells that begin at each place, zeros past the end.

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
  stands: Bool[Array, "batch query document"],
  k: int,
) -> Float[Array, "batch query k"]:
  """Returns the k largest values of each term, and 0 where there are fewer.

  Args:
    values: one for each pair of terms.
    stands: where neither term is padding.
    k: at least 1.
  """
  values = jnp.where(stands, values, -jnp.inf)
  values = jnp.pad(values, ((0, 0), (0, 0), (0, k)), constant_values=-jnp.inf)
  largest, _ = jax.lax.top_k(values, k)
  return jnp.where(jnp.isfinite(largest), largest, 0.0)
