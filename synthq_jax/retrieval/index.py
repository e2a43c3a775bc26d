"""Search by inner product with faiss: exact, or approximate by IVF-PQ and HNSW.

The approximate kinds find most of the best documents in a fraction of the time
of an exact search, and IVF-PQ in a fraction of its memory. What is lost has to be
measured on one's own vectors: `tests/benchmarks/search.py` does that.

References:
  Jegou, Douze and Schmid, "Product Quantization for Nearest Neighbor Search",
  TPAMI 2011, section 4 (IVF-PQ).
  Malkov and Yashunin, "Efficient and Robust Approximate Nearest Neighbor Search
  Using Hierarchical Navigable Small World Graphs", TPAMI 2020.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import artifacts, checks, extras

with extras.required("run"):
  import faiss

__all__ = [
  "Approximate",
  "HNSW",
  "IVFPQ",
  "Index",
  "Rows",
  "check_search",
  "exact",
  "finite",
  "load",
  "load_exact",
]

_MARGIN = 16  # candidates beyond k, so that ties at the border are rarely cut
_RESCORED = 1 << 22  # numbers of candidate vectors: 32 MiB in float64
_ADDED = 1 << 16  # vectors read and added at a time


class Rows(Protocol):
  """Vectors that may be larger than memory: arrays, memory maps, `Vectors`."""

  shape: tuple[int, ...]
  dtype: Any

  def __len__(self) -> int:
    """Returns the number of vectors."""

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Returns the vectors of a slice, or at an array of positions."""


def finite(
  name: str, vectors: Float[np.ndarray, "row dim"]
) -> Float[np.ndarray, "row dim"]:
  """Returns finite float32 vectors, or says what is wrong."""
  array = np.ascontiguousarray(vectors, np.float32)
  if array.ndim != 2 or not np.isfinite(array).all():
    raise ValueError(
      f"expected finite {name} of two axes, got shape {array.shape}; look at "
      "the encoder"
    )
  return array


def _blocks(vectors: Rows, size: int) -> Iterator[np.ndarray]:
  for start in range(0, len(vectors), size):
    yield finite("vectors", vectors[start : start + size])


def check_search(queries: np.ndarray, k: int, dim: int) -> None:
  """Refuses a search for nothing, or with vectors of another encoder."""
  if k < 1 or queries.shape[1] != dim:
    raise ValueError(
      f"expected k >= 1 and queries of dim={dim}, got "
      f"k={k} and dim={queries.shape[1]}; use the encoder of the index"
    )


def _rescore(
  queries: Float[np.ndarray, "query dim"],
  vectors: Rows,
  at: Int[np.ndarray, "query k"],
) -> Float[np.ndarray, "query k"]:
  """Returns the inner products with the documents at `at`, in float64."""
  rows = max(1, _RESCORED // max(1, at.shape[1] * queries.shape[1]))
  scores = np.zeros(at.shape)
  for start in range(0, len(queries), rows):
    part = slice(start, start + rows)
    scores[part] = np.einsum(
      "qd,qkd->qk",
      queries[part].astype(np.float64),
      vectors[at[part]].astype(np.float64),
    )
  return scores


@dataclasses.dataclass(frozen=True)
class Index:
  """Vectors that `exact` indexed.

  faiss finds candidates in single precision, where the last bits depend on how
  many queries come at once; these are scored again in double precision, and the
  search is widened until rounding cannot have hidden a better one. So the result
  depends on the vectors alone.

  Attributes:
    vectors: the documents.
    flat: the faiss index of the same vectors.
    longest: the largest norm of a document.
  """

  vectors: Float[np.ndarray, "document dim"]
  flat: faiss.IndexFlatIP = dataclasses.field(repr=False)
  longest: float

  def search(
    self, queries: Float[np.ndarray, "query dim"], k: int
  ) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
    """Finds the documents with the largest inner products.

    Equal scores stand in the order of the documents.

    Args:
      queries: the query vectors, float32.
      k: how many documents; all of them where there are fewer.

    Returns:
      Scores in float64, descending, and positions of the documents.

    Raises:
      ValueError: if k < 1, or the queries have another dim or are not finite.
    """
    queries = finite("queries", queries)
    check_search(queries, k, self.vectors.shape[1])
    k = min(k, len(self.vectors))
    scores = np.zeros((len(queries), k))
    places = np.zeros((len(queries), k), np.int64)
    open_, width = np.arange(len(queries)), k
    while len(open_):
      width = min(width + max(width, _MARGIN), len(self.vectors))
      found, at, sure = self._candidates(queries[open_], k, width)
      scores[open_], places[open_] = found, at
      open_ = open_[~sure]
    return scores, places

  def save(self, path: str | os.PathLike) -> None:
    """Writes the faiss index, vectors included; it appears when complete.

    Args:
      path: the file, which `load_exact` and faiss itself read.
    """
    _write(self.flat, path)

  def _candidates(
    self, queries: np.ndarray, k: int, width: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores, positions, and for which queries these are final."""
    rough, at = self.flat.search(queries, width)
    at = np.sort(at, axis=1)  # by position, which a stable sort keeps for ties
    scores = _rescore(queries, self.vectors, at)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    at = np.take_along_axis(at, order, axis=1)
    # A document left out scored at most rough[:, -1] in faiss; a float32 sum
    # of dim products is off by at most dim * 2^-24 times the norms (and faiss
    # rounds the last product once more).
    slack = (queries.shape[1] + 2) * 2.0**-24 * self.longest
    slack = slack * np.linalg.norm(queries.astype(np.float64), axis=1)
    sure = scores[:, -1] > rough[:, -1] + slack
    return scores, at, sure | (width == len(self.vectors))


def exact(vectors: Float[np.ndarray, "document dim"]) -> Index:
  """Indexes document vectors for exact search.

  >>> index = exact(np.eye(3, dtype=np.float32))
  >>> index.search(np.array([[0.0, 2.0, 1.0]], np.float32), k=2)[1]
  array([[1, 2]])

  Args:
    vectors: one per document, float32; normalise them for cosines.

  Returns:
    The index.

  Raises:
    ValueError: if there are no vectors, or one is not finite.
  """
  vectors = finite("vectors", vectors)
  if not vectors.size:
    raise ValueError(
      f"expected document vectors, got shape {vectors.shape}; encode some"
    )
  flat = faiss.IndexFlatIP(vectors.shape[1])
  flat.add(vectors)
  longest = float(np.linalg.norm(vectors, axis=1).max())
  return Index(vectors, flat, longest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IVFPQ:
  """Vectors in lists by their nearest centroid, each kept as a few bytes.

  Equal seeds and vectors give equal indexes on one machine; another one may add
  floating-point numbers in another order.

  >>> config = IVFPQ(lists=2, subquantizers=2, bits=1, probes=2, seed=0)
  >>> index = config.build(np.eye(4, dtype=np.float32))
  >>> index.search(np.eye(4, dtype=np.float32), k=3)[1].shape
  (4, 3)

  Attributes:
    lists: centroids, >= 1. The root of the number of vectors is common; faiss
      wants 39 vectors to train each.
    subquantizers: parts of a vector that are quantized apart; divides its dim.
    bits: of each part's code, in [1, 12]. A vector takes subquantizers * bits / 8
      bytes and 8 for its position.
    probes: lists that a search looks into, in [1, lists]; those that hold too
      few vectors for it are followed by the next.
    training_sample: vectors that the centroids are trained on, at most.
    rerank: candidates, if more than k, that are scored again with the original
      vectors; 0 for none: then scores are approximate too.
    seed: of the training sample and of k-means.
  """

  lists: int
  subquantizers: int
  bits: int = 8
  probes: int
  training_sample: int = 1 << 18
  rerank: int = 0
  seed: int

  def __post_init__(self):
    """Checks the fields."""
    _at_least(self, 1, "lists", "subquantizers", "training_sample")
    _at_least(self, 0, "rerank", "seed")
    checks.within("[1, 12]", bits=self.bits)
    checks.within(f"[1, {self.lists}]", probes=self.probes)

  def build(self, vectors: Rows) -> "Approximate":
    """Trains on a sample and adds all vectors, block by block.

    Args:
      vectors: one per document. What has a shape and can be indexed will do;
        they are kept, as they are, only if there is a `rerank`.

    Returns:
      The index.

    Raises:
      ValueError: if there are too few vectors to train on, `subquantizers` does
        not divide their dim, or one is not finite.
    """
    sample = self._sample(vectors)
    dim = vectors.shape[1]
    inner = faiss.IndexIVFPQ(
      faiss.IndexFlatIP(dim),
      dim,
      self.lists,
      self.subquantizers,
      self.bits,
      faiss.METRIC_INNER_PRODUCT,
    )
    for clustering in (inner.cp, inner.pq.cp):
      clustering.seed = self.seed
      clustering.max_points_per_centroid = len(sample)  # it is one already
    inner.train(sample)
    return _filled(self, inner, vectors)

  def _sample(self, vectors: Rows) -> np.ndarray:
    """Returns the vectors to train on, or says why they will not do."""
    shape = vectors.shape
    count = min(shape[0], self.training_sample)
    needed = max(self.lists, 1 << self.bits)
    if len(shape) != 2 or count < needed:
      raise ValueError(
        f"expected at least max(lists, 2**bits)={needed} vectors to train on, "
        f"got {count} of shape {tuple(shape)}; lower lists or bits, or raise "
        "training_sample"
      )
    if shape[1] % self.subquantizers:
      raise ValueError(
        f"expected subquantizers that divide dim={shape[1]}, got "
        f"subquantizers={self.subquantizers}; choose a divisor"
      )
    rng = np.random.default_rng(self.seed)
    chosen = np.sort(rng.permutation(shape[0])[:count])
    return finite("vectors", vectors[chosen])

  def _candidates(
    self, inner: faiss.Index, queries: np.ndarray, width: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and positions, `width` for each query."""
    probes = self.probes
    parameters = faiss.SearchParametersIVF(nprobe=probes)
    scores, at = inner.search(queries, width, params=parameters)
    short = at[:, -1] < 0
    while short.any() and probes < self.lists:
      probes = min(2 * probes, self.lists)
      parameters = faiss.SearchParametersIVF(nprobe=probes)
      scores[short], at[short] = inner.search(
        queries[short], width, params=parameters
      )
      short = at[:, -1] < 0
    return scores, at

  def _made(self, inner: faiss.Index) -> bool:
    """Whether the index could be one of this configuration."""
    return isinstance(inner, faiss.IndexIVFPQ) and (
      inner.nlist,
      inner.pq.M,
      inner.pq.nbits,
    ) == (self.lists, self.subquantizers, self.bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HNSW:
  """A graph that a search walks, from far neighbours to near ones.

  Inner products are no distances: this is meant for vectors of about equal
  length. Equal seeds and vectors give equal graphs if faiss inserts with one
  thread (`faiss.omp_set_num_threads(1)`); the order in which several insert is
  not promised. Searching a graph gives the same each time.

  >>> index = HNSW(links=4, ef_search=8, seed=0).build(
  ...   np.eye(4, dtype=np.float32)
  ... )
  >>> index.search(np.eye(4, dtype=np.float32), k=1)[1].T
  array([[0, 1, 2, 3]])

  Attributes:
    links: neighbours of a vector, twice as many on the lowest level; >= 2. A
      vector takes about 8 * links bytes besides its numbers.
    ef_construction: candidates while a vector is inserted, >= 1.
    ef_search: candidates while a query is answered, >= 1; at least k are kept.
    rerank: candidates, if more than k, that are scored again in float64; 0 for
      none: scores are float32 then.
    seed: of the levels on which vectors stand.
  """

  links: int = 32
  ef_construction: int = 200
  ef_search: int
  rerank: int = 0
  seed: int

  def __post_init__(self):
    """Checks the fields."""
    _at_least(self, 2, "links")
    _at_least(self, 1, "ef_construction", "ef_search")
    _at_least(self, 0, "rerank", "seed")

  def build(self, vectors: Rows) -> "Approximate":
    """Inserts all vectors, block by block.

    Args:
      vectors: one per document. What has a shape and slices will do.

    Returns:
      The index, which holds a copy of the vectors.

    Raises:
      ValueError: if there are no vectors, or one is not finite.
    """
    if len(vectors.shape) != 2 or not vectors.shape[0]:
      raise ValueError(
        f"expected document vectors, got shape {tuple(vectors.shape)}; encode "
        "some"
      )
    inner = faiss.IndexHNSWFlat(
      vectors.shape[1], self.links, faiss.METRIC_INNER_PRODUCT
    )
    inner.hnsw.efConstruction = self.ef_construction
    inner.hnsw.rng = faiss.RandomGenerator(self.seed)
    return _filled(self, inner, vectors)

  def _candidates(
    self, inner: faiss.Index, queries: np.ndarray, width: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and positions, `width` for each query."""
    parameters = faiss.SearchParametersHNSW(efSearch=max(self.ef_search, width))
    scores, at = inner.search(queries, width, params=parameters)
    short = at[:, -1] < 0
    if short.any():  # a part of the graph that no path leads to
      storage = faiss.downcast_index(inner.storage)
      scores[short], at[short] = storage.search(queries[short], width)
    return scores, at

  def _made(self, inner: faiss.Index) -> bool:
    """Whether the index could be one of this configuration."""
    return isinstance(inner, faiss.IndexHNSWFlat) and (
      inner.hnsw.nb_neighbors(1),
      inner.hnsw.efConstruction,
    ) == (self.links, self.ef_construction)


@dataclasses.dataclass(frozen=True)
class Approximate:
  """Vectors that `IVFPQ` or `HNSW` indexed.

  What only a search needs can be changed without building again:
  `dataclasses.replace(index, config=dataclasses.replace(config, probes=64))`.

  Attributes:
    config: how it was built and is searched.
    inner: the faiss index.
    vectors: the originals, where the configuration has a `rerank`.
  """

  config: IVFPQ | HNSW
  inner: faiss.Index = dataclasses.field(repr=False)
  vectors: Rows | None = dataclasses.field(repr=False)

  def search(
    self, queries: Float[np.ndarray, "query dim"], k: int
  ) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
    """Does what `Index.search` does, and finds most of the best documents.

    Every query gets k documents: a search that meets fewer is widened.
    """
    queries = finite("queries", queries)
    check_search(queries, k, self.inner.d)
    total = self.inner.ntotal
    k, width = min(k, total), min(max(k, self.config.rerank), total)
    scores, at = self.config._candidates(self.inner, queries, width)
    scores = scores.astype(np.float64)
    if self.config.rerank:
      scores = _rescore(queries, self.vectors, at)
    order = np.lexsort((at, -scores), axis=1)[:, :k]
    return (
      np.take_along_axis(scores, order, axis=1),
      np.take_along_axis(at, order, axis=1),
    )

  def save(self, path: str | os.PathLike) -> None:
    """Writes the faiss index; the file appears only when it is complete.

    Args:
      path: the file. The original vectors are not in it.
    """
    _write(self.inner, path)


def _write(inner: faiss.Index, path: str | os.PathLike) -> None:
  with artifacts.replacing(path) as stream:
    faiss.write_index(inner, faiss.PyCallbackIOWriter(stream.write))


def _read(path: str | os.PathLike) -> faiss.Index:
  try:
    return faiss.read_index(os.fspath(path))
  except (RuntimeError, MemoryError) as error:
    raise ValueError(
      f"{path}: expected a whole faiss index, got {str(error).splitlines()[-1]}"
      "; build it again"
    ) from error


def load_exact(path: str | os.PathLike) -> Index:
  """Reads an index that `Index.save` wrote.

  Args:
    path: the file.

  Raises:
    ValueError: if it is missing, damaged or an index of another kind.
  """
  flat = _read(path)
  if not isinstance(flat, faiss.IndexFlatIP):
    raise ValueError(
      f"{path}: expected all vectors, for inner products, got a"
      f" {type(flat).__name__}; build it again"
    )
  return exact(flat.reconstruct_n(0, flat.ntotal))


def load(
  path: str | os.PathLike,
  config: IVFPQ | HNSW,
  vectors: Rows | None = None,
) -> Approximate:
  """Reads an index that `Approximate.save` wrote.

  Args:
    path: the file.
    config: that of the index; what only a search needs can be another.
    vectors: the originals; needed where the configuration has a `rerank`.

  Returns:
    The index.

  Raises:
    ValueError: if the file is missing, damaged or of another configuration, or
      the vectors are not those of the index.
  """
  inner = _read(path)
  product = inner.metric_type == faiss.METRIC_INNER_PRODUCT
  if not product or not config._made(inner):
    raise ValueError(
      f"{path}: expected an index of inner products made by {config}, got a "
      f"{type(inner).__name__} of other settings; build it again"
    )
  return _checked(config, inner, vectors)


def _checked(
  config: IVFPQ | HNSW, inner: faiss.Index, vectors: Rows | None
) -> Approximate:
  """Returns the index with the vectors it needs, or says what is missing."""
  if not config.rerank:
    return Approximate(config, inner, None)
  got = None if vectors is None else tuple(vectors.shape)
  if got != (inner.ntotal, inner.d):
    raise ValueError(
      f"expected the original vectors of shape {(inner.ntotal, inner.d)} for "
      f"rerank={config.rerank}, got {got}; pass them, or rerank=0"
    )
  return Approximate(config, inner, vectors)


def _filled(
  config: IVFPQ | HNSW, inner: faiss.Index, vectors: Rows
) -> Approximate:
  """Adds all vectors."""
  for block in _blocks(vectors, _ADDED):
    inner.add(block)
  return _checked(config, inner, vectors)


def _at_least(config: IVFPQ | HNSW, least: int, *names: str) -> None:
  for name in names:
    if getattr(config, name) < least:
      raise ValueError(
        f"expected {name} >= {least}, got {name}={getattr(config, name)}; "
        "change it"
      )
