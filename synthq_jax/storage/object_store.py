"""Reads and writes objects in a bucket, which one run at a time leases.

An object is complete or absent. A store has no folders, file modes or locks. Leases
and the ledger need one thing of it: to create an object only if none has that name.
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
"""Prefix of the names of lease objects."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)  # runs while a machine sleeps


def is_url(text: str) -> bool:
  """Returns True if a text names a store, as SCHEME://PATH.

  >>> is_url("gs://bucket/run"), is_url("beir:data"), is_url("runs/a")
  (True, False, False)
  """
  return bool(_URL.match(text))


class Store:
  """Reads and writes objects under a URL; the object URL/a/b has the name "a/b".

  Args:
    url: a URL of a file system that fsspec knows, e.g. "gs://bucket/run".

  Raises:
    ValueError: if fsspec knows no such file system.
    MissingExtraError: if the file system's package is not installed.
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
    """Returns the MD5 of each object by name, or "" if the store reports none.

    Args:
      below: prefix that limits the list to names which begin with it and "/".
    """
    self._files.invalidate_cache()
    prefix = "/".join(filter(None, (self._root, below)))
    with self._explain_errors(below):
      try:
        objects = self._files.find(prefix, detail=True)
      except FileNotFoundError:
        return {}
    names = {
      path[len(self._root) :].removeprefix("/"): _get_md5(about)
      for path, about in objects.items()
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
    with self._explain_errors(name):
      return self._files.cat_file(self._get_path(name))

  def get(self, name: str, path: pathlib.Path) -> None:
    """Downloads an object, atomically, to a file that only its owner may
    read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.partial")
    with self._explain_errors(name):
      self._files.get_file(self._get_path(name), os.fspath(partial))
    partial.chmod(0o600)
    os.replace(partial, path)

  def put(self, path: pathlib.Path, name: str) -> None:
    """Uploads a file; readers of the object see the old or the new content."""
    with self._explain_errors(name):
      self._files.put_file(os.fspath(path), self._get_path(name))

  def create(self, name: str, content: bytes) -> bool:
    """Writes an object if there is none; returns False if another one
    exists."""
    with self._explain_errors(name):
      try:
        self._files.pipe_file(self._get_path(name), content, mode="create")
      except FileExistsError:
        # If the answer was lost, a client repeats a request that has succeeded.
        return self.read(name) == content
    return True

  def write(self, name: str, content: bytes) -> None:
    """Writes an object, replacing any old one."""
    with self._explain_errors(name):
      self._files.pipe_file(self._get_path(name), content)

  def delete(self, name: str) -> None:
    """Deletes an object if it exists."""
    with self._explain_errors(name), contextlib.suppress(FileNotFoundError):
      self._files.rm_file(self._get_path(name))

  def _get_path(self, name: str) -> str:
    return f"{self._root}/{name}" if name else self._root

  @contextlib.contextmanager
  def _explain_errors(self, name: str) -> Iterator[None]:
    """Turns every error without an errno into an OSError that names the
    object."""
    try:
      yield
    except Exception as error:  # each file system has its own error classes
      if isinstance(error, FileNotFoundError) or getattr(error, "errno", None):
        raise
      words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
      number = errno.EACCES if "orbidden" in words else errno.EIO
      raise OSError(number, words, f"{self.url}/{name}") from error


def _get_md5(about: dict[str, Any]) -> str:
  """Returns the MD5 in an object's metadata, from GCS or S3; "" if it has none."""
  if encoded := about.get("md5Hash"):
    return base64.b64decode(encoded).hex()
  tag = str(about.get("ETag") or about.get("etag") or "").strip('"')
  return tag if re.fullmatch("[0-9a-f]{32}", tag) else ""


def _read_clock() -> float:
  return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class Lease:
  """Holds a store for one run, until the run releases it or fails to renew it.

  The holder is the run that created the object of the highest number. It keeps
  rewriting that object. A run that sees the object unchanged for two leases, by
  its own clock, creates the next number, which only one run can do. A holder
  that could not renew for one lease looks for a higher number before it writes.
  """

  def __init__(self, store: Store, seconds: float):
    self._store, self._seconds = store, seconds
    self._beats, self._is_lost, self._ended = 0, False, threading.Event()
    self._token = uuid.uuid4().hex
    self._number = self._acquire()
    self._guard = threading.Lock()
    self._thread = threading.Thread(target=self._renew_regularly, daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Refuses to continue if this run no longer holds the store.

    Raises:
      OSError: if another run has taken the store, or it cannot be reached.
    """
    if not self._is_lost and _read_clock() - self._renewed_at > self._seconds:
      self._renew()
    if self._is_lost:
      raise OSError(
        errno.ESTALE,
        "the lease was not renewed in time, and another run has taken over",
        self._store.url,
      )

  def release(self) -> None:
    """Releases the store for other runs."""
    self._ended.set()
    self._thread.join()
    if not self._is_lost:
      with contextlib.suppress(OSError):  # the lease then expires by itself
        self._store.write(
          self._get_name(self._number), self._make_content(free=True)
        )

  def _acquire(self) -> int:
    last = self._get_last_number()
    if last:
      self._wait_for(last)
    self._renewed_at = _read_clock()
    if not self._store.create(self._get_name(last + 1), self._make_content()):
      raise self._make_refusal(last + 1)
    if self._store.create(
      self._get_name(last + 1), self._make_content(free=True)
    ):
      raise ValueError(
        f"{self._store.url}: expected a file system that creates an object only"
        " if there is none, got one that overwrote it: leases and the ledger"
        " need that"
      )
    return last + 1

  def _wait_for(self, number: int) -> None:
    """Waits until a lock is free or has not been renewed for two leases."""
    seen, since = self._store.read(self._get_name(number)), _read_clock()
    about = json.loads(seen)
    if about["free"]:
      return
    print(
      f"{self._store.url} was last held by {about['owner']}: waiting at most"
      f" {2 * about['lease']:.0f} s to see whether that process still runs",
      file=sys.stderr,
    )
    while _read_clock() - since <= 2 * about["lease"]:
      time.sleep(about["lease"] / 10)
      now = self._store.read(self._get_name(number))
      if json.loads(now)["free"]:
        return
      if now != seen:
        raise self._make_refusal(number)

  def _make_refusal(self, number: int) -> ValueError:
    who = json.loads(self._store.read(self._get_name(number)))["owner"]
    return ValueError(
      f"{self._store.url}: expected a working directory of our own, got one that"
      f" {who} uses: wait for it, or give another --workdir"
    )

  def _renew_regularly(self) -> None:
    while not self._is_lost and not self._ended.wait(self._seconds / 3):
      with contextlib.suppress(
        OSError
      ):  # `check` tries again before each write
        self._renew()

  def _renew(self) -> None:
    with self._guard:
      began = _read_clock()
      self._beats += 1
      self._store.write(self._get_name(self._number), self._make_content())
      if self._get_last_number() > self._number:
        self._is_lost = True
      else:
        self._renewed_at = began

  def _get_last_number(self) -> int:
    names = self._store.list(LOCK)
    return max((int(n.rpartition("/")[2]) for n in names), default=0)

  def _get_name(self, number: int) -> str:
    return f"{LOCK}/{number:06}"

  def _make_content(self, *, free: bool = False) -> bytes:
    about = {
      "owner": f"process {os.getpid()} on {socket.gethostname()}",
      "token": self._token,
      "lease": self._seconds,
      "beat": self._beats,
      "free": free,
    }
    return json.dumps(about).encode()
