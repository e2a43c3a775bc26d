"""Trains a dual encoder on (query, document) pairs without noise.

It uses the in-batch softmax, shuffled epochs and Adam. No noise is added, so the
trained encoder is exactly as private as its pairs.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from synthq_jax import field_kinds
from synthq_jax.losses import contrastive
from synthq_jax.models import (
  dual_encoder,
  encoders,
  length_batches,
  t5_checkpoints,
)
from synthq_jax.training import loop
from synthq_jax.training import mesh as mesh_lib
from synthq_jax.training import recipe as recipe_lib

__all__ = [
  "Recipe",
  "cached_value_and_grad",
  "loss_fn",
  "train",
]

_TEXTS = ("queries", "documents")
_LENGTH_STEP = 32
"""Tokens: each length of a batch is a program of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(recipe_lib.Recipe):
  """The hyperparameters of a dual encoder's training."""

  temperature: float = 0.05
  """The softmax temperature, which divides the cosines."""
  directions: int = field_kinds.later(1)
  """Directions of the loss. 1: each query chooses among documents. 2: each document
  chooses among queries, too, and the loss is the mean of both."""
  projection: bool = field_kinds.later(False)
  """Whether a linear map follows the mean over tokens; it starts as the
  identity."""

  def __post_init__(self):
    if self.directions not in (1, 2):
      raise ValueError(
        f"{type(self).__module__}.{type(self).__name__}.directions must be 1 or"
        f" 2, got {self.directions}"
      )


def loss_fn(
  params: Any,
  batch: Mapping[str, jax.Array],
  *,
  model_config: t5_checkpoints.Shape,
  temperature: float,
  directions: int = 1,
) -> Float[jax.Array, " batch"]:
  """Returns the in-batch softmax loss of each pair.

  Another pair with the same document is not a negative: its column is left out.

  Args:
    params: the parameters of the encoder.
    batch: tokens of "queries" and "documents", and the documents' "rows".
    model_config: the shape of the encoder, see `models.encoders`.
    temperature: divides the cosines, above 0.
    directions: as in `Recipe`.
  """
  encode = functools.partial(encoders.of(model_config).encode, params)
  vectors = {name: encode(batch[name]) for name in _TEXTS}
  return _compute_losses(
    vectors, batch["rows"], temperature=temperature, directions=directions
  )


def _compute_losses(
  vectors: Mapping[str, jax.Array],
  rows: jax.Array,
  *,
  temperature: float,
  directions: int,
) -> Float[jax.Array, " batch"]:
  same = rows[:, None] == rows[None, :]
  cosines = vectors["queries"] @ vectors["documents"].T
  losses = functools.partial(
    contrastive.softmax,
    temperature=temperature,
    duplicate_mask=same & ~jnp.eye(*same.shape, dtype=bool),  # symmetric
  )
  if directions == 1:
    return losses(cosines)
  return (losses(cosines) + losses(cosines.T)) / 2


def _trim(
  tokens: Int[np.ndarray, "text length"], rows: Int[np.ndarray, " batch"]
) -> Int[np.ndarray, "text shorter"]:
  """Cuts the padding that no text of a batch needs, by whole steps of a length."""
  longest = max(1, int(length_batches.lengths(tokens[rows]).max(initial=0)))
  return tokens[:, : -(-longest // _LENGTH_STEP) * _LENGTH_STEP]


def cached_value_and_grad(
  params: Any,
  batch: Mapping[str, jax.Array],
  *,
  model_config: t5_checkpoints.Shape,
  microbatch_size: int,
  temperature: float,
  directions: int = 1,
) -> tuple[Float[jax.Array, ""], Any]:
  """Computes mean loss and gradient of `loss_fn` with gradient caching.

  First it encodes all texts, without the activations that a gradient needs. Then it
  computes the gradient with respect to the vectors. A second pass, by microbatches,
  carries that gradient into the parameters. The numbers differ from `loss_fn`'s by
  rounding alone, at the cost of one more forward pass.

  Args:
    params, batch, model_config, temperature, directions: as in `loss_fn`.
    microbatch_size: texts encoded at a time; divides the pairs of a batch.

  References:
    Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup", RepL4NLP 2021, section 3.2.
  """
  encode = encoders.of(model_config).encode
  parts = {
    name: batch[name].reshape(-1, microbatch_size, batch[name].shape[-1])
    for name in _TEXTS
  }
  vectors = {
    name: jax.lax.map(functools.partial(encode, params), tokens)
    for name, tokens in parts.items()
  }

  def mean_loss(vectors):
    flat = {k: v.reshape(-1, v.shape[-1]) for k, v in vectors.items()}
    losses = _compute_losses(
      flat, batch["rows"], temperature=temperature, directions=directions
    )
    return jnp.mean(losses)

  loss, cotangents = jax.value_and_grad(mean_loss)(vectors)

  def carry_back(total, part):
    tokens, cotangent = part
    _, vjp = jax.vjp(lambda params: encode(params, tokens), params)
    (grads,) = vjp(cotangent)
    return jax.tree.map(jnp.add, total, grads), None

  grads = jax.tree.map(jnp.zeros_like, params)
  for name, tokens in parts.items():
    grads, _ = jax.lax.scan(carry_back, grads, (tokens, cotangents[name]))
  return loss, grads


def train(
  recipe: Recipe,
  params: Any,
  model_config: t5_checkpoints.Shape,
  pairs: Mapping[str, np.ndarray],
  files: loop.Files,
  *,
  mesh: jax.sharding.Mesh | None = None,
  microbatch_size: int | None = None,
) -> Any:
  """Trains a dual encoder with Adam; resumes from the newest saved state.

  Args:
    recipe: the hyperparameters.
    params: the initial parameters of the encoder.
    model_config: the shape of the encoder.
    pairs: "queries" [pair, length], "documents" [pair, longer] and "rows"
      [pair], the positions of the documents.
    files: the files for states and metrics.
    mesh: a mesh of `mesh.make`. Its devices split parameters and optimizer, and
      share the pairs of a batch if the batch size is a multiple of
      `mesh.batch_ways`. Every pair is still a negative of all others. Every
      process of the mesh calls this with the same arguments. None: one device.
    microbatch_size: texts encoded at a time, see `cached_value_and_grad`; None:
      all.

  Returns:
    The trained parameters, on the host of every process.

  Raises:
    ValueError: if there are fewer pairs than a batch has.
  """
  tx = recipe.optimizer()
  if recipe.projection:
    params = dual_encoder.with_projection(params, encoders.of(model_config).dim)

  def step_fn(state, batch):
    params, opt_state = state

    options = {
      "model_config": model_config,
      "temperature": recipe.temperature,
      "directions": recipe.directions,
    }
    if microbatch_size is None:
      loss, grads = jax.value_and_grad(
        lambda params: jnp.mean(loss_fn(params, batch, **options))
      )(params)
    else:
      loss, grads = cached_value_and_grad(
        params, batch, microbatch_size=microbatch_size, **options
      )
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
    lambda rows: {
      name: read(_trim(values, rows) if name in _TEXTS else values, rows)
      for name, values in pairs.items()
    },
    len(pairs["rows"]),
    files,
  )
  return mesh_lib.gather(state[0])
