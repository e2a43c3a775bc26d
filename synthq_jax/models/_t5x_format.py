"""T5X's native checkpoints, version 3: a msgpack file beside folders of zarr.

    checkpoint_STEP/checkpoint      {version, optimizer: {state, target}}
    checkpoint_STEP/target.a.b/0.0  the chunks of the large tensors

In the msgpack file stands either a tensor or, for the large ones, a tensorstore
spec with the folder relative to it.

References:
  github.com/google-research/t5x, t5x/checkpoints.py and t5x/adafactor.py.
"""

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from synthq_jax.models import _tensors

__all__ = ["FILE", "read", "write"]

FILE = "checkpoint"
"""The msgpack file of a checkpoint."""

_VERSION = 3
_ARRAY, _SCALAR = 1, 3  # the types of Flax's msgpack extensions
_PLACEHOLDER = "PLACEHOLDER://"  # what old Orbax versions wrote for a folder
_INLINE_BYTES = 4096
_CHUNK_BYTES = 64 * 2**20
_SMALLEST_FACTORED = 128  # T5X's Adafactor.min_dim_size_to_factor


def read(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  """Describes the parameters of a checkpoint; skips the optimizer's state.

  Args:
    folder: checkpoint_STEP, or the `state` of one that an old Orbax wrote.

  Raises:
    ValueError: if the file is damaged, of another version or another kind.
  """
  path = folder / FILE
  try:
    contents = _unpack(path)
  except (ValueError, TypeError, msgpack.UnpackException) as error:
    reason = str(error) or type(error).__name__
    raise ValueError(
      f"{path}: expected a T5X checkpoint, got a damaged msgpack file"
      f" ({reason}); copy it again"
    ) from error
  version = contents.get("version")
  target = contents.get("optimizer", contents).get("target")
  if version is None and target is not None and folder.name == "state":
    version = _VERSION  # as old Orbax versions wrote it
  if version != _VERSION or not isinstance(target, dict):
    raise ValueError(
      f"{path}: expected a T5X checkpoint of version {_VERSION} with"
      f" optimizer/target, got version={version} and keys {sorted(contents)};"
      " save it again with a newer T5X"
    )
  return _describe(folder, target, ())


def _unpack(path: pathlib.Path) -> dict[str, Any]:
  """Reads the msgpack file without what lies below `state`."""
  data = path.read_bytes()
  unpacker = msgpack.Unpacker(
    max_buffer_size=max(len(data), 1), raw=False, strict_map_key=False
  )
  unpacker.feed(data)
  contents = _without_state(unpacker, nested=("optimizer",))
  if unpacker.tell() != len(data):
    raise ValueError(f"{len(data) - unpacker.tell()} bytes too many")
  return contents


def _without_state(unpacker: msgpack.Unpacker, nested: tuple[str, ...] = ()):
  contents = {}
  for _ in range(unpacker.read_map_header()):
    key = unpacker.unpack()
    if key in ("state", "param_states"):
      unpacker.skip()
    elif key in nested:
      contents[key] = _without_state(unpacker)
    else:
      contents[key] = unpacker.unpack()
  return contents


def _describe(
  folder: pathlib.Path, node: Any, path: tuple[str, ...]
) -> dict[str, _tensors.Tensor]:
  """Describes the tensors below one node of the tree."""
  if isinstance(node, dict) and not {"driver", "kvstore"} <= set(node):
    found: dict[str, _tensors.Tensor] = {}
    for key, child in node.items():
      found |= _describe(folder, child, (*path, str(key)))
    return found
  name = "/".join(path)
  with _tensors.explained(str(folder), name):
    return {name: _leaf(folder, name, node)}


def _leaf(folder: pathlib.Path, name: str, node: Any) -> _tensors.Tensor:
  if isinstance(node, msgpack.ExtType) and node.code in (_ARRAY, _SCALAR):
    array = _from_extension(node.data)
    where = str(folder / FILE)
  elif isinstance(node, str) and node.startswith(_PLACEHOLDER):
    spec = {"kvstore": {"path": node.removeprefix(_PLACEHOLDER)}}
    array, where = _open(folder, spec)
  elif isinstance(node, dict):
    array, where = _open(folder, node)
  else:
    raise ValueError(f"{str(node)[:40]} is neither a tensor nor a spec")
  return _tensors.Tensor(
    where=where,
    name=name,
    shape=tuple(array.shape),
    dtype=np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype)),
    read=lambda index: _values(array, index),
  )


def _values(array: Any, index: _tensors.Index) -> np.ndarray:
  part = array[index]
  return part.read().result() if hasattr(part, "read") else np.asarray(part)


def _from_extension(data: bytes) -> np.ndarray:
  """Decodes Flax's form of an array: shape, name of the type, bytes."""
  import jax.numpy as jnp

  shape, dtype, values = msgpack.unpackb(data, raw=False)
  return np.frombuffer(values, np.dtype(jnp.dtype(dtype))).reshape(shape)


def _open(folder: pathlib.Path, spec: Mapping[str, Any]):
  """Opens the zarr folder that a spec names, whatever system wrote it.

  Specs name their folder below `kvstore`, or at the top where an older
  tensorstore wrote them to a bucket. A public copy may lack the .zarray files;
  then the spec says what they would.
  """
  import tensorstore

  driver = spec.get("driver", "zarr")
  given = spec["kvstore"].get("path", spec.get("path"))
  if driver != "zarr" or not given:
    raise ValueError(f"a spec with driver={driver}, path={given}, not of zarr")
  place = folder / given
  inside = os.path.abspath(place).startswith(os.path.abspath(folder) + os.sep)
  if not inside or not place.is_dir():
    raise ValueError(f"no folder {given} in the checkpoint's")
  request: dict[str, Any] = {
    "driver": "zarr",
    "kvstore": {"driver": "file", "path": f"{place.resolve()}{os.sep}"},
    "open": True,
    "fill_missing_data_reads": False,  # a lost chunk is an error, not zeros
  }
  if not (place / ".zarray").is_file():
    if "metadata" not in spec:
      raise ValueError("no .zarray, and no metadata in the spec")
    request |= {"metadata": spec["metadata"], "assume_metadata": True}
    if "dtype" in spec:
      request["dtype"] = spec["dtype"]
  return tensorstore.open(request).result(), str(place)


def write(
  folder: pathlib.Path, tensors: Mapping[str, _tensors.Tensor], step: int
) -> None:
  """Writes a checkpoint into a folder.

  The second moments of T5X's Adafactor are written as zeros, which is how it
  begins, so that T5X restores the checkpoint with its default settings.

  Args:
    folder: an empty folder.
    tensors: the parameters by path, read one at a time.
    step: the number of the step.
  """
  target: dict[str, Any] = {}
  states: dict[str, Any] = {}
  for path, tensor in tensors.items():
    with _tensors.explained(tensor.where, tensor.name):
      values = np.ascontiguousarray(tensor.whole()).reshape(tensor.shape)
    if values.nbytes <= _INLINE_BYTES:
      target[path] = _to_extension(values, _ARRAY)
    else:
      target[path] = _write_zarr(folder, path, values)
    for name, shape in _adafactor_shapes(tensor.shape).items():
      zeros = np.zeros(shape, np.float32)
      states[f"{path}/{name}"] = _to_extension(zeros, _ARRAY)
  state = {
    "step": _to_extension(np.asarray(step, np.int32), _SCALAR),
    "param_states": _tensors.unflatten(states),
  }
  optimizer = {"state": state, "target": _tensors.unflatten(target)}
  packed = msgpack.packb({"version": _VERSION, "optimizer": optimizer})
  (folder / FILE).write_bytes(packed)


def _to_extension(array: np.ndarray, code: int) -> msgpack.ExtType:
  content = (array.shape, array.dtype.name, array.tobytes())
  return msgpack.ExtType(code, msgpack.packb(content))


def _write_zarr(
  folder: pathlib.Path, path: str, values: np.ndarray
) -> dict[str, Any]:
  """Writes one tensor into its folder; returns the spec that refers to it."""
  import tensorstore

  name = f"target.{path.replace('/', '.')}"
  spec = {
    "driver": "zarr",
    "dtype": values.dtype.name,
    "kvstore": {"driver": "file", "path": f"{name}/"},
    "metadata": {
      "shape": list(values.shape),
      "chunks": _chunks(values.shape, values.itemsize),
      "compressor": None,  # weights hardly shrink
    },
  }
  place = {"driver": "file", "path": f"{(folder / name).resolve()}/"}
  request = {**spec, "kvstore": place, "create": True}
  tensorstore.open(request).result().write(values).result()
  return spec


def _chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
  """Halves the longest axis until a chunk is small enough."""
  chunks = list(shape)
  while math.prod(chunks) * itemsize > _CHUNK_BYTES:
    axis = int(np.argmax(chunks))
    chunks[axis] = -(-chunks[axis] // 2)
  return chunks


def _adafactor_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of T5X's Adafactor state for one parameter."""
  shapes = dict.fromkeys(("v_row", "v_col", "v", "m"), (1,))
  order = np.argsort(shape)
  if len(shape) < 2 or shape[order[-2]] < _SMALLEST_FACTORED:
    return shapes | {"v": shape}
  row = tuple(np.delete(shape, order[-1]).tolist())
  column = tuple(np.delete(shape, order[-2]).tolist())
  return shapes | {"v_row": row, "v_col": column}
