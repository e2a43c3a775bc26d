"""The working directory of a run: where things lie, and its one secret.

Everything below `private/` must not be shared; everything else may be. The
secret decides batches and noise of private training: who knows it can take the
noise away again. It is drawn once per working directory and kept in `private/`.
"""

import hashlib
import os
import pathlib
import secrets

import jax
import numpy as np

from synthq_jax.pipeline import results

__all__ = ["Workspace"]


class Workspace:
  """Paths and derived randomness of one working directory."""

  def __init__(self, root: str | os.PathLike, secret_seed: int | None = None):
    """Opens a working directory, or makes one.

    Args:
      root: the directory.
      secret_seed: fixes the secret, for tests and demonstrations on public
        data; None draws 128 bits the first time and reads them later.
    """
    self.root = pathlib.Path(root)
    self.is_fixed = secret_seed is not None
    self._secret = self._read_or_draw(secret_seed)

  def public(self, *parts: str) -> pathlib.Path:
    """Returns a path that may be shared."""
    return self.root.joinpath(*parts)

  def private(self, *parts: str) -> pathlib.Path:
    """Returns a path that must not be shared."""
    return self.root.joinpath(results.PRIVATE, *parts)

  def relative(self, path: pathlib.Path) -> str:
    """Returns a path as results hold it."""
    return path.relative_to(self.root).as_posix()

  def seed(self, purpose: str) -> list[int]:
    """Returns a secret seed for NumPy that belongs to one purpose."""
    digest = hashlib.sha256(f"{self._secret:x} {purpose}".encode()).digest()
    return np.frombuffer(digest[:16], np.uint32).tolist()

  def key(self, purpose: str) -> jax.Array:
    """Returns a secret key for JAX that belongs to one purpose."""
    words = np.array(self.seed(purpose)[:2], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")

  def _read_or_draw(self, given: int | None) -> int:
    path = self.private("secret_seed")
    if given is not None:
      return given
    if not path.exists():
      path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
      descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
      with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{secrets.randbits(128):x}\n")
    return int(path.read_text(), 16)
