"""T5 checkpoints: our own folders, T5X's and Hugging Face's, in and out.

| format | what lies there | read | written |
|---|---|---|---|
| ours | params.safetensors, config.json | `load` | `save` |
| T5X native | checkpoint_STEP/checkpoint | `load_t5x` | `save_t5x` |
| T5X with Orbax | checkpoint_STEP/state | `load_t5x` | |
| Hugging Face | model*.safetensors, config.json | `load_huggingface` | `save_huggingface` |

`load` recognises all of them, and `convert` goes from any to any. Tensors are
read one at a time, so that a model loads within its own size plus one tensor,
and with a `sharding` each goes straight to its devices. Neither t5x nor
transformers is needed. In our own files, the name of a tensor is its path in
T5X's parameter tree, joined by "/".
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.models import (
  _formats,
  _huggingface_format,
  _safetensors_format,
  _t5x_format,
  _tensors,
  t5_config,
)

__all__ = [
  "FORMATS",
  "convert",
  "files",
  "flatten",
  "load",
  "load_config",
  "load_huggingface",
  "load_t5x",
  "save",
  "save_huggingface",
  "save_t5x",
  "unflatten",
]

FORMATS = ("t5x", "huggingface", "safetensors")
"""What `convert` writes; safetensors is our own."""

_SHARD_SIZE = 5 * 10**9

files = _formats.files
unflatten = _tensors.unflatten


def flatten(params: Any) -> dict[str, np.ndarray]:
  """Returns the leaves of nested dicts by their joined path.

  >>> flatten({"a": {"b": np.ones(1)}})
  {'a/b': array([1.])}
  """
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    flat["/".join(entry.key for entry in path)] = np.asarray(leaf)
  return flat


def save(
  directory: str | os.PathLike, params: Any, config: t5_config.T5Config
) -> None:
  """Writes our own format: parameters and shape, each file in one step.

  Args:
    directory: made where it is missing.
    params: nested dicts of arrays, all of T5 or its encoder alone.
    config: the shape they belong to.
  """
  _save_ours(pathlib.Path(directory), _tensors.of_tree(params), config)


def _save_ours(root: pathlib.Path, tensors, config) -> None:
  _safetensors_format.write(root / _formats.PARAMS, tensors)
  text = json.dumps(dataclasses.asdict(config), indent=1) + "\n"
  artifacts.write_atomically(root / _formats.CONFIG, text)


def save_t5x(path: str | os.PathLike, params: Any, step: int) -> pathlib.Path:
  """Writes a native T5X checkpoint, version 3.

  T5X restores it with its default settings: the state of its Adafactor is
  written as it begins. Set Adafactor.step_offset to `step`, so that its decay
  begins anew too. The folder appears, complete, at the end.

  Args:
    path: the folder of the model; the checkpoint is checkpoint_STEP in it.
    params: nested dicts of arrays, all of T5 or its encoder alone.
    step: the number of the step, at least 0.

  Returns:
    The folder that was written.

  Raises:
    ValueError: if it exists already, or the parameters are not those of a T5.
  """
  return _save_t5x(pathlib.Path(path), _tensors.of_tree(params), step)


def _save_t5x(path: pathlib.Path, tensors, step: int) -> pathlib.Path:
  if step < 0:
    raise ValueError(f"step must be at least 0, got step={step}")
  _formats.check("params", tensors, _tensors.infer("params", tensors))
  place = path / f"checkpoint_{step}"
  with _tensors.new_folder(place) as folder:
    _t5x_format.write(folder, tensors, step)
  return place


def save_huggingface(
  path: str | os.PathLike,
  params: Any,
  config: t5_config.T5Config,
  *,
  max_shard_size: int = _SHARD_SIZE,
) -> None:
  """Writes a Hugging Face folder: T5ForConditionalGeneration or T5EncoderModel.

  Both read it with from_pretrained. The folder appears, complete, at the end.

  Args:
    path: a folder that is not there yet, or empty.
    params: nested dicts of arrays, all of T5 or its encoder alone.
    config: the shape they belong to.
    max_shard_size: bytes of a file; what is larger is split between tensors.

  Raises:
    ValueError: if something is there already, parameters and shape do not fit,
      or transformers has no such T5.
  """
  _save_huggingface(
    pathlib.Path(path), _tensors.of_tree(params), config, max_shard_size
  )


def _save_huggingface(path, tensors, config, max_shard_size: int) -> None:
  _formats.check("params", tensors, config)
  with _tensors.new_folder(path) as folder:
    _huggingface_format.write(folder, tensors, config, max_shard_size)


def load(
  directory: str | os.PathLike,
  *,
  config: t5_config.T5Config | None = None,
  sharding: Any = None,
  dtype: Any = "float32",
) -> tuple[dict[str, Any], t5_config.T5Config]:
  """Reads parameters and shape in whichever format they are.

  Args:
    directory: a folder of ours, of Hugging Face's or of T5X's.
    config: the shape, where it must not be read off the checkpoint.
    sharding: None for NumPy arrays; else a function from a tensor's path
      ("encoder/layers_0/mlp/wo/kernel") and shape to its jax.sharding.Sharding,
      or nested dicts of them as the parameters. Each process then reads the
      slices of its own devices, and the leaves are jax.Arrays.
    dtype: type of the parameters; None keeps what is stored.

  Returns:
    Nested dicts of arrays (without "decoder" where the checkpoint has none),
    and the shape.

  Raises:
    ValueError: if the format is not known, a file is missing or damaged, or a
      tensor is missing, unknown or of another shape than the configuration asks
      for.
  """
  tensors, shape = _formats.describe(pathlib.Path(directory), config)
  return _tensors.fetch(tensors, sharding, dtype), shape


def load_t5x(
  path: str | os.PathLike,
  *,
  config: t5_config.T5Config | None = None,
  sharding: Any = None,
  dtype: Any = "float32",
) -> tuple[dict[str, Any], t5_config.T5Config]:
  """Reads a T5X checkpoint, native or Orbax; skips the optimizer's state.

  Args:
    path: DIR/checkpoint_STEP, or DIR, of which the newest step is taken.
    config: the shape; None reads it off the tensors, taking for granted what
      they do not show (a gated layer is T5 1.1's gelu; relative positions end
      at 128; no dropout).
    sharding: as in `load`.
    dtype: as in `load`.

  Returns:
    Nested dicts of arrays, and the shape.

  Raises:
    ValueError: as `load` does.
  """
  tensors, shape = _formats.describe_t5x(pathlib.Path(path), config)
  return _tensors.fetch(tensors, sharding, dtype), shape


def load_huggingface(
  path: str | os.PathLike, *, sharding: Any = None, dtype: Any = "float32"
) -> tuple[dict[str, Any], t5_config.T5Config]:
  """Reads a Hugging Face folder of T5, T5 1.1 or T5EncoderModel.

  Args:
    path: holds config.json, and model.safetensors or its parts with their
      index.
    sharding: as in `load`.
    dtype: as in `load`.

  Returns:
    Nested dicts of arrays, and the shape.

  Raises:
    ValueError: as `load` does.
  """
  tensors, shape = _huggingface_format.read(pathlib.Path(path))
  return _tensors.fetch(tensors, sharding, dtype), shape


def load_config(directory: str | os.PathLike) -> t5_config.T5Config:
  """Reads the shape of a saved model, in whichever format it is.

  Raises:
    ValueError: if there is none, or it is not a T5 shape.
  """
  return _formats.config(pathlib.Path(directory))


def convert(
  source: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  step: int = 0,
  max_shard_size: int = _SHARD_SIZE,
) -> pathlib.Path:
  """Writes a checkpoint again in another format, one tensor at a time.

  Says nothing about whether the checkpoint may be shared: a model trained on
  private data without privacy stays private in every format.

  Args:
    source: a folder that `load` reads; types of the values are kept.
    to: the new folder, not there yet or empty (T5X: its parent).
    format: one of `FORMATS`.
    step: the step that a T5X checkpoint gets.
    max_shard_size: bytes of a Hugging Face file.

  Returns:
    The folder that was written.

  Raises:
    ValueError: if the source is not readable, the target is taken or the format
      is not known.
  """
  if format not in FORMATS:
    raise ValueError(
      f"format must be one of {', '.join(FORMATS)}, got format={format}"
    )
  tensors, shape = _formats.describe(pathlib.Path(source), None)
  to = pathlib.Path(to)
  if format == "t5x":
    return _save_t5x(to, tensors, step)
  if format == "huggingface":
    _save_huggingface(to, tensors, shape, max_shard_size)
    return to
  with _tensors.new_folder(to) as folder:
    _save_ours(folder, tensors, shape)
  return to
