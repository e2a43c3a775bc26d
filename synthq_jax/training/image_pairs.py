"""Trains an image encoder on pairs, with a clipped gradient or without.

In both cases the sampler draws the batches, and the logged loss is that of public
held-out pairs. Losses of private pairs would have to stay private.
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
from jaxtyping import Array

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import keys
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop

__all__ = ["Trained", "train"]


@dataclasses.dataclass(frozen=True)
class Trained:
  """The trained parameters and the speed of the training.

  Attributes:
    params: the parameters, on the host.
    examples_per_second: expected pairs of a batch over the median time of a
      step; nan if there were fewer than four steps to time.
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
  """Trains on sampled batches of pairs.

  Formal guarantee:
    If `is_private`, the guarantee of the transform of `make_tx` for the clipped
    sum of `grad_fn`, with one sum for each batch of `sampler`: nothing else reads
    the pairs. The logged losses are those of `held_out`, so they are
    post-processing.

  Args:
    grad_fn: a gradient of `optim.contrastive_clipped_grad`.
    make_tx: makes the transform of the sums from the noise's key: `optim.logit_dp`
      chained with an optimizer; without privacy `optax.scale` and an optimizer.
    noise_key: the secret key of the noise; an argument of the compiled step, not a
      constant in it.
    params: the initial parameters.
    pairs: images "queries" and "documents" [pair, height, width, channels].
    files: the files for states, and for lines of step and held-out loss.
    is_private: False: the gradient of the summed loss, without clipping.
    held_out: public pairs, in the same form.
    held_out_loss: the loss of the held-out pairs before each step; its mean over
      pairs is logged.
    sampler: draws the batches.
    steps: the number of optimizer steps.
    batch_seed: secret seed of the sampling.
    settings: settings for saving and reporting.
  """
  params = jax.tree.map(jnp.asarray, params)
  gradient = grad_fn if is_private else _make_unclipped(grad_fn)
  held_out = jax.device_put(dict(held_out))

  words, restored = keys.as_argument(noise_key)

  @jax.jit
  def step(state: dp_step.State, batch, is_padding, held_out, words):
    tx = make_tx(restored(words))
    loss = _compute_mean_loss(grad_fn, held_out_loss, state.params, held_out)
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
  rate = _compute_rate(started, sampler.expected_batch_size)
  return Trained(jax.device_get(state.params), rate)


def _make_unclipped(grad_fn: optim.ContrastiveGrad) -> Callable[..., Any]:
  """Returns the gradient of the summed loss, with the clipped one's signature."""

  def gradient(params: Any, batch: Any, *, is_padding_example: Array):
    is_real = ~is_padding_example
    return jax.grad(grad_fn.total_loss)(params, batch, is_real), None

  return gradient


def _compute_mean_loss(
  grad_fn: optim.ContrastiveGrad,
  loss: contrastive.Softmax,
  params: Any,
  pairs: Mapping[str, Array],
) -> Array:
  queries = grad_fn.encode_query(params, pairs["queries"])
  documents = grad_fn.encode_document(params, pairs["documents"])
  return jnp.mean(loss.losses(queries @ documents.T))


def _compute_rate(started: list[float], batch_size: int) -> float:
  """Computes the examples per second, without the time of compiling."""
  # The loop waits for a step in the next one: the first gaps hold the compiling.
  gaps = np.diff(started)[2:]
  return batch_size / statistics.median(gaps) if len(gaps) else float("nan")
