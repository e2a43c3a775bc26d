"""Computes MAUVE, the similarity of two sets of texts as distributions.

It needs mauve-text, which is under the GPL and therefore an extra:
pip install 'synthq_jax[mauve]'.

Formal guarantee:
  None. A score computed from real queries is private.
"""

import dataclasses
import importlib.util

import numpy as np
from jaxtyping import Float

from synthq_jax import extras
from synthq_jax.data import vocabulary

__all__ = ["Mauve", "from_vectors", "is_installed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mauve:
  """A MAUVE score with the settings that it depends on."""

  score: float
  """The area under the divergence curve, in [0, 1]; 1: equal histograms."""
  num_texts: tuple[int, int]
  """The number of texts in the first and in the second set."""
  num_buckets: int
  """The number of clusters."""
  featurizer: str
  """A description of the model that made the vectors."""


def is_installed() -> bool:
  """Checks whether mauve-text is installed."""
  return importlib.util.find_spec("mauve") is not None


def from_vectors(
  first: Float[np.ndarray, "first dim"],
  second: Float[np.ndarray, "second dim"],
  *,
  seed: int,
  featurizer: str,
) -> Mauve:
  """Computes the MAUVE score of two sets of vectors.

  Both sets are clustered together, and their shares in each cluster give two
  histograms P and Q. The score is the area under the curve of
  (exp(-c KL(Q|R)), exp(-c KL(P|R))) over all mixtures R of P and Q. The same
  vectors, seed and libraries give the same score.

  It is not an absolute measure. It falls with the number of clusters, rises with
  the number of texts in each, and depends on the seed and the featurizer. With ten
  texts per cluster, two samples of one distribution score 0.95, not 1. So compare
  scores only with the same featurizer, seeds and sizes. Draw sets of the same size,
  some thousands if there are so many, and average over seeds. Swapping the sets
  changes the score by the clustering alone.

  Args:
    first: vectors, for example of real queries; their norm doesn't count.
    second: vectors, for example of synthetic queries.
    seed: seed of k-means. With 500 texts, scores of different seeds have a
      standard deviation of 0.05: average a few.
    featurizer: a description of the model that made the vectors, for the result.

  Returns:
    The score and its settings.

  Raises:
    ValueError: if a number is not finite.
    MissingExtraError: if mauve-text (GPL-3.0) is not installed.

  References:
    Pillutla et al. 2021, MAUVE: Measuring the Gap Between Neural Text and
    Human Text using Divergence Frontiers, section 3. Pillutla et al. 2023,
    MAUVE Scores for Generative Models: Theory and Practice.
  """
  first, second = np.asarray(first), np.asarray(second)
  extras.check("mauve", "mauve")
  _check_finite(first=first, second=second)
  buckets = max(2, round(min(len(first), len(second)) / 10))
  result = _compute(first, second, buckets, seed)
  # Equal histograms tie all points of the package's curve. It may then sort them
  # in a wrong order, which gives an area of 0.75.
  equal = np.array_equal(result.p_hist, result.q_hist)
  return Mauve(
    score=1.0 if equal else float(result.mauve),
    num_texts=(len(first), len(second)),
    num_buckets=buckets,
    featurizer=featurizer,
  )


def _compute(first, second, buckets: int, seed: int):
  """Calls mauve-text on one thread and without its warnings."""
  with extras.required("run"):
    import faiss
  with extras.required("mauve"):
    import mauve  # slow: loads scikit-learn, and torch if it is installed

  threads = faiss.omp_get_max_threads()
  # k-means is a loop of small steps: more threads wait more than they compute.
  faiss.omp_set_num_threads(1)
  try:
    # faiss warns of few points, which the method implies, and NumPy of equal
    # vectors, which have no variance.
    with (
      vocabulary.native_stderr(),
      np.errstate(invalid="ignore", divide="ignore"),
    ):
      return mauve.compute_mauve(
        first,
        second,
        num_buckets=buckets,
        kmeans_explained_var=0.9,
        kmeans_num_redo=5,
        kmeans_max_iter=500,
        mauve_scaling_factor=5.0,
        seed=seed,
      )
  finally:
    faiss.omp_set_num_threads(threads)


def _check_finite(**sets: np.ndarray) -> None:
  for name, vectors in sets.items():
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
      raise ValueError(
        f"mauve expects finite numbers, got {bad.sum()} vectors of {name} with"
        f" nan or inf, the first at {int(np.argmax(bad))}: look at the"
        " featurizer"
      )
