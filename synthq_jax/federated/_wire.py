"""What crosses between clients, as the bytes that would be sent.

Nothing is estimated: a message is serialised, its length is the traffic, and
the receiver works with what it reads back, rounding included.
"""

import io
import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.federated import noised_vectors

__all__ = [
  "DTYPES",
  "pack",
  "pack_texts",
  "unpack",
  "unpack_vectors",
  "vectors",
]

DTYPES = ("float32", "float16", "int8")
"""Types in which unit vectors travel, 4, 2 or 1 bytes a number."""


def vectors(rows: Float[np.ndarray, "row dim"], dtype: str) -> np.ndarray:
  """Returns unit vectors in the type in which they travel.

  int8 is the row over its largest entry, in 127 steps: the length of a unit
  vector need not travel.

  >>> vectors(np.array([[0.6, -0.8]]), "int8").tolist()
  [[95, -127]]

  Args:
    rows: unit vectors; zeros stay.
    dtype: one of `DTYPES`.

  Raises:
    ValueError: if the type is unknown.
  """
  if dtype not in DTYPES:
    raise ValueError(f"expected dtype among {DTYPES}, got {dtype=}")
  if dtype != "int8":
    return rows.astype(dtype)
  largest = np.max(np.abs(rows), axis=1, keepdims=True, initial=0)
  scaled = 127 * rows / np.where(largest > 0, largest, 1)
  return np.rint(scaled).astype(np.int8)


def pack(*arrays: np.ndarray) -> bytes:
  """Serialises arrays, each with its type and shape, in NumPy's format."""
  stream = io.BytesIO()
  for array in arrays:
    np.save(stream, array, allow_pickle=False)
  return stream.getvalue()


def unpack(message: bytes) -> list[np.ndarray]:
  """Returns the arrays of a message."""
  stream, arrays = io.BytesIO(message), []
  while stream.tell() < len(message):
    arrays.append(np.load(stream, allow_pickle=False))
  return arrays


def unpack_vectors(array: np.ndarray) -> Float[np.ndarray, "row dim"]:
  """Returns float32; of length 1 again where rounding has changed that."""
  if array.dtype == np.float32:
    return array
  return noised_vectors.unit(array.astype(np.float32))


def pack_texts(texts: Sequence[str]) -> bytes:
  """Serialises texts as lines of JSON in UTF-8.

  >>> len(pack_texts(["a", "b"]))
  8
  """
  lines = (json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
  return "".join(lines).encode()
