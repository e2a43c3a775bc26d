"""Which format a checkpoint has, and what is in it."""

import json
import os
import pathlib
import re
from collections.abc import Mapping

from synthq_jax.models import (
  _huggingface_format,
  _orbax_format,
  _safetensors_format,
  _t5x_format,
  _tensors,
  t5_config,
)

__all__ = [
  "CONFIG",
  "PARAMS",
  "check",
  "config",
  "describe",
  "describe_t5x",
  "files",
]

PARAMS = "params.safetensors"
"""The parameters in our own format."""
CONFIG = "config.json"
"""The shape beside them; Hugging Face's file has the same name."""

_STEP = re.compile(r"checkpoint_(\d+)")
_STATE = "state"
_PROJECTION = "projection/kernel"
_OURS, _HUGGINGFACE, _T5X = "ours", "huggingface", "t5x"

_Described = tuple[dict[str, _tensors.Tensor], t5_config.T5Config]


def describe(
  root: pathlib.Path, shape: t5_config.T5Config | None = None
) -> _Described:
  """Says which tensors a checkpoint holds, and their shape, both checked.

  Args:
    root: a folder of any format.
    shape: what to hold it against; None reads it from the checkpoint.

  Raises:
    ValueError: if there is no checkpoint, or something is wrong with it.
  """
  kind = _kind(root)
  if kind == _T5X:
    return describe_t5x(root, shape)
  if kind == _HUGGINGFACE:
    tensors, found = _huggingface_format.read(root)
  else:
    found = config(root) if shape is None else shape
    if not (root / PARAMS).is_file():
      raise ValueError(f"expected a T5 checkpoint, got no file {root / PARAMS}")
    tensors = _safetensors_format.read(root / PARAMS)
  shape = found if shape is None else shape
  ours = kind == _OURS
  check(root / PARAMS if ours else root, tensors, shape, projection=ours)
  return tensors, shape


def describe_t5x(
  root: pathlib.Path, shape: t5_config.T5Config | None = None
) -> _Described:
  """Does the same for a T5X checkpoint or a folder with several."""
  folder = _newest(root)
  if not _is_t5x(folder):
    raise ValueError(
      f"{root}: expected a T5X checkpoint (checkpoint_STEP with a file"
      f" {_t5x_format.FILE} or a folder {_STATE}), got {_listing(folder)}"
    )
  place = folder / _STATE if (folder / _STATE).is_dir() else folder
  is_orbax = (place / _orbax_format.METADATA).is_file()
  tensors = (_orbax_format if is_orbax else _t5x_format).read(place)
  shape = _tensors.infer(place, tensors) if shape is None else shape
  check(place, tensors, shape)
  return tensors, shape


def check(
  where: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  shape: t5_config.T5Config,
  *,
  projection: bool = False,
) -> None:
  """Holds tensors against a shape, whose decoder they may lack as a whole.

  Our own files may hold the dual encoder's projection besides.
  """
  decoder = any(path.startswith("decoder/") for path in tensors)
  expected = _tensors.shapes(shape, decoder=decoder)
  if projection and _PROJECTION in tensors:
    expected[_PROJECTION] = (shape.emb_dim, shape.emb_dim)
  _tensors.check(where, tensors, expected)


def config(root: pathlib.Path) -> t5_config.T5Config:
  """Reads the shape of a checkpoint.

  Raises:
    ValueError: if there is none, or it is not a T5 shape.
  """
  kind = _kind(root)
  if kind == _HUGGINGFACE:
    return _huggingface_format.config(root)
  if kind == _T5X:
    return describe_t5x(root)[1]
  path = root / CONFIG
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  try:
    fields = json.loads(path.read_text())
    fields["mlp_activations"] = tuple(fields["mlp_activations"])
    return t5_config.T5Config(**fields)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: expected a T5 shape, got {error}") from error


def files(directory: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  """Returns the files on which the parameters of a checkpoint rest, in order.

  Those of our own format are named also where they are missing.
  """
  root = pathlib.Path(directory)
  kind = _kind(root)
  if kind == _T5X:
    folder = _newest(root)
    found = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return tuple(p for p in found if not _is_beside(p.relative_to(folder)))
  if kind == _HUGGINGFACE:
    parts = (*root.glob("model*.safetensors"), *root.glob("model*.json"))
    return (*sorted(parts), root / CONFIG)
  return root / PARAMS, root / CONFIG


def _is_beside(path: pathlib.Path) -> bool:
  """Whether a file of a T5X checkpoint is the optimizer's or the data's."""
  return any(part.startswith(("state.", "train_ds")) for part in path.parts)


def _kind(root: pathlib.Path) -> str:
  """Recognises a format; what is none of the others is said to be ours."""
  if (root / PARAMS).exists():
    return _OURS
  if (root / CONFIG).is_file():
    text = (root / CONFIG).read_text(errors="replace")
    known = '"model_type"' in text or '"d_model"' in text
    return _HUGGINGFACE if known else _OURS
  return _T5X if _is_t5x(_newest(root)) else _OURS


def _is_t5x(folder: pathlib.Path) -> bool:
  places = (folder, folder / _STATE)
  names = (_t5x_format.FILE, _orbax_format.METADATA)
  return any((place / name).is_file() for place in places for name in names)


def _newest(path: pathlib.Path) -> pathlib.Path:
  """Returns the last checkpoint_STEP of a folder that has some, else itself."""
  if path.name == _t5x_format.FILE and path.is_file():
    return path.parent
  steps = {}
  for child in path.iterdir() if path.is_dir() else ():
    match = _STEP.fullmatch(child.name)
    if match and child.is_dir():
      steps[int(match[1])] = child
  return steps[max(steps)] if steps else path


def _listing(folder: pathlib.Path) -> str:
  """Says in short what lies in a folder."""
  if not folder.is_dir():
    return "no such folder"
  names = sorted(child.name for child in folder.iterdir())
  return ", ".join(names[:5]) or "an empty folder"
