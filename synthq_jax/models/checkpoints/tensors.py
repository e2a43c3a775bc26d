"""Describes the tensors of a checkpoint and reads them later, one at a time.

Every format is read in two steps: its module describes the tensors, and this one
checks their names and shapes and then reads them, so that at most one tensor is in
memory besides the model itself. This module also reads and writes safetensors
files, which several formats share.

References:
  https://github.com/huggingface/safetensors, section "Format".
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import extras
from synthq_jax.storage import artifacts

with extras.required("run"):
  import safetensors
  from flax import traverse_util

__all__ = [
  "Tensor",
  "check",
  "explain_errors",
  "fetch",
  "leaves",
  "num_bytes",
  "of_tree",
  "read_safetensors",
  "refuse_adapter",
  "rename",
  "are_equal",
  "get_shapes",
  "unflatten",
  "write_safetensors",
]

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ADAPTER = "adapter_config.json"  # of PEFT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """A tensor whose values are not read yet, only its name, shape and type."""

  where: str
  """The file or folder of the tensor, for messages."""
  name: str
  """Name of the tensor in the file or folder."""
  shape: tuple[int, ...]
  """Shape of the tensor."""
  dtype: np.dtype
  """Type of the stored values."""
  read: Callable[[], np.ndarray]
  """Reads the values; may return a view."""

  def transpose(self) -> "Tensor":
    """Returns the same tensor with its axes in the opposite order."""
    read = self.read
    return dataclasses.replace(
      self, shape=self.shape[::-1], read=lambda: read().T
    )


@contextlib.contextmanager
def explain_errors(where: str, name: str) -> Iterator[None]:
  """Turns any error of a library into one that names the tensor."""
  try:
    yield
  except Exception as error:
    reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(
      f"{where}: expected tensor {name}, got a damaged or missing file"
      f" ({reason[:300]}); copy the checkpoint again"
    ) from error


def of_tree(params: Any) -> dict[str, Tensor]:
  """Describes the leaves of nested dicts by their joined path.

  Leaves on devices are copied to the host when they are read, one by one; leaves
  that are a `Tensor` stay as they are.
  """

  def read(leaf) -> np.ndarray:
    # A jax.Array caches its copy on the host. The copy of the array, and so the
    # cache, does not outlive this line.
    values = leaf.copy() if isinstance(leaf, jax.Array) else leaf
    return np.asarray(values)

  return {
    path: leaf
    if isinstance(leaf, Tensor)
    else Tensor(
      where="params",
      name=path,
      shape=tuple(leaf.shape),
      dtype=np.dtype(leaf.dtype),
      read=functools.partial(read, leaf),
    )
    for path, leaf in leaves(params).items()
  }


def get_shapes(init: Callable[[jax.Array], Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each parameter of a network, by its path.

  Args:
    init: makes nested dicts of parameters from a key; it is traced, not run.
  """
  params = jax.eval_shape(init, jax.random.key(0))
  return {path: leaf.shape for path, leaf in leaves(params).items()}


def leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of nested dicts by their joined path."""
  leaves_with_path = jax.tree_util.tree_leaves_with_path(tree)
  joined = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return {joined(keys): leaf for keys, leaf in leaves_with_path}


unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
"""Converts a dict by joined paths back to nested dicts."""


def fetch(
  tensors: Mapping[str, Tensor], dtype: Any = "float32"
) -> dict[str, Any]:
  """Reads tensors one after the other.

  Args:
    tensors: checked tensors by path.
    dtype: type of the values; None keeps the stored types.

  Returns:
    Nested dicts of arrays.

  Raises:
    ValueError: if a tensor cannot be read.
  """
  flat = {}
  for path, tensor in tensors.items():
    target_dtype = np.dtype(tensor.dtype if dtype is None else dtype)
    with explain_errors(tensor.where, tensor.name):
      values = np.asarray(tensor.read(), target_dtype)
      flat[path] = np.require(values, requirements=("C", "W"))
  return unflatten(flat)


def are_equal(left: Tensor, right: Tensor) -> bool:
  """Returns True if two tensors hold the same values; both are read."""
  if left.shape != right.shape:
    return False
  with (
    explain_errors(left.where, left.name),
    explain_errors(right.where, right.name),
  ):
    return np.array_equal(left.read(), right.read())


def check(
  where: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  expected: Mapping[str, tuple[int, ...]],
) -> None:
  """Refuses tensors whose names, shapes or types a configuration does not
  expect.

  Raises:
    ValueError: naming the first tensor that is missing, unknown, of another
      shape or not of floating point.
  """
  for name in sorted(set(expected) | set(tensors)):
    got = tensors[name].shape if name in tensors else "nothing"
    shape = expected.get(name, "nothing")
    if got != shape:
      raise ValueError(
        f"{where}: expected tensor {name} of shape {shape}, got {got}"
      )
    if not jnp.issubdtype(tensors[name].dtype, jnp.floating):
      raise ValueError(
        f"{where}: expected tensor {name} of a floating-point type, got"
        f" {tensors[name].dtype}"
      )


def rename(
  where: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  expected: Mapping[str, tuple[int, ...]],
  name: Callable[[str], str],
  is_transposed: Callable[[str], bool],
) -> dict[str, Tensor]:
  """Checks tensors of another library and returns them by our paths.

  Args:
    where: the file or folder of the tensors, for messages.
    tensors: tensors by the library's names.
    expected: our paths, and the shapes of our tensors.
    name: translates one of our paths to the library's name.
    is_transposed: returns True if the library transposes the tensor of a path.

  Raises:
    ValueError: as in `check`.
  """
  their_shapes = {
    name(path): size[::-1] if is_transposed(path) else size
    for path, size in expected.items()
  }
  check(where, tensors, their_shapes)
  return {
    path: tensors[name(path)].transpose()
    if is_transposed(path)
    else tensors[name(path)]
    for path in expected
  }


def num_bytes(tensor: Tensor) -> int:
  """Returns the size of a tensor in bytes, in its stored type."""
  return math.prod(tensor.shape) * tensor.dtype.itemsize


def refuse_adapter(folder: pathlib.Path) -> None:
  """Refuses a model of Hugging Face with an adapter of PEFT beside it.

  Args:
    folder: the folder of the model.

  Raises:
    ValueError: if the folder has an adapter_config.json.
  """
  if (folder / _ADAPTER).is_file():
    raise ValueError(
      f"{folder}: expected a model alone, got {_ADAPTER} beside it, which"
      " transformers adds to the model: merge it (PEFT's merge_and_unload) and"
      " save the model again"
    )


def read_safetensors(path: str | os.PathLike) -> dict[str, Tensor]:
  """Describes the tensors of a safetensors file by name.

  Raises:
    ValueError: if the file is missing or truncated, or its header is damaged.
  """
  if not os.path.isfile(path):
    folder = os.path.dirname(path)
    has_torch = os.path.exists(os.path.join(folder, "pytorch_model.bin"))
    advice = (
      "got pytorch_model.bin, which runs code when it is read: if you trust it,"
      " save the model again with the library that wrote it"
    )
    raise ValueError(
      f"expected a file {path}, {advice if has_torch else 'got none: copy it'}"
    )
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      return {name: _make_tensor(path, file, name) for name in file.keys()}  # noqa: SIM118
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: expected safetensors, got a damaged file ({error});"
      " copy it again"
    ) from error


def _make_tensor(path: str | os.PathLike, file: Any, name: str) -> Tensor:
  part = file.get_slice(name)
  if part.get_dtype() not in _DTYPES:
    raise ValueError(
      f"{path}: expected tensors of {', '.join(_DTYPES)}, got {name} of type"
      f" {part.get_dtype()}: save the model again in one of them"
    )
  shape, dtype = tuple(part.get_shape()), _DTYPES[part.get_dtype()]

  def read() -> np.ndarray:
    # Each read opens the file anew, so that only one tensor's pages are held.
    with safetensors.safe_open(path, framework="numpy") as file:
      return file.get_tensor(name)

  return Tensor(where=str(path), name=name, shape=shape, dtype=dtype, read=read)


def write_safetensors(
  path: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a safetensors file, atomically.

  If all tensors have one type, the library's own writer writes the same bytes. It
  needs all tensors in memory: for eight tensors of 512 MB in total it takes 512 MB,
  and this function 128 MB.

  Args:
    path: the file; a missing folder is created.
    tensors: the tensors by name; they are read one at a time.
    metadata: texts by name for the header.

  Raises:
    ValueError: if the format does not support a tensor's type.
  """
  header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
  end = 0
  for name, tensor in sorted(tensors.items()):
    if tensor.dtype not in _NAMES:
      raise ValueError(
        f"{path}: expected tensor {name} of type {', '.join(map(str, _NAMES))},"
        f" got {tensor.dtype}"
      )
    first, end = end, end + num_bytes(tensor)
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
      with explain_errors(tensor.where, tensor.name):
        values = np.ascontiguousarray(tensor.read())
      stream.write(values.reshape(-1).view(np.uint8))
