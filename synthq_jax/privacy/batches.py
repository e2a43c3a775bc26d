"""Batches of a sampler: their rows, their seeds, and how many rows suffice."""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synthq_jax import checks

__all__ = [
  "IS_PADDING",
  "Batch",
  "Sampler",
  "binomial_tail",
  "check_sampler",
  "generator",
  "max_batch_size",
  "padded",
  "sampled_event",
  "split",
  "take",
]

IS_PADDING = "is_padding_example"
"""The field of a batch that says which of its rows are padding."""


class Batch(NamedTuple):
  """Which records one step reads.

  Private: which record is in which batch must stay secret.
  """

  indices: np.ndarray  # [max_batch_size] int32, -1 where padding
  is_padding: np.ndarray  # [max_batch_size] bool


class Sampler(abc.ABC):
  """What training and accounting ask of a sampler."""

  num_examples: int
  """The number of private records n, public."""
  expected_batch_size: int
  """The public divisor of a clipped sum."""
  max_batch_size: int
  """The fixed number of rows of every batch."""
  min_separation: int = 1
  """Steps between two batches that may hold the same record, at least."""
  knows_truncation: bool = True
  """Whether `event` says what truncation costs; else it is paid from delta."""
  group_size: int = 1
  """The most records of one unit of privacy, each drawn by its own coin."""
  num_units: int | None = None
  """Units with a record; None: as many as records."""
  keeps_bins: bool = False
  """Whether a record's steps are one bin's, as noise of `optim.blt` asks."""

  @property
  def units(self) -> int:
    """The number of units of privacy."""
    return self.num_units or self.num_examples

  @abc.abstractmethod
  def batch(self, seed: int | Sequence[int], step: int) -> Batch:
    """Returns the batch of one step.

    Args:
      seed: a non-negative integer, or several; secret.
      step: the number of the step, from 0. The batch depends on (seed, step)
        alone, so a resumed run draws what an uninterrupted one draws, given
        the same version of NumPy.

    Returns:
      Indices of distinct records in random order, then padding.
    """

  def event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the `dp_accounting.DpEvent` of `steps` noisy sums."""
    return self.untruncated_event(noise_multiplier, steps)

  @abc.abstractmethod
  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the event as if every batch had room for all its records."""

  @abc.abstractmethod
  def uses(self, steps: int) -> dict[float, float]:
    """Bounds how often, in the mean, a unit moves by so many sensitivities."""

  @abc.abstractmethod
  def overflow_delta(self, steps: int) -> float:
    """Returns what to add to delta when using `untruncated_event`."""

  def take(self, records: Mapping[str, Any], drawn: Batch) -> dict[str, Any]:
    """Returns the rows of a batch, with their padding; see `take`."""
    return take(records, drawn)

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError if nothing is claimed for that relation."""
    checks.relation(relation)

  def check_noise(self, bands: int, buffers: int = 0) -> None:
    """Refuses correlated noise for which nothing is claimed with these batches.

    Args:
      bands: of `optim.banded` noise; 1: independent in every step.
      buffers: of `optim.blt` noise; 0: none.

    Raises:
      ValueError: if a record can come back sooner than the bands allow, or
        buffers meet other batches than those of `BallsInBins`.
    """
    if not 1 <= bands <= self.min_separation:
      raise ValueError(
        f"expected noise_bands of at most {self.min_separation}, the steps that"
        " the sampler keeps a record's batches apart, got noise_bands="
        f"{bands}: draw batches with sampling.CyclicPoisson"
      )
    checks.count("noise_buffers", buffers, 0)
    if buffers and not self.keeps_bins:
      raise ValueError(
        "expected batches of sampling.BallsInBins for noise of optim.blt, got"
        f" {type(self).__name__} and noise_buffers={buffers}: nothing is claimed"
        " for others"
      )


def check_sampler(sampler: Any) -> None:
  """Refuses samplers of other libraries, whose batches nothing here accounts for.

  Args:
    sampler: how batches are drawn.

  Raises:
    TypeError: unless it is a `Sampler`.
  """
  if not isinstance(sampler, Sampler):
    raise TypeError(
      "expected a sampler of synthq_jax.privacy.sampling, such as Poisson, got"
      f" {type(sampler).__name__}: no epsilon is known for its batches"
    )


def take(records: Mapping[str, Any], drawn: Batch) -> dict[str, Any]:
  """Returns the records of a batch, and beside them which rows are padding.

  Rows of padding are zero. Clipped gradients find the field
  "is_padding_example" by themselves and leave these rows out, so that nobody has
  to remember it: a row of padding that counts is some record many times over.
  Only the mapping carries the mask: for `grad_fn(params, batch["x"])` every row
  is a record, unless `is_padding_example=batch["is_padding_example"]` is given.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> batch = take({"x": np.array([5.0, 6.0, 7.0])}, drawn)
  >>> print(batch["x"], batch["is_padding_example"])
  [7. 5. 0.] [False False  True]

  Args:
    records: arrays, or trees of arrays, with one row per record.
    drawn: from `batch`.

  Returns:
    The same fields with rows [max_batch_size, ...], and "is_padding_example",
    bool [max_batch_size].
  """
  import jax  # takes a while: only when needed

  rows = np.where(drawn.is_padding, 0, drawn.indices)

  def of_field(values: Any) -> Any:
    chosen = values[rows]  # a copy
    if isinstance(chosen, jax.Array):
      return chosen.at[drawn.is_padding].set(0)
    chosen[drawn.is_padding] = 0
    return chosen

  fields = {name: jax.tree.map(of_field, x) for name, x in records.items()}
  return {**fields, IS_PADDING: drawn.is_padding}


def split(drawn: Batch, parts: int) -> list[Batch]:
  """Divides ONE drawn batch into parts, for `optim.accumulate`.

  Formal guarantee: each record of the batch is in one part, so that the sum over
  all parts is that over the batch.

  >>> drawn = Batch(np.array([2, 0, 5, -1]), np.array([0, 0, 0, 1], bool))
  >>> [part.indices.tolist() for part in split(drawn, 2)]
  [[2, 0], [5, -1]]

  Args:
    drawn: from `batch`.
    parts: how many; they have to divide the batch's rows.

  Returns:
    Batches of rows / parts each.

  Raises:
    ValueError: if the rows cannot be divided.
  """
  rows = len(drawn.indices)
  if parts < 1 or rows % parts:
    raise ValueError(
      f"expected parts that divide the batch's {rows} rows, got {parts=}: make"
      " the sampler with_margin(..., multiple_of=parts)"
    )
  pairs = zip(*(np.split(x, parts) for x in drawn), strict=True)
  return [Batch(*pair) for pair in pairs]


def padded(indices: np.ndarray, size: int) -> Batch:
  """Returns a batch of `size` rows, the first of them the given records."""
  rows = np.full(size, -1, np.int32)
  rows[: len(indices)] = indices
  return Batch(rows, rows < 0)


def generator(
  seed: int | Sequence[int], tag: int, number: int
) -> np.random.Generator:
  """Returns the generator of one step or epoch."""
  checks.count("step", number, 0)
  # A spawn key, because SeedSequence([s]) equals SeedSequence([s, 0]).
  sequence = np.random.SeedSequence(seed, spawn_key=(tag, number))
  return np.random.Generator(np.random.PCG64(sequence))


def max_batch_size(
  *,
  count: int,
  probability: float,
  multiple_of: int,
  overflow: float,
  more: int = 0,
) -> int:
  """Returns the fewest rows that hold hardly less than any batch.

  Args:
    count: of records.
    probability: with which a step draws any of them, in (0, 1].
    multiple_of: the rows are rounded up to a multiple of this.
    overflow: the largest acceptable probability that one batch has more.
    more: rows that are left beside these.

  Raises:
    ValueError: if an argument is out of range.
  """
  checks.count("multiple_of", multiple_of, 1)
  if not 0 < overflow < 1:
    raise ValueError(f"expected overflow in (0, 1), got {overflow=}")
  mean = math.ceil(count * probability)
  # Above the mean, Bernstein's inequality bounds the search.
  log = math.log(1 / overflow)
  room = math.ceil(2 * log + math.sqrt(2 * mean * log)) + 1
  sizes = mean + np.arange(room + 1)
  tails = binomial_tail(count, probability, sizes + 1)
  size = int(sizes[np.argmax(tails <= overflow)])
  # A neighbour with one record more has room, too; `more` is that for several.
  size = min(size, count) + (more or size >= count)
  return -(-size // multiple_of) * multiple_of


def binomial_tail(count: int, probability: float, at: np.ndarray) -> Any:
  """Returns P[binomial(count, probability) >= at] for each at >= 1."""
  from scipy import special

  # Beyond `count` the incomplete beta function has no value; the tail is 0.
  inside = np.minimum(at, count)
  tail = special.betainc(inside, count - inside + 1, probability)
  return np.where(at > count, 0.0, tail)


def sampled_event(
  probability: float, noise_multiplier: float, times: int, group_size: int = 1
) -> Any:
  """Returns the `dp_accounting.DpEvent` of Poisson-sampled noisy sums.

  Args:
    probability: with which a step draws a record, in (0, 1].
    noise_multiplier: noise standard deviation over sensitivity.
    times: the number of sums.
    group_size: records that come or go together.
  """
  import dp_accounting
  from scipy import stats

  if group_size == 1:
    step = dp_accounting.PoissonSampledDpEvent(
      probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
  elif probability == 1:  # dp_accounting finds no end of some mixtures of one
    step = dp_accounting.GaussianDpEvent(noise_multiplier / group_size)
  else:
    drawn = np.arange(group_size + 1)
    shares = stats.binom.pmf(drawn, group_size, probability)
    step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
      noise_multiplier, drawn.tolist(), (shares / shares.sum()).tolist()
    )
  return dp_accounting.SelfComposedDpEvent(step, times)
