"""Checks how a loss is called, and says which arguments it should get."""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["call", "check_arguments", "check_signature", "hint_of_rows"]

_MOST_ARGUMENTS = 8  # of a loss, beyond those that are named
_KEYS = re.compile(r"key|rng|seed|random", re.IGNORECASE)
"""Names of an argument that holds a key."""


def call(
  loss_fn: Callable[..., Any], values: Sequence[Any], batch: Any, hint: str
) -> Any:
  """Calls a loss, and adds a hint to its errors of shapes.

  Args:
    loss_fn: the loss.
    values: its arguments.
    batch: the one that holds the examples.
    hint: from `hint_of_rows`; "": nothing is added.

  Raises:
    ValueError: if there is a hint and the losses have not the rows of the batch.
  """
  try:
    returned = loss_fn(*values)
  except (TypeError, ValueError) as error:
    if hint:
      error.add_note(hint)
    raise
  losses = returned[0] if isinstance(returned, tuple) else returned
  if hint and np.shape(losses)[:1] != (_num_rows(batch),):
    raise ValueError(f"expected losses [batch], got another shape: {hint}")
  return returned


def _num_rows(batch: Any) -> int | None:
  """Returns the length of the first axis of all leaves; None: they differ."""
  sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  return next(iter(*sizes), None) if len(sizes) == 1 else None


def hint_of_rows(
  loss_fn: Callable[..., Any],
  arguments: Sequence[Any],
  batch_argnum: int,
  others: Collection[int],
) -> str:
  """Writes a hint on arguments beside the batch that may hold examples.

  Args:
    loss_fn: the loss, for the names of its arguments.
    arguments: of the call.
    batch_argnum: the position of the batch.
    others: positions of arguments that are neither parameters nor the batch.

  Returns:
    One line; "" where no other argument has as many rows as the batch.
  """
  size = _num_rows(arguments[batch_argnum])
  rows = [i for i in sorted(others) if _num_rows(arguments[i]) == size]
  if size is None or not rows:
    return ""
  try:
    known = list(inspect.signature(loss_fn).parameters)
  except ValueError:  # some compiled functions have no signature
    known = []
  at = sorted([batch_argnum, *rows])
  names = " and ".join(known[i] if i < len(known) else f"{i}" for i in at)
  return f"the batch is one argument: put {names} into a dict"


def _fits(loss_fn: Callable[..., Any], count: int) -> bool:
  """Whether a function can be called with so many arguments."""
  try:
    inspect.signature(loss_fn).bind(*(None,) * count)
  except TypeError:
    return False
  except ValueError:  # some compiled functions have no signature
    pass
  return True


def check_signature(loss_fn: Callable[..., Any], least: int) -> None:
  """Refuses a function that takes anything but (params, batch[, ...][, key])."""
  if any(_fits(loss_fn, n) for n in range(least, least + _MOST_ARGUMENTS)):
    return
  name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
  parameters = inspect.signature(loss_fn).parameters
  raise TypeError(
    "expected a loss_fn(params, batch) or (params, batch, key) to losses "
    f"[batch], got {name} of {', '.join(parameters) or 'nothing'}: "
    "wrap it; a loss of similarities couples its examples and is for "
    "batch_clipped_grad"
  )


def check_arguments(
  loss_fn: Callable[..., Any], count: int, has_key: bool
) -> None:
  """Refuses a call that a loss could not follow.

  Args:
    loss_fn: any function, whose last argument may be a key.
    count: of the arguments that it gets.
    has_key: whether it gets a key behind them.

  Raises:
    ValueError: if it takes other arguments, or has a key and gets none.
  """
  if _fits(loss_fn, count + has_key):
    return
  given = f"{count} arguments and {'a' if has_key else 'no'} key"
  if not has_key and _fits(loss_fn, count + 1):
    hint = "its last argument is a key, so call it with key=step_key"
  elif has_key and _fits(loss_fn, count):
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
  raise ValueError(f"expected a call for loss_fn({names}), got {given}: {hint}")
