"""MAUVE: how near two sets of texts are, as samples of two distributions.

It takes mauve-text, which is under the GPL and therefore an extra:
pip install 'synthq_jax[mauve]'.

Formal guarantee:
  None. A score computed from real queries is private, like everything here.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax import checks, extras
from synthq_jax.data import vocabulary

__all__ = ["Config", "Mauve", "from_vectors", "is_installed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the vectors are quantised; what is compared with a paper is its own."""

  seed: int
  """Of k-means. With 500 texts, the scores of seeds have a standard deviation
  of 0.05: average a few."""
  num_buckets: int | None = None
  """Clusters, at least 2; None: a tenth of the smaller set."""
  scaling: float = 5.0
  """The paper's c: the curve is exp(-c * divergence). It decides how near to 0
  or 1 all scores lie."""
  explained_variance: float = 0.9
  """Share of the variance that is kept before clustering, in (0, 1)."""
  restarts: int = 5
  """Clusterings of which the best is taken."""
  max_iterations: int = 500
  """Of each clustering."""

  def __post_init__(self):
    checks.at_least(0, seed=self.seed)
    checks.at_least(
      1, restarts=self.restarts, max_iterations=self.max_iterations
    )
    if self.num_buckets is not None:
      checks.at_least(2, num_buckets=self.num_buckets)
    checks.within("(0, inf)", scaling=self.scaling)
    checks.within("(0, 1)", explained_variance=self.explained_variance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mauve:
  """A score with everything that it depends on."""

  score: float
  """The area under the divergence curve, in [0, 1]; 1: alike."""
  smoothed: float
  """The same after adding 1/2 to every count (MAUVE* of the 2023 paper), which
  depends less on the number of texts."""
  num_texts: tuple[int, int]
  """Of the first and of the second set."""
  num_buckets: int
  """Clusters."""
  histograms: tuple[tuple[float, ...], tuple[float, ...]]
  """The share of each set in every cluster."""
  featurizer: str
  """What made the vectors, in words."""


def is_installed() -> bool:
  """Whether mauve-text is there."""
  return importlib.util.find_spec("mauve") is not None


def from_vectors(
  first: Float[np.ndarray, "first dim"],
  second: Float[np.ndarray, "second dim"],
  *,
  config: Config,
  featurizer: str,
) -> Mauve:
  """Returns how near two sets of vectors are.

  Both sets are clustered together, and their shares in each cluster give two
  histograms P and Q. The score is the area under the curve of
  (exp(-c KL(Q|R)), exp(-c KL(P|R))) over all mixtures R of P and Q. The same
  vectors, settings and libraries give the same score.

  It is no absolute measure. It falls with the number of clusters and rises
  with the number of texts in each (two samples of one distribution score 0.95
  and not 1 with ten texts to a cluster), it moves with `scaling` and with the
  seed, and it is the featurizer's opinion. So compare scores only with the
  same featurizer, settings and sizes; draw sets of the same size, some
  thousands where there are so many, and average over seeds. Swapping the sets
  gives the same score but for the clustering.

  Args:
    first: vectors, for example of real queries; their length doesn't count.
    second: vectors, for example of synthetic queries.
    config: the quantisation.
    featurizer: what made the vectors, for the result.

  Returns:
    The score and what it depends on.

  Raises:
    ValueError: if a set is empty, dimensions differ, a number is not finite,
      or there are fewer vectors than clusters.
    MissingExtraError: if mauve-text (GPL-3.0) is not installed.

  References:
    Pillutla et al. 2021, MAUVE: Measuring the Gap Between Neural Text and
    Human Text using Divergence Frontiers, section 3. Pillutla et al. 2023,
    MAUVE Scores for Generative Models: Theory and Practice.
  """
  first, second = np.asarray(first), np.asarray(second)
  extras.check("mauve", "mauve")
  _check_sizes(first, second)
  _check_vectors(first, second)
  buckets = config.num_buckets
  if buckets is None:
    buckets = max(2, round(min(len(first), len(second)) / 10))
  if buckets > len(first) + len(second):
    raise ValueError(
      f"mauve needs at least num_buckets={buckets} vectors, got {len(first)}"
      f" and {len(second)}: choose fewer buckets"
    )
  found = _compute(first, second, buckets, config)
  # Equal histograms tie all points of the package's curve, which it then may
  # sort in a wrong order: an area of 0.75.
  equal = np.array_equal(found.p_hist, found.q_hist)
  same = equal and len(first) == len(second)  # after smoothing, too
  return Mauve(
    score=1.0 if equal else float(found.mauve),
    smoothed=1.0 if same else float(found.mauve_star),
    num_texts=(len(first), len(second)),
    num_buckets=buckets,
    histograms=(tuple(found.p_hist.tolist()), tuple(found.q_hist.tolist())),
    featurizer=featurizer,
  )


def _compute(first, second, buckets: int, config: Config):
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
        kmeans_explained_var=config.explained_variance,
        kmeans_num_redo=config.restarts,
        kmeans_max_iter=config.max_iterations,
        mauve_scaling_factor=config.scaling,
        seed=config.seed,
      )
  finally:
    faiss.omp_set_num_threads(threads)


def _check_sizes(first: Sequence, second: Sequence) -> None:
  if not len(first) or not len(second):
    raise ValueError(
      f"mauve compares two sets, got one without texts: {len(first)} and"
      f" {len(second)}"
    )


def _check_vectors(first: np.ndarray, second: np.ndarray) -> None:
  if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
    raise ValueError(
      "mauve expects vectors [text, dim] of one dimension, got shapes"
      f" {first.shape} and {second.shape}"
    )
  for name, vectors in (("first", first), ("second", second)):
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
      raise ValueError(
        f"mauve expects finite numbers, got {bad.sum()} vectors of {name} with"
        f" nan or inf, the first at {int(np.argmax(bad))}: look at the"
        " featurizer"
      )
