"""What files a folder holds, with sizes and digests, and whether it still does."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["check_files", "list_files"]

_HASHED = 1 << 30
"""Bytes up to which a file's content is compared; above that its size is."""


def list_files(
  folder: str | os.PathLike,
  *,
  but: Callable[[pathlib.Path], bool] = lambda path: False,
) -> dict[str, list[Any]]:
  """Returns the files below a folder: for each its size and SHA-256, or "".

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
      files[path.name] = [path.stat().st_size, _sha256(path)]
  return files


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
