"""KNRM: counts of similar terms, softened by kernels.

References:
  Xiong, Dai, Callan, Liu, Power: End-to-End Neural Ad-hoc Ranking with Kernel
  Pooling. SIGIR 2017, section 3.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from synthq_jax import typing
from synthq_jax.leakage.rerankers import _losses
from synthq_jax.leakage.rerankers import terms as terms_lib

__all__ = ["KNRM", "pool"]

_SMALLEST_COUNT = 1e-10
# The logarithms reach -23 for each term of a query: scaled, tanh does not begin
# where its gradient is 0.
_SCALE = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KNRM(terms_lib.OfTerms):
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
  train_embeddings: bool = True
  """Whether the vectors of terms are trained, as in the paper."""
  name: ClassVar[str] = "KNRM"

  def __post_init__(self):
    if len(self.means) != len(self.deviations) or not self.means:
      raise ValueError(
        "expected a deviation for each mean, got"
        f" {len(self.means)} means and {len(self.deviations)} deviations"
      )
    if min(self.deviations) <= 0:
      raise ValueError(
        f"expected deviations above 0, got deviations={self.deviations}"
      )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the vectors of terms and the layer that combines the kernels."""
    of_terms, of_weights = jax.random.split(key)
    return {
      "embedding": self.terms.init(of_terms),
      "weights": 0.01 * jax.random.normal(of_weights, (len(self.means),)),
      "bias": jnp.zeros(()),
    }

  def score(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Returns w . phi(M) + b of each row; there is no dropout."""
    del key
    similarity, stands = terms_lib.cosines(self.vectors(params), batch)
    pooled = pool(similarity, stands, self.means, self.deviations)
    return _SCALE * pooled @ params["weights"] + params["bias"]

  def loss(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, ""]:
    """Returns the mean hinge of the pairs."""
    return _losses.hinge(jnp.tanh(self.score(params, batch, key=key)))


def pool(
  similarity: Float[Array, "batch query document"],
  stands: Bool[Array, "batch query document"],
  means: Sequence[float],
  deviations: Sequence[float],
) -> Float[Array, "batch kernel"]:
  """Returns phi(M), the kernels' soft counts.

  phi_k(M) = sum_i log sum_j exp(-(M_ij - mu_k)^2 / (2 sigma_k^2)), over the
  terms i of the query and j of the document.

  Args:
    similarity: M, cosines.
    stands: where neither term is padding.
    means: mu.
    deviations: sigma.
  """
  # [batch, query, document, kernel]
  centre = jnp.asarray(np.asarray(means, np.float32))[None, None, None]
  width = jnp.asarray(np.asarray(deviations, np.float32))[None, None, None]
  distance = (similarity[..., None] - centre) / width
  near = jnp.where(stands[..., None], jnp.exp(-0.5 * distance * distance), 0.0)
  counts = jnp.log(jnp.maximum(jnp.sum(near, axis=2), _SMALLEST_COUNT))
  is_term = jnp.any(stands, axis=2)
  return jnp.sum(jnp.where(is_term[..., None], counts, 0.0), axis=1)
