"""Files of a folder: which there are, that they are on disk, who holds a lock."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = [
  "below",
  "check_files",
  "list_files",
  "locked",
  "naming",
  "sync",
  "sync_names",
]

_HASHED = 1 << 30
"""Bytes up to which a file's content is compared; above that its size is."""


def below(folder: str | os.PathLike) -> list[pathlib.Path]:
  """Returns all files below a folder, sorted; links are followed.

  Args:
    folder: where to look; without one there are none.
  """
  walked = os.walk(folder, followlinks=True)
  paths = (pathlib.Path(at, name) for at, _, names in walked for name in names)
  return sorted(path for path in paths if path.is_file())


def list_files(
  folder: str | os.PathLike,
  *,
  but: Callable[[pathlib.Path], bool] = lambda path: False,
) -> dict[str, list[Any]]:
  """Returns the files below a folder: for each its size and SHA-256, or "".

  All of them are on disk then, under their names: what lists them may say that
  they are complete.

  Args:
    folder: where to look; hidden files are left out.
    but: says which files and folders are left out, too.
  """
  folder, files = pathlib.Path(folder), {}
  for path in sorted(folder.iterdir()):
    if path.name.startswith(".") or but(path):
      continue
    if path.is_dir():
      inside = list_files(path, but=but)
      files.update({f"{path.name}/{k}": one for k, one in inside.items()})
    else:
      with naming(path), path.open("rb") as stream:
        os.fsync(stream.fileno())
      files[path.name] = [path.stat().st_size, _sha256(path)]
  sync(folder)
  return files


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Has an error name its file: a full disk does not say which.

  Args:
    path: the file.
  """
  try:
    yield
  except OSError as error:
    if error.errno is not None and not error.filename:
      error.filename = os.fspath(path)
    raise


def sync(folder: str | os.PathLike) -> None:
  """Has a folder's names on disk, in the order in which they appeared.

  Args:
    folder: not every file system knows how, and not every folder lets us.
  """
  with contextlib.suppress(OSError):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def sync_names(path: str | os.PathLike) -> None:
  """Has a file found after a loss of power: its name, and those of its folders.

  A folder that was just made is lost with all that it holds until the folder
  above it is on disk.

  Args:
    path: the file, whose content is on disk.
  """
  for folder in pathlib.Path(path).absolute().parents:
    sync(folder)
    if os.path.ismount(folder):
      break


def _sha256(path: pathlib.Path) -> str:
  if path.stat().st_size > _HASHED:
    return ""
  with path.open("rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def check_files(
  folder: pathlib.Path, files: Mapping[str, Sequence[Any]], hint: str
) -> None:
  """Refuses files that are not what `list_files` has seen.

  Args:
    folder: where they lie; more files may lie there.
    files: from `list_files`.
    hint: ends the message: what to do.

  Raises:
    ValueError: naming the first file that is missing or changed.
  """
  for name, (size, digest) in files.items():
    path = folder / name
    if not path.is_file():
      raise ValueError(
        f"{path}: expected what was written, got no file: {hint}"
      )
    found = path.stat().st_size
    if found != size:
      raise ValueError(
        f"{path}: expected the {size:,} bytes that were written, got"
        f" {found:,}: {hint}"
      )
    if digest and _sha256(path) != digest:
      raise ValueError(
        f"{path}: expected what was written, got another content: {hint}"
      )


@contextlib.contextmanager
def locked(
  path: pathlib.Path, refusal: Callable[[str], str], *, waits: bool = False
) -> Iterator[IO[str]]:
  """Holds a lock that other processes of this machine cannot hold.

  The lock is the operating system's: it ends with the process, however that
  ends, so nothing has to be cleaned up after a kill.

  Args:
    path: a file; made if it is not there.
    refusal: from what the file says of its holder, "another process" if nothing,
      to the message of the error.
    waits: whether to wait for another process instead.

  Yields:
    The file, to write who holds it.

  Raises:
    ValueError: if another process holds it.
  """
  with open(path, "a+") as stream:
    try:
      fcntl.flock(stream, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError as error:
      stream.seek(0)
      who = stream.read().strip() or "another process"
      raise ValueError(refusal(who)) from error
    yield stream
