"""Trains an image encoder on pairs, with a clipped gradient or without.

The batches are the same kind in both cases, Poisson samples, and so is the loss
that is written down: that of public pairs which nothing trains on. Losses of
private pairs would have to stay private.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import keys
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop

__all__ = ["Trained", "train"]

Encode = Callable[[Any, Float[Array, "batch height width channels"]], Array]


@dataclasses.dataclass(frozen=True)
class Trained:
  """What `train` returns.

  Attributes:
    params: on the host.
    examples_per_second: expected pairs of a batch over the median time of a
      step; nan where a resumed run had no step left to time.
  """

  params: Any
  examples_per_second: float


def train(
  grad_fn: optim.ContrastiveGrad,
  make_tx: Callable[[jax.Array], optax.GradientTransformation],
  noise_key: jax.Array,
  params: Any,
  pairs: Mapping[str, np.ndarray],
  files: loop.Files,
  *,
  is_private: bool,
  held_out: Mapping[str, np.ndarray],
  held_out_loss: contrastive.Softmax,
  sampler: sampling.Sampler,
  steps: int,
  batch_seed: list[int],
  settings: loop.Settings,
) -> Trained:
  """Trains on batches of pairs.

  Formal guarantee:
    Where `is_private`, that of the transform of `make_tx` for the clipped sum of
    `grad_fn`, one sum for each batch of `sampler`: nothing else reads the
    pairs. The written losses are of `held_out`, so they are post-processing.

  Args:
    grad_fn: from `optim.contrastive_clipped_grad`.
    make_tx: from the noise's key to what takes its sum: `optim.logit_dp` chained
      with an optimizer, or the latter behind `optax.scale` without privacy.
    noise_key: secret; an argument of the compiled step, no constant in it.
    params: where to start.
    pairs: images "queries" and "documents" [pair, height, width, channels].
    files: where states go, and lines of step and loss of the held-out pairs.
    is_private: False takes the gradient of the summed loss with nothing clipped.
    held_out: public pairs, in the same form.
    held_out_loss: what is measured on them before each step, mean over pairs.
    sampler: draws the batches.
    steps: optimizer steps.
    batch_seed: secret seed of the sampling.
    settings: saving and reporting.

  Returns:
    The parameters, and how fast it went.
  """
  params = jax.tree.map(jnp.asarray, params)
  gradient = grad_fn if is_private else _unclipped(grad_fn)
  held_out = jax.device_put(dict(held_out))

  words, restored = keys.as_argument(noise_key)

  @jax.jit
  def step(state: dp_step.State, batch, is_padding, held_out, words):
    tx = make_tx(restored(words))
    loss = _mean_loss(grad_fn, held_out_loss, state.params, held_out)
    grads, _ = gradient(state.params, batch, is_padding_example=is_padding)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return dp_step.State(params, opt_state), {"loss": loss}

  started = []

  def batch_fn(number: int):
    started.append(time.monotonic())
    return dp_step.draw(pairs, sampler, batch_seed, number)

  state = loop.train(
    lambda state, batch, number: step(state, *batch, held_out, words),
    dp_step.State(params, make_tx(noise_key).init(params)),
    batch_fn,
    files,
    steps=steps,
    examples_per_step=sampler.expected_batch_size,
    settings=settings,
  )
  rate = _rate(started, sampler.expected_batch_size)
  return Trained(jax.device_get(state.params), rate)


def _unclipped(grad_fn: optim.ContrastiveGrad) -> Callable[..., Any]:
  """Returns the gradient of the summed loss, in the form of the clipped one."""

  def gradient(params: Any, batch: Any, *, is_padding_example: Array):
    is_real = ~is_padding_example
    return jax.grad(grad_fn.total_loss)(params, batch, is_real), None

  return gradient


def _mean_loss(
  grad_fn: optim.ContrastiveGrad,
  loss: contrastive.Softmax,
  params: Any,
  pairs: Mapping[str, Array],
) -> Array:
  queries = grad_fn.encode_query(params, pairs["queries"])
  documents = grad_fn.encode_document(params, pairs["documents"])
  return jnp.mean(loss.losses(queries @ documents.T))


def _rate(started: list[float], batch_size: int) -> float:
  """Says how many examples a second go through, compiling aside."""
  # A step is waited for in the next one: the first gaps hold the compiling.
  gaps = np.diff(started)[2:]
  return batch_size / statistics.median(gaps) if len(gaps) else float("nan")
