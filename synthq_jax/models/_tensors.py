"""Tensors of a T5 checkpoint: described first, read later, one at a time.

Every format is read in two steps: its module says which tensors there are, and
this one checks their names and shapes and then fetches them, so that no more
than one tensor is in memory besides the model itself.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.models import t5_config

__all__ = [
  "Tensor",
  "check",
  "explained",
  "fetch",
  "infer",
  "new_folder",
  "num_bytes",
  "of_tree",
  "same",
  "shapes",
  "unflatten",
]

_EMBEDDING = "token_embedder/embedding"
_HEAD = "decoder/logits_dense/kernel"
_BIAS = "encoder/relpos_bias/rel_embedding"
_QUERY = "encoder/layers_0/attention/query/kernel"

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

  Leaves on devices are copied to the host when they are read, one by one.
  """

  def read(leaf, index: Index) -> np.ndarray:
    # A jax.Array keeps the host's copy that was made of it; its copy does not
    # outlive this line.
    values = leaf.copy() if isinstance(leaf, jax.Array) else leaf
    return np.asarray(values)[index]

  def describe(path: str, leaf) -> Tensor:
    return Tensor(
      where="params",
      name=path,
      shape=tuple(leaf.shape),
      dtype=np.dtype(leaf.dtype),
      read=functools.partial(read, leaf),
    )

  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {
    path: describe(path, leaf)
    for path, leaf in ((_joined(keys), leaf) for keys, leaf in leaves)
  }


def _joined(keys) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Turns joined paths back into nested dicts."""
  params: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, name = path.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return params


def fetch(
  tensors: Mapping[str, Tensor], sharding: Any, dtype: Any
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
      flat[path] = np.array(tensor.whole(), dtype=wanted, order="C")
  return unflatten(flat)


def _from_tree(tree: Any) -> Callable[[str, tuple[int, ...]], Any]:
  """Looks shardings up by path."""
  is_leaf = lambda x: isinstance(x, jax.sharding.Sharding)  # noqa: E731
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  flat = {_joined(keys): leaf for keys, leaf in leaves}

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


def shapes(
  config: t5_config.T5Config, *, decoder: bool = True
) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every tensor that a T5 exchanges, by path.

  Args:
    config: the shape of the model.
    decoder: whether the decoder belongs to it.
  """
  dim, width = config.emb_dim, config.num_heads * config.head_dim
  attention = {
    **{f"{name}/kernel": (dim, width) for name in ("query", "key", "value")},
    "out/kernel": (width, dim),
  }
  gates = len(config.mlp_activations)
  names = ["wi"] if gates == 1 else [f"wi_{i}" for i in range(gates)]
  mlp = {f"mlp/{name}/kernel": (dim, config.mlp_dim) for name in names}
  mlp["mlp/wo/kernel"] = (config.mlp_dim, dim)
  layers = {
    "encoder": ("attention", "pre_attention_layer_norm"),
    "decoder": (
      *("self_attention", "pre_self_attention_layer_norm"),
      *("encoder_decoder_attention", "pre_cross_attention_layer_norm"),
    ),
  }
  found = {_EMBEDDING: (config.vocab_size, dim)}
  for stack in ("encoder", "decoder") if decoder else ("encoder",):
    buckets = config.relative_attention_num_buckets
    bias = f"{stack}/relpos_bias/rel_embedding"
    found[bias] = (config.num_heads, buckets)
    found[f"{stack}/{stack}_norm/scale"] = (dim,)
    for layer in range(getattr(config, f"num_{stack}_layers")):
      head = f"{stack}/layers_{layer}"
      for name in (*layers[stack], "pre_mlp_layer_norm"):
        parts = {"scale": (dim,)} if name.endswith("norm") else attention
        found |= {f"{head}/{name}/{k}": shape for k, shape in parts.items()}
      found |= {f"{head}/{name}": shape for name, shape in mlp.items()}
  if decoder and not config.logits_via_embedding:
    found[_HEAD] = (dim, config.vocab_size)
  return found


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


def infer(
  where: str | os.PathLike, tensors: Mapping[str, Tensor]
) -> t5_config.T5Config:
  """Reads the shape of a T5 off its tensors.

  Taken for granted, since no tensor shows it: activations (relu, or a gated
  gelu where there are two kernels), relative positions up to 128, no dropout.

  Raises:
    ValueError: if a tensor that tells is missing, or they contradict.
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


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Makes a folder that appears, complete, when the block ends.

  Args:
    path: where it will be; must not exist, or be empty.

  Yields:
    A temporary folder beside it.

  Raises:
    ValueError: if there is something already.
  """
  path = pathlib.Path(path)
  if path.exists() and not (path.is_dir() and not any(path.iterdir())):
    raise ValueError(
      f"{path}: expected a place for a new checkpoint, got one that is taken:"
      " delete it, or give another"
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial")
  shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
  partial.mkdir()
  try:
    yield partial
    os.replace(partial, path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def num_bytes(tensor: Tensor) -> int:
  """Returns how much memory a tensor takes as it is stored."""
  return math.prod(tensor.shape) * tensor.dtype.itemsize
