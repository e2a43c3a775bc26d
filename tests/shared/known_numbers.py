"""Numbers of the accountant that one process of the tests computes for all.

The same few promises are calibrated by every worker and by each process that a
test starts: a quarter of a whole run's time. Tests of the accountant itself, in
tests/privacy, compute their own.
"""

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from synthq_jax.privacy import (
  accounting,
  arithmetic,
  batches,
  mixtures,
  sampling,
)

_NAMES = ("_calibrate", "_compute_epsilon", "_compute_group_epsilon")
_OWN = {name: getattr(accounting, name) for name in _NAMES}
_MODULES = (accounting, arithmetic, batches, mixtures, sampling)


def _list_members() -> list[Any]:
  """Lists everything that the accountant's modules and their classes hold."""
  members = []
  for module in _MODULES:
    for name, value in vars(module).items():
      if name not in _NAMES:
        members.append(value)
      if isinstance(value, type) and value.__module__ == module.__name__:
        members += vars(value).values()
  return members


_MEMBERS = _list_members()


def _is_patched() -> bool:
  """Says whether a test has put another piece into the accountant."""
  now = _list_members()
  return len(now) != len(_MEMBERS) or any(
    ours is not theirs for ours, theirs in zip(now, _MEMBERS, strict=True)
  )


def _name(args: tuple) -> str:
  """Returns a digest of arguments and of the classes of their samplers."""
  runs = args[0] if isinstance(args[0], tuple) else ()
  samplers = [*(run.sampler for run in runs), *args]
  kinds = [
    f"{type(one).__module__}.{type(one).__qualname__}" for one in samplers
  ]
  return hashlib.sha256(f"{kinds} {args!r}".encode()).hexdigest()


def remember(
  function: Callable[..., float], folder: pathlib.Path
) -> Callable[..., float]:
  """Keeps what a function returns in files, by the words of its arguments."""
  folder.mkdir(parents=True, exist_ok=True)

  @functools.wraps(function)
  def known(*args):
    if _is_patched():
      return function(*args)
    path = folder / _name(args)
    if not path.exists():
      own = path.with_name(f"{path.name}.{os.getpid()}")
      own.write_text(repr(function(*args)))
      own.rename(path)
    return float(path.read_text())

  return known


def install(folder: str | os.PathLike) -> None:
  """Has this process read and keep the accountant's numbers in a folder."""
  for name, own in _OWN.items():
    known = remember(own, pathlib.Path(folder) / name)
    setattr(accounting, name, known)


def remove() -> None:
  """Has this process compute each number itself, as it did before."""
  for name, own in _OWN.items():
    setattr(accounting, name, own)
