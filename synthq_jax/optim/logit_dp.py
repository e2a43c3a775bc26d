"""Private means of clipped contrastive gradients, as an optax transform."""

from typing import Any

import jax
import optax

from synthq_jax.optim import contrastive
from synthq_jax.optim import noise as noise_lib

# By name: the package's attribute `privatize` is a function.
from synthq_jax.optim.privatize import privatize

__all__ = ["logit_dp"]


def logit_dp(
  fn: contrastive.ContrastiveGrad,
  *,
  relation: Any,
  unit: str,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
) -> optax.GradientTransformation:
  """Builds the transform from `fn`'s sum to a private mean.

  Formal guarantee:
    That of `privatize` for the unit and the relation, with the sensitivity that
    `fn` has for them; so `noise_multiplier` has to be calibrated for this
    relation. Under REPLACE_ONE the accountant doubles by itself what one unit
    moves, so the noise is made for ADD_OR_REMOVE_ONE there, of which no method's
    value more than doubles. It takes the sum of ONE call of `fn` a step: sums of
    several batches must not be added before it, as `optax.MultiSteps` around it
    would, since a record that comes or goes moves records from one batch to the
    next. Accumulate inside: `microbatch_size` of `contrastive_clipped_grad`.

  >>> import jax, jax.numpy as jnp
  >>> from synthq_jax.losses import contrastive as losses
  >>> fn = contrastive.contrastive_clipped_grad(
  ...     lambda params, x: x * params, lambda params, x: x * params,
  ...     loss=losses.Softmax(temperature=1.0), l2_clip_norm=0.5,
  ...     method=contrastive.Batch(), max_batch_size=4)
  >>> tx = logit_dp(fn, relation="ADD_OR_REMOVE_ONE", unit="pair",
  ...               noise_multiplier=0.0, denominator=1.0,
  ...               key=jax.random.key(0))
  >>> mean, _ = tx.update(jnp.array([0.5]), tx.init(jnp.array([0.5])))
  >>> print(mean)
  [0.5]

  Args:
    fn: from `contrastive_clipped_grad`.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    noise_multiplier: standard deviation of the noise over the sensitivity.
    denominator: public divisor: 1 for `Batch`, the expected number of groups
      for `Group`, the expected batch size otherwise.
    key: secret key, for the noise of all steps and nothing else.
    noise: as in `privatize`.

  Returns:
    An optax transform, to be chained before an optimizer.

  Raises:
    ValueError: if `fn` does not protect the unit, or a number is out of range.
  """
  moved = fn.sensitivity(relation, unit)
  if getattr(relation, "name", relation) == "REPLACE_ONE":
    single = fn.sensitivity("ADD_OR_REMOVE_ONE", unit)
    moved = max(single, moved / 2)
  return privatize(
    l2_sensitivity=moved,
    noise_multiplier=noise_multiplier,
    denominator=denominator,
    key=key,
    noise=noise,
  )
