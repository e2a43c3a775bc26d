"""Functions of a whole batch, called where one example is written down.

Code under `jax.vmap` sees one example. A sum over examples that is written there
would first be made for each of them, in an array of their number times the
parameters. `reduce` hands the batch as it is to a function, which can then sum
in one product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["reduce"]


def reduce(
  function: Callable[..., Any], *, is_summed: Sequence[bool]
) -> Callable[..., Any]:
  """Returns the function of one example that is `function` of the whole batch.

  Args:
    function: from pytrees of arrays [batch, ...] to a tuple of arrays.
    is_summed: for each result, whether it is one for the whole batch; the
      others have a leading axis [batch].

  Returns:
    A function of the same arguments without the batch axis. Under `jax.vmap`
    its summed results are the batch's and not mapped (`out_axes=None`);
    elsewhere they are those of a batch of one.
  """

  @jax.custom_batching.custom_vmap
  def of_one(*arguments: Any) -> tuple[Any, ...]:
    results = function(*jax.tree.map(lambda x: x[None], arguments))
    return tuple(
      result if summed else result[0]
      for result, summed in zip(results, is_summed, strict=True)
    )

  @of_one.def_vmap
  def of_batch(axis_size: int, is_mapped: Any, *arguments: Any) -> Any:
    arguments = jax.tree.map(
      lambda x, mapped: (
        x if mapped else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
      ),
      arguments,
      tuple(is_mapped),
    )
    return tuple(function(*arguments)), tuple(not each for each in is_summed)

  return of_one
