"""Saves and loads results: JSON of frozen dataclasses, fingerprints, atomic writes.

A directory holds a finished result exactly if it holds `result.json`, which is
written last and atomically. Without it, the other files are work in progress.
`files.json` lists the result's files with sizes and digests, for `check`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from typing import Any, BinaryIO, TypeVar

from synthq_jax.storage import file_lists, stores

__all__ = [
  "FILES_NAME",
  "RESULT_NAME",
  "UNFINISHED",
  "append",
  "check",
  "find",
  "fingerprint",
  "fingerprint_in",
  "from_json",
  "hints",
  "load",
  "load_kind",
  "new_folder",
  "read_fingerprint",
  "read_json",
  "remove",
  "replacing",
  "save",
  "sealed",
  "to_json",
  "unsealed",
  "write_atomically",
]

RESULT_NAME = "result.json"
FILES_NAME = "files.json"
_LOCK = ".lock"
_CHECKSUM = "checksum"
_FINGERPRINT = re.compile(r"_([0-9a-f]{16})(?![0-9a-f])")
UNFINISHED = ("state_", "parts_", "ranks_")
"""Prefixes of files and folders that are deleted once a result is saved."""
_Result = TypeVar("_Result")


def to_json(value: Any) -> Any:
  """Converts nested dataclasses, tuples and paths to plain JSON values.

  Infinite and undefined numbers become the strings "inf", "-inf" and "nan",
  which `load` converts back if the field is a float.

  Args:
    value: a dataclass, mapping, sequence, path or JSON value.

  Returns:
    The same content as dicts, lists, strings, numbers, booleans and None.

  Raises:
    ValueError: if a value has no JSON form.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {
      field.name: to_json(getattr(value, field.name))
      for field in _list_written_fields(value)
    }
    return {"_type": type(value).__name__, **fields}
  if isinstance(value, dict):
    return {str(key): to_json(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_json(item) for item in value]
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
    return to_json(value.item())
  raise ValueError(f"a result holds plain values, got {type(value)}: {value!r}")


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
  """Adds a checksum to a JSON object, so that `unsealed` can detect damage.

  >>> unsealed(json.dumps(sealed({"a": 1})))
  {'a': 1}

  Args:
    content: JSON values by name.
  """
  return {**content, _CHECKSUM: _compute_checksum(content)}


def unsealed(text: str | bytes) -> dict[str, Any]:
  """Parses a JSON object and verifies its checksum, if it has one.

  Args:
    text: JSON.

  Raises:
    ValueError: if the text is no JSON object, or its checksum is wrong.
  """
  try:
    content = json.loads(text)
  except RecursionError as error:
    raise ValueError("expected JSON, got hundreds of brackets") from error
  if not isinstance(content, dict):
    raise ValueError(f"expected a JSON object, got a {type(content).__name__}")
  checksum = content.pop(_CHECKSUM, None)
  if checksum is not None and checksum != _compute_checksum(content):
    raise ValueError("expected the content as written, got another checksum")
  return content


def _compute_checksum(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(*parts: Any) -> str:
  """Returns a short digest of configurations and of earlier fingerprints.

  Fields marked `speed_only` do not count: they may change how fast a result is
  computed, never the result. Settings that a class no longer has count with their
  old default, which its `GONE` holds: results made with it stay finished.

  >>> fingerprint({"a": 1}, "b") == fingerprint({"a": 1}, "b")
  True
  """
  text = json.dumps(
    [_convert_without_speed(part) for part in parts], sort_keys=True
  )
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _list_written_fields(value: Any) -> Iterator[dataclasses.Field]:
  """Yields the fields of a dataclass, except `later` fields at their
  default."""
  for field in dataclasses.fields(value):
    is_later = field.metadata.get("later")
    if not is_later or getattr(value, field.name) != field.default:
      yield field


def _convert_without_speed(value: Any) -> Any:
  """Converts a value as `to_json` does, without the fields marked
  `speed_only`."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {
      field.name: _convert_without_speed(getattr(value, field.name))
      for field in _list_written_fields(value)
      if not field.metadata.get("speed_only")
    }
    gone = getattr(value, "GONE", {})
    return {"_type": type(value).__name__, **fields, **gone}
  if isinstance(value, (list, tuple)):
    return [_convert_without_speed(item) for item in value]
  return to_json(value)


@contextlib.contextmanager
def replacing(
  path: str | os.PathLike, *, mode: int = 0o666, is_new: bool = False
) -> Iterator[BinaryIO]:
  """Writes a file atomically: it appears, complete, when the block ends.

  A file of a mirrored folder is uploaded before the block ends.

  Args:
    path: the file; a missing folder is created.
    mode: the file's permissions, before the umask.
    is_new: whether to refuse a file that the store already has.

  Yields:
    The binary stream to write to.

  Raises:
    OSError: naming the file, even if the system's error does not (a full disk).
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial")

  def opener(name: str, flags: int) -> int:
    return os.open(name, flags, mode)

  with file_lists.naming(path):
    partial.unlink(missing_ok=True)  # left by a killed run
    with open(partial, "xb", opener=opener) as stream:
      try:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
      except BaseException:  # includes KeyboardInterrupt
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
  file_lists.sync(path.parent)
  stores.push(path, is_new=is_new)


def append(path: str | os.PathLike, stream: FileIO, content: bytes) -> None:
  """Appends bytes to a file and returns once they are on disk and in its store.

  Args:
    path: the file.
    stream: the file, opened to append, without a buffer.
    content: the bytes to append; b"" only syncs the file.

  Raises:
    OSError: naming the file; a part of the bytes may be written then.
  """
  path, rest = pathlib.Path(path), content
  with file_lists.naming(path):
    while rest:
      rest = rest[stream.write(rest) :]
    os.fsync(stream.fileno())
  file_lists.sync_names(path)
  if content:
    stores.add(path, content)


def remove(path: str | os.PathLike, *, must: bool = False) -> None:
  """Deletes a file or a folder, also from the store that mirrors it.

  Args:
    path: the file or folder, which need not exist.
    must: whether to raise if a part of a folder cannot be deleted.

  Raises:
    OSError: if the file, or with `must` the folder, cannot be deleted.
  """
  path = pathlib.Path(path)
  stores.remove(path)
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=not must)
  else:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, noun: str) -> Iterator[pathlib.Path]:
  """Creates a folder atomically: it appears, complete, when the block succeeds.

  Args:
    path: the folder, which must not exist or be empty.
    noun: a word for the folder in messages, such as "cache".

  Yields:
    A hidden sibling folder, locked against other processes; it is empty except
    for its lock file.

  Raises:
    ValueError: if the path is taken, or another process writes it.
  """
  path = pathlib.Path(os.path.abspath(path))
  is_empty = path.is_dir() and not any(path.iterdir())
  if path.is_symlink() or (path.exists() and not is_empty):
    raise ValueError(
      f"{path}: expected a path for a new {noun}, got one that is taken:"
      " delete it, or give another"
    )
  hidden = path.with_name(f".{path.name}.partial")
  hidden.mkdir(parents=True, exist_ok=True)
  with file_lists.locked(
    hidden / _LOCK,
    lambda who: (
      f"{hidden}: expected nobody else to write this {noun}, got {who}; wait for"
      " it, or write elsewhere"
    ),
  ):
    try:
      for child in hidden.iterdir():  # left by a killed run
        if child.is_dir():
          shutil.rmtree(child)
        elif child.name != _LOCK:
          child.unlink()
      yield hidden
      os.replace(hidden, path)
      (path / _LOCK).unlink()  # earlier, another process could take the folder
    except BaseException:
      shutil.rmtree(hidden, ignore_errors=True)
      raise


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
  """Writes a file so that a reader sees the old or the new content, never a
  part."""
  data = content.encode() if isinstance(content, str) else content
  with replacing(path) as stream:
    stream.write(data)


def save(
  directory: str | os.PathLike,
  result: Any,
  digest: str,
  *,
  folders: Sequence[str | os.PathLike] = (),
  data: str = "",
) -> None:
  """Marks `directory` as finished by writing its result.json.

  Args:
    directory: the stage's folder; its other files are complete by now.
    result: a frozen dataclass.
    digest: the fingerprint of the result's configuration and inputs.
    folders: all folders that hold files of the result, `directory` among them.
      Each gets its own files.json, so that a folder which may be shared reveals
      nothing about a folder which must not.
    data: the fingerprint of the result's data, for `check_data`.
  """
  listed_folders = []
  for folder in filter(os.path.isdir, map(pathlib.Path, folders)):
    files = file_lists.list_files(
      folder, but=functools.partial(_is_outside, digest)
    )
    if files:
      stores.push(*(folder / name for name in files))
      content = sealed({"fingerprint": digest, "files": files})
      write_atomically(folder / FILES_NAME, _format_json(content))
      listed_folders.append(os.path.relpath(folder, directory))
  content = {"fingerprint": digest, "result": to_json(result)}
  if listed_folders:
    content["listed"] = listed_folders
  if data:
    content["data"] = data
  path = pathlib.Path(directory) / RESULT_NAME
  write_atomically(path, _format_json(sealed(content)))


def _format_json(content: Any) -> str:
  return json.dumps(content, indent=1, sort_keys=True) + "\n"


def fingerprint_in(name: str) -> str | None:
  """Returns the fingerprint in a file's name, or None if there is none."""
  match = _FINGERPRINT.search(name)
  return match and match[1]


def _is_outside(digest: str, path: pathlib.Path) -> bool:
  """Returns True if a path in a folder is no part of this finished result."""
  path_digest = fingerprint_in(path.name)
  if path_digest and (
    path_digest != digest or path.name.startswith(UNFINISHED)
  ):
    return True
  if path.is_dir():
    return (path / RESULT_NAME).exists()
  return path.name in (RESULT_NAME, FILES_NAME)


def check(
  directory: str | os.PathLike, *, everywhere: bool = True, here: bool = True
) -> None:
  """Refuses a finished result if a file of it is missing or changed.

  Files of up to 1 GiB are compared by content, larger ones by size. Results of
  older versions, which list no files, pass.

  Args:
    directory: the folder of the result.
    everywhere: whether to check the result's files in other folders. Pass False
      for a folder that was handed on without them.
    here: whether to check the folder's own files.

  Raises:
    ValueError: naming the file and the folder to delete.
  """
  directory = pathlib.Path(directory)
  content = read_json(directory / RESULT_NAME)
  hint = (
    f"restore it, or delete {directory}, and it is made again (a private"
    " training counts as one more release)"
  )
  for listed in content.get("listed", ()):
    if not (here if listed == "." else everywhere):
      continue
    folder = pathlib.Path(os.path.normpath(directory / listed))
    path = folder / FILES_NAME
    if not path.exists():
      raise ValueError(
        f"{path}: expected the file as written, got no file: {hint}"
      )
    file_list = read_json(path)
    if file_list.get("fingerprint") != content["fingerprint"]:
      raise ValueError(
        f"{path}: expected the files of the result, got those of another: {hint}"
      )
    file_lists.check_files(folder, file_list["files"], hint)


def check_data(directory: str | os.PathLike, data: str | os.PathLike) -> None:
  """Refuses a result that was computed from other data than `data` holds now.

  Results of older versions, which do not record their data, pass.

  Args:
    directory: the folder of the result.
    data: the folder of the prepared data.

  Raises:
    ValueError: if the data were prepared again, with other settings.
  """
  data_digest = read_json(pathlib.Path(directory) / RESULT_NAME).get("data")
  if data_digest and data_digest != read_fingerprint(data):
    raise ValueError(
      f"{directory}: expected the data that it was made of in {data}, got data"
      " prepared with other settings or by another version: repeat `synthq run`"
      " with those of this result, or with the new ones, which makes it again (a"
      " private training counts as one more release)"
    )


def read_fingerprint(directory: str | os.PathLike) -> str | None:
  """Returns the fingerprint of a finished result, or None if unfinished."""
  path = pathlib.Path(directory) / RESULT_NAME
  return _read(path)["fingerprint"] if path.exists() else None


def find(
  directory: str | os.PathLike, kind: type[_Result], digest: str
) -> _Result | None:
  """Loads a finished result if it has this fingerprint; None otherwise.

  Args:
    directory: the folder of the result.
    kind: the result's dataclass.
    digest: the fingerprint.
  """
  is_same = read_fingerprint(directory) == digest
  return load(directory, kind) if is_same else None


def load(directory: str | os.PathLike, kind: type[_Result]) -> _Result:
  """Loads the result of a finished stage.

  Args:
    directory: the stage's directory.
    kind: the dataclass that was saved; nested dataclasses are found through the
      type hints of its fields.

  Returns:
    An instance of `kind`.

  Raises:
    ValueError: if there is no finished result of that kind.
  """
  path = pathlib.Path(directory) / RESULT_NAME
  if not path.exists():
    raise ValueError(f"expected a finished {kind.__name__}, got no file {path}")
  data = _read(path)["result"]
  if data.get("_type") != kind.__name__:
    raise ValueError(
      f"{path}: expected a {kind.__name__}, got a {data.get('_type')}"
    )
  try:
    return from_json(kind, data)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def load_kind(directory: str | os.PathLike) -> str:
  """Returns the class name of a finished result, or "" if there is no result.

  Args:
    directory: the stage's directory.

  Raises:
    ValueError: if the result is damaged.
  """
  path = pathlib.Path(directory) / RESULT_NAME
  return _read(path)["result"].get("_type", "") if path.is_file() else ""


def read_json(path: str | os.PathLike) -> dict[str, Any]:
  """Reads a JSON object from a file and verifies its checksum, if it has one.

  Args:
    path: the file.

  Raises:
    OSError: if the file cannot be read.
    ValueError: naming the file, if it is damaged.
  """
  path = pathlib.Path(path)
  try:
    return unsealed(path.read_bytes())
  except ValueError as error:
    raise ValueError(
      f"{path}: not JSON as it was written ({error}); restore it, or delete"
      f" {path.parent}, and it is made again"
    ) from error


def _read(path: pathlib.Path) -> dict[str, Any]:
  content = read_json(path)
  if not {"fingerprint", "result"} <= content.keys():
    raise ValueError(
      f"{path}: expected a fingerprint and a result, got"
      f" {', '.join(sorted(content)) or 'nothing'}; delete {path.parent}"
    )
  return content


def from_json(kind: type[_Result], data: dict[str, Any]) -> _Result:
  """Builds a dataclass from the JSON values of `to_json`.

  Args:
    kind: the dataclass; nested ones are found through the types of its fields.
    data: a mapping. Unknown names are ignored, but a class with a true
      `IS_STRICT` refuses an unknown name that has a value.

  Returns:
    An instance of `kind`.

  Raises:
    ValueError: if a field is missing or refused.
  """
  if not isinstance(data, dict):
    raise ValueError(
      f"expected a {kind.__name__}, got {data!r}: use the version that wrote it, or"
      " another folder"
    )
  types_by_name = hints(kind)
  unknown = {k for k, v in data.items() if v is not None} - {
    *types_by_name,
    "_type",
  }
  if unknown and getattr(kind, "IS_STRICT", False):
    raise ValueError(
      f"{kind.__name__}: unknown {min(unknown)!r}: use the version that wrote it"
    )
  values = {
    name: _convert(types_by_name[name], value)
    for name, value in data.items()
    if name in types_by_name
  }
  try:
    return kind(**values)
  except TypeError as error:
    raise ValueError(
      f"expected the fields of a {kind.__name__}, got a result of another"
      f" version ({error}): use the version that wrote it, or delete its folder;"
      " a private training that is made again counts again"
    ) from error


@functools.cache
def hints(kind: type) -> dict[str, Any]:
  """Returns a dataclass's field types by name; {} if a type cannot be
  resolved."""
  try:
    types_by_name = typing.get_type_hints(kind)
  except NameError:  # a name that only a type checker imports
    return {}
  return {
    field.name: types_by_name[field.name] for field in dataclasses.fields(kind)
  }


def _convert(hint: Any, value: Any) -> Any:
  """Converts one JSON value to the type `hint`."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if value is None:
    return None
  if origin in (typing.Union, types.UnionType):
    chosen = [kind for kind in arguments if kind is not type(None)]
    if isinstance(value, dict) and "_type" in value:  # one of several classes
      chosen = [kind for kind in chosen if kind.__name__ == value["_type"]]
    return _convert(chosen[0], value) if len(chosen) == 1 else value
  if dataclasses.is_dataclass(hint):
    return from_json(hint, value)
  if origin is tuple:
    kinds = arguments[:1] * len(value) if ... in arguments else arguments
    return tuple(_convert(*each) for each in zip(kinds, value, strict=True))
  if origin is dict:
    return {key: _convert(arguments[1], item) for key, item in value.items()}
  return float(value) if hint is float else value
