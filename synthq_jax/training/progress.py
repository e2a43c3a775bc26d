"""Shows how far a long computation is."""

from typing import Any

from synthq_jax import extras

__all__ = ["bar"]


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
