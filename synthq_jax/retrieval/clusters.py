"""Groups vectors by k-means, with a public seed and on one thread."""

from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax import checks, extras
from synthq_jax.data import vocabulary

with extras.required("run"):
  import faiss

__all__ = ["assign", "number_for"]

_PART = 65536
_POINTS = 256  # of the sample that places a centre, as faiss has it


def number_for(num_documents: int) -> int:
  """Returns how many clusters a collection gets: a public rule.

  >>> number_for(9440), number_for(1)
  (97, 1)
  """
  return max(1, round(num_documents**0.5))


def assign(
  vectors: Any, number: int, *, seed: int, iterations: int = 20
) -> Int[np.ndarray, " row"]:
  """Returns the cluster of each vector.

  Centres are placed by k-means over a sample of 256 vectors for each; then every
  vector goes to the nearest. A function of the arguments alone: whoever has the
  vectors gets the same clusters.

  >>> rows = np.repeat(np.eye(2, dtype=np.float32), 3, axis=0)
  >>> found = assign(rows, 2, seed=0)
  >>> bool((found[:3] == found[0]).all() and found[0] != found[5])
  True

  Args:
    vectors: float32 [row, dim]; what has a shape and can be indexed by an array,
      such as memory-mapped blocks.
    number: of clusters, in [1, rows].
    seed: of the sample and of the first centres; public.
    iterations: of k-means.

  Raises:
    ValueError: if there are fewer vectors than clusters.
  """
  checks.count("number", number, 1)
  if len(vectors) < number:
    raise ValueError(
      f"expected at least {number} vectors for {number} clusters, got"
      f" {len(vectors)}"
    )
  order = np.random.default_rng([seed, 7]).permutation(len(vectors))
  sample = np.ascontiguousarray(vectors[np.sort(order[: number * _POINTS])])
  threads = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  try:
    kmeans = faiss.Kmeans(
      sample.shape[1],
      number,
      niter=iterations,
      seed=seed,
      min_points_per_centroid=1,
    )
    with vocabulary.native_stderr():
      kmeans.train(sample)
    starts = range(0, len(vectors), _PART)
    parts = (np.ascontiguousarray(vectors[i : i + _PART]) for i in starts)
    found = [kmeans.index.search(part, 1)[1][:, 0] for part in parts]
  finally:
    faiss.omp_set_num_threads(threads)
  return np.concatenate(found).astype(np.int32)
