"""Adaptive clipping: a clip norm that follows a noisy quantile of the norms."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax import checks
from synthq_jax.optim import keys as keys_lib
from synthq_jax.optim import noise as noise_lib
from synthq_jax.optim.bookkeeping import devices

__all__ = ["AdaptiveClip", "AdaptiveClipState"]


class AdaptiveClipState(NamedTuple):
  """State of `AdaptiveClip`. It is as private as the trained parameters are.

  Attributes:
    l2_clip_norm: float32 [], of the next step.
    step: int32 [].
  """

  l2_clip_norm: jax.Array
  step: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AdaptiveClip:
  """Moves the clip norm towards a quantile of the gradients' norms.

  Each step counts how many of its examples have a norm below the clip norm, adds
  noise to the count, and multiplies the clip norm with exp(-rate x (fraction -
  quantile)). The count costs privacy: gradients get a little more noise, that of
  `sum_noise_multiplier`, so that both together cost what `noise_multiplier`
  promises.

  Formal guarantee:
    Unit: one example. A step releases two noisy sums over one batch: gradients
    clipped and divided by the clip norm (`rescale_to_unit_norm`), which one
    example moves by at most 1, with noise of `sum_noise_multiplier`; and values
    of -1/2 or 1/2, one for each example, 0 for padding, which it moves by at
    most 1/2, with noise of standard deviation `count_std`. Divided by these
    standard deviations they are one vector, which one example moves by at most
    sqrt(sum_noise_multiplier^-2 + (2 count_std)^-2) = 1 / noise_multiplier, so
    the step is ONE Gaussian mechanism of that noise multiplier, and samplers
    amplify it as any other; replaced, it moves by twice that, which accountants
    of REPLACE_ONE allow for. The clip norm of a step follows from earlier noisy
    sums alone: adaptive composition covers it. Asked of the caller: the clip
    norm goes into the gradient of the same step, whose norms come back, all of
    them (a part inside of `jax.shard_map` is refused); the key is used for
    nothing else. Public: the settings. A claim is made with
    `noise_multiplier`, `l2_sensitivity=1` and the initial clip norm.

  >>> clip = AdaptiveClip(initial=1.0, noise_multiplier=1.0, denominator=100,
  ...                     key=jax.random.key(0))
  >>> round(clip.sum_noise_multiplier, 4)
  1.005
  >>> state = clip.init()
  >>> state = clip.update(jnp.full(9, 5.0), state, is_padding_example=None)
  >>> bool(state.l2_clip_norm > 1)
  True

  References:
    Andrew, Thakkar, McMahan and Ramaswamy (2021), arXiv:1905.03871, section 2
    and theorem 1.
  """

  initial: float
  """The clip norm of the first step, at least 1e-12."""
  noise_multiplier: float
  """Of the claim, which covers gradients and counts, above 0."""
  denominator: float
  """Public: the expected batch size, by which the count is divided."""
  key: jax.Array = dataclasses.field(repr=False)
  """One secret key, for the noise of the counts and nothing else."""
  quantile: float = 0.5
  """Of norms, in (0, 1), which the clip norm is to follow."""
  rate: float = 0.2
  """Of the geometric updates, above 0."""
  count_std: float | None = None
  """Of the noise on the count; None: denominator / 20, or more where the claim's
  noise leaves gradients nothing otherwise."""
  range: tuple[float, float] = (1e-6, 1e6)
  """In which the clip norm stays."""

  def __post_init__(self):
    """Refuses what is out of range, and fills in what is None."""
    low, high = self.range
    checks.clip_norm(low)
    if keys_lib.check("key", self.key):
      raise ValueError(f"expected one key, got keys of shape {self.key.shape}")
    if not low <= self.initial <= high < math.inf:
      raise ValueError(
        f"expected initial in range={self.range}, got initial={self.initial}"
      )
    if self.count_std is None:
      std = max(self.denominator / 20, self.noise_multiplier)
      object.__setattr__(self, "count_std", std)
    for name in ("noise_multiplier", "denominator", "rate"):
      checks.within("(0, inf)", **{name: getattr(self, name)})
    checks.within("(0, 1)", quantile=self.quantile)
    if not self.noise_multiplier / 2 < self.count_std < math.inf:
      raise ValueError(
        "expected count_std above noise_multiplier / 2 ="
        f" {self.noise_multiplier / 2:g}, got count_std={self.count_std}: the"
        " count alone would cost more than the claim"
      )

  @property
  def sum_noise_multiplier(self) -> float:
    """Of the noise on the gradients, for `privatize`."""
    left = self.noise_multiplier**-2 - (2 * self.count_std) ** -2
    return left**-0.5

  def init(self) -> AdaptiveClipState:
    """Returns the state before the first step."""
    return AdaptiveClipState(
      jnp.asarray(self.initial, jnp.float32), jnp.zeros([], jnp.int32)
    )

  def counted(
    self,
    norms: jax.Array,
    l2_clip_norm: jax.Array,
    is_padding_example: jax.Array | None,
  ) -> jax.Array:
    """Returns the sum over examples of 1/2 below the clip norm, else -1/2.

    Args:
      norms: float32 [batch], before clipping; one that is nan is not below.
      l2_clip_norm: float32 [].
      is_padding_example: bool [batch]; such examples add 0. None: none is.
    """
    values = jnp.where(norms <= l2_clip_norm, 0.5, -0.5)
    if is_padding_example is not None:
      values = jnp.where(is_padding_example, 0.0, values)
    return jnp.sum(values)

  def update(
    self,
    norms: jax.Array,
    state: AdaptiveClipState,
    *,
    is_padding_example: jax.Array | None,
  ) -> AdaptiveClipState:
    """Returns the state of the next step.

    Args:
      norms: float32 [batch], `aux.norms` of this step.
      state: the one whose clip norm they were clipped to.
      is_padding_example: bool [batch], as `drawn.is_padding`: padding that
        counts is an example that nobody accounts for. None only where no batch
        ever has padding, as of `sampling.FixedOrder`.

    Raises:
      ValueError: if a device has norms, padding or a state of its own inside of
        `jax.shard_map`: all would add the same noise to their parts.
    """
    devices.refuse_parts(
      (norms, state, is_padding_example),
      "norms and a state",
      "return the norms from jax.shard_map and call update outside of it",
    )
    count = self.counted(norms, state.l2_clip_norm, is_padding_example)
    step_key = jax.random.fold_in(self.key, state.step)
    count += self.count_std * noise_lib.standard(step_key, ())
    # The count is about the fraction minus 1/2, times the batch's size.
    above = 0.5 + count / self.denominator - self.quantile
    clip = state.l2_clip_norm * jnp.exp(-self.rate * above)
    clip = jnp.clip(clip, *self.range)
    return AdaptiveClipState(clip, state.step + 1)
