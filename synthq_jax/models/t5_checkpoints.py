"""Checkpoints of T5s, and of static vectors: our own folders, T5X's and Hugging
Face's, in and out.

::

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
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from synthq_jax import typing
from synthq_jax.models import static_vectors, t5, t5_config
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.models.checkpoints import huggingface, sentence_folders, t5x
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
"""What `convert` writes; safetensors is our own."""

CLAIM = "PRIVACY.txt"
"""Beside an exported checkpoint: what may be claimed about it, in words."""

_SHARD_SIZE = 5 * 10**9

unflatten = _tensors.unflatten
infer = t5x.infer

_PRIVACY = "privacy"  # in the MODEL_DIR of a private training in T5X
_STATEMENT = "privacy.json"  # what `CLAIM` says, for programs
CLAIM_FILES = (_STATEMENT, CLAIM, f"{_PRIVACY}/{ledger.NAME}")
"""Of a folder, all that `claim_in` reads."""
_PARAMS = "params.safetensors"
_CONFIG = "config.json"  # the shape; Hugging Face's file has the same name
_PROJECTION = "projection/kernel"
_OURS, _HUGGINGFACE, _T5X = "ours", "huggingface", "t5x"
Shape = t5_config.T5Config | static_vectors.StaticConfig
"""The shape of an encoder that a checkpoint holds."""
_Loaded = tuple[dict[str, Any], Shape]
_Described = tuple[dict[str, _tensors.Tensor], Shape]


def flatten(params: Any) -> dict[str, np.ndarray]:
  """Returns the leaves of nested dicts by their joined path.

  >>> flatten({"a": {"b": np.ones(1)}})
  {'a/b': array([1.])}
  """
  leaves = _tensors.leaves(params)
  return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def save(directory: str | os.PathLike, params: Any, config: Shape) -> None:
  """Writes our own format: parameters and shape, each file in one step.

  Args:
    directory: made where it is missing.
    params: nested dicts of arrays, all of T5 or its encoder alone, or static
      vectors.
    config: the shape they belong to.
  """
  root = pathlib.Path(directory)
  _tensors.write_safetensors(root / _PARAMS, _tensors.of_tree(params))
  fields = dataclasses.asdict(config)
  if config.token_ids == token_ids_lib.TokenIds():  # as files always were
    del fields["token_ids"]
  text = json.dumps(fields, indent=1) + "\n"
  artifacts.write_atomically(root / _CONFIG, text)


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
  if step < 0:
    raise ValueError(f"step must be at least 0, got step={step}")
  tensors = _tensors.of_tree(params)
  _check("params", tensors, infer("params", tensors))
  place = pathlib.Path(path) / f"checkpoint_{step}"
  with artifacts.new_folder(place, "checkpoint") as folder:
    t5x.write(folder, tensors, step)
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
  _refuse_static("params", config, "huggingface")
  tensors = _tensors.of_tree(params)
  _check("params", tensors, config)
  with artifacts.new_folder(path, "checkpoint") as folder:
    huggingface.write(folder, tensors, config, max_shard_size)


def load(
  directory: str | os.PathLike,
  *,
  config: t5_config.T5Config | None = None,
  token_ids: token_ids_lib.TokenIds | None = None,
  sharding: Any = None,
  dtype: Any = "float32",
) -> _Loaded:
  """Reads parameters and shape in whichever format they are.

  Args:
    directory: a folder of ours, of Hugging Face's or of T5X's.
    config: the shape, where it must not be read off the checkpoint.
    token_ids: those of its vocabulary (`vocabulary.SentencePiece.token_ids`);
      None: those that the checkpoint says, or else T5's.
    sharding: None for NumPy arrays; else a function from a tensor's path
      ("encoder/layers_0/mlp/wo/kernel") and shape to its jax.sharding.Sharding,
      or nested dicts of them as the parameters. Each process then reads the
      slices of its own devices, and the leaves are jax.Arrays.
    dtype: type of the parameters; None keeps what is stored.

  Returns:
    Nested dicts of arrays (without "decoder" where the checkpoint has none),
    and the shape.

  Raises:
    ValueError: if the format is not known, a file is missing or damaged, a
      tensor is missing, unknown or of another shape than the configuration asks
      for, or the checkpoint says another end of a text than the vocabulary.
  """
  tensors, shape = _describe(pathlib.Path(directory), config)
  shape = with_token_ids(directory, shape, token_ids)
  return _tensors.fetch(tensors, sharding, dtype), shape


def load_t5x(
  path: str | os.PathLike,
  *,
  config: t5_config.T5Config | None = None,
  **options: Any,
) -> _Loaded:
  """Reads a T5X checkpoint, native or Orbax; skips the optimizer's state.

  Args:
    path: DIR/checkpoint_STEP, or DIR, of which the newest step is taken.
    config: the shape; None reads it off the tensors, taking for granted what
      they do not show (a gated layer is T5 1.1's gelu; relative positions end
      at 128; no dropout; T5's special ids).
    **options: `sharding` and `dtype` of `load`.

  Returns:
    Nested dicts of arrays, and the shape.

  Raises:
    ValueError: as `load` does.
  """
  tensors, shape = _describe_t5x(pathlib.Path(path), config)
  return _tensors.fetch(tensors, **options), shape


def load_huggingface(path: str | os.PathLike, **options: Any) -> _Loaded:
  """Reads a Hugging Face folder of T5, T5 1.1 or T5EncoderModel.

  Args:
    path: holds config.json, and model.safetensors or its parts with their
      index.
    **options: `sharding` and `dtype` of `load`.

  Returns:
    Nested dicts of arrays, and the shape.

  Raises:
    ValueError: as `load` does.
  """
  sentence_folders.check_texts(pathlib.Path(path))
  tensors, shape = huggingface.read(pathlib.Path(path))
  return _tensors.fetch(tensors, **options), shape


def with_token_ids(
  directory: str | os.PathLike,
  shape: Shape,
  token_ids: token_ids_lib.TokenIds | None,
) -> Shape:
  """Returns the shape of a checkpoint with the special ids of its vocabulary.

  Args:
    directory: of the checkpoint, as `load` takes it.
    shape: what was read of it.
    token_ids: of the vocabulary; None changes nothing.

  Raises:
    ValueError: if the checkpoint says another end of a text.
  """
  if token_ids is None:
    return shape
  says = _kind(pathlib.Path(directory)) == _HUGGINGFACE
  says |= shape.token_ids != token_ids_lib.TokenIds()  # left out by `save`
  stored = shape.token_ids if says else token_ids
  if stored.eos != token_ids.eos:
    raise ValueError(
      f"{directory}: expected the end of a text of its vocabulary,"
      f" id {token_ids.eos}, got eos_token_id={stored.eos}: give the vocabulary"
      " that belongs to it, or correct config.json"
    )
  own = dataclasses.replace(token_ids, pad=stored.pad)
  return dataclasses.replace(shape, token_ids=own)


def load_config(directory: str | os.PathLike) -> Shape:
  """Reads the shape of a saved model, in whichever format it is.

  Raises:
    ValueError: if there is none, or it is none that is known.
  """
  root = pathlib.Path(directory)
  kind = _kind(root)
  if kind == _HUGGINGFACE:
    return huggingface.config(root)
  if kind == _T5X:
    return _describe_t5x(root)[1]
  path = root / _CONFIG
  if not path.is_file():
    raise ValueError(f"expected a T5 checkpoint, got no file {path}")
  wanted = "a T5 shape"
  try:
    fields = artifacts.unsealed(path.read_bytes())
    if ids := fields.pop("token_ids", None):
      fields["token_ids"] = token_ids_lib.TokenIds(**ids)
    if fields.pop("kind", "") == "static":
      wanted = "a shape of static vectors"
      return static_vectors.StaticConfig(**fields)
    fields["mlp_activations"] = tuple(fields["mlp_activations"])
    return t5_config.T5Config(**fields)
  except (ValueError, KeyError, TypeError) as error:
    got = " ".join(str(error).split())
    raise ValueError(f"{path}: expected {wanted}, got {got}") from error


def save_claim(
  folder: pathlib.Path, promise: statement.PrivacyStatement
) -> None:
  """Writes what is promised of a checkpoint beside it, for `claim` and people.

  Args:
    folder: of the checkpoint.
    promise: what its training earned.
  """
  content = artifacts.sealed({"statement": artifacts.to_json(promise)})
  text = json.dumps(content, indent=1, sort_keys=True)
  artifacts.write_atomically(folder / _STATEMENT, f"{text}\n")
  words = statement.in_words(promise)
  artifacts.write_atomically(folder / CLAIM, f"{words}\n")


def claim(directory: str | os.PathLike) -> statement.PrivacyStatement | None:
  """Returns what lies beside a checkpoint about the privacy of its training.

  That is the ledger of a private training in T5X, in its MODEL_DIR, or what
  `save_claim` wrote; it is found by whichever path leads to the checkpoint.

  Args:
    directory: of any format; of T5X's also the folder with some, or what lies in
      checkpoint_STEP.

  Returns:
    The promise, of T5X's for all that lies in its MODEL_DIR, where a training may
    have gone on from another checkpoint; None where nothing lies there.

  Raises:
    ValueError: if what lies there is damaged, is for people alone, or no claim
      covers all of it.
  """
  root = pathlib.Path(directory).resolve()
  places = {root}
  if _kind(root) == _T5X:  # what lies in checkpoint_STEP, that, or MODEL_DIR
    model = t5x.newest(root).parent
    places |= {t5x.newest(root), *root.parents[:2], *model.glob("checkpoint_*")}
  return claim_in(root, sorted(places))


def claim_in(
  checkpoint: str | os.PathLike, places: Iterable[pathlib.Path]
) -> statement.PrivacyStatement | None:
  """Returns what folders together say of a checkpoint, see `claim`.

  Args:
    checkpoint: what it is called in a message.
    places: folders with some of `CLAIM_FILES`, or none.
  """
  found = [one for at in places for one in _promises(at)]
  if len(found) < 2:
    return found[0] if found else None
  made = joint.claim(found)
  if made is None:
    raise ValueError(
      f"{checkpoint}: expected trainings that one claim covers, got different"
      " units: start from another checkpoint"
    )
  return made


def _promises(at: pathlib.Path) -> list[statement.PrivacyStatement]:
  """Returns what a folder says of the checkpoints in it."""
  if (at / _STATEMENT).is_file():
    stored = artifacts.read_json(at / _STATEMENT)["statement"]
    return [artifacts.from_json(statement.PrivacyStatement, stored)]
  if (at / CLAIM).is_file():
    raise ValueError(
      f"{at / CLAIM}: expected {_STATEMENT} beside it, as exports have, got"
      " none: export this checkpoint again"
    )
  path = at / _PRIVACY / ledger.NAME
  return list(ledger.read(path).values()) if path.is_file() else []


def check(directory: str | os.PathLike) -> None:
  """Refuses a checkpoint that `load` could not read, by its headers.

  Numbers are read where a tensor is stored twice, and has to be the same.

  Args:
    directory: of any format.

  Raises:
    ValueError: as `load` does, but for damage within the tensors.
  """
  _describe(pathlib.Path(directory))


def check_finite(directory: str | os.PathLike, params: typing.Params) -> None:
  """Refuses a model that would end a run long after privacy is paid for.

  Args:
    directory: where it was read, for the message.
    params: its parameters.

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
  """Returns the files on which the parameters of a checkpoint rest, in order.

  Those of our own format are named also where they are missing.
  """
  root = pathlib.Path(directory)
  kind = _kind(root)
  if kind == _T5X:
    folder = t5x.newest(root)
    found = file_lists.below(folder)
    return tuple(p for p in found if not _is_beside(p.relative_to(folder)))
  if kind == _HUGGINGFACE:
    parts = (*root.glob("model*.safetensors"), *root.glob("model*.json"))
    return (*sorted(parts), root / _CONFIG)
  return root / _PARAMS, root / _CONFIG


def convert(
  source: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  step: int = 0,
  token_ids: token_ids_lib.TokenIds | None = None,
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
    token_ids: of its vocabulary, as in `load`.
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
  tensors, shape = _describe(pathlib.Path(source), None)
  shape = with_token_ids(source, shape, token_ids)
  if format != "safetensors":
    _refuse_static(source, shape, format)
  if _PROJECTION in tensors and format != "safetensors":
    raise ValueError(
      f"{source}: expected a T5 alone for format={format}, got a retriever with a"
      " projection, which has no place there: write sentence-transformers or"
      " safetensors"
    )
  to = pathlib.Path(to)
  if format == "t5x":
    _check_seen(source, tensors, shape)
    return save_t5x(to, tensors, step)
  if format == "huggingface":
    save_huggingface(to, tensors, shape, max_shard_size=max_shard_size)
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


def _check_seen(
  source: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  shape: t5_config.T5Config,
) -> None:
  """Refuses a model that reads as another where tensors alone are kept."""
  seen = infer(source, tensors)
  for name in ("mlp_activations", "relative_attention_max_distance"):
    own, other = getattr(shape, name), getattr(seen, name)
    if own != other:
      raise ValueError(
        f"{source}: expected {name}={other} for format=t5x, which keeps tensors"
        f" alone and would be read so, got {own}: write another format"
      )


def _describe(
  root: pathlib.Path, shape: t5_config.T5Config | None = None
) -> _Described:
  """Says which tensors a checkpoint holds, and their shape, both checked."""
  kind = _kind(root)
  if kind == _T5X:
    return _describe_t5x(root, shape)
  if kind == _HUGGINGFACE:
    sentence_folders.check_texts(root)
    tensors, found = huggingface.read(root)
  else:
    found = load_config(root) if shape is None else shape
    if not (root / _PARAMS).is_file():
      raise ValueError(
        f"expected a T5 checkpoint, got no file {root / _PARAMS}"
      )
    tensors = _tensors.read_safetensors(root / _PARAMS)
  shape = found if shape is None else shape
  ours = kind == _OURS
  _check(root / _PARAMS if ours else root, tensors, shape, projection=ours)
  return tensors, shape


def _describe_t5x(
  root: pathlib.Path, shape: t5_config.T5Config | None = None
) -> _Described:
  """Does the same for a T5X checkpoint or a folder with several."""
  place, tensors = t5x.read(root)
  shape = infer(place, tensors) if shape is None else shape
  _check(place, tensors, shape)
  return tensors, shape


def _check(
  where: str | os.PathLike,
  tensors: Mapping[str, _tensors.Tensor],
  shape: Shape,
  *,
  projection: bool = False,
) -> None:
  """Holds tensors against a shape, whose decoder they may lack as a whole.

  Our own files may hold the dual encoder's projection besides.
  """
  decoder = any(path.startswith("decoder/") for path in tensors)
  if isinstance(shape, static_vectors.StaticConfig):
    expected = static_vectors.shapes(shape)
  else:
    expected = dict(t5.shapes(shape, decoder=decoder))
  if projection and _PROJECTION in tensors:
    expected[_PROJECTION] = (shape.emb_dim, shape.emb_dim)
  _tensors.check(where, tensors, expected)


def _is_beside(path: pathlib.Path) -> bool:
  """Whether a file of a T5X checkpoint is the optimizer's or the data's."""
  return any(part.startswith(("state.", "train_ds")) for part in path.parts)


def _kind(root: pathlib.Path) -> str:
  """Recognises a format; what is none of the others is said to be ours."""
  if (root / _PARAMS).exists():
    return _OURS
  if (root / _CONFIG).is_file():
    text = (root / _CONFIG).read_text(errors="replace")
    known = '"model_type"' in text or '"d_model"' in text
    return _HUGGINGFACE if known else _OURS
  newest = t5x.newest(root)  # which an interrupted save may have left empty
  return _T5X if newest != root or t5x.is_checkpoint(root) else _OURS
