"""Computes the claim of one private training; every private training uses it.

`terms.Terms` hold the words of a claim: its unit, what is public, what is assumed
and what is not protected. A `Claim` adds the numbers: sampler, steps, sensitivity
and noise. It computes epsilon from these numbers, enters the ledger before a loss
or a gradient of any record is computed, and makes the statement that results
carry. Trainings inside T5X use it, too.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from synthq_jax import checks
from synthq_jax.privacy import (
  accounting,
  batches,
  ledger,
  releases,
  sampling,
  terms,
)
from synthq_jax.privacy import statement as statement_lib

__all__ = ["Claim", "calibrated"]

_MOST_LEVELS = 32  # levels of noise that a schedule may have in the ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """The privacy claim of noisy clipped sums over sampled batches.

  Formal guarantee:
    For one `words.unit` and the neighbouring relation `relation`, all `steps`
    noisy sums together, and everything computed from them and public data, are
    (`epsilon`, `delta`)-differentially private. Epsilon is that of
    `accounting.epsilon` for the same arguments.

    The caller must ensure the following. Each sum is over one batch of
    `sampler`, and each batch is drawn for one sum only. One record moves the sum
    by at most `l2_sensitivity` when it enters or leaves the batch. The noise has
    standard deviation `noise_multiplier * l2_sensitivity` and is independent of
    all else, or has `noise_bands` bands of `optim.banded`. The assumptions in
    `words` hold. Correlated noise without a known bound for these batches is
    refused (ValueError).

    A schedule of noise multipliers is public and fixed before the training. Under
    Poisson sampling each step counts with its own noise multiplier, rounded down.
    Under other samplers a record may be in any step of a cycle, so all steps
    count with the least. If the noise depends on earlier private sums, or is
    traced, claim a lower bound of it: the training must never go below it. If the
    clip norm changes, scale the sums to unit norm and set `l2_sensitivity=1`. A
    noisy statistic of all n records is one step of `Poisson(n, n, n + 1)`,
    because a neighbour may have one record more.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=4000, expected_batch_size=64)
  >>> claim = Claim(sampler=sampler, steps=600, noise_multiplier=1.0,
  ...               l2_clip_norm=0.1, delta=1e-4)
  >>> round(claim.epsilon, 2)
  1.97
  >>> str(claim.statement("my_training/1").unit)
  'example'
  """

  sampler: sampling.Sampler
  """The sampler that draws the batches."""
  steps: int
  """The number of noisy sums."""
  noise_multiplier: float | Callable[[int], Any]
  """Noise standard deviation over `l2_sensitivity`, or a function of the step
  (from 0), as `optim.privatize` takes it. With 0 nothing is claimed."""
  l2_clip_norm: float
  """The norm that gradients are clipped to."""
  delta: float | None = None
  """Delta of the claim, in (0, 1 / sampler.units); None: 1 / (2 sampler.units)."""
  l2_sensitivity: float | None = None
  """Sensitivity of the sum under ADD_OR_REMOVE_ONE; None: the clip norm."""
  relation: Any = "ADD_OR_REMOVE_ONE"
  """A `dp_accounting.NeighboringRelation` or its name."""
  noise_bands: int = 1
  """Bands of `optim.banded` noise; 1: independent in every step."""
  part: str = ""
  """The part of the records that is read, as in `releases.Release.part`."""
  words: terms.Terms = terms.EXAMPLES
  """Unit and words of the claim. The default is for single examples of any model;
  for trainings on queries take `terms.QUERIES`."""

  def __post_init__(self):
    """Refuses noise and words that do not fit the batches; fills in defaults."""
    batches.check_sampler(self.sampler)
    self._check_words()
    self.sampler.check_noise(self.noise_bands)
    if self.delta is None:
      object.__setattr__(self, "delta", 1 / (2 * self.sampler.units))
    if self.l2_sensitivity is None:
      object.__setattr__(self, "l2_sensitivity", self.l2_clip_norm)
    name = checks.relation(self.relation)
    object.__setattr__(self, "relation", name)

  def _check_words(self) -> None:
    """Refuses a unit with more records than the sampler accounts for."""
    if not isinstance(self.words, terms.Terms):
      raise TypeError(
        "expected words of privacy.terms, such as terms.EXAMPLES.but(unit=...),"
        f" got {type(self.words).__name__}"
      )
    unit, size = self.words.unit, self.sampler.group_size
    if 1 < size < unit.max_records:  # with 1, a unit is drawn as one record
      raise ValueError(
        f"expected a sampler of groups as large as one {unit}, got group_size="
        f"{size}: give the sampler group_size={unit.max_records}"
      )

  @functools.cached_property
  def epsilon(self) -> float:
    """Epsilon of all sums together, at `delta`; infinite without noise."""
    assert self.delta is not None  # filled in by __post_init__
    accounting.check_delta(self.delta, self.sampler)
    return accounting.composed_epsilon(
      self._runs, delta=self.delta, relation=self.relation
    )

  @property
  def constant_noise_multiplier(self) -> float:
    """The noise multiplier of every step.

    Raises:
      TypeError: if it is a schedule.
    """
    if callable(self.noise_multiplier):
      raise TypeError("expected one noise multiplier, got a schedule of steps")
    return self.noise_multiplier

  @property
  def noise_std(self) -> float:
    """The standard deviation of the noise on each sum.

    Raises:
      TypeError: if the noise multiplier is a schedule.
    """
    assert self.l2_sensitivity is not None  # filled in by __post_init__
    return self.constant_noise_multiplier * self.l2_sensitivity

  @functools.cached_property
  def _runs(self) -> tuple[accounting.Run, ...]:
    """The steps grouped by noise level, which may be rounded down."""
    # Epochs x records / batch size is no integer: rounded down, it claims less.
    checks.count("steps", self.steps, 1)
    schedule = self.noise_multiplier
    if not callable(schedule):
      run = accounting.Run(self.sampler, float(schedule), int(self.steps))
      return (run,)
    values = np.array([float(schedule(i)) for i in range(self.steps)])
    if not isinstance(self.sampler, sampling.Poisson):
      values[:] = values.min()
    levels, counts = _group_levels(values)
    return tuple(
      accounting.Run(self.sampler, float(level), int(count))
      for level, count in zip(levels, counts, strict=True)
    )

  def statement(self, identifier: str) -> statement_lib.PrivacyStatement:
    """Makes the statement of this claim, which results carry.

    Args:
      identifier: a name of this training alone, e.g. "finetune_dp/FINGERPRINT".

    Returns:
      The statement. Its ledger has one release, and for schedules one for each
      level of noise. Without noise, if `words.without_noise` is set, it is a
      statement that claims nothing.

    Raises:
      ValueError: if the identifier is empty, a norm is not positive, or
        accounting refuses an argument.
    """
    # Both are filled in by __post_init__.
    assert self.delta is not None and self.l2_sensitivity is not None
    words = self.words
    is_quiet = any(run.noise_multiplier == 0 for run in self._runs)
    if is_quiet and words.without_noise:
      return statement_lib.non_private(
        words.without_noise, unit=words.unit, relation=self.relation
      )
    entries = tuple(
      releases.Release(
        identifier=identifier if number == 0 else f"{identifier}#{number}",
        mechanism=words.mechanism,
        **releases.get_sampler_fields(self.sampler),
        noise_multiplier=run.noise_multiplier,
        l2_clip_norm=float(self.l2_clip_norm),
        l2_sensitivity=float(self.l2_sensitivity),
        steps=run.steps,
        noise_bands=int(self.noise_bands),
        part=self.part,
      )
      for number, run in enumerate(self._runs)
    )
    return statement_lib.PrivacyStatement(
      unit=words.unit,
      relation=self.relation,
      epsilon=self.epsilon,
      delta=float(self.delta),
      ledger=entries,
      public=words.public,
      assumptions=words.assumptions,
      not_protected=words.not_protected,
      notes=words.notes,
      secret_is_fixed=words.secret_is_fixed,
    )

  def enter(
    self, path: str | os.PathLike, identifier: str
  ) -> statement_lib.PrivacyStatement:
    """Enters the statement of this claim into a ledger, before any computation.

    You may read and count the records before, since n is public. Compute losses,
    gradients and noise after this call.

    Args:
      path: the ledger; created if missing.
      identifier: the name of the training. The ledger keeps one entry for each
        name, so resuming a training adds none.

    Returns:
      The statement of this claim.
    """
    statement = self.statement(identifier)
    ledger.enter(path, identifier, statement)
    return statement


def _group_levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Rounds noise multipliers down to few levels; returns levels and step counts.

  Up to `_MOST_LEVELS` distinct values stay as they are.
  """
  distinct, counts = np.unique(values, return_counts=True)
  low, high = distinct[0], distinct[-1]
  if len(distinct) <= _MOST_LEVELS or not 0 < low <= high < math.inf:
    return distinct, counts
  levels = np.geomspace(low, high, _MOST_LEVELS)
  levels[0] = low
  positions = np.searchsorted(levels, values, side="right") - 1
  used, counts = np.unique(positions, return_counts=True)
  return levels[used], counts


def calibrated(
  *,
  epsilon: float,
  sampler: sampling.Sampler,
  steps: int,
  l2_clip_norm: float,
  delta: float | None = None,
  relation: Any = "ADD_OR_REMOVE_ONE",
  decide: Callable[[Callable[[], float]], float] = lambda find: find(),
  **fields: Any,
) -> Claim:
  """Returns the claim with the least noise that reaches a target epsilon.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> claim = calibrated(epsilon=8, sampler=sampler, steps=299, l2_clip_norm=1)
  >>> round(claim.noise_multiplier, 3), claim.epsilon <= 8
  (0.747, True)

  Args:
    epsilon: the target; inf: no noise, and nothing is claimed.
    sampler: draws the batches.
    steps: the number of noisy sums.
    l2_clip_norm: the norm that gradients are clipped to.
    delta: delta of the claim; None: 1 / (2 sampler.units).
    relation: a `dp_accounting.NeighboringRelation` or its name.
    decide: takes the function that finds the noise multiplier, and returns its
      result. With several processes, one calls it and broadcasts the result.
    **fields: other fields of `Claim`.

  Raises:
    ValueError: if no noise reaches the target, or no bound is known for such
      noise with these batches.
  """
  template = Claim(
    sampler=sampler,
    steps=steps,
    noise_multiplier=math.nan,
    l2_clip_norm=l2_clip_norm,
    delta=delta,
    relation=relation,
    **fields,
  )
  claim_delta = template.delta
  assert claim_delta is not None  # filled in by Claim
  noise_multiplier = decide(
    lambda: accounting.noise_multiplier(
      epsilon=epsilon,
      delta=claim_delta,
      sampler=sampler,
      steps=steps,
      relation=template.relation,
    )
  )
  return dataclasses.replace(template, noise_multiplier=noise_multiplier)
