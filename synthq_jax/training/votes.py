"""What all processes of a training do after the same step.

A signal may reach one process alone, and clocks differ. So each process votes
after each step, and whatever any of them wanted all of them do.
"""

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.training import distributed

__all__ = ["Votes"]

_AXIS = "device"


class Votes:
  """Flags that count as soon as one process raises them.

  The votes on a step are counted by the devices behind that step, and read
  after the next one: nobody waits for them. In one process they count at once.
  """

  def __init__(self):
    self._last: jax.Array | None = None
    self._count = None
    if distributed.count() > 1:
      mesh = jax.sharding.Mesh(np.array(distributed.devices()), (_AXIS,))
      spec = jax.sharding.PartitionSpec
      self._each = jax.sharding.NamedSharding(mesh, spec(_AXIS))
      self._count = jax.jit(
        lambda flags: jnp.max(flags, axis=0),
        out_shardings=jax.sharding.NamedSharding(mesh, spec()),
      )

  def __call__(self, *flags: bool) -> tuple[bool, ...]:
    """Casts the flags of this process after a step.

    Args:
      *flags: as many in every call and process.

    Returns:
      The flags that count now, the same in all processes: those that any of
      them raised in the call before.
    """
    if self._count is None:
      return flags
    last, own = self._last, np.array(flags, np.int32)
    rows = np.tile(own, (jax.local_device_count(), 1))
    self._last = self._count(
      jax.make_array_from_process_local_data(self._each, rows)
    )
    if last is None:
      return (False,) * len(flags)
    return tuple(bool(flag) for flag in np.asarray(last))

  def forget(self) -> None:
    """Drops votes that were cast and are not read, in all processes."""
    self._last = None
