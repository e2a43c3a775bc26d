"""Lists, syncs, compares and locks the files of a folder."""

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
"""Size in bytes up to which a file is compared by content, not by size
alone."""


def below(folder: str | os.PathLike) -> list[pathlib.Path]:
  """Returns all files below a folder, sorted; links are followed.

  Args:
    folder: the folder; a missing one has no files.
  """
  walked = os.walk(folder, followlinks=True)
  paths = (pathlib.Path(at, name) for at, _, names in walked for name in names)
  return sorted(path for path in paths if path.is_file())


def list_files(
  folder: str | os.PathLike,
  *,
  but: Callable[[pathlib.Path], bool] = lambda path: False,
) -> dict[str, list[Any]]:
  """Syncs the files below a folder to disk and returns them.

  Args:
    folder: the folder; hidden files and folders are left out.
    but: returns True for other files and folders to leave out.

  Returns:
    [size in bytes, SHA-256] by path below the folder; the digest of a file
    above 1 GiB is "".
  """
  folder, files = pathlib.Path(folder), {}
  for path in sorted(folder.iterdir()):
    if path.name.startswith(".") or but(path):
      continue
    if path.is_dir():
      inside = list_files(path, but=but)
      files.update({f"{path.name}/{k}": entry for k, entry in inside.items()})
    else:
      with naming(path), path.open("rb") as stream:
        os.fsync(stream.fileno())
      files[path.name] = [path.stat().st_size, _compute_sha256(path)]
  sync(folder)
  return files


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Adds a file's name to an OSError without one, such as that of a full disk.

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
  """Syncs the names in a folder to disk, if the file system and folder allow
  it.
  """
  with contextlib.suppress(OSError):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def sync_names(path: str | os.PathLike) -> None:
  """Syncs the names of a file and of its parent folders to disk.

  A power loss deletes a new folder and its files unless the parent folder is on
  disk, too.

  Args:
    path: the file, whose content is on disk already.
  """
  for folder in pathlib.Path(path).absolute().parents:
    sync(folder)
    if os.path.ismount(folder):
      break


def _compute_sha256(path: pathlib.Path) -> str:
  if path.stat().st_size > _HASHED:
    return ""
  with path.open("rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def check_files(
  folder: pathlib.Path, files: Mapping[str, Sequence[Any]], hint: str
) -> None:
  """Refuses files that differ from a list of `list_files`.

  Args:
    folder: the folder of the files; it may hold other files, too.
    files: [size, digest] by path below the folder, from `list_files`.
    hint: the end of the message, which tells the user what to do.

  Raises:
    ValueError: naming the first file that is missing or changed.
  """
  for name, (size, digest) in files.items():
    path = folder / name
    if not path.is_file():
      raise ValueError(
        f"{path}: expected the file as written, got no file: {hint}"
      )
    found_size = path.stat().st_size
    if found_size != size:
      raise ValueError(
        f"{path}: expected the {size:,} bytes that were written, got"
        f" {found_size:,}: {hint}"
      )
    if digest and _compute_sha256(path) != digest:
      raise ValueError(
        f"{path}: expected the content as written, got another: {hint}"
      )


@contextlib.contextmanager
def locked(
  path: pathlib.Path, refusal: Callable[[str], str], *, waits: bool = False
) -> Iterator[IO[str]]:
  """Locks a file against the other processes of this machine.

  The operating system releases the lock when the process ends, so that a kill
  leaves nothing to clean up.

  Args:
    path: the lock file; it is created if it is missing.
    refusal: turns the holder's name in the file, or "another process" if there
      is none, into the error message.
    waits: whether to wait for another process instead of raising.

  Yields:
    The file, into which the holder may write its name.

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
