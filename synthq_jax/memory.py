"""Caches results in memory, up to a number of bytes."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

_Result = TypeVar("_Made")


class Kept(Generic[_Result]):
  """An LRU cache of results, keyed by everything on which they depend.

  >>> cache = Kept(most_bytes=2, size=len)
  >>> [cache.get(key, lambda: key) for key in ("a", "b", "a", "c", "long")]
  ['a', 'b', 'a', 'c', 'long']
  >>> cache.get("a", lambda: "made again"), cache.get("b", lambda: "made again")
  ('a', 'made again')
  """

  def __init__(
    self,
    *,
    most_bytes: int,
    size: Callable[[_Result], int],
    most: int | None = None,
  ):
    """Makes an empty cache.

    Args:
      most_bytes: largest size of all results in bytes; a larger result is not cached.
      size: returns the size of a result in bytes.
      most: largest number of results; before another one is made, the least recently
        used result is dropped. None: any number.
    """
    self.most_bytes = most_bytes
    self._size, self._most = size, most
    self._results: dict[Hashable, _Result] = {}

  def __len__(self) -> int:
    return len(self._results)

  def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
    """Returns the cached result of a key, or makes and caches it.

    Args:
      key: the key; equal keys must mean equal results.
      make: makes a missing result; if it raises, the other results stay cached.
    """
    if key in self._results:
      self._results[key] = self._results.pop(key)  # now the most recently used
      return self._results[key]
    while self._most is not None and len(self) >= self._most:
      self._drop_oldest()
    result = make()
    room = self.most_bytes - self._size(result)
    if room >= 0:
      while sum(map(self._size, self._results.values())) > room:
        self._drop_oldest()
      self._results[key] = result
    return result

  def _drop_oldest(self) -> None:
    del self._results[next(iter(self._results))]
