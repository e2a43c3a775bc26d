"""Batches of a sampler: their rows, their seeds, and how many rows suffice."""

import abc
import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from synthq_jax import checks

__all__ = [
  "IS_PADDING",
  "Batch",
  "Indices",
  "Sampler",
  "binomial_tail",
  "check_sampler",
  "generator",
  "is_padded_field",
  "max_batch_size",
  "padded",
  "sampled_event",
  "split",
  "take",
]

IS_PADDING = "is_padding_example"
"""The field of a batch that says which of its rows are padding."""


_NEEDS_MASK = (
  "expected a drawn batch with its mask, got {what} alone: call"
  " sampler.take(records, drawn), or drawn.to_arrays(padding_index=0) for"
  " indices and mask"
)


class _NotAnArray:
  """Refuses to become an array, a number or a sequence, with one line."""

  def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
    """Raises TypeError."""
    del arguments, options
    raise TypeError(_NEEDS_MASK.format(what=type(self).__name__))

  __array__ = __index__ = __int__ = __float__ = _refuse

  def __repr__(self) -> str:
    """Names no record, and says what to call: JAX's messages quote it."""
    name = type(self).__name__
    return f"<{name}, not an array: call sampler.take(records, drawn)>"


class Indices(_NotAnArray):
  """The numbers of a batch's records, which no array can be indexed with.

  NumPy reads index -1 as the last record and JAX reads one that is too large
  as the last record. So the rows of padding have no number here: only a mask
  that leaves all of them out gives the numbers of the others.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> drawn.indices[~drawn.is_padding]
  array([2, 0], dtype=int32)
  """

  __hash__ = None  # type: ignore[assignment]

  def __init__(self, values: Any, is_padding: np.ndarray):
    """Takes integers [max_batch_size]; those of padding are not read."""
    self._values = np.array(values, np.int32)
    self._is_padding = is_padding

  def __len__(self) -> int:
    return len(self._values)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape (max_batch_size,)."""
    return self._values.shape

  def __getitem__(self, mask: Any) -> np.ndarray:
    """Returns the numbers under a mask, bool [max_batch_size], int32.

    Raises:
      TypeError: for anything but such a mask.
      IndexError: if the mask selects padding.
    """
    chosen = None if isinstance(mask, _NotAnArray) else np.asarray(mask)
    if chosen is None or chosen.dtype != bool or chosen.shape != self.shape:
      self._refuse()
    if (chosen & self._is_padding).any():
      raise IndexError(
        "expected a mask that leaves padding out, got one that selects"
        f" {np.sum(chosen & self._is_padding)} rows of it: index with"
        " ~drawn.is_padding, or call sampler.take(records, drawn)"
      )
    return self._values[chosen]

  def __eq__(self, other: object) -> bool:
    """Whether two batches hold the same records in the same rows."""
    if not isinstance(other, Indices):
      self._refuse()
    pairs = zip(self.to_arrays(-1), other.to_arrays(-1), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)

  def __iter__(self) -> Iterator[int]:
    self._refuse()

  def __getattr__(self, name: str) -> NoReturn:
    """Refuses what arrays have, such as `tolist` and `astype`."""
    raise AttributeError(_NEEDS_MASK.format(what=f"Indices.{name}"))

  def to_arrays(self, padding_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `Batch.to_arrays` does."""
    indices = np.where(self._is_padding, padding_index, self._values)
    return indices.astype(np.int32), self._is_padding


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Batch(_NotAnArray):
  """Which records one step reads.

  `sampler.take(records, drawn)` reads them and marks the padding. A batch is
  neither an array nor a pytree, so that its numbers do not reach a gather
  without the mask.

  Private: which record is in which batch must stay secret.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> np.array([5.0, 6.0, 7.0])[drawn.indices]
  Traceback (most recent call last):
  ...
  TypeError: expected a drawn batch with its mask, got Indices alone: call ...
  """

  indices: Indices
  """The records' numbers, which need the mask."""
  is_padding: np.ndarray
  """Bool [max_batch_size]."""

  def __init__(self, indices: Indices | np.ndarray, is_padding: np.ndarray):
    """Joins numbers and mask; refuses a real row without a record.

    Args:
      indices: int [max_batch_size].
      is_padding: bool [max_batch_size].

    Raises:
      ValueError: if shapes differ, or a row without padding has no record.
    """
    is_padding = np.array(is_padding, bool)
    if isinstance(indices, Indices):
      indices, _ = indices.to_arrays(-1)
    values = np.asarray(indices)
    if values.ndim != 1 or values.shape != is_padding.shape:
      raise ValueError(
        "expected indices and is_padding of one shape [max_batch_size], got"
        f" {values.shape} and {is_padding.shape}"
      )
    if (values[~is_padding] < 0).any():
      raise ValueError(
        "expected indices from 0 in rows that are no padding, got a negative"
        " one: mark the row in is_padding"
      )
    object.__setattr__(self, "is_padding", is_padding)
    object.__setattr__(self, "indices", Indices(values, is_padding))

  def __iter__(self) -> Iterator[Any]:
    """Unpacks into `indices, is_padding`."""
    return iter((self.indices, self.is_padding))

  def to_arrays(self, *, padding_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns both arrays, for gathers of one's own.

    Rows of padding then hold a record, or what lies at `padding_index`: give
    the mask to the clipped gradient, as `is_padding_example`.

    >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
    >>> indices, is_padding = drawn.to_arrays(padding_index=0)
    >>> print(indices, is_padding)
    [2 0 0] [False False  True]

    Args:
      padding_index: the index of the rows of padding.

    Returns:
      Indices, int32 [max_batch_size], and which rows are padding, bool.
    """
    return self.indices.to_arrays(padding_index)


class Sampler(abc.ABC):
  """What training and accounting ask of a sampler."""

  if TYPE_CHECKING:
    # Fields or properties of a sampler. A property that existed at run time
    # would be the default of a dataclass field of the same name.
    @property
    def num_examples(self) -> int:
      """The number of private records n, public."""
      ...

    @property
    def expected_batch_size(self) -> int:
      """The public divisor of a clipped sum."""
      ...

    @property
    def max_batch_size(self) -> int:
      """The fixed number of rows of every batch."""
      ...

  @property
  def min_separation(self) -> int:
    """Steps between two batches that may hold the same record, at least."""
    return 1

  @property
  def knows_truncation(self) -> bool:
    """Whether `event` says what truncation costs; else it is paid from delta."""
    return True

  @property
  def group_size(self) -> int:
    """The most records of one unit of privacy, each drawn by its own coin."""
    return 1

  @property
  def num_units(self) -> int | None:
    """Units with a record; None: as many as records."""
    return None

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
  def uses(self, steps: int) -> dict[int, float]:
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

  def check_noise(self, bands: int) -> None:
    """Refuses correlated noise for which nothing is claimed with these batches.

    Args:
      bands: of `optim.banded` noise; 1: independent in every step.

    Raises:
      ValueError: if a record can come back sooner than the bands allow.
    """
    if not 1 <= bands <= self.min_separation:
      raise ValueError(
        f"expected noise_bands of at most {self.min_separation}, the steps that"
        " the sampler keeps a record's batches apart, got noise_bands="
        f"{bands}: draw batches with sampling.CyclicPoisson"
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
  Only the mapping carries the mask: `grad_fn(params, batch["x"])` is refused, and
  in a compiled function every row of `batch["x"]` is a record, unless
  `is_padding_example=batch["is_padding_example"]` is given.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> batch = take({"x": np.array([5.0, 6.0, 7.0])}, drawn)
  >>> print(batch["x"], batch["is_padding_example"])
  [7. 5. 0.] [False False  True]

  Args:
    records: arrays, or trees of arrays, with one row per record; of a token
      cache its `columns`.
    drawn: from `batch`.

  Returns:
    The same fields with rows [max_batch_size, ...], and "is_padding_example",
    bool [max_batch_size].
  """
  import jax  # takes a while: only when needed

  rows, is_padding = drawn.to_arrays(padding_index=0)

  def of_field(values: Any) -> Any:
    chosen = values[rows]  # a copy
    if isinstance(chosen, jax.Array):
      chosen = chosen.at[is_padding].set(0)
    else:
      chosen[is_padding] = 0
    if is_padding.any():
      _note_padding(chosen)
    return chosen

  fields = {name: jax.tree.map(of_field, x) for name, x in records.items()}
  return {**fields, IS_PADDING: is_padding}


_PADDED_FIELDS: dict[int, weakref.ref] = {}


def _note_padding(values: Any) -> None:
  """Remembers an array with rows of padding for as long as it lives."""
  number = id(values)
  _PADDED_FIELDS[number] = weakref.ref(
    values, lambda _: _PADDED_FIELDS.pop(number, None)
  )


def is_padded_field(values: Any) -> bool:
  """Whether an array is a field that `take` returned, with rows of padding.

  Arguments of a compiled function and copies are other objects: False.
  """
  note = _PADDED_FIELDS.get(id(values))
  return note is not None and note() is values


def split(drawn: Batch, parts: int) -> list[Batch]:
  """Divides ONE drawn batch into parts, for `optim.accumulate`.

  Formal guarantee: each record of the batch is in one part, so that the sum over
  all parts is that over the batch.

  >>> drawn = Batch(np.array([2, 0, 5, -1]), np.array([0, 0, 0, 1], bool))
  >>> [part.indices[~part.is_padding].tolist() for part in split(drawn, 2)]
  [[2, 0], [5]]

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
  arrays = drawn.to_arrays(padding_index=-1)
  pairs = zip(*(np.split(x, parts) for x in arrays), strict=True)
  return [Batch(*pair) for pair in pairs]


def padded(indices: np.ndarray, size: int) -> Batch:
  """Returns a batch of `size` rows: the records, then padding."""
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
