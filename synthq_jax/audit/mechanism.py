"""Audits the private training step itself, with the strongest canaries.

Canaries in text tell how much a language model gives away; they are too weak to
notice most mistakes in the mechanism behind it. Here the model is linear. Every
canary has a coordinate of its own, into which its gradient points with a norm
far above the clip norm, and whoever attacks sees every private mean and knows
the noise that was claimed. Such an audit takes seconds, so it can stand in
front of every change of the code that clips, adds noise, draws or accounts.

References:
  Nasr et al., "Adversary Instantiation: Lower Bounds for Differentially Private
  Machine Learning", S&P 2021, for canaries in the space of gradients.
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023, for many of them in one training.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Shaped

from synthq_jax import checks, optim
from synthq_jax.audit import lower_bounds
from synthq_jax.privacy import accounting, sampling
from synthq_jax.training import dp_step

__all__ = ["Audit", "Mechanism", "audit", "loss_fn", "make_records"]

_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
_CANARY_NORM = 100.0  # gradient norm over the clip norm: clipping has to act
_ORDINARY_NORM = 0.5
_COINS, _BATCHES, _NOISE = range(3)  # streams of one seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
  """A private training in the pieces that earn its claim, all hashable.

  The defaults are this library's; put yours in their place to audit it.
  """

  epsilon: float
  """The claim, from which the noise is calculated; finite."""
  delta: float
  """Of the claim, below 1 / num_examples."""
  sampler: sampling.Sampler
  """Draws the batches and says by which law the claim accounts for them."""
  steps: int = 1
  """The number of noisy sums, all of them released."""
  l2_clip_norm: float = 1.0
  """Of one record's gradient."""
  clipped_grad: Callable[..., Any] = optim.clipped_grad
  """Called as `clipped_grad(loss_fn, l2_clip_norm=...)`."""
  privatize: Callable[..., Any] = optim.privatize
  """Makes an optax transform of clipped sums: called with l2_sensitivity,
  noise_multiplier, denominator and key. What an optimizer makes of private means
  is post-processing and stays out."""
  step: Callable[..., Any] = dp_step.step
  """Called as `step(grad_fn, transform)`."""

  def __post_init__(self):
    """Refuses a claim that says nothing."""
    checks.within("(0, inf)", epsilon=self.epsilon)

  @property
  def noise_multiplier(self) -> float:
    """The noise that the accounting asks for."""
    return accounting.noise_multiplier(
      epsilon=self.epsilon,
      delta=self.delta,
      sampler=self.sampler,
      steps=self.steps,
      relation=_RELATION,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
  """What one audit found; noisy sums are public, the coins are not."""

  claim: float
  """Epsilon that the accounting promises."""
  bounds: lower_bounds.Audited
  """How much the training gives away at least."""
  inserted: Bool[np.ndarray, " canary"]
  """The coins."""
  releases: Float[np.ndarray, "step canary"]
  """Noisy sums: 1 where a canary took part, 0 elsewhere, and noise; for other
  attacks than the audit's own."""

  @property
  def violates(self) -> bool:
    """Whether the claim is refuted, at the confidence of the bounds."""
    return self.bounds.epsilon_one_run_fdp > self.claim


def audit(
  mechanism: Mechanism,
  *,
  num_canaries: int,
  seed: int,
  confidence: float = 0.95,
) -> Audit:
  """Trains once on canaries, guesses which were there, and bounds epsilon.

  The canaries are the first of the sampler's records. A fair coin for each
  decides whether it keeps its gradient or is replaced by an empty record. They
  own one of the model's two leaves; the other gets noise alone, and what that
  tells about the noise of the first, which should be nothing, is subtracted.
  Canaries are scored by the likelihood of their noisy sums under the claim.

  Formal guarantee:
    If the pieces do what is claimed (unit: one record; REPLACE_SPECIAL, which
    for Poisson batches is ADD_OR_REMOVE_ONE), `violates` is true for at most a
    share 1 - confidence of seeds. The bound is the one for f-DP, which takes
    the claim for that of a Gaussian mechanism: exactly so for one sum of all
    records, and safe for Poisson batches wherever their privacy profile lies
    below that of the Gaussian with the same (epsilon, delta). Passing proves
    nothing: what needs more canaries, what a linear loss does not reach (rules
    for the norms of layers, optimizers, whatever happened to the data before)
    and weak random numbers all pass.

  >>> sampler = sampling.FixedOrder(num_examples=500, batch_size=500)
  >>> claimed = Mechanism(epsilon=4.0, delta=1e-5, sampler=sampler)
  >>> audit(claimed, num_canaries=500, seed=0).violates
  False

  Args:
    mechanism: what is audited.
    num_canaries: at most the sampler's records; more of them notice more.
    seed: of coins, batches and noise.
    confidence: of the bounds, in (0.5, 1).

  Returns:
    The bounds beside the claim, and what they were computed from.

  Raises:
    ValueError: if a number is out of range.
  """
  sampler = mechanism.sampler
  checks.within(f"[2, {sampler.num_examples}]", num_canaries=num_canaries)
  records, inserted = make_records(sampler.num_examples, num_canaries, seed)
  records["norm"] *= np.float32(mechanism.l2_clip_norm)
  first, second = _train(mechanism, records, num_canaries, seed)
  releases = first - second * _slope(first, second)
  scores = _log_likelihood_ratio(
    releases,
    probability=sampler.expected_batch_size / sampler.num_examples,
    noise_multiplier=mechanism.noise_multiplier,
  )
  bounds = lower_bounds.audit(
    scores[inserted],
    scores[~inserted],
    delta=mechanism.delta,
    confidence=confidence,
    seed=seed,
  )
  return Audit(
    claim=mechanism.epsilon, bounds=bounds, inserted=inserted, releases=releases
  )


def make_records(
  num_records: int, num_canaries: int, seed: int
) -> tuple[
  dict[str, Shaped[np.ndarray, " record"]], Bool[np.ndarray, " canary"]
]:
  """Makes the records of an audit for a clip norm of 1, and throws the coins.

  Args:
    num_records: canaries and ordinary ones together.
    num_canaries: the first of them.
    seed: of the coins.

  Returns:
    "coordinate" and "norm" of each record's gradient (ordinary records share
    the coordinate behind the canaries'; a held-out canary has norm 0), and the
    coins.
  """
  inserted = np.random.default_rng((seed, _COINS)).random(num_canaries) < 0.5
  norm = np.full(num_records, _ORDINARY_NORM, np.float32)
  norm[:num_canaries] = np.where(inserted, _CANARY_NORM, 0.0)
  coordinate = np.minimum(np.arange(num_records, dtype=np.int32), num_canaries)
  return {"coordinate": coordinate, "norm": norm}, inserted


def loss_fn(
  params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]
) -> jax.Array:
  """Returns losses [batch] whose gradients are what the records say."""
  return batch["norm"] * params["first"][batch["coordinate"]]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(mechanism: Mechanism, sigma: float, key: jax.Array, *rest: Any):
  """Takes one private step; compiled once for all seeds."""
  grad_fn = _grad_fn(mechanism)
  return mechanism.step(grad_fn, _transform(mechanism, sigma, key))(*rest)


def _grad_fn(mechanism: Mechanism) -> Any:
  return mechanism.clipped_grad(loss_fn, l2_clip_norm=mechanism.l2_clip_norm)


def _transform(mechanism: Mechanism, sigma: float, key: jax.Array) -> Any:
  return mechanism.privatize(
    l2_sensitivity=_grad_fn(mechanism).sensitivity(_RELATION),
    noise_multiplier=sigma,
    denominator=float(mechanism.sampler.expected_batch_size),
    key=key,
  )


def _train(
  mechanism: Mechanism,
  records: Mapping[str, np.ndarray],
  num_canaries: int,
  seed: int,
) -> list[Float[np.ndarray, "step canary"]]:
  """Returns both leaves' noisy sums, in units of the clip norm."""
  sampler, sigma = mechanism.sampler, mechanism.noise_multiplier
  key = jax.random.fold_in(jax.random.key(seed), _NOISE)
  zeros = {name: jnp.zeros(num_canaries + 1) for name in ("first", "second")}
  state = dp_step.State(zeros, _transform(mechanism, sigma, key).init(zeros))
  means = []
  for number in range(mechanism.steps):
    drawn = dp_step.draw(records, sampler, (seed, _BATCHES), number)
    state, _ = _step(mechanism, sigma, key, state, *drawn)
    means.append(jax.device_get(state.params))
    # The loss is linear, so parameters do not matter: from 0, a step is a mean.
    state = dp_step.State(zeros, state.opt_state)
  unit = sampler.expected_batch_size / mechanism.l2_clip_norm
  return [
    unit * np.array([mean[name][:num_canaries] for mean in means], float)
    for name in zeros
  ]


def _slope(first: np.ndarray, second: np.ndarray) -> float:
  """Returns how much of the second leaf's noise stands in the first."""
  power = np.sum(second**2)
  return 0.0 if power == 0 else float(np.sum(first * second) / power)


def _log_likelihood_ratio(
  releases: Float[np.ndarray, "step canary"],
  *,
  probability: float,
  noise_multiplier: float,
) -> Float[np.ndarray, " canary"]:
  """Returns log p(releases | inserted) - log p(releases | held out).

  Each step reads a canary with the given probability, independently.
  """
  present = (2 * releases - 1) / (2 * noise_multiplier**2)
  if probability == 1:
    return present.sum(axis=0)
  absent = math.log1p(-probability)
  return np.logaddexp(absent, math.log(probability) + present).sum(axis=0)
