"""Computes the private step's gradient for a model with T5X's loss.

This module does not need T5X: a model is an object with `loss_fn(params, batch,
key)` that returns the loss of a batch and metrics.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from synthq_jax import extras, optim
from synthq_jax.backends.t5x import batches
from synthq_jax.privacy import sampling

with extras.required("run"):
  from flax.linen import partitioning

__all__ = ["Model", "clipped_grad", "private_mean", "split"]


class Model(Protocol):
  """The interface of T5X's models that this module uses."""

  def loss_fn(
    self, params: Any, batch: Mapping[str, jax.Array], dropout_rng: Any
  ) -> tuple[jax.Array, Any]:
    """Returns the loss of a batch, and metrics."""


def clipped_grad(
  model: Model,
  *,
  l2_clip_norm: float,
  strategy: str = "auto",
  microbatch_size: int | None = None,
) -> optim.ClippedGrad:
  """Makes the function that sums clipped gradients of T5X's loss per example.

  Formal guarantee: the guarantee of `optim.clipped_grad` for one example of the
  batch. The model sees one example at a time, so its loss cannot couple them; a
  loss that T5X normalizes by the batch (LOSS_NORMALIZING_FACTOR) is normalized
  by the example. With dropout, the guarantee needs an EXAMPLE_ID that is a
  function of the example alone, as from `batches.with_ids`, not its position
  among others.

  Args:
    model: T5X's model.
    l2_clip_norm: as in `optim.clipped_grad`.
    strategy: as in `optim.clipped_grad`.
    microbatch_size: as in `optim.clipped_grad`.

  Returns:
    A function as from `optim.clipped_grad`, which takes a dropout key.
  """

  def loss_fn(params: Any, batch: Any, key: Any = None) -> jax.Array:
    features = {k: x for k, x in batch.items() if k != batches.EXAMPLE_ID}
    with _remove_batch_rule():
      loss, _ = model.loss_fn(params, features, key)
    return jnp.reshape(loss, (1,))

  return optim.clipped_grad(
    loss_fn,
    l2_clip_norm=l2_clip_norm,
    strategy=strategy,
    microbatch_size=microbatch_size,
  )


def split(
  batch: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Splits a batch into the model's features with ids and the mask of padding.

  Args:
    batch: a batch from `sampling.take`, of records from `batches.with_ids`.

  Raises:
    ValueError: if the batch lacks ids or the mask, or its rows are packed.
  """
  if sampling.IS_PADDING not in batch or batches.EXAMPLE_ID not in batch:
    raise ValueError(
      "expected Poisson batches, got features"
      f" {', '.join(sorted(batch))}: set train.get_dataset_fn ="
      " @dp_dataset.get_dataset, whose sampling the accounting is for"
    )
  packed = sorted(name for name in batch if name.endswith("_segment_ids"))
  if packed:
    raise ValueError(
      f"expected one example in each row, got {', '.join(packed)}: set"
      " DatasetConfig.pack = False"
    )
  features = {k: x for k, x in batch.items() if k != sampling.IS_PADDING}
  return features, batch[sampling.IS_PADDING]


def private_mean(
  total: Any,
  step: jax.Array,
  *,
  l2_sensitivity: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
) -> Any:
  """Adds the noise of one step to a clipped sum and divides by a public number.

  Formal guarantee: the guarantee of `optim.privatize`. The noise is a function
  of the key and the step's number alone.

  Args:
    total: the clipped sum.
    step: number of the step, a scalar int32.
    l2_sensitivity: as in `optim.privatize`.
    noise_multiplier: as in `optim.privatize`.
    denominator: as in `optim.privatize`.
    key: as in `optim.privatize`.

  Returns:
    The private mean, float32 in the structure of `total`.
  """
  transform = optim.privatize(
    l2_sensitivity=l2_sensitivity,
    noise_multiplier=noise_multiplier,
    denominator=denominator,
    key=key,
  )
  state = transform.init(total)._replace(step=jnp.asarray(step, jnp.int32))
  mean, _ = transform.update(total, state)
  return mean


@contextlib.contextmanager
def _remove_batch_rule() -> Iterator[None]:
  """Removes the partitioning rule of the model's "batch" axis in a `with` block.

  The axis holds one example here. The rule would partition it over the devices,
  over which the axis of examples is partitioned already.
  """
  rules = [r for r in partitioning.get_axis_rules() if r[0] != "batch"]
  with partitioning.axis_rules(rules):
    yield
