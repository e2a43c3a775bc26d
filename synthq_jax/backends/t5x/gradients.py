"""The private step's gradient, from a model with T5X's loss.

Nothing here needs T5X: a model is an object with `loss_fn(params, batch, key)`
that returns the loss of a batch and metrics.
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
  """What is asked of T5X's models."""

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
  """Builds the sum of clipped gradients of T5X's loss of single examples.

  Formal guarantee: that of `optim.clipped_grad` for one example of the batch.
  The model sees one example at a time, so its loss cannot couple them; a loss
  that T5X normalizes by the batch (LOSS_NORMALIZING_FACTOR) is normalized by
  the example. With dropout, if an example's EXAMPLE_ID is its own, as from
  `batches.with_ids`, and no place among others that come and go.

  Args:
    model: of T5X.
    l2_clip_norm: as in `optim.clipped_grad`.
    strategy: as in `optim.clipped_grad`.
    microbatch_size: as in `optim.clipped_grad`.

  Returns:
    A function as of `optim.clipped_grad`, which takes a dropout key.
  """

  def loss_fn(params: Any, batch: Any, key: Any = None) -> jax.Array:
    features = {k: x for k, x in batch.items() if k != batches.EXAMPLE_ID}
    with _without_batch_rule():
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
  """Returns the model's features with ids, and which rows are padding.

  Args:
    batch: of `sampling.take`, of records `batches.with_ids`.

  Raises:
    ValueError: if it is no such batch, or its rows are packed.
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
  """Adds the noise of one step to a clipped sum; divides by a public number.

  Formal guarantee: that of `optim.privatize`. The noise is a function of the
  key and the step's number alone.

  Args:
    total: the clipped sum.
    step: number of the step, [] int32.
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
def _without_batch_rule() -> Iterator[None]:
  """Lets the model's "batch" axis, of one example, lie where it likes.

  The rule would spread this axis over the devices, which the axis of examples
  around it is spread over already.
  """
  rules = [r for r in partitioning.get_axis_rules() if r[0] != "batch"]
  with partitioning.axis_rules(rules):
    yield
