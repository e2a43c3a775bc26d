"""A promise about one private training: the one place where promises are made.

`terms.Terms` name what a promise says: what one record is, what is public,
assumed, and not protected. A `Claim` adds the numbers: how batches are drawn,
how many noisy sums are taken, over which sensitivity, with how much noise. It
computes epsilon from these, enters the ledger before a loss or a gradient of any
record is computed, and becomes the statement that results carry. Every private training of the
project, T5X's among them, makes its promise here.
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

_MOST_LEVELS = 32  # of noise, in the ledger of a schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """Noise on clipped sums over drawn batches, and what that promises.

  Formal guarantee:
    For one `words.unit` and the neighbouring relation `relation`, whoever sees
    all `steps` noisy sums, and whatever is computed from them and public data,
    is promised (`epsilon`, `delta`)-differential privacy, that of
    `accounting.epsilon` for the same arguments. Asked of the caller: each sum
    is over one batch of `sampler`, drawn for no other sum; one record moves it
    by at most `l2_sensitivity` when it comes to the batch or leaves it; the
    noise has standard deviation `noise_multiplier * l2_sensitivity`,
    independent of all else, or `noise_bands` bands of `optim.banded`; and
    what `words` assume. Correlated noise with batches for which nothing is
    claimed is refused (ValueError). A noise multiplier that is a schedule is
    public and was fixed before; under Poisson sampling each step counts with its
    own, rounded down, and under other samplers, where a record may be in
    whichever step of a cycle, all count with the least. Where noise follows from earlier private
    sums, or is traced, the claim is one about a number that it never falls
    below: whoever trains has to keep to it. A clip norm that changes asks for
    sums of unit norm, and then for `l2_sensitivity=1`. A noisy statistic of all n
    records is one step of `Poisson(n, n, n + 1)`: a neighbour has one more.

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
  """How batches are drawn."""
  steps: int
  """The number of noisy sums."""
  noise_multiplier: float | Callable[[int], Any]
  """Noise standard deviation over `l2_sensitivity`, or a schedule of the step
  from 0, as `optim.privatize` takes it; 0 claims nothing."""
  l2_clip_norm: float
  """The norm that gradients are clipped to."""
  delta: float | None = None
  """Of the promise, in (0, 1 / n), n units (records, but for groups); None:
  1 / (2n)."""
  l2_sensitivity: float | None = None
  """Of the sum, for ADD_OR_REMOVE_ONE; None: the clip norm."""
  relation: Any = "ADD_OR_REMOVE_ONE"
  """A `dp_accounting.NeighboringRelation` or its name."""
  noise_bands: int = 1
  """Of `optim.banded` noise; 1: independent in every step."""
  accountant: str = "pld"
  """"pld" or "rdp"."""
  part: str = ""
  """The records that are read, as `releases.Release` has it."""
  words: terms.Terms = terms.EXAMPLES
  """The words: of single examples of any model. Who trains on queries says so
  (`terms.QUERIES`)."""

  def __post_init__(self):
    """Refuses noise that does not fit the batches; fills in what is None."""
    batches.check_sampler(self.sampler)
    self.sampler.check_noise(self.noise_bands)
    if self.delta is None:
      object.__setattr__(self, "delta", 1 / (2 * self.sampler.units))
    if self.l2_sensitivity is None:
      object.__setattr__(self, "l2_sensitivity", self.l2_clip_norm)
    name = checks.relation(self.relation)
    object.__setattr__(self, "relation", name)

  @functools.cached_property
  def epsilon(self) -> float:
    """Of all sums together, at `delta`; infinite without noise."""
    assert self.delta is not None  # filled in by __post_init__
    accounting.check_delta(self.delta, self.sampler)
    return accounting.composed_epsilon(
      self._runs,
      delta=self.delta,
      relation=self.relation,
      accountant=self.accountant,
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
    """The steps by their noise, which may be rounded down."""
    schedule = self.noise_multiplier
    if not callable(schedule):
      run = accounting.Run(self.sampler, float(schedule), int(self.steps))
      return (run,)
    values = np.array([float(schedule(i)) for i in range(self.steps)])
    if not isinstance(self.sampler, sampling.Poisson):
      values[:] = values.min()
    levels, counts = _levels(values)
    return tuple(
      accounting.Run(self.sampler, float(level), int(count))
      for level, count in zip(levels, counts, strict=True)
    )

  def statement(self, identifier: str) -> statement_lib.PrivacyStatement:
    """Returns the promise as results carry it.

    Args:
      identifier: names this training and no other, e.g.
        "finetune_dp/FINGERPRINT".

    Returns:
      The statement, with a release in its ledger for each level of noise, of
      which there is one but for schedules; one that claims nothing
      where there is no noise and `words` have a sentence for that.

    Raises:
      ValueError: if the identifier is empty, a norm is not positive, or
        accounting refuses.
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
        **releases.sampler_fields(self.sampler),
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
      accountant=self.accountant,
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
    """Enters the promise into a ledger; do it before anything is computed.

    Records may be read before, and counted: n is public. A loss, a gradient or
    noise comes after.

    Args:
      path: the ledger; made where it is missing.
      identifier: of the training; one that is there already, as that of a
        resumed training, is not entered again.

    Returns:
      The statement that was entered.
    """
    made = self.statement(identifier)
    ledger.enter(path, identifier, made)
    return made


def _levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns few noise multipliers, rounded down, and the steps of each."""
  found, counts = np.unique(values, return_counts=True)
  low, high = found[0], found[-1]
  if len(found) <= _MOST_LEVELS or not 0 < low <= high < math.inf:
    return found, counts
  levels = np.geomspace(low, high, _MOST_LEVELS)
  levels[0] = low
  places = np.searchsorted(levels, values, side="right") - 1
  found, counts = np.unique(places, return_counts=True)
  return levels[found], counts


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
  """Returns the claim with the least noise that reaches a target.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> claim = calibrated(epsilon=8, sampler=sampler, steps=299, l2_clip_norm=1)
  >>> round(claim.noise_multiplier, 3), claim.epsilon <= 8
  (0.747, True)

  Args:
    epsilon: the target; inf: no noise, and nothing is claimed.
    sampler: how batches are drawn.
    steps: the number of noisy sums.
    l2_clip_norm: the norm that gradients are clipped to.
    delta: of the promise; None: 1 / (2 num_examples).
    relation: a `dp_accounting.NeighboringRelation` or its name.
    decide: returns what finding the noise gives; for several processes, of
      which one finds it and the others are told.
    **fields: of `Claim`.

  Raises:
    ValueError: if the target cannot be met, or nothing is claimed for such
      noise with these batches.
  """
  known = Claim(
    sampler=sampler,
    steps=steps,
    noise_multiplier=math.nan,
    l2_clip_norm=l2_clip_norm,
    delta=delta,
    relation=relation,
    **fields,
  )
  target = known.delta
  assert target is not None  # filled in by Claim
  noise_multiplier = decide(
    lambda: accounting.noise_multiplier(
      epsilon=epsilon,
      delta=target,
      sampler=sampler,
      steps=steps,
      relation=known.relation,
      accountant=known.accountant,
    )
  )
  return dataclasses.replace(known, noise_multiplier=noise_multiplier)
