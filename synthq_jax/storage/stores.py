"""Mirrors a bucket prefix to a local folder and uploads files written to it.

All other modules read and write local files. `mirrored` opens the mirror of a
URL. When `artifacts` writes or removes a file in it, the bucket is updated before
the call returns, so that objects appear in the order in which files do. An object
is complete or absent. A store has no folders, file modes or locks, so that

- a lease admits one run at a time: numbered objects, each created only if absent,
  renewed by their owner and never deleted (`object_store.Lease`);
- the ledger, to which runs only append, has one such object for each addition;
- a secret is created only if absent, and needs the user's consent
  (`check_secret`).

The store may be any file system of fsspec that can create an object only if there
is none. `etils.epath` lacks that, reports no digests, and knows fewer file systems.
"""

import contextlib
import errno
import functools
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures

from synthq_jax.storage import file_lists, object_store

__all__ = [
  "add",
  "as_urls",
  "get_url",
  "check_secret",
  "has",
  "keep_in",
  "local",
  "mirrored",
  "push",
  "remove",
]

_ADDED = re.compile(r"(.+)\.lines/(\d{6})")
_LEASE = "SYNTHQ_LEASE_SECONDS"
_THREADS = 16


class _Mirror:
  """Keeps a store equal to a local folder."""

  def __init__(
    self, store: object_store.Store, root: pathlib.Path, *, has_consent: bool
  ):
    self.store, self.root, self.has_consent = store, root, has_consent
    self.lease = object_store.Lease(store, float(os.environ.get(_LEASE, "30")))
    self._states: dict[str, tuple[int, ...]] = {}

  def download(self) -> None:
    """Downloads the store into the folder."""
    names = _download(self.store, self.root)
    self._states = {name: _get_state(self.root / name) for name in names}

  def name(self, path: pathlib.Path) -> str:
    return path.relative_to(self.root).as_posix()

  def push(self, path: pathlib.Path, *, is_new: bool) -> None:
    name, state = self.name(path), _get_state(path)
    if self._states.get(name) == state or "/." in f"/{name}":
      return
    self.lease.check()
    if not is_new:
      self.store.put(path, name)
    elif not self.store.create(name, path.read_bytes()):
      path.unlink()
      raise _make_stale_error(f"{self.store.url}/{name}")
    self._states[name] = state

  def remove(self, path: pathlib.Path) -> None:
    name = self.name(path)
    names = {n for n in self._states if n == name or n.startswith(f"{name}/")}
    if names:
      self.lease.check()
      _run_in_threads(self.store.delete, [(n,) for n in sorted(names)])
      for name in names:
        del self._states[name]

  def add(self, path: pathlib.Path, content: bytes) -> None:
    self.lease.check()
    prefix = f"{self.name(path)}.lines/"
    number = 1 + sum(name.startswith(prefix) for name in self._states)
    name = f"{prefix}{number:06}"
    if not self.store.create(name, content):
      raise _make_stale_error(f"{self.store.url}/{name}")
    self._states[name] = ()


def _get_state(path: pathlib.Path) -> tuple[int, ...]:
  """Returns (inode, size, mtime), which detects a change; () for a missing
  file."""
  try:
    about = path.stat()
  except FileNotFoundError:
    return ()
  return about.st_ino, about.st_size, about.st_mtime_ns


def _make_stale_error(url: str) -> OSError:
  words = "another run has written this in the meantime"
  return OSError(errno.ESTALE, words, url)


_mirrors: list[_Mirror] = []
_mirrors_folder: pathlib.Path | None = None
_urls: dict[str, str] = {}
"""URLs by the folders of their mirrors."""


def _find_mirror(
  path: str | os.PathLike,
) -> tuple[_Mirror | None, pathlib.Path]:
  path = pathlib.Path(path).absolute()
  mirrors = (m for m in _mirrors if path.is_relative_to(m.root))
  return next(mirrors, None), path


def has(path: str | os.PathLike) -> bool:
  """Returns True if this path lies in the mirror of a store."""
  return _find_mirror(path)[0] is not None


def push(*paths: str | os.PathLike, is_new: bool = False) -> None:
  """Uploads complete files to the store that mirrors their folder, if any.

  Args:
    *paths: files in any order; files unchanged since the last upload are
      skipped, and so are hidden files and files of hidden folders.
    is_new: whether to refuse to replace an object.

  Raises:
    OSError: if the upload fails, or another run holds the store.
  """
  each = [(mirror, path) for mirror, path in map(_find_mirror, paths) if mirror]
  _run_in_threads(lambda mirror, path: mirror.push(path, is_new=is_new), each)


def add(path: str | os.PathLike, content: bytes) -> None:
  """Uploads an addition to a file as its own object, if a store mirrors the file.

  Formal guarantee: a run never overwrites another run's addition, even if it has
  lost the store and does not know that yet. Each addition has a number, and its
  object is created only if there is none.
  Assumed: the store creates only if absent, which is tested when it is opened.

  Args:
    path: the local file, which has the addition already.
    content: the addition.

  Raises:
    OSError: if another run has made an addition since this run began.
  """
  mirror, path = _find_mirror(path)
  if mirror is not None:
    mirror.add(path, content)


def remove(path: str | os.PathLike) -> None:
  """Deletes the objects of a file or folder, if a store mirrors it."""
  mirror, path = _find_mirror(path)
  if mirror is not None:
    mirror.remove(path)


def check_secret(path: str | os.PathLike) -> None:
  """Refuses a secret in a store unless the user has agreed to keep it there.

  Args:
    path: the file of the secret, which need not exist.

  Raises:
    ValueError: naming the flag by which a user agrees.
  """
  mirror, path = _find_mirror(path)
  if mirror is not None and not mirror.has_consent:
    raise ValueError(
      f"{mirror.store.url}/{mirror.name(path)}: expected a secret that only its"
      " owner may read, got a bucket, where file modes mean nothing and anyone"
      " who may read it can undo the privacy: agree with --private_in_bucket"
    )


def get_url(path: str | os.PathLike) -> str:
  """Returns the URL whose copy a path is; "" for a path of this machine alone."""
  absolute = pathlib.Path(path).resolve()
  for folder, url in _urls.items():
    root = pathlib.Path(folder).resolve()
    if absolute.is_relative_to(root):
      below = absolute.relative_to(root).as_posix()
      return url if below == "." else f"{url}/{below}"
  return ""


def as_urls(text: str) -> str:
  """Replaces the folders of mirrors in a text by their URLs."""
  for folder, url in _urls.items():
    text = text.replace(folder, url)
  return text


def keep_in(folder: str | os.PathLike | None) -> None:
  """Sets the folder that keeps mirrors; None: a temporary one, deleted at
  exit."""
  global _mirrors_folder
  _mirrors_folder = None if folder is None else pathlib.Path(folder).absolute()


@functools.cache
def _make_scratch() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="synthq-mirror-")


def _make_folder(url: str, without: str = "") -> pathlib.Path:
  """Creates the folder for the mirror of a URL, which only its owner may enter.

  Args:
    url: the URL.
    without: pattern of the objects that this mirror lacks.
  """
  parent = (
    pathlib.Path(_make_scratch().name)
    if _mirrors_folder is None
    else _mirrors_folder
  )
  digest = hashlib.sha256(f"{url}{without}".encode()).hexdigest()[:12]
  # A BEIR set takes its name from its folder, sometimes with the parent folder.
  folder = parent.joinpath(digest, *url.rstrip("/").split("/")[-2:])
  folder.mkdir(parents=True, exist_ok=True)
  (parent / digest).chmod(0o700)
  _urls[os.fspath(folder)] = url.rstrip("/")
  return folder


@contextlib.contextmanager
def mirrored(
  url: str, *, private_in_bucket: bool = False
) -> Iterator[pathlib.Path]:
  """Mirrors a bucket prefix to a local folder and uploads files written to it.

  Args:
    url: the URL of the working directory.
    private_in_bucket: whether the user agrees to keep secrets in the store.

  Yields:
    The folder.

  Raises:
    ValueError: if another run holds the store, or the store cannot create an
      object only if absent.
    OSError: if the store cannot be reached.
  """
  with _lock_folder(url) as root:
    store = object_store.Store(url)
    mirror = _Mirror(store, root, has_consent=private_in_bucket)
    try:
      mirror.download()
      _mirrors.append(mirror)
      yield root
    finally:
      if mirror in _mirrors:
        _mirrors.remove(mirror)
      mirror.lease.release()


@contextlib.contextmanager
def _lock_folder(url: str) -> Iterator[pathlib.Path]:
  """Locks the mirror of a URL against other processes of this machine."""
  root = _make_folder(url)
  with file_lists.locked(
    root.with_name(f".{root.name}.lock"),
    lambda who: (
      f"{root}: expected a mirror of our own, got one that {who} of this machine"
      " uses: wait for it, or give another --mirror"
    ),
  ):
    yield root


@functools.cache
def local(
  text: str, *, missing_ok: bool = False, without: re.Pattern | None = None
) -> str:
  """Returns a local path; the objects under a URL are downloaded once.

  >>> local("data/scifact")
  'data/scifact'

  Args:
    text: a path, or the URL of an object or of a prefix.
    missing_ok: whether to return an empty folder if there is no object.
    without: pattern of object names, matched in full, that are not downloaded.

  Raises:
    OSError: if the store cannot be reached, or there is no object.
  """
  if not object_store.is_url(text):
    return text
  store = object_store.Store(text)
  root = _make_folder(text, "" if without is None else without.pattern)
  turns = root.with_name(
    f".{root.name}.turns.lock"
  )  # several processes of one run
  with (
    file_lists.locked(turns, str, waits=True),
    _lock_folder(text) as folder,
  ):
    names = _download(store, folder, without=without)
    if not names:  # a file stored as one object for each addition
      parent, _, name = store.url.rpartition("/")
      if _download(object_store.Store(parent), folder, below=f"{name}.lines"):
        names = {""}
  if not names and not missing_ok:
    raise FileNotFoundError(errno.ENOENT, "nothing lies there", text)
  return os.fspath(folder / folder.name if names == {""} else folder)


def _download(
  store: object_store.Store,
  root: pathlib.Path,
  *,
  below: str = "",
  without: re.Pattern | None = None,
) -> set[str]:
  """Makes a folder equal to a store; returns the names of the store's objects.

  A file whose content has the MD5 that the store reports is not downloaded
  again. Files without an object are deleted: a killed run has left them.
  """
  objects = {
    name: digest
    for name, digest in store.list(below).items()
    if not name.startswith(f"{object_store.LOCK}/")
    and not (without and without.fullmatch(name))
  }
  added: dict[str, list[str]] = {}
  for name in sorted(objects):
    if match := _ADDED.fullmatch(name):
      lines = added.setdefault(match[1], [])
      lines.append(name)
      if int(match[2]) != len(lines):
        raise ValueError(
          f"{store.url}/{match[1]}.lines/{len(lines):06}: expected the addition"
          " of this number, got no object: restore it"
        )
  whole_files = objects.keys() - {
    name for names in added.values() for name in names
  }
  files = {name: root / (name or root.name) for name in whole_files}
  wanted_paths = {root / name for name in added} | set(files.values())
  for path in sorted(root.rglob("*"), reverse=True):
    if path.is_dir():
      with contextlib.suppress(OSError):  # not empty
        path.rmdir()
    elif path not in wanted_paths:
      path.unlink()
  _run_in_threads(
    lambda name, path: _download_if_changed(store, name, path, objects[name]),
    list(files.items()),
  )
  for name, lines in added.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("wb" if name not in whole_files else "ab") as stream:
      stream.writelines(map(store.read, lines))
  return set(objects)


def _download_if_changed(
  store: object_store.Store, name: str, path: pathlib.Path, digest: str
) -> None:
  if not (digest and path.is_file() and _compute_md5(path) == digest):
    store.get(name, path)


def _compute_md5(path: pathlib.Path) -> str:
  with path.open("rb") as stream:
    return hashlib.file_digest(
      stream, functools.partial(hashlib.md5, usedforsecurity=False)
    ).hexdigest()


def _run_in_threads(call: Callable[..., None], each: list[tuple]) -> None:
  if len(each) < 2:
    for arguments in each:
      call(*arguments)
    return
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(lambda arguments: call(*arguments), each):
      pass
