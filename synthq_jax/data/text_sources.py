"""Public text that a manifest names: fetched once, read into entries.

The manifest lists for each source its name, version, licence and files, so that
the text of a checkpoint can be made again without being stored. A source is
fetched by the client of its own home (git, pip, apt-get). Nothing is imported;
pip itself runs the build backend of a source distribution for its metadata.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator

from synthq_jax import artifacts
from synthq_jax.data import open_text

__all__ = ["Source", "entries", "fetch", "manifest"]

_SKIPPED = re.compile(
  r"(^|[/_])(tests?|testing|_vendor|vendored|third_party|releases?|whatsnew"
  r"|changelog|changes|news|history|node_modules|zh|ja|fr|de|es|pt|ru|ko|it)"
  r"([/_.]|$)",
  re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Where some text comes from, and under what licence."""

  name: str
  """"github:OWNER/NAME", "sdist:NAME" and "wheel:NAME" (of the package index),
  "debian:NAME", or "folder:PATH" for text of one's own."""
  version: str
  """A commit, or a version; not used for a folder."""
  licence: str
  """SPDX names where there are any."""
  files: tuple[tuple[str, str], ...]
  """(glob, reader): which files, and a key of `open_text.READERS`."""

  def __post_init__(self):
    kind = self.name.partition(":")[0]
    if kind not in ("github", "sdist", "wheel", "debian", "folder"):
      raise ValueError(
        "Source.name must start with github:, sdist:, wheel:, debian: or"
        f" folder:, got {self.name!r}"
      )
    for _, reader in self.files:
      if reader not in open_text.READERS:
        raise ValueError(
          f"{self.name}: expected a reader among"
          f" {sorted(open_text.READERS)}, got {reader!r}"
        )


def manifest(path: str | os.PathLike) -> list[Source]:
  """Reads the list of sources from a JSON file."""
  rows = json.loads(pathlib.Path(path).read_text())
  return [
    Source(**row | {"files": tuple(map(tuple, row["files"]))}) for row in rows
  ]


def entries(
  source: Source, store: str | os.PathLike
) -> Iterator[open_text.Entry]:
  """Yields what a source's files hold, in the order of their names.

  Left out are translations, tests, lists of changes, and files that a reader
  cannot take in.

  Args:
    source: what to read.
    store: the folder for what was fetched.

  Raises:
    ValueError: if the source cannot be fetched.
  """
  root, seen = fetch(source, store), set()
  for pattern, reader in source.files:
    for path in sorted(root.glob(pattern)):
      inside = path.relative_to(root).as_posix()
      if path in seen or not path.is_file() or _SKIPPED.search(inside):
        continue
      seen.add(path)
      try:
        yield from open_text.READERS[reader](path)
      except (AttributeError, LookupError, SyntaxError, ValueError):
        print(f"[pretrain] {source.name}: cannot read {inside}, left out")


def fetch(source: Source, store: str | os.PathLike) -> pathlib.Path:
  """Returns the folder that holds a source, which is fetched where it is not.

  Args:
    source: what to fetch.
    store: holds one folder for each source and version.

  Raises:
    ValueError: with what the client said, if it fails.
  """
  kind, _, name = source.name.partition(":")
  if kind == "folder":
    return pathlib.Path(name)
  place = f"{kind}+{name.replace('/', '+')}+{source.version}"
  target = pathlib.Path(store) / re.sub(r"[^\w.+-]", "_", place)
  if not target.exists():
    with artifacts.new_folder(target, "text source") as folder:
      {
        "github": _clone, "sdist": _download, "wheel": _download,
        "debian": _unpack_debian,
      }[kind](kind, name, source.version, folder)  # fmt: skip
  return target


def _run(*command: str, folder: pathlib.Path) -> None:
  result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
  if result.returncode:
    said = (result.stderr.strip() or "nothing").splitlines()[-1]
    raise ValueError(f"{' '.join(command[:3])}... failed: {said}")


def _clone(kind, name, version, folder) -> None:
  del kind
  _run("git", "init", "-q", folder=folder)
  url = f"https://github.com/{name}"
  _run("git", "fetch", "-q", "--depth=1", url, version, folder=folder)
  _run("git", "checkout", "-q", "FETCH_HEAD", folder=folder)
  shutil.rmtree(folder / ".git")


def _download(kind, name, version, folder) -> None:
  form = ("--no-binary" if kind == "sdist" else "--only-binary", ":all:")
  _run(
    sys.executable, "-m", "pip", "download", "-q", "--no-deps",
    "--no-build-isolation", *form, f"{name}=={version}", folder=folder,
  )  # fmt: skip
  archive = _only_file(folder)
  if kind == "sdist":
    with tarfile.open(archive) as packed:
      packed.extractall(folder, filter="data")
  else:
    with zipfile.ZipFile(archive) as packed:
      packed.extractall(folder)
  archive.unlink()


def _only_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns what was downloaded, beside the lock of `artifacts.new_folder`."""
  [archive] = (x for x in folder.iterdir() if not x.name.startswith("."))
  return archive


def _unpack_debian(kind, name, version, folder) -> None:
  del kind
  _run("apt-get", "download", "-q", f"{name}={version}", folder=folder)
  archive = _only_file(folder)
  _run("dpkg-deb", "-x", archive.name, ".", folder=folder)
  archive.unlink()
