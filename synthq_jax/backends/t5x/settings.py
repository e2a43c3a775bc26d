"""What a private training in T5X promises, from public numbers alone."""

import dataclasses
import math

import dp_accounting

from synthq_jax.privacy import accounting, sampling
from synthq_jax.privacy import statement as statement_lib

__all__ = ["Settings"]

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_MECHANISM = "per-example gradients in T5X, clipped, summed, Gaussian noise"
_PUBLIC = (
  "The number of private examples.",
  "The settings: model, vocabulary, initial checkpoint, learning rate, clip "
  "norm, batch sizes, number of steps and noise.",
)
_ASSUMPTIONS = (
  "An example of the task is one record, drawn and clipped as one, and a "
  "person's or query's data is in one example.",
  *statement_lib.ASSUMPTIONS[1:2],
  "Which examples were in which batch stays secret; every checkpoint may be "
  "published.",
  "Losses, gradient norms and scores on private examples are not published: "
  "what T5X's evaluation of a private split writes is outside this claim.",
  "The settings were chosen without looking at the private examples; trials "
  "that did look are releases of their own, each in its own MODEL_DIR.",
  *statement_lib.ASSUMPTIONS[5:],
)
_NOT_PROTECTED = (
  "How many private examples there are.",
  "What many examples have in common: learning that is the purpose.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The public settings of one private training.

  Formal guarantee: noise of standard deviation `noise_multiplier` times
  `l2_clip_norm` on the clipped sums of `steps` batches of `sampler` is
  (epsilon, delta)-differentially private for one example that is added or
  removed; see `accounting.epsilon`.
  """

  num_examples: int
  """Examples of the training split, public."""
  expected_batch_size: int
  """Mean number of examples in a batch, and the public divisor."""
  max_batch_size: int
  """Rows of a batch, padding included: T5X's BATCH_SIZE."""
  steps: int
  """Private steps: TRAIN_STEPS less the step of the initial checkpoint."""
  epsilon: float
  """Target; inf trains without noise and claims nothing."""
  l2_clip_norm: float
  """The norm that each example's gradient is clipped to."""
  delta: float | None = None
  """Target; None: 1 / (2 num_examples)."""
  unit: str = "example"
  """What one example is, in the words of the statement."""

  def __post_init__(self):
    """Refuses numbers that contradict each other."""
    if not (self.l2_clip_norm > 0 and math.isfinite(self.l2_clip_norm)):
      raise ValueError(
        "expected Settings.l2_clip_norm (CLIP_NORM) > 0 and finite, got"
        f" {self.l2_clip_norm}"
      )
    if self.steps < 1:
      raise ValueError(
        "expected Settings.steps (PRIVATE_STEPS) of at least 1, got"
        f" {self.steps}"
      )
    if self.delta is None:
      object.__setattr__(self, "delta", 1 / (2 * self.num_examples))
    self.sampler.check_relation(_RELATION)

  @property
  def sampler(self) -> sampling.Poisson:
    """How batches are drawn."""
    return sampling.Poisson(
      num_examples=self.num_examples,
      expected_batch_size=self.expected_batch_size,
      max_batch_size=self.max_batch_size,
    )

  def noise_multiplier(self) -> float:
    """Returns the least noise that reaches the target; 0 without one."""
    return accounting.noise_multiplier(
      epsilon=self.epsilon,
      delta=self.delta,
      sampler=self.sampler,
      steps=self.steps,
      relation=_RELATION,
    )

  def statement(self, identifier: str) -> statement_lib.PrivacyStatement:
    """States what a training with these settings earns.

    Args:
      identifier: names the training and no other.

    Returns:
      The statement; one that claims nothing without noise.
    """
    if math.isinf(self.epsilon):
      return statement_lib.non_private(
        "Trained in T5X on private examples without noise.", unit=self.unit
      )
    return statement_lib.training(
      identifier=identifier,
      sampler=self.sampler,
      noise_multiplier=self.noise_multiplier(),
      l2_clip_norm=self.l2_clip_norm,
      steps=self.steps,
      delta=self.delta,
      relation=_RELATION,
      unit=self.unit,
      mechanism=_MECHANISM,
      public=_PUBLIC,
      assumptions=_ASSUMPTIONS,
      not_protected=_NOT_PROTECTED,
    )
