"""Trains a dual encoder on (query, document) pairs without noise.

In-batch softmax over shuffled epochs, Adam. What comes out is as private as the
pairs are: nothing here adds noise.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from synthq_jax.losses import contrastive
from synthq_jax.models import encoders, t5_config
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import recipe as recipe_lib

__all__ = ["Recipe", "loss_fn", "train"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(recipe_lib.Recipe):
  """How a dual encoder is trained."""

  temperature: float = 0.05
  """Divides the cosines."""


def loss_fn(
  params: Any,
  batch: Mapping[str, jax.Array],
  *,
  model_config: t5_config.T5Config,
  temperature: float,
) -> Float[jax.Array, " batch"]:
  """Returns the in-batch softmax loss of each pair.

  Another pair of the same document is no negative: its column is left out.

  Args:
    params: of the encoder.
    batch: tokens of "queries" and "documents", and the documents' "rows".
    model_config: the shape of the encoder, see `models.encoders`.
    temperature: divides the cosines, above 0.
  """
  encode = functools.partial(encoders.of(model_config).encode, params)
  similarity = encode(batch["queries"]) @ encode(batch["documents"]).T
  same = batch["rows"][:, None] == batch["rows"][None, :]
  return contrastive.softmax(
    similarity,
    temperature=temperature,
    duplicate_mask=same & ~jnp.eye(len(same), dtype=bool),
  )


def train(
  recipe: Recipe,
  params: Any,
  model_config: t5_config.T5Config,
  pairs: Mapping[str, np.ndarray],
  *,
  directory: str | os.PathLike,
  metrics_path: str | os.PathLike,
  description: str,
  mesh: jax.sharding.Mesh | None = None,
) -> Any:
  """Trains with Adam; goes on from the newest state in `directory`.

  Args:
    recipe: length, batches, learning rate (a peak; linear warm-up and decay).
    params: of the encoder, where to start.
    model_config: its shape.
    pairs: "queries" [pair, length], "documents" [pair, longer] and "rows"
      [pair], the positions of the documents.
    directory: where states are saved.
    metrics_path: JSON lines of step and loss.
    description: of the training, for the progress bar and messages.
    mesh: from `mesh.make`: its devices share the pairs of a batch, where their
      number divides by that of the devices, and split parameters and optimizer.
      Every pair is still the negative of all others. Every process of the mesh
      calls this with the same arguments. None: one device.

  Returns:
    The trained parameters, on the host of every process.

  Raises:
    ValueError: if there are fewer pairs than a batch has.
  """
  tx = recipe.optimizer()

  def step_fn(state, batch):
    params, opt_state = state

    def mean_loss(params):
      return jnp.mean(
        loss_fn(
          params,
          batch,
          model_config=model_config,
          temperature=recipe.temperature,
        )
      )

    loss, grads = jax.value_and_grad(mean_loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

  if mesh is None:
    params = jax.tree.map(jnp.asarray, params)
    state, jitted = (params, tx.init(params)), jax.jit(step_fn)
    read = operator.getitem
  else:
    state, where = mesh_lib.place_state(params, tx.init, mesh)
    jitted = jax.jit(step_fn, out_shardings=(where, mesh_lib.whole(mesh)))
    sharding = mesh_lib.batch_sharding(mesh)
    if recipe.batch_size % mesh_lib.batch_ways(mesh):
      sharding = mesh_lib.whole(mesh)
    read = functools.partial(mesh_lib.place_rows, sharding=sharding)
  state = recipe.train(
    lambda state, batch, step: jitted(state, batch),
    state,
    lambda rows: {name: read(values, rows) for name, values in pairs.items()},
    len(pairs["rows"]),
    directory=directory,
    metrics_path=metrics_path,
    description=description,
  )
  return mesh_lib.gather(state[0])
