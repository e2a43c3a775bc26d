"""Audits the private step itself with canaries among gradients: a table.

The smallest model there is: every canary has a coordinate of its own, into which
its gradient points with a norm far above the clip norm. The attacker sees every
noisy sum. Clipping, noise, sampling and accounting are the library's. A bound above
the claim in more than 5% of seeds is a mistake in one of them; none above it proves
nothing beyond mistakes that so many canaries can see.

References:
  Nasr et al., "Adversary Instantiation: Lower Bounds for Differentially Private
  Machine Learning", S&P 2021.
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023.

  python tests/benchmarks/private_step.py
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import optim
from synthq_jax.audit import lower_bounds
from synthq_jax.privacy import accounting, sampling
from synthq_jax.training import dp_step

_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
_CANARY_NORM = 100.0  # gradient norm over the clip norm: clipping has to act
_COINS, _BATCHES, _NOISE = range(3)  # streams of one seed
_EPOCH = 50  # Poisson batches
_DELTA = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
  """A private training of which every record is a canary; hashable.

  `privatize` and `clipped_grad` are the library's. A test puts a broken one there.
  """

  epsilon: float
  sampler: sampling.Sampler
  steps: int = 1
  clip_norm: float = 1.0
  clipped_grad: Callable[..., Any] = optim.clipped_grad
  privatize: Callable[..., Any] = optim.privatize

  @property
  def noise_multiplier(self) -> float:
    """The noise that the accounting asks for."""
    return accounting.noise_multiplier(
      epsilon=self.epsilon,
      delta=_DELTA,
      sampler=self.sampler,
      steps=self.steps,
      relation=_RELATION,
    )


def in_one_sum(epsilon: float, records: int, **pieces: Any) -> Mechanism:
  """Returns the mechanism of one noisy sum of all records."""
  sampler = sampling.FixedOrder(num_examples=records, batch_size=records)
  return Mechanism(epsilon=epsilon, sampler=sampler, **pieces)


def in_poisson_batches(
  epsilon: float, records: int, **pieces: Any
) -> Mechanism:
  """Returns the mechanism of an epoch of Poisson batches."""
  sampler = sampling.Poisson.with_margin(
    num_examples=records, expected_batch_size=records // _EPOCH
  )
  return Mechanism(epsilon=epsilon, sampler=sampler, steps=_EPOCH, **pieces)


def make_records(
  number: int, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Throws a coin for each canary: it keeps its gradient, or has an empty one."""
  inserted = np.random.default_rng((seed, _COINS)).random(number) < 0.5
  norm = np.where(inserted, np.float32(_CANARY_NORM), np.float32(0))
  return {
    "coordinate": np.arange(number, dtype=np.int32),
    "norm": norm,
  }, inserted


def loss_fn(params, batch) -> jax.Array:
  """Returns losses [batch] whose gradients are what the records say."""
  return batch["norm"] * params["first"][batch["coordinate"]]


def _make_transform(mechanism: Mechanism, sigma: float, key: jax.Array) -> Any:
  grad_fn = mechanism.clipped_grad(loss_fn, l2_clip_norm=mechanism.clip_norm)
  return grad_fn, mechanism.privatize(
    l2_sensitivity=grad_fn.sensitivity(_RELATION),
    noise_multiplier=sigma,
    denominator=float(mechanism.sampler.expected_batch_size),
    key=key,
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(mechanism: Mechanism, sigma: float, key: jax.Array, *rest: Any):
  """Takes one private step; compiled once for all seeds."""
  return dp_step.step(*_make_transform(mechanism, sigma, key))(*rest)


def train(
  mechanism: Mechanism, records: dict[str, np.ndarray], seed: int
) -> list[np.ndarray]:
  """Returns both leaves' noisy sums [step, canary], in units of the clip norm."""
  sampler, sigma = mechanism.sampler, mechanism.noise_multiplier
  key = jax.random.fold_in(jax.random.key(seed), _NOISE)
  zeros = {
    name: jnp.zeros(sampler.num_examples) for name in ("first", "second")
  }
  transform = _make_transform(mechanism, sigma, key)[1]
  state, means = dp_step.State(zeros, transform.init(zeros)), []
  for number in range(mechanism.steps):
    drawn = dp_step.draw(records, sampler, (seed, _BATCHES), number)
    state, _ = _step(mechanism, sigma, key, state, *drawn)
    means.append(jax.device_get(state.params))
    # The loss is linear, so parameters do not matter: from 0, a step is a mean.
    state = dp_step.State(zeros, state.opt_state)
  unit = sampler.expected_batch_size / mechanism.clip_norm
  return [unit * np.array([m[name] for m in means], float) for name in zeros]


def audit(
  mechanism: Mechanism, seed: int
) -> tuple[lower_bounds.Audited, np.ndarray, np.ndarray]:
  """Trains once on canaries, guesses which were there, and bounds epsilon.

  Canaries own one of two leaves. The other one gets noise alone: what it tells
  about the noise of the first, which should be nothing, is subtracted.

  Returns:
    The bounds, the coins, and the noisy sums.
  """
  sampler, sigma = mechanism.sampler, mechanism.noise_multiplier
  records, inserted = make_records(sampler.num_examples, seed)
  records["norm"] *= np.float32(mechanism.clip_norm)
  first, second = train(mechanism, records, seed)
  power = np.sum(second**2)
  sums = first - second * (np.sum(first * second) / power if power else 0.0)
  present = (2 * sums - 1) / (2 * sigma**2)
  rate = sampler.expected_batch_size / sampler.num_examples
  if rate < 1:  # a step reads a canary with this probability
    present = np.logaddexp(math.log1p(-rate), math.log(rate) + present)
  scores = present.sum(axis=0)
  bounds = lower_bounds.audit(
    scores[inserted], scores[~inserted], delta=_DELTA, seed=seed
  )
  return bounds, inserted, sums


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--epsilon", type=float, nargs="+", default=[1, 4, 8])
  parser.add_argument("--canaries", type=int, nargs="+",
                      default=[100, 400, 1600])  # fmt: skip
  parser.add_argument("--seeds", type=int, default=10)
  options = parser.parse_args()
  print("training epsilon canaries median_bound largest above_claim")
  cases = itertools.product(
    (in_one_sum, in_poisson_batches), options.epsilon, options.canaries
  )
  for make, epsilon, number in cases:
    mechanism = make(epsilon, number)
    found = [audit(mechanism, seed)[0] for seed in range(options.seeds)]
    bounds = np.array([one.epsilon_one_run_fdp for one in found])
    print(
      f"{make.__name__} {epsilon:g} {number} {np.median(bounds):.2f}"
      f" {bounds.max():.2f} {np.sum(bounds > epsilon)}/{len(bounds)}",
      flush=True,
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
