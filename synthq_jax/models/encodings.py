"""Caches an encoder's outputs for a collection, for all readers of its documents.

Generators with an untrained encoder share the outputs of the public one, and so does
the training of their decoders: if memory allows, each document is encoded once. If
only later layers of a decoder are trained, the outputs of its first layers are
computed once for each record.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from synthq_jax import memory
from synthq_jax.models import device_rows, t5, t5_checkpoints, t5_config

__all__ = [
  "MOST_BYTES",
  "PARTS",
  "Encodings",
  "begin",
  "encode",
  "kept",
  "num_begun",
  "num_bytes",
]

MOST_BYTES = 2**29
"""Largest size of the outputs that callers should cache, in bytes."""
PARTS = ("encoder/", "token_embedder/")
"""Prefixes of the paths of the parameters that an encoder uses."""
_BLOCK = 2048


def num_bytes(num_tokens: int, config: t5_config.T5Config) -> int:
  """Returns the size of an encoder's outputs for some tokens, padding
  included."""
  return num_tokens * config.emb_dim * jnp.dtype(config.dtype).itemsize


def encode(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "document length"],
) -> Float[np.ndarray, "document length dim"]:
  """Computes an encoder's outputs, in blocks of one shape.

  Each output is a function of its own document to the last bit: another document
  does not change its rounding.

  Args:
    params: parameters of a T5, by path; only those of `PARTS` are used.
    config: the shape of the T5, without dropout.
    tokens: tokens of the documents, 0 = padding at the end of a row.
  """
  own = {k: v for k, v in params.items() if k.startswith(PARTS)}
  return _apply_to_rows(own, (tokens,), config=config, method="encode")


def begin(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "row length"],
  encoded: Float[np.ndarray, "row length dim"],
  targets: Int[np.ndarray, "row query"],
  *,
  layers: int,
) -> Float[np.ndarray, "row query dim"]:
  """Computes the outputs of a decoder's first layers for targets, row by row.

  Each output is a function of its own row, as in `encode`.

  Args:
    params: parameters of a T5, by path.
    config: the shape of the T5, without dropout.
    tokens: tokens of the encoder's inputs, 0 = padding at the end of a row.
    encoded: the outputs of `encode` for these inputs.
    targets: tokens of the targets; the decoder reads them shifted.
    layers: number of layers of the decoder.
  """
  parts = (
    "token_embedder/",
    "decoder/relpos_bias/",
    *(f"decoder/layers_{layer}/" for layer in range(layers)),
  )
  own = {k: v for k, v in params.items() if k.startswith(parts)}
  shifted = np.asarray(t5.shift_right(targets))
  rows = (encoded, tokens, shifted)
  return _apply_to_rows(own, rows, layers, config=config, method="begin")


def num_begun(trained: Iterable[str], config: t5_config.T5Config) -> int:
  """Returns the number of decoder layers before the first trained one.

  Args:
    trained: paths of the trained parameters, none of which is the encoder's.
    config: the shape of the T5.
  """
  if any(path.startswith("decoder/relpos_bias/") for path in trained):
    return 0
  for layer in range(config.num_decoder_layers):
    if any(path.startswith(f"decoder/layers_{layer}/") for path in trained):
      return layer
  return config.num_decoder_layers


def _apply_to_rows(params, rows, *arguments, config, method) -> np.ndarray:
  """Applies a method of the model to each row, in blocks of one shape."""
  at_once = device_rows.CPU_ROWS if jax.default_backend() == "cpu" else 256
  count = len(rows[0])
  more = -count % at_once
  rows = tuple(
    np.pad(row, ((0, more), *((0, 0),) * (row.ndim - 1))) for row in rows
  )
  outputs = _mapped(
    params,
    rows,
    config=config,
    method=method,
    arguments=arguments,
    at_once=at_once,
  )
  return np.asarray(outputs)[:count]


@functools.partial(
  jax.jit, static_argnames=("config", "method", "arguments", "at_once")
)
def _mapped(params, rows, *, config, method, arguments, at_once):
  model = t5.Transformer(config)
  tree = {"params": t5_checkpoints.unflatten(params)}

  def of_one(row):
    single = [field[None] for field in row]
    return model.apply(tree, *single, *arguments, method=method)[0]

  return jax.lax.map(of_one, rows, batch_size=at_once)


class Encodings:
  """Computes the outputs of one encoder for one collection lazily.

  Attributes:
    tokens: the encoder's input tokens for all documents [document, length].
  """

  def __init__(
    self,
    params: Mapping[str, Any],
    config: t5_config.T5Config,
    tokens: Int[np.ndarray, "document length"],
  ):
    self.tokens = tokens
    self._params = {k: v for k, v in params.items() if k.startswith(PARTS)}
    self._config = config
    self._blocks: dict[int, np.ndarray] = {}

  @property
  def num_bytes(self) -> int:
    """Size of all outputs in bytes, whether or not they are computed."""
    return num_bytes(self.tokens.size, self._config)

  def rows(
    self, places: Int[np.ndarray, " row"]
  ) -> Float[np.ndarray, "row length dim"]:
    """Returns the outputs of some documents.

    The time of a call reveals which outputs are computed already. So ask for the
    outputs of all documents if the choice of documents is private.

    Args:
      places: positions of the documents in the collection.
    """
    blocks, within = np.divmod(places, _BLOCK)
    first = self._get_block(blocks[0] if len(blocks) else 0)
    outputs = np.empty((len(places), *first.shape[1:]), first.dtype)
    for number in np.unique(blocks).tolist():
      chosen = np.flatnonzero(blocks == number)
      outputs[chosen] = self._get_block(number)[within[chosen]]
    return outputs

  def _get_block(self, number: int) -> np.ndarray:
    if number not in self._blocks:
      tokens = self.tokens[number * _BLOCK : (number + 1) * _BLOCK]
      short = _BLOCK - len(tokens)
      padded = np.pad(tokens, ((0, short), (0, 0))) if number else tokens
      outputs = encode(self._params, self._config, padded)
      self._blocks[number] = outputs[: len(tokens)]
    return self._blocks[number]


_kept: memory.Kept[Encodings] = memory.Kept(
  most_bytes=MOST_BYTES, size=lambda encodings: encodings.num_bytes, most=1
)


def kept(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "document length"],
) -> Encodings:
  """Returns the outputs for a collection, from a cache that holds the last one.

  They stay in memory: ask for at most `MOST_BYTES`.

  Args:
    params: parameters of a T5, by path; only those of `PARTS` are used.
    config: the shape of the T5; dropout is switched off.
    tokens: tokens of all documents, 0 = padding at the end of a row.
  """
  config = dataclasses.replace(config, dropout_rate=0.0, remat=False)
  digest = hashlib.sha256(repr(config).encode())
  for path, values in sorted(params.items()):
    if path.startswith(PARTS):
      array = np.ascontiguousarray(values)
      digest.update(f"{path} {array.shape} {array.dtype}".encode())
      digest.update(array.tobytes())
  digest.update(f"{tokens.shape} {tokens.dtype}".encode())
  digest.update(tokens.tobytes())
  return _kept.get(
    digest.hexdigest(), lambda: Encodings(params, config, tokens)
  )
