"""Draws the clients of a round, and puts their batches into one fixed shape."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.federated import fedavg
from synthq_jax.privacy import sampling

__all__ = ["cut", "drop", "poisson", "stack"]


def poisson(
  *, num_clients: int, clients_per_round: int, multiple_of: int = 1
) -> sampling.Poisson:
  """Returns the sampler in which each client throws a coin of its own.

  Formal guarantee: that of `privacy.sampling.Poisson`, whose records are
  clients here: a round has rows for so many that hardly ever one is cut, which
  is accounted for all the same. With clients_per_round = num_clients everybody
  takes part in every round. Public: all arguments. Secret: seed and draws.

  >>> sampler = poisson(num_clients=1000, clients_per_round=50)
  >>> sampler.probability, sampler.max_batch_size
  (0.05, 105)

  Args:
    num_clients: how many there are.
    clients_per_round: the expected number of a round.
    multiple_of: rows of a round are a multiple of this, for example the devices
      of a mesh times `clients_at_once`.
  """
  sampler = sampling.Poisson.with_margin(
    num_examples=num_clients,
    expected_batch_size=clients_per_round,
    multiple_of=multiple_of,
  )
  if sampler.max_batch_size != num_clients:
    return sampler
  # A neighbour with one client more has room, too: nothing is ever cut.
  rows = -(-(num_clients + 1) // multiple_of) * multiple_of
  return dataclasses.replace(sampler, max_batch_size=rows)


def stack(
  batches: Sequence[Mapping[str, np.ndarray]],
  ids: Sequence[int],
  *,
  weights: Sequence[float] | None = None,
  size: int | None = None,
  steps: int | None = None,
  like: Mapping[str, np.ndarray] | None = None,
) -> fedavg.Cohort:
  """Puts clients' batches side by side, with padding where one has fewer.

  Rounds whose cohorts have one `size` and one number of `steps` are compiled
  once. Clients of like size should stand next to each other where several are
  trained side by side, since these take the steps of the longest.

  >>> import numpy as np
  >>> def client(steps):
  ...   return {"x": np.ones((steps, 4, 2), np.float32),
  ...           "is_padding": np.zeros((steps, 4), bool)}
  >>> cohort = stack([client(3), client(1)], [7, 9], size=4)
  >>> print(cohort.batches["x"].shape, cohort.is_dropped)
  (4, 3, 4, 2) [False False  True  True]

  Args:
    batches: for each client arrays [step, batch, ...] with "is_padding", bool
      [step, batch]; they may differ in the number of steps alone.
    ids: of the clients, at least 0, all different.
    weights: of the clients, for example how many examples each has; None: all
      the same.
    size: clients of the cohort, the rest of them padding; None: no padding.
    steps: of every client; None: those of the longest.
    like: the arrays of some client, for their shapes alone, where nobody takes
      part. A Poisson draw of m clients is empty with probability exp(-m), and
      such a round is made as any other: to leave it out would break the claim.

  Returns:
    A cohort, on the host.

  Raises:
    ValueError: if there is no client and no `like`, one stands there twice, or
      there are more clients or steps than fit.
  """
  ids = [int(one) for one in ids]
  longest = max((len(one["is_padding"]) for one in batches), default=0)
  size = max(len(ids), 1) if size is None else size
  steps = longest if steps is None else steps
  template = batches[0] if batches else like
  if template is None or len(ids) != len(batches):
    raise ValueError(
      "expected batches and an id for each of one or more clients, got"
      f" {len(batches)} batches and {len(ids)} ids; give a client's arrays as"
      " `like` for a round without clients"
    )
  if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
    raise ValueError(
      "expected different ids of clients, 0 or more, got one that is below 0 or"
      " stands there twice: a client may take part in a round once"
    )
  if longest > steps or len(ids) > size:
    raise ValueError(
      f"expected at most size={size} clients of at most steps={steps} steps,"
      f" got {len(ids)} clients of up to {longest} steps: raise both"
    )

  def rows(name: str) -> np.ndarray:
    first = np.asarray(template[name])
    shape = (size, steps, *first.shape[1:])
    stacked = np.full(shape, name == "is_padding", first.dtype)
    for place, one in enumerate(batches):
      stacked[place, : len(one[name])] = one[name]
    return stacked

  missing = size - len(ids)
  if weights is not None:
    weights = np.pad(np.asarray(weights, np.float32), (0, missing))
  return fedavg.Cohort(
    batches={name: rows(name) for name in template},
    ids=np.pad(np.asarray(ids, np.int32), (0, missing), constant_values=-1),
    is_dropped=np.arange(size) >= len(ids),
    weights=weights,
  )


def cut(cohort: fedavg.Cohort, steps: jax.Array) -> fedavg.Cohort:
  """Returns the cohort in which clients did no more than so many steps.

  What a straggler did until then counts, with the weight it had; `drop` leaves
  it out instead.

  Args:
    cohort: of any clients.
    steps: [client] int32; a client of 0 steps sends what it was given.
  """
  is_padding = jnp.asarray(cohort.batches["is_padding"])
  step = jnp.arange(is_padding.shape[1])[None, :, None]
  is_padding |= step >= jnp.asarray(steps)[:, None, None]
  return cohort._replace(batches={**cohort.batches, "is_padding": is_padding})


def drop(cohort: fedavg.Cohort, is_dropped: jax.Array) -> fedavg.Cohort:
  """Returns the cohort without some clients, in the same shape.

  Args:
    cohort: of any clients.
    is_dropped: [client] bool: who stays away.
  """
  return cohort._replace(
    is_dropped=jnp.asarray(cohort.is_dropped) | jnp.asarray(is_dropped)
  )
