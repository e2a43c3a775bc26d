"""Keeps a working directory in a bucket, through a mirror on this machine's disk.

Everything else reads and writes files. `mirrored` opens a folder that holds what
lies under a URL, and whatever `artifacts` then writes or removes there is put
into the bucket, or deleted from it, before the call returns: the order in which
files appear is the order in which objects do. An object is whole or not there;
a store has no folders, no file modes and no locks, so that

- one run at a time is a lease: numbered objects, each created only if absent,
  renewed by their owner and never deleted (`object_store.Lease`);
- what is only ever added to, the ledger, is one such object for each addition;
- a secret is created only if absent, and needs the user's word (`check_secret`).

Any file system of fsspec will do that creates an object only if there is none.
`etils.epath` has no such creation, tells no digest of an object, and knows fewer
file systems.
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
  """A folder of this machine, and the store that has to hold the same."""

  def __init__(
    self, store: object_store.Store, root: pathlib.Path, *, has_consent: bool
  ):
    self.store, self.root, self.has_consent = store, root, has_consent
    self.lease = object_store.Lease(store, float(os.environ.get(_LEASE, "30")))
    self._known: dict[str, tuple[int, ...]] = {}

  def pull(self) -> None:
    """Makes the folder equal to the store."""
    names = _pull(self.store, self.root)
    self._known = {name: _state(self.root / name) for name in names}

  def name(self, path: pathlib.Path) -> str:
    return path.relative_to(self.root).as_posix()

  def push(self, path: pathlib.Path, *, is_new: bool) -> None:
    name, state = self.name(path), _state(path)
    if self._known.get(name) == state or "/." in f"/{name}":
      return
    self.lease.check()
    if not is_new:
      self.store.put(path, name)
    elif not self.store.create(name, path.read_bytes()):
      path.unlink()
      raise _taken(f"{self.store.url}/{name}")
    self._known[name] = state

  def remove(self, path: pathlib.Path) -> None:
    name = self.name(path)
    own = {n for n in self._known if n == name or n.startswith(f"{name}/")}
    if own:
      self.lease.check()
      _side_by_side(self.store.delete, [(n,) for n in sorted(own)])
      for one in own:
        del self._known[one]

  def add(self, path: pathlib.Path, content: bytes) -> None:
    self.lease.check()
    prefix = f"{self.name(path)}.lines/"
    number = 1 + sum(name.startswith(prefix) for name in self._known)
    name = f"{prefix}{number:06}"
    if not self.store.create(name, content):
      raise _taken(f"{self.store.url}/{name}")
    self._known[name] = ()


def _state(path: pathlib.Path) -> tuple[int, ...]:
  """Returns what changes when a file does; () for one that is not there."""
  try:
    about = path.stat()
  except FileNotFoundError:
    return ()
  return about.st_ino, about.st_size, about.st_mtime_ns


def _taken(url: str) -> OSError:
  words = "another run has written this meanwhile"
  return OSError(errno.ESTALE, words, url)


_mirrors: list[_Mirror] = []
_place: pathlib.Path | None = None
_urls: dict[str, str] = {}
"""By the folders where they are mirrored."""


def _of(path: str | os.PathLike) -> tuple[_Mirror | None, pathlib.Path]:
  path = pathlib.Path(path).absolute()
  found = (one for one in _mirrors if path.is_relative_to(one.root))
  return next(found, None), path


def has(path: str | os.PathLike) -> bool:
  """Says whether a store holds what lies at this path."""
  return _of(path)[0] is not None


def push(*paths: str | os.PathLike, is_new: bool = False) -> None:
  """Puts files that are complete into the store that they belong to, if any.

  Args:
    *paths: in any order; those that have not changed since are left out, and
      hidden ones of the working directory stay here.
    is_new: whether the object must not be there yet.

  Raises:
    OSError: if the store did not take them, or another run holds it.
  """
  each = [(mirror, path) for mirror, path in map(_of, paths) if mirror]
  _side_by_side(lambda mirror, path: mirror.push(path, is_new=is_new), each)


def add(path: str | os.PathLike, content: bytes) -> None:
  """Adds to what a store holds of a file, as an object of its own, if any does.

  Formal guarantee: an addition that another run has made is never overwritten,
  also by one that no longer holds the store and does not know it yet: an
  addition has a number, and an object is created only if there is none.
  Assumed: the store creates only if absent, which is tried when it is opened.

  Args:
    path: the file, which has the addition already.
    content: the addition.

  Raises:
    OSError: if another run has added something since this one began.
  """
  mirror, path = _of(path)
  if mirror is not None:
    mirror.add(path, content)


def remove(path: str | os.PathLike) -> None:
  """Deletes what a store holds of a file or folder, if any does."""
  mirror, path = _of(path)
  if mirror is not None:
    mirror.remove(path)


def check_secret(path: str | os.PathLike) -> None:
  """Refuses a secret in a store to which the user has not agreed.

  Args:
    path: where the secret lies, or would.

  Raises:
    ValueError: naming the flag.
  """
  mirror, path = _of(path)
  if mirror is not None and not mirror.has_consent:
    raise ValueError(
      f"{mirror.store.url}/{mirror.name(path)}: expected a secret that its owner"
      " alone may read, got a bucket, where file modes mean nothing and whoever"
      " may read it can undo the privacy: agree with --private_in_bucket"
    )


def as_urls(text: str) -> str:
  """Returns a text with URLs in place of the folders where they are mirrored."""
  for folder, url in _urls.items():
    text = text.replace(folder, url)
  return text


def keep_in(place: str | os.PathLike | None) -> None:
  """Says where mirrors lie, and stay; None: in a folder that goes at the end."""
  global _place
  _place = None if place is None else pathlib.Path(place).absolute()


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="synthq-mirror-")


def _folder(url: str) -> pathlib.Path:
  """Returns the folder of a URL, which its owner alone may enter."""
  place = pathlib.Path(_scratch().name) if _place is None else _place
  digest = hashlib.sha256(url.encode()).hexdigest()[:12]
  # A BEIR set is called as its folder, some with the one above.
  folder = place.joinpath(digest, *url.rstrip("/").split("/")[-2:])
  folder.mkdir(parents=True, exist_ok=True)
  (place / digest).chmod(0o700)
  _urls[os.fspath(folder)] = url.rstrip("/")
  return folder


@contextlib.contextmanager
def mirrored(
  url: str, *, private_in_bucket: bool = False
) -> Iterator[pathlib.Path]:
  """Opens a folder that holds what lies under a URL; what is written there, too.

  Args:
    url: of the working directory.
    private_in_bucket: whether the user agrees that secrets lie in the store.

  Yields:
    The folder.

  Raises:
    ValueError: if another run holds the store, or it cannot create only if
      absent.
    OSError: if it cannot be reached.
  """
  with _own_folder(url) as root:
    store = object_store.Store(url)
    mirror = _Mirror(store, root, has_consent=private_in_bucket)
    try:
      mirror.pull()
      _mirrors.append(mirror)
      yield root
    finally:
      if mirror in _mirrors:
        _mirrors.remove(mirror)
      mirror.lease.release()


@contextlib.contextmanager
def _own_folder(url: str) -> Iterator[pathlib.Path]:
  """Keeps other processes of this machine out of the folder of a URL."""
  root = _folder(url)
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
  """Returns a path of this machine: what lies under a URL is downloaded once.

  >>> local("data/scifact")
  'data/scifact'

  Args:
    text: a path, or the URL of an object or of what lies below it.
    missing_ok: whether an empty folder will do where nothing lies there.
    without: names of objects, as a whole, that are not downloaded.

  Raises:
    OSError: if it cannot be reached, or nothing lies there.
  """
  if not object_store.is_url(text):
    return text
  store = object_store.Store(text)
  root = _folder(text)
  turns = root.with_name(f".{root.name}.turns.lock")  # of processes of one run
  with (
    file_lists.locked(turns, str, waits=True),
    _own_folder(text) as folder,
  ):
    names = _pull(store, folder, without=without)
    if not names:  # a file that is kept as what was added to it
      parent, _, name = store.url.rpartition("/")
      if _pull(object_store.Store(parent), folder, below=f"{name}.lines"):
        names = {""}
  if not names and not missing_ok:
    raise FileNotFoundError(errno.ENOENT, "nothing lies there", text)
  return os.fspath(folder / folder.name if names == {""} else folder)


def _pull(
  store: object_store.Store,
  root: pathlib.Path,
  *,
  below: str = "",
  without: re.Pattern | None = None,
) -> set[str]:
  """Makes a folder equal to a store; returns the names of its objects.

  A file is kept if its content is that of the object, by the MD5 that the store
  tells. Nothing else stays: it belongs to a run that was killed.
  """
  objects = {
    name: digest
    for name, digest in store.list(below).items()
    if not name.startswith(f"{object_store.LOCK}/")
    and not (without and without.fullmatch(name))
  }
  added: dict[str, list[str]] = {}
  for name in sorted(objects):
    if found := _ADDED.fullmatch(name):
      lines = added.setdefault(found[1], [])
      lines.append(name)
      if int(found[2]) != len(lines):
        raise ValueError(
          f"{store.url}/{found[1]}.lines/{len(lines):06}: expected what was"
          " added, got no object: restore it"
        )
  whole = objects.keys() - {name for names in added.values() for name in names}
  files = {name: root / (name or root.name) for name in whole}
  kept = {root / name for name in added} | set(files.values())
  for path in sorted(root.rglob("*"), reverse=True):
    if path.is_dir():
      with contextlib.suppress(OSError):  # not empty
        path.rmdir()
    elif path not in kept:
      path.unlink()
  _side_by_side(
    lambda name, path: _get(store, name, path, objects[name]),
    list(files.items()),
  )
  for name, lines in added.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("wb" if name not in whole else "ab") as stream:
      stream.writelines(map(store.read, lines))
  return set(objects)


def _get(
  store: object_store.Store, name: str, path: pathlib.Path, digest: str
) -> None:
  if not (digest and path.is_file() and _md5(path) == digest):
    store.get(name, path)


def _md5(path: pathlib.Path) -> str:
  with path.open("rb") as stream:
    return hashlib.file_digest(
      stream, functools.partial(hashlib.md5, usedforsecurity=False)
    ).hexdigest()


def _side_by_side(call: Callable[..., None], each: list[tuple]) -> None:
  if len(each) < 2:
    for arguments in each:
      call(*arguments)
    return
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(lambda arguments: call(*arguments), each):
      pass
