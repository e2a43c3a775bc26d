"""Encodes whole collections, in batches of few fixed shapes."""

import collections
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import checks, typing
from synthq_jax.data import blocks
from synthq_jax.models import (
  device_rows,
  encoders,
  length_batches,
  static_vectors,
)
from synthq_jax.retrieval import vector_files
from synthq_jax.storage import artifacts

__all__ = ["encode", "to_files"]


def encode(
  params: typing.Params,
  config: Any,
  tokens: Int[np.ndarray, "row length"],
  *,
  batch_size: int = 256,
  devices: Sequence[jax.Device] | None = None,
  progress: Callable[[int], object] | None = None,
) -> Float[np.ndarray, "row dim"]:
  """Encodes every row of tokens.

  Rows are batched by length and trimmed of padding. The batches have few shapes,
  so few programs are compiled. A batch is split over the devices, and each device
  works on its own. A row's vector does not depend on the other rows or on its
  position in a batch, to the last bit. This is tested on CPUs; no compiler
  guarantees it. On CPUs, batches run in threads, which see settings of
  `jax.config.update` and not those of a `with` block.

  Args:
    params: the encoder's parameters, e.g. those of a T5.
    config: the shape of a T5 or a BERT, or any config of `models.encoders`.
    tokens: tokens, 0 = padding at the end of a row.
    batch_size: rows at a time on all devices together, rounded up to a multiple
      of their number; changes vectors by rounding alone. On CPUs, encoders with
      layers take at most `device_rows.CPU_TOKENS` tokens for each device, and as
      many batches at once as there are cores for a device.
    devices: the devices of this process to use; None: JAX's default device.
    progress: called with the number of rows after each batch, for example
      `tqdm.tqdm(...).update`.

  Returns:
    One float32 unit vector per row, in the order of `tokens`; 0 for a row
    that is all padding.

  Raises:
    ValueError: if `tokens` is not a matrix, `batch_size` is below 1 or there
      are no devices.
  """
  checks.at_least(1, batch_size=batch_size)
  encoder = encoders.of(config)
  mesh = device_rows.mesh(devices)
  params = device_rows.replicate(encoder.select(params), mesh)
  vectors = np.zeros((len(tokens), encoder.dim), np.float32)
  limit, workers = None, 1
  if mesh.devices.flat[0].platform == "cpu" and not _is_table(config):
    limit = device_rows.CPU_TOKENS
    cores = device_rows.count_cores() if mesh.size == 1 else 1
    workers = min(cores, device_rows.CPU_ROWS)  # long rows take much memory

  def get_size(width: int) -> int:
    """Returns the rows of a batch of a width, the same for each device."""
    size = batch_size
    if limit is not None:
      size = min(size, max(limit // width, 1) * mesh.size)
    return -(-size // mesh.size) * mesh.size

  def run(batch: length_batches.LengthBatch) -> np.ndarray:
    return np.asarray(_encode(params, batch.tokens, encoder=encoder, mesh=mesh))

  batches = length_batches.split(tokens, get_size)
  for batch, encoded in _map_ahead(run, batches, workers):
    vectors[batch.rows] = encoded[: len(batch.rows)]
    if progress is not None:
      progress(len(batch.rows))
  return vectors


def _map_ahead(
  run: Callable[[length_batches.LengthBatch], np.ndarray],
  batches: Iterable[length_batches.LengthBatch],
  workers: int,
) -> Iterator[tuple[length_batches.LengthBatch, np.ndarray]]:
  """Yields each batch and what `run` makes of it, several of them at once.

  XLA leaves cores of a CPU idle between the products of a single batch. The first
  batch of a shape runs alone, so that its program is compiled once.
  """
  waiting: collections.deque = collections.deque()
  shape = None
  with futures.ThreadPoolExecutor(workers) as pool:
    for batch in batches:
      if workers == 1 or batch.tokens.shape != shape:
        shape = batch.tokens.shape
        yield batch, run(batch)
        continue
      waiting.append((batch, pool.submit(run, batch)))
      if len(waiting) > workers:
        earlier, future = waiting.popleft()
        yield earlier, future.result()
    for earlier, future in waiting:
      yield earlier, future.result()


def _is_table(config: Any) -> bool:
  """Checks whether an encoder has no layers, only a vector for each token."""
  own = getattr(config, "model", config)
  return isinstance(own, static_vectors.StaticConfig)


@functools.partial(jax.jit, static_argnames=("encoder", "mesh"))
def _encode(
  params: typing.Params,
  tokens: Int[Array, "batch length"],
  *,
  encoder: encoders.Encoder,
  mesh: jax.sharding.Mesh,
) -> Float[Array, "batch dim"]:
  """Encodes a batch, each device its own rows."""
  return device_rows.split(encoder.encode, mesh, num_replicated=1)(
    params, tokens
  )


def to_files(
  params: typing.Params,
  config: Any,
  tokens: Any,
  directory: str | os.PathLike,
  *,
  shard: int = 0,
  num_shards: int = 1,
  block_rows: int = 65536,
  batch_size: int = 256,
  devices: Sequence[jax.Device] | None = None,
  progress: Callable[[int], object] | None = None,
) -> None:
  """Encodes one process's share of a collection into files.

  A restarted process keeps finished blocks. It only makes blocks that are missing,
  damaged, of another encoder or of other tokens. Memory holds one block of tokens
  and vectors. The processes never communicate. When all are done,
  `vector_files.open_vectors` opens the result.

  Args:
    params: as in `encode`.
    config: as in `encode`.
    tokens: rows of tokens [row, length], 0 = padding at the end of a row; any
      object with a length and slices, such as a memory map.
    directory: the folder, the same for all processes.
    shard: the number of this process, in [0, num_shards).
    num_shards: the number of processes. Each encodes consecutive blocks.
    block_rows: the number of rows of a file, the most that a kill loses.
    batch_size: as in `encode`.
    devices: as in `encode`.
    progress: called with numbers of rows, including those of finished blocks.

  Raises:
    ValueError: if there are no rows, or an argument is out of range.
  """
  params = encoders.of(config).select(params)
  owned = vector_files.of_shard(
    len(tokens), block_rows=block_rows, shard=shard, num_shards=num_shards
  )
  encoder = artifacts.fingerprint(_digest(params), config)
  files = vector_files.files(directory)
  params = device_rows.replicate(params, device_rows.mesh(devices))
  for number, part in owned.items():
    rows = np.ascontiguousarray(tokens[part], np.int32)
    made_of = f"{encoder} {blocks.digest(rows)}"
    if files.read(number, mapped=True, made_of=made_of) is None:
      vectors = encode(
        params,
        config,
        rows,
        batch_size=batch_size,
        devices=devices,
        progress=progress,
      )
      files.write(number, vectors, made_of=made_of)
    elif progress is not None:
      progress(len(rows))


def _digest(params: typing.Params) -> str:
  """Returns a digest of the names and values of the parameters."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  state = hashlib.sha256()
  for name, leaf in sorted((jax.tree_util.keystr(p), x) for p, x in leaves):
    state.update(f"{name} {blocks.digest(np.asarray(leaf))}\n".encode())
  return state.hexdigest()
