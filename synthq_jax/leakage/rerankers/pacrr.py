"""PACRR: matches of n-grams at their places, the best of each query term.

References:
  Hui, Yates, Berberich, de Melo: PACRR: A Position-Aware Neural IR Model for
  Relevance Matching. EMNLP 2017, section 3.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from synthq_jax import typing
from synthq_jax.leakage.rerankers import _losses
from synthq_jax.leakage.rerankers import terms as terms_lib

__all__ = ["PACRR", "best", "ngrams"]

_MASKED = -1e10


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PACRR(terms_lib.OfTerms):
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
  """Whether the vectors of terms are trained; not in the paper."""
  name: ClassVar[str] = "PACRR"

  def __post_init__(self):
    self.check_sizes("longest", "filters", "k", "hidden")

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the vectors of terms and the network's parameters."""
    of_terms, of_network = jax.random.split(key)
    network = _init(
      of_network,
      network=self._network(),
      query_length=self.terms.query_length,
    )
    return {"embedding": self.terms.init(of_terms), "network": network}

  def score(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Returns the network's output for each row; there is no dropout."""
    del key
    similarity, stands = terms_lib.cosines(self.vectors(params), batch)
    is_term = batch["query"] != 0
    # Not infinite: rows that fill a batch up hold no term at all.
    weights = jax.nn.softmax(jnp.where(is_term, batch["idf"], _MASKED))
    weights = jnp.where(is_term, weights, 0.0)
    return self._network().apply(
      {"params": params["network"]}, similarity, stands, weights
    )

  def loss(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, ""]:
    """Returns the mean cross-entropy of the pairs."""
    return _losses.softmax(self.score(params, batch, key=key))

  def _network(self) -> "_Network":
    return _Network(self.longest, self.filters, self.k, self.hidden)


class _Network(nn.Module):
  """The layers after the matrix of cosines."""

  longest: int
  filters: int
  k: int
  hidden: int

  @nn.compact
  def __call__(
    self,
    similarity: Float[Array, "batch query document"],
    stands: Bool[Array, "batch query document"],
    weights: Float[Array, "batch query"],
  ) -> Float[Array, " batch"]:
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
    return nn.Dense(1)(x)[:, 0]


@functools.partial(jax.jit, static_argnames=("network", "query_length"))
def _init(
  key: jax.Array, *, network: _Network, query_length: int
) -> typing.Params:
  matrix = jnp.zeros((1, query_length, 1))
  stands = jnp.zeros(matrix.shape, bool)
  return network.init(key, matrix, stands, matrix[..., 0])["params"]


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
