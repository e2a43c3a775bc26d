"""Approximate search by inner product, with faiss: IVF-PQ and HNSW.

Both find most of the best documents in a fraction of the time of an exact
search, and IVF-PQ in a fraction of its memory. What is lost has to be measured
on one's own vectors: `tests/benchmarks/search.py` does that.

References:
  Jegou, Douze and Schmid, "Product Quantization for Nearest Neighbor Search",
  TPAMI 2011, section 4 (IVF-PQ).
  Malkov and Yashunin, "Efficient and Robust Approximate Nearest Neighbor Search
  Using Hierarchical Navigable Small World Graphs", TPAMI 2020.
"""

import dataclasses
import os

import faiss
import numpy as np
from jaxtyping import Float, Int

from synthq_jax import artifacts
from synthq_jax.retrieval import _vectors

__all__ = ["HNSW", "IVFPQ", "Index", "load"]

_BLOCK = 1 << 16  # vectors read and added at a time


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
    if not 1 <= self.bits <= 12 or not 1 <= self.probes <= self.lists:
      raise ValueError(
        "expected bits in [1, 12] and probes in [1, lists], got "
        f"bits={self.bits}, probes={self.probes}, lists={self.lists}; change "
        "them"
      )

  def build(self, vectors: _vectors.Rows) -> "Index":
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

  def _sample(self, vectors: _vectors.Rows) -> np.ndarray:
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
    return _vectors.finite("vectors", vectors[chosen])

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

  def build(self, vectors: _vectors.Rows) -> "Index":
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
class Index:
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
  vectors: _vectors.Rows | None = dataclasses.field(repr=False)

  def search(
    self, queries: Float[np.ndarray, "query dim"], k: int
  ) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
    """Finds documents with large inner products, most of the largest.

    Every query gets k documents: a search that meets fewer is widened. Equal
    scores stand in the order of the documents.

    Args:
      queries: the query vectors, float32.
      k: how many documents; all of them where there are fewer.

    Returns:
      Scores in float64, descending, and positions of the documents.

    Raises:
      ValueError: if k < 1, or the queries have another dim or are not finite.
    """
    queries = _vectors.finite("queries", queries)
    _vectors.check_search(queries, k, self.inner.d)
    total = self.inner.ntotal
    k, width = min(k, total), min(max(k, self.config.rerank), total)
    scores, at = self.config._candidates(self.inner, queries, width)
    scores = scores.astype(np.float64)
    if self.config.rerank:
      scores = _vectors.rescore(queries, self.vectors, at)
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
    with artifacts.replacing(path) as stream:
      faiss.write_index(self.inner, faiss.PyCallbackIOWriter(stream.write))


def load(
  path: str | os.PathLike,
  config: IVFPQ | HNSW,
  vectors: _vectors.Rows | None = None,
) -> Index:
  """Reads an index that `Index.save` wrote.

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
  try:
    inner = faiss.read_index(os.fspath(path))
  except (RuntimeError, MemoryError) as error:
    raise ValueError(
      f"{path}: expected a whole faiss index, got {str(error).splitlines()[-1]}"
      "; build it again"
    ) from error
  product = inner.metric_type == faiss.METRIC_INNER_PRODUCT
  if not product or not config._made(inner):
    raise ValueError(
      f"{path}: expected an index of inner products made by {config}, got a "
      f"{type(inner).__name__} of other settings; build it again"
    )
  return _checked(config, inner, vectors)


def _checked(
  config: IVFPQ | HNSW, inner: faiss.Index, vectors: _vectors.Rows | None
) -> Index:
  """Returns the index with the vectors it needs, or says what is missing."""
  if not config.rerank:
    return Index(config, inner, None)
  got = None if vectors is None else tuple(vectors.shape)
  if got != (inner.ntotal, inner.d):
    raise ValueError(
      f"expected the original vectors of shape {(inner.ntotal, inner.d)} for "
      f"rerank={config.rerank}, got {got}; pass them, or rerank=0"
    )
  return Index(config, inner, vectors)


def _filled(
  config: IVFPQ | HNSW, inner: faiss.Index, vectors: _vectors.Rows
) -> Index:
  """Adds all vectors."""
  for block in _vectors.blocks(vectors, _BLOCK):
    inner.add(block)
  return _checked(config, inner, vectors)


def _at_least(config: IVFPQ | HNSW, least: int, *names: str) -> None:
  for name in names:
    if getattr(config, name) < least:
      raise ValueError(
        f"expected {name} >= {least}, got {name}={getattr(config, name)}; "
        "change it"
      )
