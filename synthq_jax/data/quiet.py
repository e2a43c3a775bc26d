"""Holds back what C++ libraries print by themselves."""

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["native_stderr"]


@contextlib.contextmanager
def native_stderr() -> Iterator[None]:
  """Sends the process's standard error nowhere while the block runs.

  For libraries that print below Python, where warnings cannot be filtered;
  exceptions are not touched. Other threads are silent meanwhile, too.
  """
  sys.stderr.flush()
  saved = os.dup(2)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(saved, 2)
      os.close(saved)
