"""Released T5 weights on disk: params.safetensors beside config.json.

Tensor names are the paths of T5X's parameter tree joined by "/". The readers
and writers of T5X's and Hugging Face's own formats are to join this module.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import t5, t5_config

__all__ = ["flatten", "load", "load_config", "save", "unflatten"]

_PARAMS = "params.safetensors"
_CONFIG = "config.json"


def flatten(params: Any) -> dict[str, np.ndarray]:
  """Returns the leaves of nested dicts by their joined path.

  >>> flatten({"a": {"b": np.ones(1)}})
  {'a/b': array([1.])}
  """
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    flat["/".join(entry.key for entry in path)] = np.asarray(leaf)
  return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
  """Turns joined paths back into nested dicts."""
  params: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, name = path.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return params


def save(
  directory: str | os.PathLike, params: Any, config: t5_config.T5Config
) -> None:
  """Writes parameters and shape, each file in one step.

  Args:
    directory: made where it is missing.
    params: nested dicts of arrays, all of T5 or its encoder alone.
    config: the shape they belong to.
  """
  import safetensors.numpy

  root = pathlib.Path(directory)
  data = safetensors.numpy.save(
    {k: np.ascontiguousarray(v) for k, v in flatten(params).items()}
  )
  artifacts.write_atomically(root / _PARAMS, data)
  text = json.dumps(dataclasses.asdict(config), indent=1) + "\n"
  artifacts.write_atomically(root / _CONFIG, text)


def load_config(directory: str | os.PathLike) -> t5_config.T5Config:
  """Reads the shape of a saved model.

  Raises:
    ValueError: if there is none, or it is not a T5 shape.
  """
  path = pathlib.Path(directory) / _CONFIG
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    fields = json.loads(path.read_text())
    fields["mlp_activations"] = tuple(fields["mlp_activations"])
    return t5_config.T5Config(**fields)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: expected a T5 shape, got {error}") from error


def load(
  directory: str | os.PathLike,
) -> tuple[dict[str, Any], t5_config.T5Config]:
  """Reads parameters and shape, and checks one against the other.

  Args:
    directory: from `save`.

  Returns:
    Nested dicts of float32 NumPy arrays, and the shape.

  Raises:
    ValueError: if a file is missing or damaged, or a tensor is missing, unknown
      or of another shape than the configuration asks for.
  """
  import safetensors.numpy

  config = load_config(directory)
  path = pathlib.Path(directory) / _PARAMS
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    flat = safetensors.numpy.load(path.read_bytes())
  except Exception as error:
    raise ValueError(
      f"{path}: expected safetensors, got a damaged file ({error});"
      " copy it again"
    ) from error
  _check(path, flat, config)
  return unflatten(flat), config


def _check(path, flat, config: t5_config.T5Config) -> None:
  """Compares names and shapes with what the configuration builds."""
  abstract = jax.eval_shape(
    lambda key: t5.init_params(config, key), jax.random.key(0)
  )
  expected = {
    "/".join(entry.key for entry in tree_path): leaf.shape
    for tree_path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
  }
  if not any(name.startswith("decoder/") for name in flat):
    expected = {k: v for k, v in expected.items() if "decoder/" not in k}
  for name in sorted(set(expected) | set(flat)):
    found = flat[name].shape if name in flat else "nothing"
    wanted = expected.get(name, "nothing")
    if found != wanted:
      raise ValueError(
        f"{path}: expected tensor {name} of shape {wanted}, got {found}"
      )
