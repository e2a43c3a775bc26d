"""Bugs of private training, and how many canaries an audit needs to see them.

Each bug is planted into the pieces of `audit.mechanism`; the number of canaries
is doubled until the bound exceeds the claim, at 95% confidence, in 9 of 10 seeds.
Prints one JSON document.

  python tests/benchmarks/audit_bugs.py --epsilon 1 4 8
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.audit import lower_bounds
from synthq_jax.audit import mechanism as mechanism_lib
from synthq_jax.optim import clipping
from synthq_jax.optim import noise as noise_lib
from synthq_jax.privacy import sampling

DELTA = 1e-5
EPOCH = 50  # steps of one pass, where batches are smaller than the data
CONFIDENCE = 0.95


def one_shot(epsilon: float, records: int) -> mechanism_lib.Mechanism:
  """Returns one noisy sum of all records."""
  everything = sampling.FixedOrder(num_examples=records, batch_size=records)
  return mechanism_lib.Mechanism(
    epsilon=epsilon, delta=DELTA, sampler=everything
  )


def poisson(epsilon: float, records: int) -> mechanism_lib.Mechanism:
  """Returns an epoch of Poisson batches."""
  sampler = sampling.Poisson.with_margin(
    num_examples=records, expected_batch_size=records // EPOCH
  )
  return mechanism_lib.Mechanism(
    epsilon=epsilon, delta=DELTA, sampler=sampler, steps=EPOCH
  )


def privatize_without_noise(*, noise_multiplier: float, **arguments: Any):
  del noise_multiplier
  return optim.privatize(noise_multiplier=0.0, **arguments)


def privatize_with_half_the_sensitivity(
  *, l2_sensitivity: float, **arguments: Any
):
  return optim.privatize(l2_sensitivity=l2_sensitivity / 2, **arguments)


class OneKey(noise_lib.Iid):
  """Draws the noise of every leaf with the key of the step."""

  def draw(self, key, step, tree, state=()):
    step_key = jax.random.fold_in(key, step)
    draw = functools.partial(jax.random.normal, step_key)
    return jax.tree.map(lambda leaf: draw(jnp.shape(leaf)), tree), state


privatize_with_one_key = functools.partial(optim.privatize, noise=OneKey())


class ClippedMean:
  """Averages gradients, and clips the mean."""

  def __init__(self, loss_fn: Callable[..., Any], *, l2_clip_norm: float):
    self.loss_fn, self.l2_clip_norm = loss_fn, l2_clip_norm

  def __call__(self, params, batch, *, is_padding_example=None):
    size = jax.tree.leaves(batch)[0].shape[0]
    if is_padding_example is None:
      is_padding_example = jnp.zeros(size, bool)
    real = jnp.maximum(jnp.sum(~is_padding_example), 1)

    def mean(params):
      losses = jnp.where(is_padding_example, 0.0, self.loss_fn(params, batch))
      return jnp.sum(losses) / real

    loss, gradient = jax.value_and_grad(mean)(params)
    clip = optax.clip_by_global_norm(self.l2_clip_norm)
    clipped, _ = clip.update(gradient, clip.init(params))
    total = jax.tree.map(lambda x: x * real, clipped)
    aux = clipping.Aux(
      jnp.full(size, loss), jnp.full(size, optax.global_norm(gradient))
    )
    return total, aux

  def sensitivity(self, relation):
    del relation
    return self.l2_clip_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedAsPoisson(sampling.Poisson):
  """Goes through the shuffled records, and says that it drew coins."""

  def batch(self, seed, step):
    batch = self._fixed().batch(seed, step)
    padding = np.full(self.max_batch_size - len(batch.indices), -1, np.int32)
    indices = np.concatenate([batch.indices, padding])
    return sampling.Batch(indices, indices < 0)

  def _fixed(self):
    return sampling.FixedOrder(
      num_examples=self.num_examples, batch_size=self.expected_batch_size
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFileOrderAsPoisson(FixedAsPoisson):
  """Does so without a shuffle: whoever knows the file knows the batches."""

  def batch(self, seed, step):
    batch = super().batch(seed, step)
    size = self.expected_batch_size
    indices = np.where(
      batch.is_padding, -1, step * size + np.arange(self.max_batch_size)
    )
    return sampling.Batch(indices.astype(np.int32), batch.is_padding)


def with_sampler(mechanism: mechanism_lib.Mechanism, kind: Any):
  """Draws with another sampler than the one that is accounted for."""
  fields = dataclasses.asdict(mechanism.sampler)
  return dataclasses.replace(mechanism, sampler=kind(**fields))


def in_its_own_step(found: mechanism_lib.Audit) -> np.ndarray:
  """Scores a canary by the step that reads its place of the file."""
  # All records are canaries here.
  steps, canaries = found.releases.shape
  place = np.arange(canaries)
  return found.releases[place // (canaries // steps), place]


@dataclasses.dataclass(frozen=True)
class Bug:
  """A mistake, where to plant it, and the attack that is made for it."""

  training: Callable[[float, int], mechanism_lib.Mechanism]
  plant: Callable[[mechanism_lib.Mechanism], mechanism_lib.Mechanism]
  attack: Callable[[mechanism_lib.Audit], np.ndarray] | None = None

  def bounds(self, epsilon: float, canaries: int, seed: int):
    """Returns what an audit of a training with the bug finds."""
    mechanism = self.plant(self.training(epsilon, canaries))
    found = mechanism_lib.audit(mechanism, num_canaries=canaries, seed=seed)
    if self.attack is None:
      return found.bounds
    scores = self.attack(found)
    return lower_bounds.audit(
      scores[found.inserted], scores[~found.inserted], delta=DELTA, seed=seed
    )

  def bound(self, epsilon: float, canaries: int, seed: int) -> float:
    """Returns the bound that decides."""
    return self.bounds(epsilon, canaries, seed).epsilon_one_run_fdp


def _replacing(**changes: Any):
  return lambda mechanism: dataclasses.replace(mechanism, **changes)


BUGS = {
  "no bug": Bug(one_shot, lambda mechanism: mechanism),
  "no bug, Poisson batches": Bug(poisson, lambda mechanism: mechanism),
  "no noise": Bug(one_shot, _replacing(privatize=privatize_without_noise)),
  "one key for all leaves": Bug(
    one_shot, _replacing(privatize=privatize_with_one_key)
  ),
  "half the sensitivity": Bug(
    one_shot, _replacing(privatize=privatize_with_half_the_sensitivity)
  ),
  "half the sensitivity, Poisson batches": Bug(
    poisson, _replacing(privatize=privatize_with_half_the_sensitivity)
  ),
  "clipping after averaging": Bug(
    one_shot, _replacing(clipped_grad=ClippedMean)
  ),
  "fixed batches as Poisson, in the order of the file": Bug(
    poisson,
    functools.partial(with_sampler, kind=InFileOrderAsPoisson),
    in_its_own_step,
  ),
  "fixed batches as Poisson, shuffled": Bug(
    poisson, functools.partial(with_sampler, kind=FixedAsPoisson)
  ),
}


def power(
  bug: Bug, epsilon: float, *, seeds: int, most: int, seconds: float
) -> list[dict[str, Any]]:
  """Doubles the canaries until nearly all seeds, or the time, are through."""
  rows, canaries, began = [], 100, time.monotonic()
  while canaries <= most and time.monotonic() - began < seconds:
    bounds = [bug.bound(epsilon, canaries, seed) for seed in range(seeds)]
    caught = float(np.mean(np.array(bounds) > epsilon))
    rows.append(
      {
        "canaries": canaries,
        "caught": caught,
        "median_bound": round(float(np.median(bounds)), 3),
      }
    )
    if caught >= 0.9:
      break
    canaries *= 2
  return rows


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--epsilon", type=float, nargs="+", default=[1, 4, 8])
  parser.add_argument("--bugs", nargs="+", default=list(BUGS), choices=BUGS)
  parser.add_argument("--seeds", type=int, default=10)
  parser.add_argument("--most", type=int, default=51_200)
  parser.add_argument("--seconds", type=float, default=300.0, help="of a row")
  options = parser.parse_args()
  rows = []
  for name in options.bugs:
    for epsilon in options.epsilon:
      sizes = power(
        BUGS[name],
        epsilon,
        seeds=options.seeds,
        most=options.most,
        seconds=options.seconds,
      )
      enough = sizes[-1]["canaries"] if sizes[-1]["caught"] >= 0.9 else None
      row = {"bug": name, "epsilon": epsilon, "enough": enough}
      rows.append({**row, "sizes": sizes})
      print(json.dumps(row), file=sys.stderr, flush=True)
  document = {
    "confidence": CONFIDENCE,
    "delta": DELTA,
    "seeds": options.seeds,
    "rows": rows,
  }
  print(json.dumps(document, indent=2))
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
