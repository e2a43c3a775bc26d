"""T5X's Orbax checkpoints: checkpoint_STEP/state with the keys target, state."""

import pathlib
from typing import Any

import jax
import numpy as np

from synthq_jax.models import _tensors

__all__ = ["METADATA", "read"]

METADATA = "_METADATA"
"""The file by which a folder of Orbax's is known."""

_TARGET = "target"


def read(folder: pathlib.Path) -> dict[str, _tensors.Tensor]:
  """Describes the parameters of a checkpoint; skips the optimizer's state.

  Args:
    folder: checkpoint_STEP/state.

  Raises:
    ValueError: if Orbax cannot read the metadata, or there is no `target`.
  """
  import orbax.checkpoint as ocp

  folder = folder.resolve()
  try:
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(folder)
    # Wrapped or plain: it depends on Orbax's version.
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
    "/".join(keys): _tensor(checkpointer, folder, keys, leaf)
    for keys, leaf in ((_keys(path), leaf) for path, leaf in leaves)
  }


def _keys(path) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _tensor(checkpointer, folder, keys: tuple[str, ...], leaf):
  import orbax.checkpoint as ocp

  def restore(arguments) -> Any:
    """Restores this leaf alone."""
    item, wanted = leaf, arguments
    for key in reversed((_TARGET, *keys)):
      item, wanted = {key: item}, {key: wanted}
    request = ocp.args.PyTreeRestore(
      item=item, restore_args=wanted, partial_restore=True
    )
    found = checkpointer.restore(folder, args=request)
    for key in (_TARGET, *keys):
      found = found[key]
    return found

  def read_part(index: _tensors.Index) -> np.ndarray:
    return restore(ocp.RestoreArgs(restore_type=np.ndarray))[index]

  def place(sharding: jax.sharding.Sharding, dtype: np.dtype) -> jax.Array:
    return restore(ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype))

  return _tensors.Tensor(
    where=str(folder),
    name="/".join(keys),
    shape=tuple(leaf.shape),
    dtype=np.dtype(leaf.dtype),
    read=read_part,
    place=place,
  )
