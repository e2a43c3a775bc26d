"""Trains clients from one model and averages their parameters.

In a round of federated averaging, every client trains from the server's
parameters (`local_training`). The weighted mean of the clients' parameters is
the next model (`mean`). Clients are trained one after the other, so a round
needs the memory of two models for any number of clients. On real devices, a
framework such as Flower would call the same functions at both ends of its
connection. This module contains no network code.

References:
  McMahan et al. (2017), arXiv:1602.05629, algorithm 1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import checks, typing

__all__ = [
  "Batches",
  "ClientUpdate",
  "local_training",
  "mean",
  "padded",
  "step",
]

Batches = Mapping[str, jax.Array]
"""Arrays [step, batch, ...]; "is_padding", bool [step, batch], is one of them.

Rows of padding do not count, and steps of padding alone are skipped. So clients
with little data have the same shapes as others.
"""

ClientUpdate = Callable[[typing.Params, Batches], typing.Params]
"""Local training: from parameters and a client's data to new parameters."""


def step(
  loss_fn: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[typing.Params, optax.OptState, jax.Array]]:
  """Builds a training step on the mean loss of a batch's real rows.

  Args:
    loss_fn: loss function, as in `local_training`.
    optimizer: optimizer, which gets the gradient of the mean loss.

  Returns:
    A function from (params, optimizer state, batch) to (params, state, mean
    loss). It raises ValueError if "is_padding" is no bool [batch] or losses have
    another shape.
  """

  def mean_loss(params: typing.Params, batch: Any) -> jax.Array:
    is_real = ~_check_bool(batch["is_padding"], ("batch",))
    losses = loss_fn(params, batch)
    if np.shape(losses) != is_real.shape:  # JAX would broadcast
      raise ValueError(
        f"expected a loss of each row, {is_real.shape}, got losses"
        f" {np.shape(losses)}: return one number a row"
      )
    losses = losses.astype(jnp.promote_types(losses.dtype, jnp.float32))
    total = jnp.sum(jnp.where(is_real, losses, 0.0))
    return total / jnp.maximum(jnp.sum(is_real), 1)

  def train(
    params: typing.Params, state: optax.OptState, batch: Any
  ) -> tuple[typing.Params, optax.OptState, jax.Array]:
    loss, grads = jax.value_and_grad(mean_loss)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  return train


def local_training(
  loss_fn: Callable[..., jax.Array],
  optimizer: optax.GradientTransformation,
  *,
  epochs: int = 1,
) -> ClientUpdate:
  """Builds local training: steps of an optimizer with a fresh state.

  Each step uses the mean loss of a batch's real rows. A step of padding alone
  changes neither parameters nor optimizer state. Padding after the last real
  step takes no time. For clients trained side by side, this is the last real
  step of any client.

  Args:
    loss_fn: function from (params, batch) to losses [batch]. `batch` has an
      "is_padding" for losses that couple examples. Losses of padding are not
      read, but they and their gradients must be finite.
    optimizer: optimizer of one client; its state ends with the round.
    epochs: passes over the batches, in the same order.

  Returns:
    A function from (params, batches) to parameters.

  Raises:
    ValueError: if `epochs` is below 1; in a call, if losses have another shape
      than [batch], "is_padding" is no bool [step, batch], or an array has other
      steps.
  """
  checks.at_least(1, epochs=epochs)
  train = step(loss_fn, optimizer)

  def update(params: typing.Params, batches: Batches) -> typing.Params:
    _check_padding(batches)
    batches = jax.tree.map(jnp.asarray, dict(batches))
    is_empty = jnp.all(batches["is_padding"], axis=1)  # [step]
    number = jnp.arange(1, len(is_empty) + 1)
    steps = jnp.max(jnp.where(is_empty, 0, number), initial=0)

    def one_step(i: jax.Array, carry: Any) -> Any:
      position = i % jnp.maximum(steps, 1)
      batch = jax.tree.map(lambda x: x[position], batches)
      return jax.lax.cond(
        is_empty[position],
        lambda carry: carry,
        lambda carry: train(*carry, batch)[:2],
        carry,
      )

    start = (params, optimizer.init(params))
    return jax.lax.fori_loop(0, epochs * steps, one_step, start)[0]

  return update


def padded(
  batches: Mapping[str, np.ndarray], steps: int
) -> dict[str, np.ndarray]:
  """Pads a client's batches with steps, so that clients share a compiled program.

  >>> batches = {"x": np.ones((1, 2)), "is_padding": np.zeros((1, 2), bool)}
  >>> padded(batches, 3)["is_padding"].tolist()
  [[False, False], [True, True], [True, True]]

  Args:
    batches: a client's arrays [step, batch, ...] with "is_padding".
    steps: number of steps to reach, at least the present number.

  Returns:
    The arrays with zeros appended; "is_padding" is True there.

  Raises:
    ValueError: if the batches have more steps, "is_padding" is no bool
      [step, batch], or an array has other steps.
  """
  _check_padding(batches)
  more = steps - len(batches["is_padding"])
  if more < 0:
    raise ValueError(
      f"expected at most steps={steps} batches of a client, got"
      f" {steps - more}: give the number of the largest client"
    )
  return {
    name: np.pad(
      rows,
      [(0, more), *((0, 0) for _ in rows.shape[1:])],
      constant_values=name == "is_padding",
    )
    for name, rows in batches.items()
  }


def _check_padding(batches: Mapping[str, Any]) -> None:
  if "is_padding" not in batches:
    raise ValueError(
      'expected an array "is_padding" [step, batch] among the batches, got'
      f" {', '.join(batches) or 'none'}: add one, False for real rows"
    )
  is_padding = _check_bool(batches["is_padding"], ("step", "batch"))
  for name, rows in batches.items():
    for leaf in jax.tree.leaves(rows):  # JAX would repeat the last step
      if np.shape(leaf)[:1] != (len(is_padding),):
        raise ValueError(
          f"expected {len(is_padding)} steps in {name!r}, as in is_padding, got"
          f" shape {list(np.shape(leaf))}: give all arrays a first axis of steps"
        )


def _check_bool(is_padding: Any, axes: tuple[str, ...]) -> Any:
  """Refuses padding of another type or number of axes; returns it."""
  # Of integers, ~ makes -1 and -2: every row would count.
  dtype = jnp.result_type(is_padding)
  if np.ndim(is_padding) != len(axes) or dtype != jnp.bool_:
    raise ValueError(
      f'expected "is_padding" as bool [{", ".join(axes)}], got'
      f" {dtype} {list(np.shape(is_padding))}: add the lacking axis, or use"
      " astype(bool)"
    )
  return is_padding


def mean(models: Iterable[tuple[typing.Params, float]]) -> typing.Params:
  """Averages clients' parameters, one client after the other.

  The running mean m + (w / W) (x - m) of one client, or of clients with equal
  parameters, equals these parameters to the bit. It is in float32, whatever the
  precision of the parameters.

  >>> models = [({"w": jnp.array([1.0])}, 3), ({"w": jnp.array([5.0])}, 1)]
  >>> print(mean(models)["w"])
  [2.]

  Args:
    models: parameters and weight of each client, at least one. Weights, such as
      numbers of examples, are above 0.

  Returns:
    The mean as JAX arrays, in the types of the first client's parameters (float64
    only under `jax_enable_x64`).

  Raises:
    ValueError: if there is no client, a weight is not above 0, a parameter is no
      floating-point number, or clients' parameters differ in names or shapes.
  """
  mean, dtypes, shapes, total = None, None, None, 0.0
  for model, weight in models:
    checks.within("(0, inf)", weight=weight)
    total += weight
    own_shapes = jax.tree.map(np.shape, model)
    if shapes is not None and own_shapes != shapes:  # JAX would broadcast
      raise ValueError(
        "expected parameters of one shape from all clients, got others from a"
        " later client than from the first: average equal models"
      )
    shapes = own_shapes
    if mean is None:
      dtypes = jax.tree.map(_check_type, model)
      mean = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model)
    else:
      mean = _move(mean, model, weight / total)
    del model  # frees memory while the next client is trained
  if mean is None:
    raise ValueError("expected clients, got none: pass one or more")
  return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), mean, dtypes)


def _check_type(leaf: Any) -> np.dtype:
  """Returns a parameter's type; refuses one that a mean would truncate."""
  dtype = jnp.result_type(leaf)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f"expected parameters that are real numbers, got an array of {dtype}:"
      " leave it out of what clients average"
    )
  return dtype


@jax.jit
def _move(mean: Any, model: Any, share: float) -> Any:
  """Moves a running mean towards the next client's parameters."""
  return jax.tree.map(
    lambda own, leaf: own + share * (leaf.astype(own.dtype) - own), mean, model
  )
