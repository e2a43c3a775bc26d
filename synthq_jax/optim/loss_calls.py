"""Checks the arguments of a loss."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["HINT", "check_arguments", "check_batch", "check_signature"]

_MOST_ARGUMENTS = 8  # numbers of arguments that are tried, from the least on
HINT = "if another argument than the batch holds examples, put both into a dict"
"""Advice for errors of a loss with more arguments than parameters and batch."""


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
  names = ", ".join(inspect.signature(loss_fn).parameters)
  raise ValueError(
    f"expected a call for loss_fn({names}), got {got}: {hint}; {HINT}"
  )
