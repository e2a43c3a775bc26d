"""What the study of image encoders promises about its pairs."""

from synthq_jax import optim
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms

__all__ = ["UNIT", "claim"]

UNIT = terms.IMAGE_PAIRS.unit


def claim(
  grad_fn: optim.ContrastiveGrad | None,
  *,
  sampler: sampling.Poisson,
  epsilon: float,
  delta: float | None,
  steps: int,
  is_fixed: bool,
) -> claim_lib.Claim:
  """Returns the promise of a training, with the least noise for its target.

  Formal guarantee: that of `claim.Claim`, for one pair of images that is added
  or removed, and noise on each of `steps` sums of `grad_fn` over batches of
  `sampler`.

  Args:
    grad_fn: clips; None where nothing is clipped and nothing is claimed.
    sampler: draws the batches.
    epsilon: the target, finite.
    delta: the target; None: 1 / (2n).
    steps: noisy sums.
    is_fixed: whether the secret is known to everybody.

  Raises:
    ValueError: if accounting refuses.
  """
  if grad_fn is None:
    return claim_lib.Claim(
      sampler=sampler,
      steps=steps,
      noise_multiplier=0.0,
      l2_clip_norm=0.0,
      words=terms.IMAGE_PAIRS,
    )
  return claim_lib.calibrated(
    epsilon=epsilon,
    sampler=sampler,
    steps=steps,
    l2_clip_norm=grad_fn.l2_clip_norm,
    l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE", "pair"),
    delta=delta,
    words=terms.IMAGE_PAIRS.but(
      assumptions=(terms.fixed_secret("study"),) if is_fixed else (),
      mechanism=_mechanism(grad_fn),
    ),
  )


def _mechanism(grad_fn: optim.ContrastiveGrad) -> str:
  what = (
    "the gradient of a whole batch, clipped as one"
    if isinstance(grad_fn.method, optim.Batch)
    else "gradients of similarities, each clipped, weighted and summed"
  )
  return f"{type(grad_fn.loss).__name__} loss: {what}, Gaussian noise"
