"""What the study of image encoders claims, in numbers and sentences."""

import dataclasses

from synthq_jax import optim
from synthq_jax.privacy import accounting, sampling
from synthq_jax.privacy import statement as statement_lib

__all__ = ["UNIT", "Claim", "claim"]

UNIT = "pair of images"

_PUBLIC = (
  "The test images with their labels, and which images are for testing.",
  "The number of private pairs.",
  "The settings: encoder, loss, temperature, learning rate, clip norm, batch"
  " sizes, number of steps and noise.",
)
_ASSUMPTIONS = (
  "An image is in one pair at most, and a pair is drawn as one.",
  statement_lib.SECRET_SEEDS,
  "Which pairs were in which batch stays secret; every intermediate encoder may"
  " be published.",
  "The settings were chosen without looking at the private pairs. Those of the"
  " study's files were chosen on the public set itself: for private images such"
  " trials would be releases of their own.",
  statement_lib.IDEAL_NUMBERS,
)
_NOT_PROTECTED = (
  "How many private pairs there are.",
  "Somebody with images in several pairs is protected less.",
  "What many images have in common: learning that is the purpose.",
)
_HEAD = (
  "A linear head was trained on the frozen vectors of separate public images and"
  " labels, without privacy: post-processing of the encoder."
)
_FIXED_SECRET = (
  "The secret of this study was fixed by its settings, as only public data"
  " allows: anybody can recompute the noise, so this statement shows what would"
  " be claimed, and protects nobody."
)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A statement, and the noise that earns it.

  Attributes:
    statement: of the encoder and of all that is computed from it.
    noise_multiplier: noise over sensitivity; 0 without noise.
    l2_sensitivity: when one pair comes or goes; 0 without clipping.
  """

  statement: statement_lib.PrivacyStatement
  noise_multiplier: float
  l2_sensitivity: float


def claim(
  identifier: str,
  grad_fn: optim.ContrastiveGrad | None,
  *,
  sampler: sampling.Poisson,
  epsilon: float,
  delta: float | None,
  steps: int,
  is_fixed: bool,
) -> Claim:
  """Calibrates the noise of a training and states what it will earn.

  Formal guarantee:
    Unit: one pair of images; neighbours: add or remove one. That of
    `statement.training` for noise of standard deviation noise_multiplier x
    l2_sensitivity on each of `steps` sums of `grad_fn` over batches of
    `sampler`.

  Args:
    identifier: of the training, in the ledger.
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
    return Claim(
      statement_lib.non_private(
        "Trained on the pairs without clipping and noise.", unit=UNIT
      ),
      0.0,
      0.0,
    )
  delta = delta or 1 / (2 * sampler.num_examples)
  sigma = accounting.noise_multiplier(
    epsilon=epsilon, delta=delta, sampler=sampler, steps=steps
  )
  moved = grad_fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")
  statement = statement_lib.training(
    identifier=identifier,
    sampler=sampler,
    noise_multiplier=sigma,
    l2_clip_norm=grad_fn.l2_clip_norm,
    l2_sensitivity=moved,
    steps=steps,
    delta=delta,
    unit=UNIT,
    mechanism=_mechanism(grad_fn),
    public=_PUBLIC,
    assumptions=(*((_FIXED_SECRET,) if is_fixed else ()), *_ASSUMPTIONS),
    not_protected=_NOT_PROTECTED,
  )
  return Claim(statement_lib.inherit(statement, _HEAD), sigma, moved)


def _mechanism(grad_fn: optim.ContrastiveGrad) -> str:
  what = (
    "the gradient of a whole batch, clipped as one"
    if isinstance(grad_fn.method, optim.Batch)
    else "gradients of similarities, each clipped, weighted and summed"
  )
  return f"{type(grad_fn.loss).__name__} loss: {what}, Gaussian noise"
