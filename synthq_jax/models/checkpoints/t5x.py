"""Reads T5X's checkpoints, native (version 3) and Orbax, and writes native ones.

    checkpoint_STEP/checkpoint      {version, optimizer: {state, target}}
    checkpoint_STEP/target.a.b/0.0  the chunks of the large tensors
    checkpoint_STEP/state           Orbax, with the keys target and state

The native file, in msgpack, holds each small tensor, and for each large one a
tensorstore spec with a folder relative to the file.

References:
  github.com/google-research/t5x, t5x/checkpoints.py and t5x/adafactor.py.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import extras
from synthq_jax.models import t5_config
from synthq_jax.models.checkpoints import tensors as _tensors

with extras.required("run"):
  import msgpack

__all__ = [
  "FILE",
  "infer",
  "is_checkpoint",
  "newest",
  "read",
  "step",
  "write",
]

FILE = "checkpoint"
"""The msgpack file of a checkpoint."""

_METADATA = "_METADATA"  # this file identifies a folder of Orbax
_STATE, _TARGET = "state", "target"
_STEP = re.compile(r"checkpoint_(\d+)")

_EMBEDDING = "token_embedder/embedding"
_HEAD = "decoder/logits_dense/kernel"
_BIAS = "encoder/relpos_bias/rel_embedding"
_QUERY = "encoder/layers_0/attention/query/kernel"

_VERSION = 3
_ARRAY, _SCALAR = 1, 3  # the types of Flax's msgpack extensions
_PLACEHOLDER = (
  "PLACEHOLDER://"  # prefix by which old Orbax versions refer to a folder
)
_INLINE_BYTES = 4096
_CHUNK_BYTES = 64 * 2**20
_SMALLEST_FACTORED = 128  # T5X's Adafactor.min_dim_size_to_factor


def is_checkpoint(folder: pathlib.Path) -> bool:
  """Returns True if a folder is a checkpoint_STEP."""
  folders = (folder, folder / _STATE)
  names = (FILE, _METADATA)
  return any((each / name).is_file() for each in folders for name in names)


def newest(path: pathlib.Path) -> pathlib.Path:
  """Returns the last checkpoint_STEP in a folder, or the folder if it has
  none."""
  if path.name == FILE and path.is_file():
    return path.parent
  steps = {}
  for child in path.iterdir() if path.is_dir() else ():
    match = _STEP.fullmatch(child.name)
    if match and child.is_dir():
      steps[int(match[1])] = child
  return steps[max(steps)] if steps else path


def step(path: pathlib.Path) -> int:
  """Returns the step in the name of a checkpoint's folder, or 0.

  Args:
    path: checkpoint_STEP, or a folder with several, whose last counts.
  """
  match = _STEP.fullmatch(newest(path).name)
  return int(match[1]) if match else 0


def read(
  root: pathlib.Path,
) -> tuple[pathlib.Path, dict[str, _tensors.Tensor]]:
  """Describes the parameters of a checkpoint without the optimizer's state.

  Args:
    root: checkpoint_STEP, or a folder with several, whose last is read.

  Returns:
    The folder of the tensors, and the tensors by path.

  Raises:
    ValueError: if there is no checkpoint, or it is damaged, of another version
      or another kind.
  """
  folder = newest(root)
  if not is_checkpoint(folder):
    content = sorted(child.name for child in folder.iterdir())
    raise ValueError(
      f"{folder}: expected a T5X checkpoint (checkpoint_STEP with a file {FILE} or"
      f" a folder {_STATE}), got {', '.join(content[:5]) or 'an empty folder'}"
    )
  inner = folder / _STATE if (folder / _STATE).is_dir() else folder
  is_orbax = (inner / _METADATA).is_file()
  return inner, (_read_orbax if is_orbax else _read_native)(inner)


def _read_native(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  path = folder / FILE
  try:
    contents = _unpack(path)
  except (ValueError, TypeError, msgpack.UnpackException) as error:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(
      f"{path}: expected a T5X checkpoint, got a damaged msgpack file"
      f" ({reason}); copy it again"
    ) from error
  version = contents.get("version")
  optimizer = contents.get("optimizer", contents)
  target = optimizer.get("target") if isinstance(optimizer, dict) else None
  if version is None and target is not None and folder.name == "state":
    version = _VERSION  # old Orbax versions omit the version
  if version != _VERSION or not isinstance(target, dict):
    raise ValueError(
      f"{path}: expected a T5X checkpoint of version {_VERSION} with"
      f" optimizer/target, got version={version!r:.40} and keys"
      f" {sorted(map(str, contents))!s:.200};"
      " save it again with a newer T5X"
    )
  return _describe(folder, target, ())


def _unpack(path: pathlib.Path) -> dict[str, Any]:
  """Reads the msgpack file without the values below `state`."""
  data = path.read_bytes()
  unpacker = msgpack.Unpacker(
    max_buffer_size=max(len(data), 1), raw=False, strict_map_key=False
  )
  unpacker.feed(data)
  contents = _unpack_without_state(unpacker, nested=("optimizer",))
  if unpacker.tell() != len(data):
    raise ValueError(f"{len(data) - unpacker.tell()} bytes too many")
  return contents


def _unpack_without_state(
  unpacker: msgpack.Unpacker, nested: tuple[str, ...] = ()
):
  contents = {}
  for _ in range(unpacker.read_map_header()):
    key = unpacker.unpack()
    if key in ("state", "param_states"):
      unpacker.skip()
    elif key in nested:  # TypeError for an unhashable key
      contents[key] = _unpack_without_state(unpacker)
    else:
      contents[key] = unpacker.unpack()
  return contents


def _describe(
  folder: pathlib.Path, node: Any, path: tuple[str, ...]
) -> dict[str, _tensors.Tensor]:
  if isinstance(node, dict) and not {"driver", "kvstore"} <= set(node):
    tensors: dict[str, _tensors.Tensor] = {}
    for key, child in node.items():
      tensors |= _describe(folder, child, (*path, str(key)))
    return tensors
  name = "/".join(path)
  with _tensors.explain_errors(str(folder), name):
    return {name: _make_tensor(folder, name, node)}


def _make_tensor(folder: pathlib.Path, name: str, node: Any) -> _tensors.Tensor:
  if isinstance(node, msgpack.ExtType) and node.code in (_ARRAY, _SCALAR):
    array = _decode_extension(node.data)
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
    read=lambda: _read_values(array),
  )


def _read_values(array: Any) -> np.ndarray:
  return array.read().result() if hasattr(array, "read") else np.asarray(array)


def _decode_extension(data: bytes) -> np.ndarray:
  """Decodes Flax's encoding of an array: shape, name of the type, bytes."""
  shape, dtype, values = msgpack.unpackb(data, raw=False)
  return np.frombuffer(values, np.dtype(jnp.dtype(dtype))).reshape(shape)


def _open(folder: pathlib.Path, spec: Mapping[str, Any]):
  """Opens the zarr folder that a spec names, whatever system wrote it.

  Specs name their folder below `kvstore`, or at the top if an older tensorstore
  wrote them to a bucket. A public copy may lack the .zarray files; then the spec
  holds their content.
  """
  with extras.required("run"):
    import tensorstore

  driver = spec.get("driver", "zarr")
  name = spec["kvstore"].get("path", spec.get("path"))
  if driver != "zarr" or not name:
    raise ValueError(f"a spec with driver={driver}, path={name}, not of zarr")
  target = folder / name
  inside = os.path.abspath(target).startswith(os.path.abspath(folder) + os.sep)
  if not inside or not target.is_dir():
    raise ValueError(f"no folder {name} in the checkpoint's")
  request: dict[str, Any] = {
    "driver": "zarr",
    "kvstore": {"driver": "file", "path": f"{target.resolve()}{os.sep}"},
    "open": True,
    "fill_missing_data_reads": False,  # a lost chunk is an error, not zeros
  }
  if not (target / ".zarray").is_file():
    if "metadata" not in spec:
      raise ValueError("no .zarray, and no metadata in the spec")
    request |= {"metadata": spec["metadata"], "assume_metadata": True}
    if "dtype" in spec:
      request["dtype"] = spec["dtype"]
  return tensorstore.open(request).result(), str(target)


def _read_orbax(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  with extras.required("run"):
    import orbax.checkpoint as ocp

  folder = folder.resolve()
  try:
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(folder)
    # Some versions of Orbax wrap the tree, others do not.
    tree = getattr(tree, "item_metadata", tree)
    tree = getattr(tree, "tree", tree)
    if not isinstance(tree, dict):
      raise ValueError("no tree of tensors in its metadata")
  except Exception as error:
    raise ValueError(
      f"{folder}: expected an Orbax checkpoint, got a damaged one"
      f" ({' '.join(str(error).split())[:300]}); copy it again"
    ) from error
  if _TARGET not in tree:
    raise ValueError(
      f"{folder}: expected a T5X checkpoint with the key {_TARGET}, got"
      f" {sorted(tree)}"
    )
  leaves = jax.tree_util.tree_leaves_with_path(tree[_TARGET])
  return {
    "/".join(keys): _make_orbax_tensor(checkpointer, folder, keys, leaf)
    for keys, leaf in ((_get_keys(path), leaf) for path, leaf in leaves)
  }


def _get_keys(path) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _make_orbax_tensor(checkpointer, folder, keys: tuple[str, ...], leaf):
  folder_name = ".".join((_TARGET, *keys))
  stored, name = folder / folder_name / ".zarray", "/".join(keys)
  # Orbax reads lost chunks of older checkpoints as zeros. With a fill value, a
  # missing chunk may be correct.
  if stored.is_file() and json.loads(stored.read_text())["fill_value"] is None:
    with _tensors.explain_errors(str(folder), name):
      return _make_tensor(folder, name, f"{_PLACEHOLDER}{folder_name}")
  with extras.required("run"):
    import orbax.checkpoint as ocp

  def read() -> np.ndarray:
    """Restores only this leaf."""
    item, restore_args = leaf, ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed((_TARGET, *keys)):
      item, restore_args = {key: item}, {key: restore_args}
    request = ocp.args.PyTreeRestore(
      item=item, restore_args=restore_args, partial_restore=True
    )
    restored = checkpointer.restore(folder, args=request)
    for key in (_TARGET, *keys):
      restored = restored[key]
    return restored

  return _tensors.Tensor(
    where=str(folder),
    name=name,
    shape=tuple(leaf.shape),
    dtype=np.dtype(leaf.dtype),
    read=read,
  )


def write(
  folder: pathlib.Path, tensors: Mapping[str, _tensors.Tensor], step: int
) -> None:
  """Writes a native checkpoint to a folder.

  The second moments of T5X's Adafactor are zeros, its initial state, so that T5X
  restores the checkpoint with its default settings.

  Args:
    folder: an empty folder.
    tensors: the parameters by path; they are read one at a time.
    step: the number of the step.
  """
  target: dict[str, Any] = {}
  states: dict[str, Any] = {}
  for path, tensor in tensors.items():
    with _tensors.explain_errors(tensor.where, tensor.name):
      values = np.ascontiguousarray(tensor.read()).reshape(tensor.shape)
    if values.nbytes <= _INLINE_BYTES:
      target[path] = _encode_extension(values, _ARRAY)
    else:
      target[path] = _write_zarr(folder, path, values)
    for name, shape in _get_adafactor_shapes(tensor.shape).items():
      zeros = np.zeros(shape, np.float32)
      states[f"{path}/{name}"] = _encode_extension(zeros, _ARRAY)
  state = {
    "step": _encode_extension(np.asarray(step, np.int32), _SCALAR),
    "param_states": _tensors.unflatten(states),
  }
  optimizer = {"state": state, "target": _tensors.unflatten(target)}
  packed = msgpack.packb({"version": _VERSION, "optimizer": optimizer})
  (folder / FILE).write_bytes(packed)


def _encode_extension(array: np.ndarray, code: int) -> msgpack.ExtType:
  content = (array.shape, array.dtype.name, array.tobytes())
  return msgpack.ExtType(code, msgpack.packb(content))


def _write_zarr(
  folder: pathlib.Path, path: str, values: np.ndarray
) -> dict[str, Any]:
  """Writes one tensor to its folder and returns the spec that refers to it."""
  with extras.required("run"):
    import tensorstore

  name = f"target.{path.replace('/', '.')}"
  spec = {
    "driver": "zarr",
    "dtype": values.dtype.name,
    "kvstore": {"driver": "file", "path": f"{name}/"},
    "metadata": {
      "shape": list(values.shape),
      "chunks": _choose_chunks(values.shape, values.itemsize),
      "compressor": None,  # weights are hardly compressible
    },
  }
  kvstore = {"driver": "file", "path": f"{(folder / name).resolve()}/"}
  request = {**spec, "kvstore": kvstore, "create": True}
  tensorstore.open(request).result().write(values).result()
  return spec


def _choose_chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
  """Halves the longest axis until a chunk is small enough."""
  chunks = list(shape)
  while math.prod(chunks) * itemsize > _CHUNK_BYTES:
    axis = int(np.argmax(chunks))
    chunks[axis] = -(-chunks[axis] // 2)
  return chunks


def _get_adafactor_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of T5X's Adafactor state for one parameter."""
  shapes = dict.fromkeys(("v_row", "v_col", "v", "m"), (1,))
  order = np.argsort(shape)
  if len(shape) < 2 or shape[order[-2]] < _SMALLEST_FACTORED:
    return shapes | {"v": shape}
  row = tuple(np.delete(shape, order[-1]).tolist())
  column = tuple(np.delete(shape, order[-2]).tolist())
  return shapes | {"v_row": row, "v_col": column}


def infer(
  where: str | os.PathLike, tensors: Mapping[str, _tensors.Tensor]
) -> t5_config.T5Config:
  """Infers the shape of a T5 from its tensors.

  No tensor reveals some fields, for which defaults are taken: activations (relu, or a
  gated gelu if there are two kernels), relative positions up to 128, no dropout, and
  T5's special ids.

  Raises:
    ValueError: if a needed tensor is missing, or tensors contradict each other.
  """

  def shape(*names: str) -> tuple[int, ...]:
    for name in names:
      if name in tensors and len(tensors[name].shape) == 2:
        return tensors[name].shape
    raise ValueError(
      f"{where}: expected a T5 with a matrix {names[-1]}, got"
      f" {len(tensors)} tensors ({', '.join(sorted(tensors)[:3])}, ...);"
      " stacked (scanned) layers are not read"
    )

  def layers(stack: str) -> int:
    head = f"{stack}/layers_"
    return len({k.split("/")[1] for k in tensors if k.startswith(head)})

  vocab_size, emb_dim = shape(_EMBEDDING)
  heads, buckets = shape(_BIAS)
  mlp = "encoder/layers_0/mlp/wi"
  gated = f"{mlp}_0/kernel" in tensors
  width = shape(_QUERY)[1]
  if heads < 1 or width % heads:
    raise ValueError(
      f"{where}: expected query kernels of a multiple of {heads} heads, got"
      f" {width} columns"
    )
  complete = any(name.startswith("decoder/") for name in tensors)
  return t5_config.T5Config(
    vocab_size=vocab_size,
    emb_dim=emb_dim,
    num_heads=heads,
    head_dim=width // heads,
    mlp_dim=shape(f"{mlp}_0/kernel", f"{mlp}/kernel")[1],
    num_encoder_layers=layers("encoder"),
    num_decoder_layers=layers("decoder") if complete else layers("encoder"),
    mlp_activations=("gelu", "linear") if gated else ("relu",),
    logits_via_embedding=_HEAD not in tensors if complete else not gated,
    relative_attention_num_buckets=buckets,
  )
