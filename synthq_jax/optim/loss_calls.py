"""Checks the arguments of a loss and writes hints for wrong ones."""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

__all__ = [
  "call",
  "check_arguments",
  "check_batch",
  "check_signature",
  "write_rows_hint",
]

_MOST_ARGUMENTS = 8  # numbers of arguments that are tried, from the least on
_KEYS = re.compile(r"key|rng|seed|random", re.IGNORECASE)
"""Pattern in the name of an argument that holds a key."""


def call(
  loss_fn: Callable[..., Any], values: Sequence[Any], batch: Any, hint: str
) -> Any:
  """Calls a loss and adds a hint to its TypeErrors and ValueErrors.

  Args:
    loss_fn: the loss.
    values: its arguments.
    batch: the argument that holds the examples.
    hint: from `write_rows_hint`; "": nothing is added.

  Raises:
    ValueError: if there is a hint and the losses have not the batch's number of
      rows.
  """
  try:
    returned = loss_fn(*values)
  except (TypeError, ValueError) as error:
    if hint:
      error.add_note(hint)
    raise
  losses = returned[0] if isinstance(returned, tuple) else returned
  if hint and np.shape(losses)[:1] != (_count_rows(batch),):
    raise ValueError(f"expected losses [batch], got another shape: {hint}")
  return returned


def _count_rows(batch: Any) -> int | None:
  """Returns the number of rows of all leaves; None if they differ."""
  sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  return next(iter(*sizes), None) if len(sizes) == 1 else None


def write_rows_hint(
  loss_fn: Callable[..., Any],
  arguments: Sequence[Any],
  batch_argnum: int,
  others: Collection[int],
) -> str:
  """Writes a hint about arguments other than the batch that may hold examples.

  Args:
    loss_fn: the loss, for the names of its arguments.
    arguments: the arguments of the call.
    batch_argnum: the position of the batch.
    others: positions of arguments that are neither parameters nor the batch.

  Returns:
    One line; "" if no other argument has as many rows as the batch.
  """
  size = _count_rows(arguments[batch_argnum])
  rows = [i for i in sorted(others) if _count_rows(arguments[i]) == size]
  if size is None or not rows:
    return ""
  try:
    names = list(inspect.signature(loss_fn).parameters)
  except ValueError:  # some compiled functions have no signature
    names = []
  positions = sorted([batch_argnum, *rows])
  fields = [names[i] if i < len(names) else f"{i}" for i in positions]
  return f"the batch is one argument: put {' and '.join(fields)} into a dict"


def _takes(loss_fn: Callable[..., Any], count: int) -> bool:
  """Checks whether a function takes `count` positional arguments."""
  try:
    inspect.signature(loss_fn).bind(*(None,) * count)
  except TypeError:
    return False
  except ValueError:  # some compiled functions have no signature
    pass
  return True


def check_signature(loss_fn: Callable[..., Any], least: int) -> None:
  """Refuses a function that takes anything but (params, batch[, ...][, key])."""
  if any(_takes(loss_fn, n) for n in range(least, least + _MOST_ARGUMENTS)):
    return
  name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
  parameters = inspect.signature(loss_fn).parameters
  raise TypeError(
    "expected a loss_fn(params, batch) or (params, batch, key) to losses "
    f"[batch], got {name} of {', '.join(parameters) or 'nothing'}: "
    "wrap it; a loss of similarities couples its examples and is for "
    "batch_clipped_grad"
  )


def check_batch(batch: Any, batch_argnum: int) -> None:
  """Refuses a random key in the batch's place, as in loss(params, rng, batch).

  Args:
    batch: the argument that holds the examples.
    batch_argnum: its position.

  Raises:
    TypeError: if it is one key, typed or raw.
  """
  dtype, shape = getattr(batch, "dtype", None), getattr(batch, "shape", None)
  is_raw = dtype == np.uint32 and shape == (2,)
  is_typed = dtype is not None and jax.dtypes.issubdtype(
    dtype, jax.dtypes.prng_key
  )
  if is_raw or (is_typed and shape == ()):
    raise TypeError(
      f"expected examples as argument {batch_argnum} of the loss, got a random"
      " key: write loss(params, batch, key), and call grad_fn(params, batch,"
      " key=key)"
    )


def check_arguments(
  loss_fn: Callable[..., Any], count: int, has_key: bool
) -> None:
  """Refuses a call with arguments that a loss does not take.

  Args:
    loss_fn: any function, whose last argument may be a key.
    count: number of arguments, without the key.
    has_key: whether a key follows them.

  Raises:
    ValueError: if the loss takes other arguments, or needs a key and gets none.
  """
  if _takes(loss_fn, count + has_key):
    return
  got = f"{count} arguments and {'a' if has_key else 'no'} key"
  if not has_key and _takes(loss_fn, count + 1):
    hint = "its last argument is a key, so call it with key=step_key"
  elif has_key and _takes(loss_fn, count):
    hint = "it takes no key, so leave key out, or add it as last argument"
  else:
    hint = "call it with the arguments of the loss"
  parameters = list(inspect.signature(loss_fn).parameters)
  if count == 2 and not has_key and not _KEYS.search(parameters[-1]):
    hint += (
      "; the batch is one argument: if these are examples, put"
      f" {' and '.join(parameters[1:])} into a dict"
    )
  names = ", ".join(parameters)
  raise ValueError(f"expected a call for loss_fn({names}), got {got}: {hint}")
