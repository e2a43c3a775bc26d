"""Keeps what an encoder makes of a collection, for all who read the same documents.

A generator whose encoder was not trained reads as the public one does, and so does
the training of its decoder: where there is room, each document is encoded once. So is
what the first layers of a decoder make of each record, where later ones are trained.
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
"""Of outputs: what should be kept at most."""
PARTS = ("encoder/", "token_embedder/")
"""How the paths of what an encoder reads begin."""
_BLOCK = 2048


def num_bytes(num_tokens: int, config: t5_config.T5Config) -> int:
  """Returns the size of what an encoder makes of so many tokens, padding too."""
  return num_tokens * config.emb_dim * jnp.dtype(config.dtype).itemsize


def encode(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "document length"],
) -> Float[np.ndarray, "document length dim"]:
  """Returns an encoder's outputs, in blocks of one shape.

  So each output is of one document, to the last bit: one more rounds no other.

  Args:
    params: of a T5, by path; only those of `PARTS` are read.
    config: its shape; without dropout.
    tokens: 0 = padding at the end of a row.
  """
  own = {k: v for k, v in params.items() if k.startswith(PARTS)}
  return _of_rows(own, (tokens,), config=config, method="encode")


def begin(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "row length"],
  encoded: Float[np.ndarray, "row length dim"],
  targets: Int[np.ndarray, "row query"],
  *,
  layers: int,
) -> Float[np.ndarray, "row query dim"]:
  """Returns what the first layers of a decoder make of targets, row by row.

  As `encode` does, each of its row alone.

  Args:
    params: of a T5, by path.
    config: its shape; without dropout.
    tokens: of the encoder's inputs, 0 = padding at the end of a row.
    encoded: what `encode` made of them.
    targets: what is to be written; the decoder reads them shifted.
    layers: how many layers of the decoder.
  """
  parts = (
    "token_embedder/",
    "decoder/relpos_bias/",
    *(f"decoder/layers_{layer}/" for layer in range(layers)),
  )
  own = {k: v for k, v in params.items() if k.startswith(parts)}
  shifted = np.asarray(t5.shift_right(targets))
  rows = (encoded, tokens, shifted)
  return _of_rows(own, rows, layers, config=config, method="begin")


def num_begun(trained: Iterable[str], config: t5_config.T5Config) -> int:
  """Returns how many layers of the decoder come before the first that is trained.

  Args:
    trained: paths of what is trained, which does not belong to the encoder.
    config: shape of the T5.
  """
  if any(path.startswith("decoder/relpos_bias/") for path in trained):
    return 0
  for layer in range(config.num_decoder_layers):
    if any(path.startswith(f"decoder/layers_{layer}/") for path in trained):
      return layer
  return config.num_decoder_layers


def _of_rows(params, rows, *whole, config, method) -> np.ndarray:
  """Returns what a method of the model makes of rows, in blocks of one shape."""
  at_once = device_rows.CPU_ROWS if jax.default_backend() == "cpu" else 256
  count = len(rows[0])
  more = -count % at_once
  rows = tuple(
    np.pad(row, ((0, more), *((0, 0),) * (row.ndim - 1))) for row in rows
  )
  made = _mapped(
    params, rows, config=config, method=method, whole=whole, at_once=at_once
  )
  return np.asarray(made)[:count]


@functools.partial(
  jax.jit, static_argnames=("config", "method", "whole", "at_once")
)
def _mapped(params, rows, *, config, method, whole, at_once):
  model = t5.Transformer(config)
  tree = {"params": t5_checkpoints.unflatten(params)}

  def of_one(row):
    single = [field[None] for field in row]
    return model.apply(tree, *single, *whole, method=method)[0]

  return jax.lax.map(of_one, rows, batch_size=at_once)


class Encodings:
  """The outputs of one encoder for one collection, computed when asked for.

  Attributes:
    tokens: of all documents, as the encoder reads them [document, length].
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
    """The size of all outputs, whether they are there already or not."""
    return num_bytes(self.tokens.size, self._config)

  def rows(
    self, places: Int[np.ndarray, " row"]
  ) -> Float[np.ndarray, "row length dim"]:
    """Returns the outputs of some documents.

    Which are there already changes how long this takes. So whoever asks for those
    of private records asks for all.

    Args:
      places: of the documents in the collection.
    """
    blocks, within = np.divmod(places, _BLOCK)
    first = self._block(blocks[0] if len(blocks) else 0)
    outputs = np.empty((len(places), *first.shape[1:]), first.dtype)
    for number in np.unique(blocks).tolist():
      chosen = np.flatnonzero(blocks == number)
      outputs[chosen] = self._block(number)[within[chosen]]
    return outputs

  def _block(self, number: int) -> np.ndarray:
    if number not in self._blocks:
      tokens = self.tokens[number * _BLOCK : (number + 1) * _BLOCK]
      short = _BLOCK - len(tokens)
      padded = np.pad(tokens, ((0, short), (0, 0))) if number else tokens
      outputs = encode(self._params, self._config, padded)
      self._blocks[number] = outputs[: len(tokens)]
    return self._blocks[number]


_kept: memory.Kept[Encodings] = memory.Kept(
  most_bytes=MOST_BYTES, size=lambda made: made.num_bytes, most=1
)


def kept(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "document length"],
) -> Encodings:
  """Returns the outputs for a collection: those of the last call, if they are its.

  They stay in memory: ask for at most `MOST_BYTES`.

  Args:
    params: of a T5, by path; only those of `PARTS` are read.
    config: its shape; dropout is off.
    tokens: of all documents, 0 = padding at the end of a row.
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
