"""Objects in a bucket, and the lease by which one run at a time holds it.

An object is whole or not there. A store has no folders, no file modes and no
locks; all that is asked of it is to create an object only if there is none.
"""

import base64
import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from synthq_jax import extras

__all__ = ["LOCK", "Lease", "Store", "is_url"]

LOCK = ".lock"
"""Below it, the objects of leases."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")
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
    names = {
      path[len(self._root) :].removeprefix("/"): _md5_said(about)
      for path, about in found.items()
      if about.get("type") != "directory" and not path.endswith("/")
    }
    for name in filter(None, names):
      if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(
          f"{self.url}/{name}: expected an object with the name of a file"
        )
    return names

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


def _clock() -> float:
  return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class Lease:
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
    if self._store.create(self._name(last + 1), self._content(free=True)):
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
    names = self._store.list(LOCK)
    return max((int(n.rpartition("/")[2]) for n in names), default=0)

  def _name(self, number: int) -> str:
    return f"{LOCK}/{number:06}"

  def _content(self, *, free: bool = False) -> bytes:
    about = {
      "owner": f"process {os.getpid()} on {socket.gethostname()}",
      "token": self._token,
      "lease": self._seconds,
      "beat": self._beats,
      "free": free,
    }
    return json.dumps(about).encode()
