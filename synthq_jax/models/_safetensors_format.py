"""Files of the safetensors format, read and written one tensor at a time.

Eight bytes say how long the header is, the header (JSON) says where each tensor
lies, and the tensors follow without gaps. bfloat16 included, which the library's
own NumPy interface leaves out.

References:
  https://github.com/huggingface/safetensors, section "Format".
"""

import json
import math
import mmap
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import _tensors

__all__ = ["read", "write"]

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000


def read(path: str | os.PathLike) -> dict[str, _tensors.Tensor]:
  """Describes the tensors of a file.

  Raises:
    ValueError: if it is truncated, or its header is not one.
  """
  try:
    header, start, size = _header(pathlib.Path(path))
    entries = {k: v for k, v in header.items() if k != _METADATA}
    _check_tiling(entries, size - start)
    return {
      name: _tensor(path, name, entry, start) for name, entry in entries.items()
    }
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{path}: expected safetensors, got a damaged file ({error});"
      " copy it again"
    ) from error


def _header(path: pathlib.Path) -> tuple[dict[str, Any], int, int]:
  """Returns the header, where the tensors begin, and the file's length."""
  size = path.stat().st_size
  with open(path, "rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
      raise ValueError(f"{size} bytes with a header of {length}")
    return json.loads(stream.read(length)), 8 + length, size


def _check_tiling(entries: Mapping[str, Any], size: int) -> None:
  """Refuses tensors that overlap, leave gaps or end past the file."""
  end = 0
  for name, entry in sorted(
    entries.items(), key=lambda item: item[1]["data_offsets"]
  ):
    first, last = entry["data_offsets"]
    if first != end or last < first:
      raise ValueError(f"tensor {name} at bytes {first} to {last}, not {end}")
    end = last
  if end != size:
    raise ValueError(f"tensors of {end} bytes, and {size} in the file")


def _tensor(path, name: str, entry, start: int) -> _tensors.Tensor:
  shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
  first, last = entry["data_offsets"]
  if dtype is None:
    raise ValueError(
      f"tensor {name} of type {entry['dtype']}, not one of {', '.join(_DTYPES)}"
    )
  if math.prod(shape) * dtype.itemsize != last - first:
    raise ValueError(f"tensor {name} of shape {shape} in {last - first} bytes")

  def part(index: _tensors.Index) -> np.ndarray:
    if not math.prod(shape):
      return np.zeros(shape, dtype)[index]
    # The map ends with its last view: pages of one tensor are held at a time.
    with open(path, "rb") as stream:
      mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    flat = np.frombuffer(mapped, dtype, math.prod(shape), start + first)
    return flat.reshape(shape)[index]

  return _tensors.Tensor(
    where=str(path), name=name, shape=shape, dtype=dtype, read=part
  )


def write(
  path: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a file, complete or not at all.

  Args:
    path: the file; its folder is made where it is missing.
    tensors: what goes into it, read one at a time.
    metadata: text for the header.

  Raises:
    ValueError: if a tensor has a type that the format does not know.
  """
  header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
  end = 0
  for name, tensor in sorted(tensors.items()):
    if tensor.dtype not in _NAMES:
      raise ValueError(
        f"{path}: expected tensor {name} of type {', '.join(map(str, _NAMES))},"
        f" got {tensor.dtype}"
      )
    first, end = end, end + _tensors.num_bytes(tensor)
    header[name] = {
      "dtype": _NAMES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [first, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
  with artifacts.replacing(path) as stream:
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in sorted(tensors.items()):
      with _tensors.explained(tensor.where, tensor.name):
        values = np.ascontiguousarray(tensor.whole())
      stream.write(values.reshape(-1).view(np.uint8))
