"""One process of a round of federated averaging; see hosts_test.py.

  python launch/processes.py --num_processes=3 --devices_per_process=1 -- \
      python tests/federated/hosts_script.py FOLDER

Each process reads the batches of its own clients alone. Process 0 leaves the
global model in plain.npz and the private one, with its noise, in private.npz.
"""

import argparse
import pathlib
import sys

import numpy as np

NUM_CLIENTS, STEPS, ROWS = 7, 2, 4
SIZE = 9  # with padding, a multiple of three devices


def batches():
  """The data of all clients, different ones."""
  rng = np.random.default_rng(11)
  return [
    {
      "x": rng.normal(size=(1 + place % STEPS, ROWS, 6)).astype(np.float32),
      "y": rng.normal(size=(1 + place % STEPS, ROWS)).astype(np.float32),
      "is_padding": np.zeros((1 + place % STEPS, ROWS), bool),
    }
    for place in range(NUM_CLIENTS)
  ]


def loss_fn(params, batch, key):
  """Of a net with two layers, and dropout so that keys matter."""
  import jax
  import jax.numpy as jnp

  hidden = jnp.tanh(batch["x"] @ params["first"])
  hidden *= jax.random.bernoulli(key, 0.8, hidden.shape)
  return (hidden @ params["second"] - batch["y"]) ** 2


def models(mesh=None):
  """Returns the global models after one round, without noise and with it."""
  import jax
  import optax

  from synthq_jax.federated import (
    cohorts,
    fedavg,
    local_training,
    user_privacy,
  )
  from synthq_jax.training import mesh as mesh_lib

  rng = np.random.default_rng(12)
  params = {
    "first": rng.normal(size=(6, 8)).astype(np.float32),
    "second": rng.normal(size=8).astype(np.float32),
  }
  update = local_training.local_training(loss_fn, optax.adam(0.05))
  privacy = user_privacy.claim(
    sampler=cohorts.poisson(num_clients=100, clients_per_round=7),
    rounds=1,
    l2_clip_norm=0.2,
    noise_multiplier=1.0,
    delta=1e-3,
  )
  made = {
    "plain": fedavg.fedavg(update, clients_at_once=2, mesh=mesh),
    "private": user_privacy.fedavg(
      update,
      privacy,
      noise_key=jax.random.key(4),
      clients_at_once=2,
      mesh=mesh,
    ),
  }
  weights = {"plain": range(1, NUM_CLIENTS + 1), "private": None}
  found = {}
  for name, functions in made.items():
    cohort = cohorts.stack(
      batches(), range(NUM_CLIENTS), weights=weights[name], size=SIZE
    )
    cohort = cohorts.drop(cohort, np.arange(SIZE) == 3)
    state = functions.init(params)
    if mesh is not None:
      rows = jax.tree.map(lambda _: mesh_lib.batch_sharding(mesh), cohort)
      cohort = mesh_lib.place(cohort, rows)
      whole = jax.tree.map(lambda _: mesh_lib.whole(mesh), state)
      state = mesh_lib.place(state, whole)
    state, _ = jax.jit(functions.apply)(state, cohort, jax.random.key(3))
    found[name] = mesh_lib.gather(state.params)
  return found


def main(folder: pathlib.Path) -> int:
  from synthq_jax.training import cluster, distributed

  distributed.start(cluster.from_flags(argparse.Namespace(distributed=None)))
  import jax

  from synthq_jax.training import mesh as mesh_lib

  assert jax.process_count() == 3 and len(jax.local_devices()) == 1
  for name, params in models(mesh_lib.make(mesh_lib.Shape())).items():
    if distributed.is_main():
      np.savez(folder / f"{name}.npz", **params)
  distributed.finish(0)
  return 0


if __name__ == "__main__":
  sys.exit(main(pathlib.Path(sys.argv[1])))
