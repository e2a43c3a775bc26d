"""Manages the working directory of a run: its paths, and its one secret.

Nothing below `private/` may be shared. The joint statement covers the results
outside it. Of these, share `report/` and the output of `synthq export`, not the
folder: `config.gin` names the log, and fingerprints and times are in every
result. The secret decides batches and noise of private training; anyone who
knows it can remove the noise. It is drawn once per working directory and stored
in `private/`.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import secrets
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import checks
from synthq_jax.privacy import ledger
from synthq_jax.runtime import results
from synthq_jax.storage import artifacts, file_lists, stores

__all__ = [
  "Folders",
  "Workspace",
  "check_lost",
  "locked",
  "make_empty",
  "prepared",
]


@contextlib.contextmanager
def locked(root: str | os.PathLike) -> Generator[None]:
  """Keeps a second run out of a working directory.

  Args:
    root: the working directory, created if it is missing.

  Raises:
    ValueError: if another run uses it.
  """
  path = pathlib.Path(root) / ".lock"
  path.parent.mkdir(parents=True, exist_ok=True)
  with file_lists.locked(
    path,
    lambda who: (
      f"{root}: expected a working directory of our own, got one that {who}"
      " uses: wait for it, or give another --workdir"
    ),
  ) as stream:
    stream.truncate(0)
    stream.write(f"process {os.getpid()}\n")
    stream.flush()
    yield


class Folders:
  """The folders of a working directory, without its secret.

  Formal guarantee:
    Code that holds this and no Workspace draws neither batches nor noise of a
    private training, and cannot remove noise.
  """

  def __init__(self, root: str | os.PathLike):
    self.root = pathlib.Path(root)

  def public(self, *parts: str) -> pathlib.Path:
    """Returns a path that may be shared."""
    return self.root.joinpath(*parts)

  def private(self, *parts: str) -> pathlib.Path:
    """Returns a path that must not be shared."""
    return self.root.joinpath(results.PRIVATE, *parts)

  def relative(self, path: pathlib.Path) -> str:
    """Returns a path in the form that results store: relative to the root."""
    return path.relative_to(self.root).as_posix()


def make_empty(folder: pathlib.Path) -> pathlib.Path:
  """Creates an empty folder, removes its earlier content, and returns it."""
  artifacts.remove(folder)
  folder.mkdir(parents=True)
  return folder


def check_lost(folders: Folders) -> None:
  """Refuses a working directory that lost the secret of its private trainings.

  Another secret would repeat them, and the new ledger would not know the first
  ones. A copy without `private/` is such a directory.

  Args:
    folders: the working directory.

  Raises:
    ValueError: naming the ledger or a result of a training without its secret.
  """
  path = folders.private("secret_seed")
  if path.exists():
    return
  trained = [ledger.NAME] * ledger.begun(folders.private(ledger.NAME))
  records = [
    record
    for level in ("*", "*/*")  # stages without rows, and with rows
    for record in folders.root.glob(f"{level}/{artifacts.RESULT_NAME}")
  ]
  for record in sorted(records):
    result = artifacts.read_json(record).get("result")
    claim = result.get("statement") if isinstance(result, dict) else None
    if claim and claim.get("ledger"):
      trained.append(folders.relative(record.parent))
  if trained:
    raise ValueError(
      f"{path}: expected the secret of the trainings in {trained[0]}, got no file:"
      f" restore {results.PRIVATE}/, give another --workdir, or the SECRET_SEED that"
      " it was made with"
    )


def prepared(folders: Folders, *, first: str) -> results.PreparedData:
  """Loads the prepared data of an existing run.

  Args:
    folders: the working directory.
    first: the command that makes the data, for the message.

  Raises:
    ValueError: if there is no prepared data.
  """
  folder = folders.private("prepare_data")
  if artifacts.read_fingerprint(folder) is None:
    raise ValueError(
      f"{folders.root}: expected the working directory of a run, got one without"
      f" prepared data: run `synthq {first}` first, or check --workdir"
    )
  return artifacts.load(folder, results.PreparedData)


class Workspace(Folders):
  """Paths and derived randomness of one working directory."""

  def __init__(
    self,
    root: str | os.PathLike,
    secret_seed: int | None = None,
    *,
    may_draw: bool = True,
  ):
    """Opens a working directory, or creates one.

    Args:
      root: the directory.
      secret_seed: fixed secret, for tests and demonstrations on public data;
        None draws 128 bits the first time and reads them later.
      may_draw: False for a process that follows another one: two secrets in one
        training would draw two samples and two noises.

    Raises:
      ValueError: if the secret is missing and may not be drawn, or is damaged;
        or if others than its owner may read it, as in a bucket that the user
        has not confirmed.
    """
    super().__init__(root)
    self.is_fixed = secret_seed is not None
    self._secret = self._read_or_draw(secret_seed, may_draw)

  def seed(self, purpose: str) -> list[int]:
    """Returns a secret seed for NumPy that belongs to one purpose."""
    digest = hashlib.sha256(f"{self._secret:x} {purpose}".encode()).digest()
    return np.frombuffer(digest[:16], np.uint32).tolist()

  def key(self, purpose: str) -> jax.Array:
    """Returns a secret key for JAX that belongs to one purpose."""
    words = np.array(self.seed(purpose)[:2], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

  def _read_or_draw(self, fixed: int | None, may_draw: bool) -> int:
    path = self.private("secret_seed")
    if fixed is not None:
      return fixed
    stores.check_secret(path)
    if not path.exists():
      check_lost(self)
      if not may_draw:
        raise ValueError(
          f"{path}: expected the secret that process 0 has drawn, got no file:"
          " give all processes one --workdir on a file system that they share"
        )
      path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
      with artifacts.replacing(path, mode=0o600, is_new=True) as stream:
        number = f"{secrets.randbits(128):032x}"
        stream.write(f"{number} {_compute_checksum(number)}\n".encode())
      file_lists.sync_names(path)
    checks.hide(path.parent)
    checks.owner_alone(path)
    text = path.read_text(errors="replace")
    number, *check = text.split() or [""]
    is_whole = re.fullmatch("[0-9a-f]{1,32}", number) and text.endswith("\n")
    if not is_whole or check not in ([], [_compute_checksum(number)]):
      raise ValueError(  # the message must not show the secret
        f"{path}: expected the secret that was drawn, got a damaged file:"
        " restore it, or give another --workdir"
      )
    return int(number, 16)


def _compute_checksum(number: str) -> str:
  """Returns a checksum that shows whether the text of a secret is complete."""
  return hashlib.sha256(f"{number} check".encode()).hexdigest()[:8]
