"""Reads and writes T5 checkpoints in three formats, and static vectors in ours.

::

  | format | files | read | written |
  |---|---|---|---|
  | ours | params.safetensors, config.json | `load` | `save` |
  | T5X native | checkpoint_STEP/checkpoint | `load_t5x` | `save_t5x` |
  | T5X with Orbax | checkpoint_STEP/state | `load_t5x` | |
  | Hugging Face | model*.safetensors, config.json | `load_huggingface` | `save_huggingface` |

`load` recognises all of them, and `convert` converts any of them. Tensors are
read one at a time, so that loading takes the memory of the model plus one tensor.
Neither t5x nor transformers is needed. In our own files, the name of a tensor is
its path in T5X's parameter tree, joined by "/".
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from synthq_jax import typing
from synthq_jax.models import static_vectors, t5, t5_config
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.models.checkpoints import (
  claim_copies,
  huggingface,
  sentence_folders,
  t5x,
)
from synthq_jax.models.checkpoints import tensors as _tensors
from synthq_jax.privacy import joint, ledger, statement
from synthq_jax.storage import artifacts, file_lists

__all__ = [
  "CLAIM",
  "CLAIM_FILES",
  "FORMATS",
  "Shape",
  "check",
  "check_finite",
  "claim",
  "claim_in",
  "convert",
  "files",
  "flatten",
  "infer",
  "load",
  "load_config",
  "load_huggingface",
  "load_t5x",
  "save",
  "save_claim",
  "save_huggingface",
  "save_t5x",
  "unflatten",
  "with_token_ids",
]

FORMATS = ("t5x", "huggingface", "safetensors")
"""Formats that `convert` writes; safetensors is our own."""

CLAIM = "PRIVACY.txt"
"""Name of the file with the privacy statement of an exported checkpoint."""

_SHARD_SIZE = 5 * 10**9

unflatten = _tensors.unflatten
infer = t5x.infer

_PRIVACY = "privacy"  # folder in the MODEL_DIR of a private training in T5X
_STATEMENT = "privacy.json"  # the statement of `CLAIM`, for programs
CLAIM_FILES = (_STATEMENT, CLAIM, f"{_PRIVACY}/{ledger.NAME}")
"""Paths in a folder of all files that `claim_in` reads."""
_PARAMS = "params.safetensors"
_CONFIG = "config.json"  # the shape; Hugging Face's file has the same name
_PROJECTION = "projection/kernel"
_OURS, _HUGGINGFACE, _T5X = "ours", "huggingface", "t5x"
Shape = t5_config.T5Config | static_vectors.StaticConfig
"""The shape of a checkpoint."""
_Loaded = tuple[dict[str, Any], Shape]
_Described = tuple[dict[str, _tensors.Tensor], Shape]


def flatten(params: Any) -> dict[str, np.ndarray]:
  """Flattens nested dicts to arrays by their joined path.

  >>> flatten({"a": {"b": np.ones(1)}})
  {'a/b': array([1.])}
  """
  leaves = _tensors.leaves(params)
  return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def save(directory: str | os.PathLike, params: Any, config: Shape) -> None:
  """Writes parameters and shape in our own format, each file atomically.

  Args:
    directory: the folder, which is created if it is missing.
    params: nested dicts of arrays of a whole T5, its encoder alone, or static
      vectors.
    config: the shape of the model.
  """
  root = pathlib.Path(directory)
  _tensors.write_safetensors(root / _PARAMS, _tensors.of_tree(params))
  fields = dataclasses.asdict(config)
  if (
    config.token_ids == token_ids_lib.TokenIds()
  ):  # keeps the files of T5's vocabulary the same
    del fields["token_ids"]
  text = json.dumps(fields, indent=1) + "\n"
  artifacts.write_atomically(root / _CONFIG, text)


def save_t5x(path: str | os.PathLike, params: Any, step: int) -> pathlib.Path:
  """Writes a native T5X checkpoint, version 3.

  T5X restores it with its default settings; the checkpoint holds Adafactor's
  initial state. Set Adafactor.step_offset to `step`, so that Adafactor's decay
  starts anew, too. The folder is written atomically.

  Args:
    path: the folder of the model; the checkpoint is checkpoint_STEP in it.
    params: nested dicts of arrays of a whole T5 or its encoder alone.
    step: the number of the step, at least 0.

  Returns:
    The folder of the checkpoint.

  Raises:
    ValueError: if the folder exists, or the parameters are not a T5's.
  """
  if step < 0:
    raise ValueError(f"step must be at least 0, got step={step}")
  tensors = _tensors.of_tree(params)
  _check("params", tensors, infer("params", tensors))
  target = pathlib.Path(path) / f"checkpoint_{step}"
  with artifacts.new_folder(target, "checkpoint") as folder:
    t5x.write(folder, tensors, step)
  return target


def save_huggingface(
  path: str | os.PathLike,
  params: Any,
  config: t5_config.T5Config,
) -> None:
  """Writes a Hugging Face folder: T5ForConditionalGeneration or T5EncoderModel.

  Both read it with from_pretrained. The folder is written atomically.

  Args:
    path: a folder that does not exist or is empty.
    params: nested dicts of arrays of a whole T5 or its encoder alone.
    config: the shape of the model.

  Raises:
    ValueError: if the path is taken, parameters and shape do not agree, or
      transformers has no such T5.
  """
  _refuse_static("params", config, "huggingface")
  tensors = _tensors.of_tree(params)
  _check("params", tensors, config)
  with artifacts.new_folder(path, "checkpoint") as folder:
    huggingface.write(folder, tensors, config, _SHARD_SIZE)


def load(
  directory: str | os.PathLike,
  *,
  token_ids: token_ids_lib.TokenIds | None = None,
  dtype: Any = "float32",
) -> _Loaded:
  """Reads the parameters and the shape of a checkpoint in any format.

  The shape of a T5X checkpoint is inferred from its tensors, which do not reveal
  some fields. For these, defaults are taken: a gated layer is T5 1.1's gelu,
  relative positions end at 128, no dropout, T5's special ids.

  Args:
    directory: a folder in our format; of Hugging Face, with T5, T5 1.1 or
      T5EncoderModel; or of T5X, checkpoint_STEP or its parent, whose newest step is
      read.
    token_ids: special ids of the vocabulary (`vocabulary.SentencePiece.token_ids`);
      None: the checkpoint's, or else T5's.
    dtype: type of the parameters; None keeps the stored types.

  Returns:
    Nested dicts of arrays (without "decoder" if the checkpoint has none), and the
    shape.

  Raises:
    ValueError: if the format is unknown, a file is missing or damaged, a tensor
      does not fit the configuration, or the checkpoint's end of a text differs
      from the vocabulary's.
  """
  tensors, shape = _describe(pathlib.Path(directory))
  shape = with_token_ids(directory, shape, token_ids)
  return _tensors.fetch(tensors, dtype), shape


def load_t5x(path: str | os.PathLike, *, dtype: Any = "float32") -> _Loaded:
  """Reads a T5X checkpoint, native or Orbax, without the optimizer's state.

  Args:
    path: DIR/checkpoint_STEP, or DIR, whose newest step is read.
    dtype: type of the parameters; None keeps the stored types.

  Returns:
    Nested dicts of arrays, and the shape, inferred as in `load`.

  Raises:
    ValueError: as `load` does.
  """
  tensors, shape = _describe_t5x(pathlib.Path(path))
  return _tensors.fetch(tensors, dtype), shape


def load_huggingface(
  path: str | os.PathLike, *, dtype: Any = "float32"
) -> _Loaded:
  """Reads a Hugging Face folder of T5, T5 1.1 or T5EncoderModel.

  Args:
    path: a folder with config.json, and model.safetensors or its parts with their
      index.
    dtype: type of the parameters; None keeps the stored types.

  Returns:
    Nested dicts of arrays, and the shape.

  Raises:
    ValueError: as `load` does.
  """
  tensors, shape = _read_huggingface(pathlib.Path(path))
  return _tensors.fetch(tensors, dtype), shape


def with_token_ids(
  directory: str | os.PathLike,
  shape: Shape,
  token_ids: token_ids_lib.TokenIds | None,
) -> Shape:
  """Replaces the special ids in a checkpoint's shape by those of its vocabulary.

  Args:
    directory: the folder of the checkpoint, as in `load`.
    shape: the shape that was read from it.
    token_ids: special ids of the vocabulary; None returns the shape unchanged.

  Raises:
    ValueError: if the checkpoint has another end of a text.
  """
  if token_ids is None:
    return shape
  has_ids = _find_kind(pathlib.Path(directory)) == _HUGGINGFACE
  has_ids |= (
    shape.token_ids != token_ids_lib.TokenIds()
  )  # `save` omits the default
  stored = shape.token_ids if has_ids else token_ids
  if stored.eos != token_ids.eos:
    raise ValueError(
      f"{directory}: expected the end of a text of its vocabulary,"
      f" id {token_ids.eos}, got eos_token_id={stored.eos}: give the vocabulary"
      " of this checkpoint, or correct config.json"
    )
  own = dataclasses.replace(token_ids, pad=stored.pad)
  return dataclasses.replace(shape, token_ids=own)


def load_config(directory: str | os.PathLike) -> Shape:
  """Reads the shape of a checkpoint in any format.

  Raises:
    ValueError: if there is no checkpoint, or its shape is unknown.
  """
  root = pathlib.Path(directory)
  kind = _find_kind(root)
  if kind == _HUGGINGFACE:
    return huggingface.config(root)
  if kind == _T5X:
    return _describe_t5x(root)[1]
  path = root / _CONFIG
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  expected = "a T5 shape"
  try:
    fields = artifacts.unsealed(path.read_bytes())
    if ids := fields.pop("token_ids", None):
      fields["token_ids"] = token_ids_lib.TokenIds(**ids)
    if fields.pop("kind", "") == "static":
      expected = "a shape of static vectors"
      return static_vectors.StaticConfig(**fields)
    fields["mlp_activations"] = tuple(fields["mlp_activations"])
    return t5_config.T5Config(**fields)
  except (ValueError, KeyError, TypeError) as error:
    got = " ".join(str(error).split())
    raise ValueError(f"{path}: expected {expected}, got {got}") from error


def save_claim(
  folder: pathlib.Path, promise: statement.PrivacyStatement
) -> None:
  """Writes a checkpoint's privacy statement to its folder, for `claim` and people.

  Args:
    folder: the folder of the checkpoint.
    promise: the privacy statement of its training.
  """
  content = artifacts.sealed({"statement": artifacts.to_json(promise)})
  text = json.dumps(content, indent=1, sort_keys=True)
  artifacts.write_atomically(folder / _STATEMENT, f"{text}\n")
  words = statement.in_words(promise)
  artifacts.write_atomically(folder / CLAIM, f"{words}\n")


def claim(directory: str | os.PathLike) -> statement.PrivacyStatement | None:
  """Reads the privacy statement of a checkpoint's training.

  Its source is the ledger of a private training in T5X, in its MODEL_DIR, or the
  file of `save_claim`. Any path that leads to the checkpoint finds it.

  Args:
    directory: the folder of a checkpoint in any format; for T5X also the folder with
      several checkpoints, or a folder inside checkpoint_STEP.

  Returns:
    The statement; for T5X a joint one of all checkpoints in MODEL_DIR, since a
    training may have started from another of them. None if there is none.

  Raises:
    ValueError: if the files are damaged, the statement is for people alone, or no
      claim covers all of them.
  """
  root = pathlib.Path(directory).resolve()
  if _find_kind(root) != _T5X:
    return claim_in(root, [root])
  # Root may be inside checkpoint_STEP, or MODEL_DIR.
  model = t5x.newest(root).parent
  places = {root, t5x.newest(root), *root.parents[:2]}
  places.update(model.glob("checkpoint_*"))
  with claim_copies.download(root, CLAIM_FILES) as copies:
    return claim_in(root, [*sorted(places), *copies])


def claim_in(
  checkpoint: str | os.PathLike, places: Iterable[pathlib.Path]
) -> statement.PrivacyStatement | None:
  """Joins the privacy statements in several folders to one, see `claim`.

  Args:
    checkpoint: the checkpoint's name in messages.
    places: folders that may hold `CLAIM_FILES`.
  """
  promises = [each for folder in places for each in _read_promises(folder)]
  if len(promises) < 2:
    return promises[0] if promises else None
  joined = joint.claim(promises)
  if joined is None:
    raise ValueError(
      f"{checkpoint}: expected trainings that one claim covers, got different"
      " units: start from another checkpoint"
    )
  return joined


def _read_promises(folder: pathlib.Path) -> list[statement.PrivacyStatement]:
  """Reads the privacy statements of the checkpoints in a folder."""
  path = folder / _STATEMENT
  content = artifacts.read_json(path) if path.is_file() else {}
  if stored := content.get("statement"):
    return [artifacts.from_json(statement.PrivacyStatement, stored)]
  if content or (folder / CLAIM).is_file():
    raise ValueError(
      f"{path}: expected the statement of an export, got none: export this"
      " checkpoint again"
    )
  path = folder / _PRIVACY / ledger.NAME
  return list(ledger.read(path).values()) if path.is_file() else []


def check(directory: str | os.PathLike) -> None:
  """Refuses a checkpoint that `load` could not read, by reading its headers.

  Values are read only of a tensor that is stored twice, to compare them.

  Args:
    directory: the folder of a checkpoint in any format.

  Raises:
    ValueError: as `load` does, except for damage within the tensors.
  """
  _describe(pathlib.Path(directory))


def check_finite(directory: str | os.PathLike, params: typing.Params) -> None:
  """Refuses a model with NaN or infinity, which would fail after privacy is spent.

  Args:
    directory: the folder of the model, for the message.
    params: the model's parameters.

  Raises:
    ValueError: naming the first tensor with NaN or an infinity.
  """
  for path, values in sorted(flatten(params).items()):
    if not np.isfinite(np.asarray(values)).all():
      raise ValueError(
        f"{directory}: expected finite numbers, got NaN or infinity in tensor"
        f" {path}: save or convert the checkpoint again, in a wider type"
      )


def files(directory: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  """Returns the files that determine the parameters of a checkpoint, in order.

  The files of our own format are listed even if they are missing.
  """
  root = pathlib.Path(directory)
  kind = _find_kind(root)
  if kind == _T5X:
    folder = t5x.newest(root)
    paths = file_lists.below(folder)
    return tuple(p for p in paths if not _is_other_state(p.relative_to(folder)))
  if kind == _HUGGINGFACE:
    parts = (*root.glob("model*.safetensors"), *root.glob("model*.json"))
    return (*sorted(parts), root / _CONFIG)
  return root / _PARAMS, root / _CONFIG


def convert(
  source: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  token_ids: token_ids_lib.TokenIds | None = None,
) -> pathlib.Path:
  """Converts a checkpoint to another format, one tensor at a time.

  A conversion does not make a checkpoint shareable: a model trained on private data
  without privacy stays private in every format.

  Args:
    source: a folder that `load` reads; types of the values are kept.
    to: the new folder, which does not exist or is empty (T5X: its parent).
    format: one of `FORMATS`.
    token_ids: special ids of the vocabulary, as in `load`.

  Returns:
    The folder of the new checkpoint.

  Raises:
    ValueError: if the source is not readable, the target is taken or the format
      is unknown.
  """
  if format not in FORMATS:
    raise ValueError(
      f"format must be one of {', '.join(FORMATS)}, got format={format}"
    )
  tensors, shape = _describe(pathlib.Path(source))
  shape = with_token_ids(source, shape, token_ids)
  if format != "safetensors":
    _refuse_static(source, shape, format)
  if _PROJECTION in tensors and format != "safetensors":
    raise ValueError(
      f"{source}: expected a T5 alone for format={format}, got a retriever with a"
      " projection, which the format cannot hold: write sentence-transformers or"
      " safetensors"
    )
  to = pathlib.Path(to)
  if format == "t5x":
    _check_inferred(source, tensors, shape)
    return save_t5x(to, tensors, 0)
  if format == "huggingface":
    save_huggingface(to, tensors, shape)
    return to
  with artifacts.new_folder(to, "checkpoint") as folder:
    save(folder, tensors, shape)
  return to


def _refuse_static(where: Any, shape: Shape, name: str) -> None:
  if not isinstance(shape, t5_config.T5Config):
    raise ValueError(
      f"{where}: expected a T5 for format={name}, got static vectors: write"
      " sentence-transformers or safetensors"
    )


def _check_inferred(
  source: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  shape: t5_config.T5Config,
) -> None:
  """Refuses a model whose shape could not be inferred from its tensors
  alone."""
  inferred = infer(source, tensors)
  for name in ("mlp_activations", "relative_attention_max_distance"):
    own, other = getattr(shape, name), getattr(inferred, name)
    if own != other:
      raise ValueError(
        f"{source}: expected {name}={other} for format=t5x, which keeps only"
        f" tensors and would be read so, got {own}: write another format"
      )


def _describe(root: pathlib.Path) -> _Described:
  """Returns the tensors of a checkpoint and its shape, after checking both."""
  kind = _find_kind(root)
  if kind == _T5X:
    return _describe_t5x(root)
  if kind == _HUGGINGFACE:
    tensors, shape = _read_huggingface(root)
  else:
    shape = load_config(root)
    if not (root / _PARAMS).is_file():
      raise ValueError(
        f"expected a T5 checkpoint, got no file {root / _PARAMS}"
      )
    tensors = _tensors.read_safetensors(root / _PARAMS)
  ours = kind == _OURS
  _check(root / _PARAMS if ours else root, tensors, shape, projection=ours)
  return tensors, shape


def _read_huggingface(root: pathlib.Path) -> _Described:
  sentence_folders.check_texts(root)
  return huggingface.read(root)


def _describe_t5x(root: pathlib.Path) -> _Described:
  """Returns the tensors and shape of a T5X checkpoint, or of the newest in a
  folder."""
  folder, tensors = t5x.read(root)
  shape = infer(folder, tensors)
  _check(folder, tensors, shape)
  return tensors, shape


def _check(
  where: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  shape: Shape,
  *,
  projection: bool = False,
) -> None:
  """Refuses tensors that do not fit a shape; the whole decoder may be missing.

  Files of our own format may also hold the dual encoder's projection.
  """
  decoder = any(path.startswith("decoder/") for path in tensors)
  if isinstance(shape, static_vectors.StaticConfig):
    expected = static_vectors.shapes(shape)
  else:
    expected = dict(t5.shapes(shape, decoder=decoder))
  if projection and _PROJECTION in tensors:
    expected[_PROJECTION] = (shape.emb_dim, shape.emb_dim)
  _tensors.check(where, tensors, expected)


def _is_other_state(path: pathlib.Path) -> bool:
  """Returns True for a T5X file of the optimizer's or the data's state."""
  return any(part.startswith(("state.", "train_ds")) for part in path.parts)


def _find_kind(root: pathlib.Path) -> str:
  """Returns the format of a folder; a folder in no other format counts as
  ours."""
  if (root / _PARAMS).exists():
    return _OURS
  if (root / _CONFIG).is_file():
    text = (root / _CONFIG).read_text(errors="replace")
    is_huggingface = '"model_type"' in text or '"d_model"' in text
    return _HUGGINGFACE if is_huggingface else _OURS
  newest = t5x.newest(root)  # an interrupted save may leave it empty
  return _T5X if newest != root or t5x.is_checkpoint(root) else _OURS
