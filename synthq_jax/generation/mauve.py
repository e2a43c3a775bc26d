"""MAUVE: how near two sets of texts are, as samples of two distributions.

It takes mauve-text, which is under the GPL and therefore an extra:
pip install 'synthq_jax[mauve]'.

Formal guarantee:
  None. A score computed from real queries is private, like everything here.
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
  """A score with everything that it depends on."""

  score: float
  """The area under the divergence curve, in [0, 1]; 1: alike."""
  num_texts: tuple[int, int]
  """Of the first and of the second set."""
  num_buckets: int
  """Clusters."""
  featurizer: str
  """What made the vectors, in words."""


def is_installed() -> bool:
  """Whether mauve-text is there."""
  return importlib.util.find_spec("mauve") is not None


def from_vectors(
  first: Float[np.ndarray, "first dim"],
  second: Float[np.ndarray, "second dim"],
  *,
  seed: int,
  featurizer: str,
) -> Mauve:
  """Returns how near two sets of vectors are.

  Both sets are clustered together, and their shares in each cluster give two
  histograms P and Q. The score is the area under the curve of
  (exp(-c KL(Q|R)), exp(-c KL(P|R))) over all mixtures R of P and Q. The same
  vectors, seed and libraries give the same score.

  It is no absolute measure. It falls with the number of clusters and rises
  with the number of texts in each (two samples of one distribution score 0.95
  and not 1 with ten texts to a cluster), it moves with the seed, and it is the
  featurizer's opinion. So compare scores only with the same featurizer, seeds and
  sizes; draw sets of the same size, some thousands where there are so many, and
  average over seeds. Swapping the sets gives the same score but for the clustering.

  Args:
    first: vectors, for example of real queries; their length doesn't count.
    second: vectors, for example of synthetic queries.
    seed: of k-means. With 500 texts, the scores of seeds have a standard
      deviation of 0.05: average a few.
    featurizer: what made the vectors, for the result.

  Returns:
    The score and what it depends on.

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
  found = _compute(first, second, buckets, seed)
  # Equal histograms tie all points of the package's curve, which it then may
  # sort in a wrong order: an area of 0.75.
  equal = np.array_equal(found.p_hist, found.q_hist)
  return Mauve(
    score=1.0 if equal else float(found.mauve),
    num_texts=(len(first), len(second)),
    num_buckets=buckets,
    featurizer=featurizer,
  )


def _compute(first, second, buckets: int, seed: int):
  """Calls mauve-text on one thread, and without its warnings."""
  with extras.required("run"):
    import faiss
  with extras.required("mauve"):
    import mauve  # slow: scikit-learn, and torch where it is installed

  threads = faiss.omp_get_max_threads()
  # k-means is a loop of small steps: more threads wait more than they compute.
  faiss.omp_set_num_threads(1)
  try:
    # faiss complains of few points, which the method implies; equal vectors
    # have no variance, which is no reason to warn.
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
