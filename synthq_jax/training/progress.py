"""Shows how far a long computation is, and what memory it took."""

import resource
import sys
from typing import Any

from synthq_jax import extras

__all__ = ["bar", "format_duration", "peak_bytes"]


def peak_bytes() -> tuple[int, int]:
  """Returns the largest resident sizes of this process and of its children."""
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
  own, children = (
    resource.getrusage(who).ru_maxrss * unit
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return own, children


def bar(
  description: str,
  total: int | None,
  progress: bool,
  *,
  unit: str = "row",
  initial: int = 0,
) -> Any:
  """Returns a bar, for `with`; its `update(number)` moves it on.

  Where standard error is no terminal, as in a log, nothing is drawn: a run says
  by a line what it makes.

  Args:
    description: stands before it.
    total: of the units; None: unknown.
    progress: False shows nothing.
    unit: what is counted.
    initial: what was done before.
  """
  with extras.required("run"):
    import tqdm

  return tqdm.tqdm(
    total=total,
    initial=initial,
    desc=description or None,
    unit=unit,
    disable=None if progress else True,  # None: where there is no terminal
    mininterval=1.0,
    dynamic_ncols=True,
  )


def format_duration(seconds: float) -> str:
  """Writes a duration.

  >>> [format_duration(seconds) for seconds in (4.21, 59.98, 125, 7384)]
  ['4.2 s', '1 min 0 s', '2 min 5 s', '2 h 3 min']
  """
  if round(seconds, 1) < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {rest} s"
  return f"{minutes // 60} h {minutes % 60} min"
