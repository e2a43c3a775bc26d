"""Keeps a working directory in a bucket, through a mirror on this machine's disk.

Everything else reads and writes files. `mirrored` opens a folder that holds what
lies under a URL, and whatever `artifacts` then writes or removes there is put
into the bucket, or deleted from it, before the call returns: the order in which
files appear is the order in which objects do. An object is whole or not there;
a store has no folders, no file modes and no locks, so that

- one run at a time is a lease: numbered objects, each created only if absent,
  renewed by their owner and never deleted (`_Lease`);
- what is only ever added to, the ledger, is one such object for each addition;
- a secret is created only if absent, and needs the user's word (`check_secret`).

Any file system of fsspec will do that creates an object only if there is none.
"""

import base64
import contextlib
import errno
import functools
import hashlib
import json
import os
import pathlib
import re
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

from synthq_jax import extras

__all__ = [
  "Store",
  "add",
  "as_urls",
  "check_secret",
  "has",
  "is_url",
  "keep_in",
  "local",
  "mirrored",
  "push",
  "remove",
]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")
_LOCK = ".lock"
_ADDED = re.compile(r"(.+)\.lines/(\d{6})")
_LEASE = "SYNTHQ_LEASE_SECONDS"
_THREADS = 16
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)  # runs while a machine sleeps


def is_url(text: str) -> bool:
  """Says whether a text names a store: SCHEME://PLACE.

  >>> is_url("gs://bucket/run"), is_url("beir:data"), is_url("runs/a")
  (True, False, False)
  """
  return bool(_URL.match(text))


class Store:
  """Objects under a URL, by name: "a/b" for URL/a/b.

  Args:
    url: of a file system that fsspec knows, e.g. "gs://bucket/run".

  Raises:
    ValueError: if there is no such file system.
    MissingExtraError: if its package is not installed.
  """

  def __init__(self, url: str):
    with extras.required("gcs"):
      import fsspec

    self.url = url.rstrip("/")
    try:
      self._files, self._root = fsspec.url_to_fs(
        self.url, use_listings_cache=False
      )
    except ImportError as error:
      words = "pip install 'synthq_jax[gcs]'" if url[:2] == "gs" else str(error)
      raise extras.MissingExtraError(f"{url}: {words}") from error
    except ValueError as error:
      raise ValueError(f"{url}: {error}") from error

  def list(self, below: str = "") -> dict[str, str]:
    """Returns the MD5 of each object by name; "" where the store has none.

    Args:
      below: only names that begin with this and "/".
    """
    self._files.invalidate_cache()
    place = "/".join(filter(None, (self._root, below)))
    with self._explained(below):
      try:
        found = self._files.find(place, detail=True)
      except FileNotFoundError:
        return {}
    return {
      path[len(self._root) :].lstrip("/"): _md5_said(about)
      for path, about in found.items()
      if about.get("type") != "directory" and not path.endswith("/")
    }

  def read(self, name: str) -> bytes:
    """Returns the content of an object."""
    with self._explained(name):
      return self._files.cat_file(self._path(name))

  def get(self, name: str, path: pathlib.Path) -> None:
    """Downloads an object into a file that its owner alone may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.partial")
    with self._explained(name):
      self._files.get_file(self._path(name), os.fspath(partial))
    partial.chmod(0o600)
    os.replace(partial, path)

  def put(self, path: pathlib.Path, name: str) -> None:
    """Writes an object, or replaces it: others see the old or the new one."""
    with self._explained(name):
      self._files.put_file(os.fspath(path), self._path(name))

  def create(self, name: str, content: bytes) -> bool:
    """Writes an object unless there is one; says whether it did."""
    with self._explained(name):
      try:
        self._files.pipe_file(self._path(name), content, mode="create")
      except FileExistsError:
        # The first answer may have been lost, and the request made again.
        return self.read(name) == content
    return True

  def write(self, name: str, content: bytes) -> None:
    """Writes an object, or replaces it."""
    with self._explained(name):
      self._files.pipe_file(self._path(name), content)

  def delete(self, name: str) -> None:
    """Deletes an object, which need not be there."""
    with self._explained(name), contextlib.suppress(FileNotFoundError):
      self._files.rm_file(self._path(name))

  def _path(self, name: str) -> str:
    return f"{self._root}/{name}" if name else self._root

  @contextlib.contextmanager
  def _explained(self, name: str) -> Iterator[None]:
    """Names the object; what is no error of a file may pass, as a connection."""
    try:
      yield
    except Exception as error:  # each file system has errors of its own
      if isinstance(error, FileNotFoundError) or getattr(error, "errno", None):
        raise
      words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
      number = errno.EACCES if "orbidden" in words else errno.EIO
      raise OSError(number, words, f"{self.url}/{name}") from error


def _md5_said(about: dict[str, Any]) -> str:
  """Returns the MD5 in what a store says of an object: GCS's words, or S3's."""
  if said := about.get("md5Hash"):
    return base64.b64decode(said).hex()
  tag = str(about.get("ETag") or about.get("etag") or "").strip('"')
  return tag if re.fullmatch("[0-9a-f]{32}", tag) else ""


def _md5(path: pathlib.Path) -> str:
  with path.open("rb") as stream:
    return hashlib.file_digest(
      stream, functools.partial(hashlib.md5, usedforsecurity=False)
    ).hexdigest()


def _clock() -> float:
  return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class _Lease:
  """Holds a store for one run, until it is released or not renewed in time.

  The holder is whoever created the object of the highest number. It writes that
  object again and again; whoever finds it unchanged for two leases, by a clock
  of its own, creates the next number, which only one can. A holder that could
  not renew for one lease puts nothing before it has looked for a higher number.
  """

  def __init__(self, store: Store, seconds: float):
    self._store, self._seconds = store, seconds
    self._beats, self._is_lost, self._ended = 0, False, threading.Event()
    self._token = uuid.uuid4().hex
    self._number = self._take()
    self._guard = threading.Lock()
    self._thread = threading.Thread(target=self._keep, daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Refuses to go on for a run that holds the store no more.

    Raises:
      OSError: if another run has taken it, or the store cannot be asked.
    """
    if not self._is_lost and _clock() - self._renewed_at > self._seconds:
      self._renew()
    if self._is_lost:
      raise OSError(
        errno.ESTALE,
        "the lease was not renewed in time, and another run has taken over",
        self._store.url,
      )

  def release(self) -> None:
    """Leaves the store to others."""
    self._ended.set()
    self._thread.join()
    if not self._is_lost:
      with contextlib.suppress(OSError):  # then it runs out
        self._store.write(self._name(self._number), self._content(free=True))

  def _take(self) -> int:
    last = self._last()
    while True:
      if last:
        self._wait_for(last)
      self._renewed_at = _clock()
      if self._store.create(self._name(last + 1), self._content()):
        break
      raise self._held(last + 1)
    if self._store.create(self._name(last + 1), b"another"):
      raise ValueError(
        f"{self._store.url}: expected a file system that creates an object only"
        " if there is none, got one that wrote over it: one run at a time and"
        " the ledger need that"
      )
    return last + 1

  def _wait_for(self, number: int) -> None:
    """Returns once a lock is free or was not renewed for two of its leases."""
    seen, since = self._store.read(self._name(number)), _clock()
    about = json.loads(seen)
    if about["free"]:
      return
    print(
      f"{self._store.url} was last held by {about['owner']}: waiting at most"
      f" {2 * about['lease']:.0f} s to see whether that still runs",
      file=sys.stderr,
    )
    while _clock() - since <= 2 * about["lease"]:
      time.sleep(about["lease"] / 10)
      now = self._store.read(self._name(number))
      if json.loads(now)["free"]:
        return
      if now != seen:
        raise self._held(number)

  def _held(self, number: int) -> ValueError:
    who = json.loads(self._store.read(self._name(number)))["owner"]
    return ValueError(
      f"{self._store.url}: expected a working directory of our own, got one that"
      f" {who} uses: wait for it, or give another --workdir"
    )

  def _keep(self) -> None:
    while not self._is_lost and not self._ended.wait(self._seconds / 3):
      with contextlib.suppress(OSError):  # asked again before anything is put
        self._renew()

  def _renew(self) -> None:
    with self._guard:
      began = _clock()
      self._beats += 1
      self._store.write(self._name(self._number), self._content())
      if self._last() > self._number:
        self._is_lost = True
      else:
        self._renewed_at = began

  def _last(self) -> int:
    names = self._store.list(_LOCK)
    return max((int(n.rpartition("/")[2]) for n in names), default=0)

  def _name(self, number: int) -> str:
    return f"{_LOCK}/{number:06}"

  def _content(self, *, free: bool = False) -> bytes:
    about = {
      "owner": f"process {os.getpid()} on {socket.gethostname()}",
      "token": self._token,
      "lease": self._seconds,
      "beat": self._beats,
      "free": free,
    }
    return json.dumps(about).encode()


class _Mirror:
  """A folder of this machine, and the store that has to hold the same."""

  def __init__(self, store: Store, root: pathlib.Path, *, has_consent: bool):
    self.store, self.root, self.has_consent = store, root, has_consent
    self.lease = _Lease(store, float(os.environ.get(_LEASE, "30")))
    self._names: set[str] = set()

  def pull(self) -> None:
    """Makes the folder equal to the store."""
    self._names = _pull(self.store, self.root)

  def name(self, path: pathlib.Path) -> str:
    return path.relative_to(self.root).as_posix()

  def push(self, paths: Iterable[pathlib.Path], *, is_new: bool) -> None:
    for path in paths:
      self.lease.check()
      name = self.name(path)
      if not is_new:
        self.store.put(path, name)
      elif not self.store.create(name, path.read_bytes()):
        path.unlink()
        raise _taken(f"{self.store.url}/{name}")
      self._names.add(name)

  def remove(self, path: pathlib.Path) -> None:
    name = self.name(path)
    own = {n for n in self._names if n == name or n.startswith(f"{name}/")}
    if own:
      self.lease.check()
      _side_by_side(self.store.delete, [(n,) for n in sorted(own)])
      self._names -= own

  def add(self, path: pathlib.Path, content: bytes) -> None:
    self.lease.check()
    prefix = f"{self.name(path)}.lines/"
    number = 1 + sum(name.startswith(prefix) for name in self._names)
    name = f"{prefix}{number:06}"
    if not self.store.create(name, content):
      raise _taken(f"{self.store.url}/{name}")
    self._names.add(name)


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
    *paths: of one folder, in any order; hidden files stay here.
    is_new: whether the object must not be there yet.

  Raises:
    OSError: if the store did not take them, or another run holds it.
  """
  for path in paths:
    mirror, path = _of(path)
    if mirror is not None and not path.name.startswith("."):
      mirror.push([path], is_new=is_new)


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
  mirror = _Mirror(Store(url), _folder(url), has_consent=private_in_bucket)
  try:
    mirror.pull()
    _mirrors.append(mirror)
    yield mirror.root
  finally:
    if mirror in _mirrors:
      _mirrors.remove(mirror)
    mirror.lease.release()


@functools.cache
def local(text: str) -> str:
  """Returns a path of this machine: what lies under a URL is downloaded once.

  >>> local("data/scifact")
  'data/scifact'

  Args:
    text: a path, or the URL of an object or of what lies below it.

  Raises:
    OSError: if it cannot be reached, or nothing lies there.
  """
  if not is_url(text):
    return text
  store, folder = Store(text), _folder(text)
  names = _pull(store, folder)
  if not names:  # a file that is kept as what was added to it
    parent, _, name = store.url.rpartition("/")
    if _pull(Store(parent), folder, below=f"{name}.lines"):
      names = {""}
  if not names:
    raise FileNotFoundError(errno.ENOENT, "nothing lies there", text)
  return os.fspath(folder / folder.name if names == {""} else folder)


def _pull(store: Store, root: pathlib.Path, *, below: str = "") -> set[str]:
  """Makes a folder equal to a store; returns the names of its objects.

  A file is kept if its content is that of the object, by the MD5 that the store
  tells. Nothing else stays: it belongs to a run that was killed.
  """
  objects = {
    name: digest
    for name, digest in store.list(below).items()
    if not name.startswith(f"{_LOCK}/")
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


def _get(store: Store, name: str, path: pathlib.Path, digest: str) -> None:
  if not (digest and path.is_file() and _md5(path) == digest):
    store.get(name, path)


def _side_by_side(call: Callable[..., None], each: list[tuple]) -> None:
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(lambda arguments: call(*arguments), each))
