"""Results on disk: JSON of frozen dataclasses, fingerprints, atomic writes.

A directory holds a finished result exactly when it holds `result.json`, which
is written last and in one step. Whatever else lies there is work in progress.
Beside it `files.json` lists its files with sizes and digests, for `check`.
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
"""Begin the names of what goes once a result is saved."""
_Result = TypeVar("_Result")


def to_json(value: Any) -> Any:
  """Turns nested dataclasses, tuples and paths into plain JSON values.

  Infinite and undefined numbers become the strings "inf", "-inf" and "nan",
  which `load` reads back where the field is a float.

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
      for field in _written(value)
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
  """Returns a JSON object with a checksum, by which `unsealed` knows damage.

  >>> unsealed(json.dumps(sealed({"a": 1})))
  {'a': 1}

  Args:
    content: JSON values by name.
  """
  return {**content, _CHECKSUM: _checksum(content)}


def unsealed(text: str | bytes) -> dict[str, Any]:
  """Reads a JSON object that `sealed` made, or one without a checksum.

  Args:
    text: JSON.

  Raises:
    ValueError: if it is no JSON object, or not what was written.
  """
  try:
    content = json.loads(text)
  except RecursionError as error:
    raise ValueError("expected JSON, got hundreds of brackets") from error
  if not isinstance(content, dict):
    raise ValueError(f"expected a JSON object, got a {type(content).__name__}")
  said = content.pop(_CHECKSUM, None)
  if said is not None and said != _checksum(content):
    raise ValueError("expected what was written, got another checksum")
  return content


def _checksum(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(*parts: Any) -> str:
  """Returns a short digest of configurations and of earlier fingerprints.

  Fields from `speed_only` do not count: they may
  change how fast a result is made, never the result.

  >>> fingerprint({"a": 1}, "b") == fingerprint({"a": 1}, "b")
  True
  """
  text = json.dumps([_without_speed(part) for part in parts], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(value: Any) -> Iterator[dataclasses.Field]:
  """Yields the fields of a dataclass, but for `later` ones at their default."""
  for field in dataclasses.fields(value):
    is_later = field.metadata.get("later")
    if not is_later or getattr(value, field.name) != field.default:
      yield field


def _without_speed(value: Any) -> Any:
  """Like `to_json`, but leaves out the fields marked `speed_only`."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    kept = {
      field.name: _without_speed(getattr(value, field.name))
      for field in _written(value)
      if not field.metadata.get("speed_only")
    }
    return {"_type": type(value).__name__, **kept}
  if isinstance(value, (list, tuple)):
    return [_without_speed(item) for item in value]
  return to_json(value)


@contextlib.contextmanager
def replacing(
  path: str | os.PathLike, *, mode: int = 0o666, is_new: bool = False
) -> Iterator[BinaryIO]:
  """Opens a file for bytes that appears, complete, when the block ends.

  Where it belongs to a store it is there, too, when the block has ended.

  Args:
    path: the file; its folder is made where it is missing.
    mode: who may read and write it, less what the umask takes away.
    is_new: whether a store must not have it yet.

  Yields:
    The stream to write to.

  Raises:
    OSError: naming the file, also where the system does not (a full disk).
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial")

  def opener(name: str, flags: int) -> int:
    return os.open(name, flags, mode)

  with file_lists.naming(path):
    partial.unlink(missing_ok=True)  # of a run that was killed
    with open(partial, "xb", opener=opener) as stream:
      try:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
      except BaseException:  # asked to stop, too
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
  file_lists.sync(path.parent)
  stores.push(path, is_new=is_new)


def append(path: str | os.PathLike, stream: FileIO, content: bytes) -> None:
  """Adds bytes to a file, and returns once they outlive the machine.

  Args:
    path: the file.
    stream: the file, opened to append, without a buffer.
    content: what comes behind what is there; nothing is done for b"".

  Raises:
    OSError: naming the file; a part may be written then.
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
  """Deletes a file or a folder, also from the store that it belongs to.

  Args:
    path: of either; it need not be there.
    must: whether a folder that the system keeps a part of is an error.

  Raises:
    OSError: if it cannot be deleted.
  """
  path = pathlib.Path(path)
  stores.remove(path)
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=not must)
  else:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, what: str) -> Iterator[pathlib.Path]:
  """Makes a folder that appears, complete, when the block ends without error.

  Args:
    path: where it will be; must not exist, or be empty.
    what: what it is, for messages.

  Yields:
    A hidden folder beside it, which no other process writes to: empty, but for a
    hidden file that locks it.

  Raises:
    ValueError: if there is something already, or somebody else is writing.
  """
  path = pathlib.Path(os.path.abspath(path))
  is_empty = path.is_dir() and not any(path.iterdir())
  if path.is_symlink() or (path.exists() and not is_empty):
    raise ValueError(
      f"{path}: expected a place for a new {what}, got one that is taken:"
      " delete it, or give another"
    )
  hidden = path.with_name(f".{path.name}.partial")
  hidden.mkdir(parents=True, exist_ok=True)
  with file_lists.locked(
    hidden / _LOCK,
    lambda who: (
      f"{hidden}: expected nobody else to write this {what}, got {who}; wait for"
      " it, or write elsewhere"
    ),
  ):
    try:
      for child in hidden.iterdir():  # of a run that was killed
        if child.is_dir():
          shutil.rmtree(child)
        elif child.name != _LOCK:
          child.unlink()
      yield hidden
      os.replace(hidden, path)
      (path / _LOCK).unlink()  # not before: another process would take it
    except BaseException:
      shutil.rmtree(hidden, ignore_errors=True)
      raise


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
  """Writes a file so that a reader sees the old or the new one, never half."""
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
    directory: where the stage wrote its other files, all complete by now.
    result: a frozen dataclass.
    digest: the fingerprint of the configuration and inputs it came from.
    folders: those that hold the files of the result, `directory` among them:
      each gets a files.json of its own, so that one which may be shared says
      nothing of one which must not.
    data: the fingerprint of the data that it was made of, for `check_data`.
  """
  listed = []
  for folder in filter(os.path.isdir, map(pathlib.Path, folders)):
    files = file_lists.list_files(
      folder, but=functools.partial(_is_apart, digest)
    )
    if files:
      stores.push(*(folder / name for name in files))
      content = sealed({"fingerprint": digest, "files": files})
      write_atomically(folder / FILES_NAME, _text(content))
      listed.append(os.path.relpath(folder, directory))
  content = {"fingerprint": digest, "result": to_json(result)}
  if listed:
    content["listed"] = listed
  if data:
    content["data"] = data
  path = pathlib.Path(directory) / RESULT_NAME
  write_atomically(path, _text(sealed(content)))


def _text(content: Any) -> str:
  return json.dumps(content, indent=1, sort_keys=True) + "\n"


def fingerprint_in(name: str) -> str | None:
  """Returns the fingerprint in a file's name, None if it holds none."""
  found = _FINGERPRINT.search(name)
  return found and found[1]


def _is_apart(digest: str, path: pathlib.Path) -> bool:
  """Says whether something in a folder is no part of this finished result."""
  named = fingerprint_in(path.name)
  if named and (named != digest or path.name.startswith(UNFINISHED)):
    return True
  if path.is_dir():
    return (path / RESULT_NAME).exists()
  return path.name in (RESULT_NAME, FILES_NAME)


def check(
  directory: str | os.PathLike, *, everywhere: bool = True, here: bool = True
) -> None:
  """Refuses a finished result whose files are not those that were written.

  Contents are compared up to 1 GiB a file, and sizes of larger ones. Results of
  older versions, which list no files, pass.

  Args:
    directory: of the result.
    everywhere: whether its files in other folders count; not where the folder
      alone was handed on.
    here: whether the folder's own files count.

  Raises:
    ValueError: naming the file and the folder to delete.
  """
  directory = pathlib.Path(directory)
  content = read_json(directory / RESULT_NAME)
  hint = (
    f"restore it, or delete {directory}, and it is made again (a private"
    " training as one more release)"
  )
  for place in content.get("listed", ()):
    if not (here if place == "." else everywhere):
      continue
    folder = pathlib.Path(os.path.normpath(directory / place))
    path = folder / FILES_NAME
    if not path.exists():
      raise ValueError(
        f"{path}: expected what was written, got no file: {hint}"
      )
    found = read_json(path)
    if found.get("fingerprint") != content["fingerprint"]:
      raise ValueError(
        f"{path}: expected the files of the result, got those of another: {hint}"
      )
    file_lists.check_files(folder, found["files"], hint)


def check_data(directory: str | os.PathLike, data: str | os.PathLike) -> None:
  """Refuses a result of other data than lies there now.

  Results of older versions, which do not say what they were made of, pass.

  Args:
    directory: of the result.
    data: of the prepared data.

  Raises:
    ValueError: if the data were prepared anew, with other settings, since.
  """
  made_of = read_json(pathlib.Path(directory) / RESULT_NAME).get("data")
  if made_of and made_of != read_fingerprint(data):
    raise ValueError(
      f"{directory}: expected the data that it was made of in {data}, got data"
      " prepared with other settings or by another version: repeat `synthq run`"
      " with those of this result, or with the new ones, which makes it again (a"
      " private training as one more release)"
    )


def read_fingerprint(directory: str | os.PathLike) -> str | None:
  """Returns the fingerprint of a finished result, or None if unfinished."""
  path = pathlib.Path(directory) / RESULT_NAME
  return _read(path)["fingerprint"] if path.exists() else None


def find(
  directory: str | os.PathLike, kind: type[_Result], digest: str
) -> _Result | None:
  """Returns the finished result of a fingerprint, or None if there is none.

  Args:
    directory: where it would lie.
    kind: the dataclass that it would be.
    digest: the fingerprint.
  """
  is_same = read_fingerprint(directory) == digest
  return load(directory, kind) if is_same else None


def load(directory: str | os.PathLike, kind: type[_Result]) -> _Result:
  """Reads the result of a finished stage.

  Args:
    directory: the stage's directory.
    kind: the dataclass that was saved; nested dataclasses are read through
      the classes that `kind`'s module can see.

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
  return from_json(kind, data)


def load_kind(directory: str | os.PathLike) -> str:
  """Returns the name of the dataclass of a finished result; "": none is there.

  Args:
    directory: the stage's directory.

  Raises:
    ValueError: if it is damaged.
  """
  path = pathlib.Path(directory) / RESULT_NAME
  return _read(path)["result"].get("_type", "") if path.is_file() else ""


def read_json(path: str | os.PathLike) -> dict[str, Any]:
  """Reads a file that holds what `sealed` made, or an object without checksum.

  Args:
    path: the file.

  Raises:
    OSError: if it cannot be read.
    ValueError: naming it, if it is damaged.
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
  """Builds a dataclass from what `to_json` made of it.

  Args:
    kind: the dataclass; nested ones are read through the types of its fields.
    data: a mapping. Names that the class does not have are ignored, but a class
      with a true `IS_STRICT` refuses those with a value.

  Returns:
    An instance of `kind`.

  Raises:
    ValueError: if a field is missing, or refused.
  """
  if not isinstance(data, dict):
    raise ValueError(
      f"expected a {kind.__name__}, got {data!r}: use the version that wrote it, or"
      " another folder"
    )
  known = hints(kind)
  others = {k for k, v in data.items() if v is not None} - {*known, "_type"}
  if others and getattr(kind, "IS_STRICT", False):
    raise ValueError(
      f"{kind.__name__}: unknown {min(others)!r}: use the version that wrote it"
    )
  values = {
    name: _convert(known[name], value)
    for name, value in data.items()
    if name in known
  }
  try:
    return kind(**values)
  except TypeError as error:
    raise ValueError(
      f"expected the fields of a {kind.__name__}, got a result of another"
      f" version ({error}): delete its folder"
    ) from error


@functools.cache
def hints(kind: type) -> dict[str, Any]:
  """Returns the types of a dataclass's fields; none where they are unknown."""
  try:
    found = typing.get_type_hints(kind)
  except NameError:  # a name that only a type checker imports
    return {}
  return {field.name: found[field.name] for field in dataclasses.fields(kind)}


def _convert(hint: Any, value: Any) -> Any:
  """Reads one JSON value as the type `hint`."""
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
