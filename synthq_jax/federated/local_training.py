"""What a client does in a round: some steps on its own data."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks, typing

__all__ = ["Batches", "ClientUpdate", "local_training", "step"]

Batches = Mapping[str, jax.Array]
"""Arrays [step, batch, ...]; "is_padding", bool [step, batch], is one of them.

Rows of padding count nothing, and steps that hold nothing else are no steps:
so clients with little data, and those that were interrupted, have the same
shapes as others.
"""


class ClientUpdate(Protocol):
  """What a client does; depends on its arguments alone."""

  def __call__(
    self, params: typing.Params, batches: Batches, key: jax.Array
  ) -> typing.Params:
    """Returns the parameters after local training."""


def step(
  loss_fn: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[typing.Params, optax.OptState, jax.Array]]:
  """Builds a step on the mean loss of a batch's rows that are no padding.

  Args:
    loss_fn: as in `local_training`.
    optimizer: takes the gradient of the mean loss.

  Returns:
    From (params, optimizer's state, batch, key) to (params, state, mean loss);
    the key, which `loss_fn` gets, may be None.
  """

  def mean_loss(params: typing.Params, batch: Any, key: Any) -> jax.Array:
    is_real = ~batch["is_padding"]
    losses = jnp.where(is_real, loss_fn(params, batch, key), 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(is_real), 1)

  def train(
    params: typing.Params, state: optax.OptState, batch: Any, key: Any = None
  ) -> tuple[typing.Params, optax.OptState, jax.Array]:
    loss, grads = jax.value_and_grad(mean_loss)(params, batch, key)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  return train


def local_training(
  loss_fn: Callable[..., jax.Array],
  optimizer: optax.GradientTransformation,
  *,
  epochs: int = 1,
) -> ClientUpdate:
  """Builds local training: steps of an optimizer that starts afresh.

  Each step takes the mean loss over a batch's rows that are no padding. A step
  that is all padding changes nothing, the state of the optimizer included, and
  padding behind the last real step takes no time (for clients that are trained
  side by side, behind the last one's). Step i, over all epochs, gets
  fold_in(key, i).

  Args:
    loss_fn: from (params, batch, key) to losses [batch]. `batch` has an
      "is_padding", for losses whose examples see each other; the losses of
      padding are not read, but have to be finite, with finite gradients.
    optimizer: of one client; its state does not survive the round.
    epochs: how often the batches are gone through, in the same order.

  Returns:
    From (params, batches, key) to parameters.

  Raises:
    ValueError: if `epochs` is below 1.
  """
  checks.at_least(1, epochs=epochs)
  train = step(loss_fn, optimizer)

  def update(
    params: typing.Params, batches: Batches, key: jax.Array
  ) -> typing.Params:
    batches = jax.tree.map(jnp.asarray, dict(batches))
    is_empty = jnp.all(batches["is_padding"], axis=1)  # [step]
    number = jnp.arange(1, len(is_empty) + 1)
    steps = jnp.max(jnp.where(is_empty, 0, number), initial=0)

    def one_step(i: jax.Array, carry: Any) -> Any:
      place = i % jnp.maximum(steps, 1)
      batch = jax.tree.map(lambda x: x[place], batches)
      return jax.lax.cond(
        is_empty[place],
        lambda carry: carry,
        lambda carry: train(*carry, batch, jax.random.fold_in(key, i))[:2],
        carry,
      )

    start = (params, optimizer.init(params))
    return jax.lax.fori_loop(0, epochs * steps, one_step, start)[0]

  return update
