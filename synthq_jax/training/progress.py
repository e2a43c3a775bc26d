"""Shows the progress of long computations, and their peak memory."""

import contextlib
import contextvars
import resource
import sys
from collections.abc import Generator
from typing import Any

from synthq_jax import extras

__all__ = ["bar", "format_duration", "peak_bytes", "shown"]

_IS_SHOWN = contextvars.ContextVar("_IS_SHOWN", default=True)


@contextlib.contextmanager
def shown(is_shown: bool) -> Generator[None]:
  """Decides whether bars made inside are shown; a caller that hides them wins."""
  token = _IS_SHOWN.set(_IS_SHOWN.get() and is_shown)
  try:
    yield
  finally:
    _IS_SHOWN.reset(token)


def peak_bytes() -> tuple[int, int]:
  """Returns the peak resident sizes of this process and its children, in bytes."""
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
  own, children = (
    resource.getrusage(who).ru_maxrss * unit
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return own, children


def bar(
  description: str,
  total: int | None,
  *,
  unit: str = "row",
  initial: int = 0,
) -> Any:
  """Makes a progress bar for `with`; its `update(number)` advances it.

  No bar is drawn inside of `shown(False)`, or if standard error is not a terminal,
  as in a log.

  Args:
    description: the label in front of the bar.
    total: the number of units; None: unknown.
    unit: the name of a unit.
    initial: the number of units done before.
  """
  with extras.required("run"):
    import tqdm

  return tqdm.tqdm(
    total=total,
    initial=initial,
    desc=description or None,
    unit=unit,
    disable=None if _IS_SHOWN.get() else True,  # None: without a terminal
    mininterval=1.0,
    dynamic_ncols=True,
  )


def format_duration(seconds: float) -> str:
  """Writes a duration with one or two units.

  >>> [format_duration(seconds) for seconds in (4.21, 59.98, 125, 7384)]
  ['4.2 s', '1 min 0 s', '2 min 5 s', '2 h 3 min']
  """
  if round(seconds, 1) < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {rest} s"
  return f"{minutes // 60} h {minutes % 60} min"
