"""Federated averaging over many clients, simulated on one machine or several.

A round is: every client of the cohort trains where the server's parameters are,
and the server makes one model of what they send. Here all of it is functions:

- a client's side: `local_training.local_training`, from (params, batches, key)
  to parameters, with the key that `client_key` makes;
- the server's: `aggregation`, from clients' parameters to one `Total`, and
  `FedAvg.finish`, from the total to the next state.

`FedAvg.apply` is a round of both. On real devices, a framework such as Flower
would call the same functions at both ends of its own connection; nothing here
knows of any.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from synthq_jax import checks, typing
from synthq_jax.federated import aggregation as aggregation_lib
from synthq_jax.federated import local_training
from synthq_jax.training import mesh as mesh_lib

__all__ = ["Cohort", "FedAvg", "State", "client_key", "fedavg"]


class Cohort(NamedTuple):
  """The clients of a round, or some of them."""

  batches: local_training.Batches  # [client, step, batch, ...]
  ids: jax.Array  # [client] int32, different ones; what padding has is ignored
  is_dropped: jax.Array  # [client] bool, true also for padding
  weights: jax.Array | None = None  # [client] float32, None: all the same


class State(NamedTuple):
  """What the server keeps between rounds."""

  params: typing.Params
  server_state: optax.OptState
  round: jax.Array  # [] int32


class FedAvg(NamedTuple):
  """Federated averaging as functions; none is compiled by itself."""

  init: Callable[[typing.Params], State]
  """From parameters to the state before the first round."""
  apply: Callable[..., tuple[State, dict[str, jax.Array]]]
  """(state, cohort, key) -> (state, metrics): a whole round."""
  begin: Callable[[State], aggregation_lib.Total]
  """From a state to the total of no clients."""
  add: Callable[..., aggregation_lib.Total]
  """(total, state, cohort, key) -> total: trains clients and adds them."""
  finish: Callable[..., tuple[State, dict[str, jax.Array]]]
  """(state, total) -> (state, metrics): the server's side of a round."""


def fedavg(
  update: local_training.ClientUpdate,
  *,
  server: optax.GradientTransformation | None = None,
  aggregation: aggregation_lib.Aggregation | None = None,
  clients_at_once: int = 1,
  mesh: jax.sharding.Mesh | None = None,
) -> FedAvg:
  """Builds federated averaging.

  Clients are trained in chunks, side by side, and each joins the total at once:
  the memory of a round is `clients_at_once` models and optimizers plus the
  cohort's batches. Where these do not fit, `begin`, `add` for each part of the
  cohort and `finish` are the same round.

  Guarantees, which tests hold:
    A client's result depends on the parameters, its own batches, its id and
    (key, round), not on who else takes part. A dropped client has the effect
    of one that was never in the cohort. With `server=None` and the mean, a
    cohort of one client gives that client's parameters to the bit, and so do
    several that are the same; `clients_at_once` and `mesh` change rounding
    alone. (To the bit on CPU with XLA's own settings: one that fuses
    otherwise may round a round and a loop apart, in the last bit.)

  Metrics:
    "clients": how many counted. "failed": how many sent nan or inf and were
    left out. "norm": the mean L2 norm of the updates of those that counted. All
    are private values.

  Args:
    update: what a client does.
    server: an optimizer that takes parameters before the round less the
      clients' mean for a gradient (Reddi et al. 2021), for example
      `optax.adam(1e-2)`. None: the clients' mean is the next model. A round in
      which nobody counts is a gradient of zero.
    aggregation: how clients become one: `aggregation.Mean()` if None.
    clients_at_once: of one device; more take more memory, and less time where
      one client does not fill the device.
    mesh: from `mesh.make`, with a `data` axis alone: its devices share the
      clients, and each has the whole model. Every process of it calls the
      functions with the same arguments, and cohorts of `mesh.batch_sharding`.
      None: one device.

  Returns:
    The functions.

  Raises:
    ValueError: if `clients_at_once` is below 1, or the mesh splits models.

  References:
    McMahan et al. (2017), arXiv:1602.05629. Reddi et al. (2021),
    arXiv:2003.00295, algorithm 1.
  """
  checks.at_least(1, clients_at_once=clients_at_once)
  _check_mesh(mesh)
  aggregation = aggregation_lib.Mean() if aggregation is None else aggregation

  def init(params: typing.Params) -> State:
    params = jax.tree.map(jnp.asarray, params)
    server_state = () if server is None else server.init(params)
    return State(params, server_state, jnp.zeros([], jnp.int32))

  def begin(state: State) -> aggregation_lib.Total:
    # A client of no weight is none.
    return aggregation.of(state.params, state.params, 0.0)

  def on_device(
    total: aggregation_lib.Total, state: State, cohort: Cohort, key: jax.Array
  ) -> aggregation_lib.Total:
    chunks = _split(_padded(cohort, clients_at_once), clients_at_once)

    def one_chunk(total: Any, chunk: Cohort) -> tuple[Any, None]:
      sent = _train(update, aggregation, state, chunk, key)
      total, _ = jax.lax.scan(
        lambda total, one: (aggregation.merge(total, one), None), total, sent
      )
      return total, None

    return jax.lax.scan(one_chunk, total, chunks)[0]

  def add(
    total: aggregation_lib.Total, state: State, cohort: Cohort, key: jax.Array
  ) -> aggregation_lib.Total:
    if cohort.weights is not None and not aggregation.takes_weights:
      raise ValueError(
        "expected Cohort.weights=None where updates are clipped, got weights: "
        "sizes of clients are private and would move the sensitivity"
      )
    cohort = _weighted(cohort)
    state = state._replace(server_state=())  # clients do not see it
    if mesh is None:
      return on_device(total, state, cohort, key)

    def on_mesh(state: State, cohort: Cohort, key: jax.Array) -> Any:
      part = on_device(begin(state), state, cohort, key)
      return aggregation.join(part, "data")

    part = jax.shard_map(
      on_mesh,
      mesh=mesh,
      in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec()),
      out_specs=PartitionSpec(),
      check_vma=False,  # `join` makes it the same everywhere
    )(state, _padded(cohort, mesh.size), key)
    return aggregation.merge(total, part)

  def finish(
    state: State, total: aggregation_lib.Total
  ) -> tuple[State, dict[str, jax.Array]]:
    params, server_state = state.params, state.server_state
    if server is None:
      params = aggregation.params(total, params)
    else:
      updates, server_state = server.update(
        aggregation.gradient(total, params), server_state, params
      )
      params = optax.apply_updates(params, updates)
    metrics = {
      "clients": total.clients,
      "failed": total.failed,
      "norm": total.norm / jnp.maximum(total.clients, 1),
    }
    return State(params, server_state, state.round + 1), metrics

  def apply(
    state: State, cohort: Cohort, key: jax.Array
  ) -> tuple[State, dict[str, jax.Array]]:
    return finish(state, add(begin(state), state, cohort, key))

  return FedAvg(init, apply, begin, add, finish)


def client_key(
  key: jax.Array, round_number: jax.Array | int, client: jax.Array | int
) -> jax.Array:
  """Returns the key of one client in one round.

  It does not depend on who else takes part. Whoever has `key` has it for all
  clients: what clients keep from each other needs keys of their own.

  Args:
    key: of the whole training.
    round_number: from 0.
    client: its id.
  """
  return jax.random.fold_in(jax.random.fold_in(key, round_number), client)


def _train(
  update: local_training.ClientUpdate,
  aggregation: aggregation_lib.Aggregation,
  state: State,
  chunk: Cohort,
  key: jax.Array,
) -> aggregation_lib.Total:
  def one(client: Cohort) -> aggregation_lib.Total:
    own_key = client_key(key, state.round, client.ids)
    model = update(state.params, client.batches, own_key)
    return aggregation.of(state.params, model, client.weights)

  if len(chunk.ids) > 1:
    return jax.vmap(one)(chunk)
  # By itself and not as a batch of one: the same program as plain training.
  alone = one(jax.tree.map(lambda x: x[0], chunk))
  return jax.tree.map(lambda x: x[None], alone)


def _weighted(cohort: Cohort) -> Cohort:
  """Gives every client a weight: 0 if it is dropped, and then no steps."""
  is_dropped = cohort.is_dropped
  weights = cohort.weights
  if weights is None:
    weights = jnp.ones(is_dropped.shape, jnp.float32)
  is_padding = cohort.batches["is_padding"] | is_dropped[:, None, None]
  return cohort._replace(
    batches={**cohort.batches, "is_padding": is_padding},
    weights=jnp.where(is_dropped, 0.0, weights).astype(jnp.float32),
  )


def _padded(cohort: Cohort, multiple: int) -> Cohort:
  """Adds clients of no weight, up to a multiple."""
  more = -len(cohort.ids) % multiple
  if not more:
    return cohort

  def pad(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:])))

  padded = jax.tree.map(pad, cohort)
  is_new = jnp.arange(len(padded.ids)) >= len(cohort.ids)
  return _weighted(padded._replace(is_dropped=padded.is_dropped | is_new))


def _split(cohort: Cohort, size: int) -> Cohort:
  """Returns chunks of so many clients, [chunk, client, ...]."""
  return jax.tree.map(
    lambda x: jnp.reshape(x, (-1, size, *x.shape[1:])), cohort
  )


def _check_mesh(mesh: jax.sharding.Mesh | None) -> None:
  """Refuses a mesh that would split a client's model."""
  if mesh is None:
    return
  rest = math.prod(mesh.shape[axis] for axis in mesh_lib.AXES if axis != "data")
  if rest > 1:
    raise ValueError(
      "expected a mesh whose devices each hold a client's whole model, got"
      f" fsdp={mesh.shape['fsdp']}, tensor={mesh.shape['tensor']}: set both to 1"
    )
