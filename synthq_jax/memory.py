"""Results that are asked for again stay in memory while they have room."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

_Made = TypeVar("_Made")


class Kept(Generic[_Made]):
  """The results that were asked for last, by all that they follow from.

  >>> kept = Kept(most_bytes=2, size=len)
  >>> [kept.get(key, lambda: key) for key in ("a", "b", "a", "c", "long")]
  ['a', 'b', 'a', 'c', 'long']
  >>> kept.get("a", lambda: "made again"), kept.get("b", lambda: "made again")
  ('a', 'made again')
  """

  def __init__(
    self,
    *,
    most_bytes: int,
    size: Callable[[_Made], int],
    most: int | None = None,
  ):
    """Keeps nothing yet.

    Args:
      most_bytes: of all results; one that is larger alone is not kept.
      size: bytes of a result.
      most: results at once, before the next of which the oldest goes; None: any.
    """
    self.most_bytes = most_bytes
    self._size, self._most = size, most
    self._made: dict[Hashable, _Made] = {}

  def __len__(self) -> int:
    return len(self._made)

  def get(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
    """Returns what is kept under a key, or makes it.

    Args:
      key: equal for equal results alone.
      make: called where nothing is kept; an error leaves what is kept.
    """
    if key in self._made:
      self._made[key] = self._made.pop(key)  # asked for last
      return self._made[key]
    while self._most is not None and len(self) >= self._most:
      self._forget()
    made = make()
    room = self.most_bytes - self._size(made)
    if room >= 0:
      while sum(map(self._size, self._made.values())) > room:
        self._forget()
      self._made[key] = made
    return made

  def _forget(self) -> None:
    del self._made[next(iter(self._made))]
