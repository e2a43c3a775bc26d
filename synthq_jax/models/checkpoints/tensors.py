"""Describes tensors of a checkpoint, and reads them later, one at a time.

Every format is read in two steps: its module says which tensors there are, and
this one checks their names and shapes and then fetches them, so that no more
than one tensor is in memory besides the model itself. Files of safetensors, which
several formats share, are read and written here.

References:
  https://github.com/huggingface/safetensors, section "Format".
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
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
  "explained",
  "fetch",
  "leaves",
  "num_bytes",
  "of_tree",
  "read_safetensors",
  "renamed",
  "same",
  "shapes_of",
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

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """A tensor of which nothing but name, shape and type has been read."""

  where: str
  """The file or folder it lies in, for messages."""
  name: str
  """What it is called there."""
  shape: tuple[int, ...]
  """Its shape."""
  dtype: np.dtype
  """Its type."""
  read: Callable[[Index], np.ndarray]
  """Reads what one slice for each axis selects; may return a view."""
  place: Callable[[jax.sharding.Sharding, np.dtype], jax.Array] | None = None
  """Reads it straight onto devices, where the format does that itself."""

  def transposed(self) -> "Tensor":
    """Returns the same tensor with its axes in the opposite order."""
    read = self.read
    return dataclasses.replace(
      self,
      shape=self.shape[::-1],
      read=lambda index: read(index[::-1]).T,
      place=None,
    )

  def whole(self) -> np.ndarray:
    """Reads all of it."""
    return self.read((slice(None),) * len(self.shape))


@contextlib.contextmanager
def explained(where: str, name: str) -> Iterator[None]:
  """Says which tensor could not be read when a library says less."""
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

  Leaves on devices are copied to the host when they are read, one by one; those
  that are described already stay as they are.
  """

  def read(leaf, index: Index) -> np.ndarray:
    # A jax.Array keeps the host's copy that was made of it; its copy does not
    # outlive this line.
    values = leaf.copy() if isinstance(leaf, jax.Array) else leaf
    return np.asarray(values)[index]

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


def shapes_of(init: Callable[[jax.Array], Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each parameter that a network makes, by its path.

  Args:
    init: from a key to nested dicts; it is traced, not run.
  """
  params = jax.eval_shape(init, jax.random.key(0))
  return {path: leaf.shape for path, leaf in leaves(params).items()}


def leaves(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
  """Returns the leaves of nested dicts by their joined path."""
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  joined = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return {joined(keys): leaf for keys, leaf in found}


unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
"""Turns a dict by joined paths back into nested dicts."""


def fetch(
  tensors: Mapping[str, Tensor], sharding: Any = None, dtype: Any = "float32"
) -> dict[str, Any]:
  """Reads tensors one after the other.

  Args:
    tensors: by path, already checked.
    sharding: None for NumPy arrays; else a function from path and shape to a
      jax.sharding.Sharding, or nested dicts of them.
    dtype: what the values become; None keeps what is stored.

  Returns:
    Nested dicts of arrays.

  Raises:
    ValueError: if a tensor cannot be read, or has no sharding.
  """
  if sharding is not None and not callable(sharding):
    sharding = _from_tree(sharding)
  flat = {}
  for path, tensor in tensors.items():
    wanted = np.dtype(tensor.dtype if dtype is None else dtype)
    if sharding is not None:
      flat[path] = _sharded(tensor, sharding(path, tensor.shape), wanted)
      continue
    with explained(tensor.where, tensor.name):
      whole = np.asarray(tensor.whole(), wanted)
      flat[path] = np.require(whole, requirements=("C", "W"))
  return unflatten(flat)


def _from_tree(tree: Any) -> Callable[[str, tuple[int, ...]], Any]:
  flat = leaves(tree, lambda x: isinstance(x, jax.sharding.Sharding))

  def find(path: str, shape: tuple[int, ...]):
    del shape
    if path not in flat:
      raise ValueError(f"sharding must hold one for {path}, got none")
    return flat[path]

  return find


def _sharded(
  tensor: Tensor, sharding: jax.sharding.Sharding, dtype: np.dtype
) -> jax.Array:
  """Puts a tensor onto its devices, reading each slice that is needed once."""
  if not isinstance(sharding, jax.sharding.Sharding):
    raise ValueError(
      f"sharding must give a jax.sharding.Sharding for {tensor.name}, got"
      f" {type(sharding).__name__}"
    )
  if tensor.place is not None:
    with explained(tensor.where, tensor.name):
      return tensor.place(sharding, dtype)
  seen: dict[tuple, np.ndarray] = {}  # devices that hold the same slice

  def read(index: Index) -> np.ndarray:
    bounds = tuple((part.start, part.stop) for part in index)
    if bounds not in seen:
      with explained(tensor.where, tensor.name):
        seen[bounds] = np.array(tensor.read(index), dtype=dtype, order="C")
    return seen[bounds]

  return jax.make_array_from_callback(tensor.shape, sharding, read)


def same(left: Tensor, right: Tensor) -> bool:
  """Whether two tensors hold the same numbers; both are read."""
  if left.shape != right.shape:
    return False
  with explained(left.where, left.name), explained(right.where, right.name):
    return np.array_equal(left.whole(), right.whole())


def check(
  where: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  expected: Mapping[str, tuple[int, ...]],
) -> None:
  """Compares names, shapes and types with what a configuration asks for.

  Raises:
    ValueError: naming the first tensor that is missing, unknown, of another
      shape or not of floating point.
  """
  for name in sorted(set(expected) | set(tensors)):
    found = tensors[name].shape if name in tensors else "nothing"
    wanted = expected.get(name, "nothing")
    if found != wanted:
      raise ValueError(
        f"{where}: expected tensor {name} of shape {wanted}, got {found}"
      )
    if not jnp.issubdtype(tensors[name].dtype, jnp.floating):
      raise ValueError(
        f"{where}: expected tensor {name} of a floating-point type, got"
        f" {tensors[name].dtype}"
      )


def renamed(
  where: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  expected: Mapping[str, tuple[int, ...]],
  name: Callable[[str], str],
  is_transposed: Callable[[str], bool],
) -> dict[str, Tensor]:
  """Checks tensors of another library, and returns them by our paths.

  Args:
    where: where they lie, for messages.
    tensors: by their own names.
    expected: our paths, and the shapes of our tensors.
    name: from one of our paths to their name.
    is_transposed: whether they hold the tensor of a path transposed.

  Raises:
    ValueError: as in `check`.
  """
  wanted = {
    name(path): size[::-1] if is_transposed(path) else size
    for path, size in expected.items()
  }
  check(where, tensors, wanted)
  return {
    path: tensors[name(path)].transposed()
    if is_transposed(path)
    else tensors[name(path)]
    for path in expected
  }


def num_bytes(tensor: Tensor) -> int:
  """Returns how much memory a tensor takes as it is stored."""
  return math.prod(tensor.shape) * tensor.dtype.itemsize


def read_safetensors(path: str | os.PathLike) -> dict[str, Tensor]:
  """Describes the tensors of a file.

  Raises:
    ValueError: if it is truncated, or its header is not one.
  """
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      return {name: _in_file(path, file, name) for name in file.keys()}  # noqa: SIM118
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: expected safetensors, got a damaged file ({error});"
      " copy it again"
    ) from error


def _in_file(path: str | os.PathLike, file: Any, name: str) -> Tensor:
  part = file.get_slice(name)
  if part.get_dtype() not in _DTYPES:
    raise ValueError(
      f"{path}: expected tensors of {', '.join(_DTYPES)}, got {name} of type"
      f" {part.get_dtype()}: save the model again in one of them"
    )
  shape, dtype = tuple(part.get_shape()), _DTYPES[part.get_dtype()]

  def read(index: Index) -> np.ndarray:
    # Opened anew: the pages of one tensor are held at a time.
    with safetensors.safe_open(path, framework="numpy") as file:
      if shape and math.prod(shape):
        return file.get_slice(name)[index]
      return file.get_tensor(name)[index]

  return Tensor(where=str(path), name=name, shape=shape, dtype=dtype, read=read)


def write_safetensors(
  path: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a file, complete or not at all.

  The library's own writer gives the same bytes, and wants all tensors in memory
  at once: 512 MB of 512 MB in eight tensors, of which this one holds 128.

  Args:
    path: the file; its folder is made where it is missing.
    tensors: what goes into it, read one at a time.
    metadata: text for the header.

  Raises:
    ValueError: if a tensor has a type that the format does not know.
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
      with explained(tensor.where, tensor.name):
        values = np.ascontiguousarray(tensor.whole())
      stream.write(values.reshape(-1).view(np.uint8))
