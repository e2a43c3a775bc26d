"""Exact search by inner product on the accelerators, with JAX.

Documents are split over the devices. Each goes through its share block by block
and keeps the k best so far; then the k best of every device are merged. A
matrix of queries and documents never exists, only one of some queries and a
block. Documents that stay on the host, or on disk, come chunk by chunk, the
next while one is searched.

`jax.lax.approx_max_k` is faster on TPUs and not used: it misses some.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax.models import device_rows
from synthq_jax.retrieval import index

__all__ = ["search"]

_AXIS = "documents"
_QUERIES = 1024  # that meet a block of documents at once
_CHUNK_BYTES = 1 << 30  # of documents on one device; two chunks at a time
_MOST = 2**31 - 1  # positions are int32 on the devices

Best = tuple[
  Float[Array, "group query k"], Int[Array, "group query k"], Array
]  # scores, positions, and whether all scores so far were finite


def search(
  queries: Float[np.ndarray, "query dim"],
  documents: index.Rows | Float[Array, "document dim"],
  k: int,
  *,
  block_size: int = 16384,
  chunk_size: int | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
  """Finds the documents with the largest inner products.

  Products are sums in float32, exact to its rounding (`index.exact` computes in
  float64, so the order of scores that differ only there can be another). Equal
  scores stand in the order of the documents.

  >>> documents = np.eye(3, dtype=np.float32)
  >>> search(np.array([[0.0, 2.0, 1.0]], np.float32), documents, k=2)[1]
  array([[1, 2]])

  Args:
    queries: the query vectors, float32.
    documents: the document vectors. What has a shape, a dtype and slices will
      do: a memory map or `data.blocks.Rows` is read chunk by chunk. A
      `jax.Array` is searched where it lies if it is split evenly over
      `devices`, else moved. float16 and bfloat16 stay so in memory.
    k: how many documents; all of them where there are fewer.
    block_size: documents scored at once on a device; changes the speed and the
      memory only: 4 bytes for each of them times at most 1,024 queries.
    chunk_size: documents that are brought to the devices at once, over all
      devices; by default 1 GiB a device. Changes the speed and the memory only.
    devices: those of this process to use; JAX's default one if not given.

  Returns:
    Scores in float32, descending, and positions of the documents.

  Raises:
    ValueError: if there are no documents, k, block_size or chunk_size is below
      1, the queries have another dim, there are no devices, or a score is not
      finite.
  """
  queries = index.finite("queries", queries)
  _check(documents, block_size, chunk_size)
  index.check_search(queries, k, documents.shape[1])
  k = min(k, len(documents))
  if not len(queries):
    return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
  mesh = device_rows.mesh(devices, _AXIS)
  groups = device_rows.replicate(_in_groups(queries), mesh)
  best = device_rows.replicate(_nothing_yet(groups.shape[:2], k), mesh)
  for first, count, chunk in _chunks(documents, chunk_size, mesh):
    # The chunk before is done with, so that at most two are on the devices.
    jax.block_until_ready(best)
    best = _search_chunk(
      best, groups, chunk, first, count, mesh=mesh, block_size=block_size
    )
  return _on_host(best, len(queries))


def _check(
  documents: index.Rows, block_size: int, chunk_size: int | None
) -> None:
  shape = documents.shape
  if len(shape) != 2 or not 0 < shape[0] <= _MOST:
    raise ValueError(
      f"expected document vectors of two axes, at most {_MOST}, got shape "
      f"{tuple(shape)}; encode some, or search in parts"
    )
  if block_size < 1 or (chunk_size is not None and chunk_size < 1):
    raise ValueError(
      f"expected block_size and chunk_size >= 1, got block_size={block_size}, "
      f"chunk_size={chunk_size}; leave them out"
    )


def _in_groups(
  queries: Float[np.ndarray, "query dim"],
) -> Float[np.ndarray, "group some dim"]:
  """Cuts queries into groups of equal size; zeros fill the last."""
  groups = -(-len(queries) // _QUERIES)
  size = -(-len(queries) // groups)
  padded = np.zeros((groups * size, queries.shape[1]), np.float32)
  padded[: len(queries)] = queries
  return padded.reshape(groups, size, -1)


def _nothing_yet(shape: tuple[int, ...], k: int) -> Best:
  scores = np.full((*shape, k), -np.inf, np.float32)
  return scores, np.zeros(scores.shape, np.int32), np.array(True)


def _chunks(
  documents: index.Rows, chunk_size: int | None, mesh: jax.sharding.Mesh
) -> Iterator[tuple[int, int, jax.Array]]:
  """Yields first position, number of documents, and them on the devices."""
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS))
  total, dim = documents.shape
  if isinstance(documents, jax.Array):
    rows = jnp.pad(documents, ((0, -total % mesh.size), (0, 0)))
    yield 0, total, jax.device_put(rows, split)
    return
  size = chunk_size or max(1, _CHUNK_BYTES * mesh.size // (4 * max(dim, 1)))
  size = -(-total // -(-total // size))  # chunks of equal size
  size = -(-size // mesh.size) * mesh.size
  for first in range(0, total, size):
    rows = np.asarray(documents[first : first + size])
    count = len(rows)
    if count < size:  # chunks of one shape: one compilation
      rows = np.concatenate([rows, np.zeros((size - count, dim), rows.dtype)])
    yield first, count, jax.device_put(rows, split)


@functools.partial(jax.jit, static_argnames=("mesh", "block_size"))
def _search_chunk(
  best: Best,
  queries: Float[Array, "group query dim"],
  documents: Float[Array, "document dim"],
  first: Int[Array, ""],
  count: Int[Array, ""],
  *,
  mesh: jax.sharding.Mesh,
  block_size: int,
) -> Best:
  """Merges the best of one chunk, of which `count` rows are documents."""
  k = best[0].shape[-1]
  part = jax.sharding.PartitionSpec

  def on_device(queries, documents, first, count):
    skipped = jax.lax.axis_index(_AXIS) * len(documents)
    scores, positions, finite = jax.lax.map(
      lambda group: _search_share(
        group, documents, count - skipped, k, block_size
      ),
      queries,
    )
    # A new leading axis: one entry per device.
    return scores[None], positions[None] + first + skipped, finite[None]

  scores, positions, finite = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(part(), part(_AXIS), part(), part()),
    out_specs=part(_AXIS),
    check_vma=False,  # the loop's first carry is a constant
  )(queries, documents, first, count)
  # In order of documents: what was there, then device after device.
  found = [(best[0], best[1]), *zip(scores, positions, strict=True)]
  merged = *_merge(*zip(*found, strict=True), k), best[2] & jnp.all(finite)
  return jax.lax.with_sharding_constraint(
    merged, jax.sharding.NamedSharding(mesh, part())
  )


def _search_share(
  queries: Float[Array, "query dim"],
  documents: Float[Array, "document dim"],
  count: Int[Array, ""],
  k: int,
  block_size: int,
) -> tuple[Float[Array, "query k"], Int[Array, "query k"], Array]:
  """Searches the documents of one device, of which the first `count` count."""
  size = min(block_size, len(documents))

  def step(i, best):
    # The last block reaches back over rows that were seen already.
    start = jnp.minimum(i * size, len(documents) - size)
    block = jax.lax.dynamic_slice_in_dim(documents, start, size)
    rows = start + jnp.arange(size)
    counts = (rows >= i * size) & (rows < count)
    scores = _scores(queries, block)
    finite = best[2] & jnp.all(jnp.isfinite(scores))
    scores = jnp.where(counts[None, :], scores, -jnp.inf)
    top, at = jax.lax.top_k(scores, min(k, size))
    merged = _merge((best[0], top), (best[1], at + start), k)
    return *merged, finite

  scores, positions, finite = _nothing_yet((len(queries),), k)
  first = jnp.asarray(scores), jnp.asarray(positions), jnp.asarray(finite)
  return jax.lax.fori_loop(0, -(-len(documents) // size), step, first)


def _scores(
  queries: Float[Array, "query dim"], block: Float[Array, "document dim"]
) -> Float[Array, "query document"]:
  scores = jnp.einsum(
    "qd,nd->qn",
    queries,
    block.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  return jnp.where(scores == 0, 0.0, scores)  # top_k ranks -0.0 below 0.0


def _merge(
  scores: Sequence[Float[Array, "*queries some"]],
  positions: Sequence[Int[Array, "*queries some"]],
  k: int,
) -> tuple[Float[Array, "*queries k"], Int[Array, "*queries k"]]:
  """Returns the k best; of equal scores the first ones, as top_k does."""
  top, at = jax.lax.top_k(jnp.concatenate(scores, axis=-1), k)
  positions = jnp.concatenate(positions, axis=-1)
  return top, jnp.take_along_axis(positions, at, axis=-1)


def _on_host(best: Best, total: int) -> tuple[np.ndarray, np.ndarray]:
  scores, positions, finite = jax.device_get(best)
  if not finite:
    raise ValueError(
      "expected finite scores, got infinite or undefined ones of shape "
      f"{scores.shape[:2]}; look at the encoder of the documents"
    )
  k = scores.shape[-1]
  scores, positions = scores.reshape(-1, k), positions.reshape(-1, k)
  return scores[:total], positions[:total].astype(np.int64)
