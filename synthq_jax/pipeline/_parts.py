"""Shows a bar of the rows that a long stage has finished."""

from typing import Any

from synthq_jax import extras

__all__ = ["bar"]


def bar(description: str, total: int, progress: bool) -> Any:
  """Returns a bar of rows; it shows nothing without `progress`."""
  with extras.required("run"):
    import tqdm

  return tqdm.tqdm(
    total=total, desc=description, unit="row", disable=not progress,
    mininterval=1.0, dynamic_ncols=True,
  )  # fmt: skip
