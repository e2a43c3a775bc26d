"""Defines batches and samplers: rows, padding, seeds and batch sizes."""

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
  "check_sampler",
  "choose_max_batch_size",
  "compute_binomial_tail",
  "is_padded_field",
  "make_generator",
  "make_sampled_event",
  "pad_batch",
  "split",
  "take",
]

IS_PADDING = "is_padding_example"
"""Name of the batch field with the padding mask, bool [max_batch_size]."""


_NEEDS_MASK = (
  "expected a drawn batch with its mask, got {what} alone: call"
  " sampler.take(records, drawn), or drawn.to_arrays(padding_index=0) for"
  " indices and mask"
)


class _NotAnArray:
  """Refuses conversion to an array or a number, with a one-line error."""

  def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
    """Raises TypeError."""
    del arguments, options
    raise TypeError(_NEEDS_MASK.format(what=type(self).__name__))

  __array__ = __index__ = __int__ = __float__ = _refuse

  def __repr__(self) -> str:
    """Returns a hint without record numbers: messages of JAX quote the repr."""
    name = type(self).__name__
    return f"<{name}, not an array: call sampler.take(records, drawn)>"


class Indices(_NotAnArray):
  """The record numbers of a batch, which cannot index an array.

  NumPy reads index -1 as the last record, and JAX reads an index that is too
  large as the last record. So the rows of padding have no number here. Only a
  mask that leaves out all padding returns record numbers.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> drawn.indices[~drawn.is_padding]
  array([2, 0], dtype=int32)
  """

  __hash__ = None  # type: ignore[assignment]

  def __init__(self, values: Any, is_padding: np.ndarray):
    """Stores integers [max_batch_size]; the values in padding are not used."""
    self._values = np.array(values, np.int32)
    self._is_padding = is_padding

  def __len__(self) -> int:
    return len(self._values)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape (max_batch_size,)."""
    return self._values.shape

  def __getitem__(self, mask: Any) -> np.ndarray:
    """Returns the record numbers, int32, that a mask selects.

    Args:
      mask: bool [max_batch_size].

    Raises:
      TypeError: for any other index.
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
    """Compares records and padding row by row."""
    if not isinstance(other, Indices):
      self._refuse()
    pairs = zip(self.to_arrays(-1), other.to_arrays(-1), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)

  def __iter__(self) -> Iterator[int]:
    self._refuse()

  def __getattr__(self, name: str) -> NoReturn:
    """Refuses attributes of arrays, such as `tolist` and `astype`."""
    raise AttributeError(_NEEDS_MASK.format(what=f"Indices.{name}"))

  def to_arrays(self, padding_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices and mask, as `Batch.to_arrays` does."""
    indices = np.where(self._is_padding, padding_index, self._values)
    return indices.astype(np.int32), self._is_padding


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Batch(_NotAnArray):
  """The record numbers of one step, with a padding mask.

  `sampler.take(records, drawn)` reads the records and marks the padding. A batch
  is neither an array nor a pytree, so its numbers do not reach a gather without
  the mask.

  Private: the membership of records in batches must stay secret.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> np.array([5.0, 6.0, 7.0])[drawn.indices]
  Traceback (most recent call last):
  ...
  TypeError: expected a drawn batch with its mask, got Indices alone: call ...
  """

  indices: Indices
  """The record numbers, which only a mask can select."""
  is_padding: np.ndarray
  """The padding mask, bool [max_batch_size]."""

  def __init__(self, indices: Indices | np.ndarray, is_padding: np.ndarray):
    """Joins record numbers and mask; refuses a negative number in a real row.

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
    """Yields `indices`, then `is_padding`, for unpacking."""
    return iter((self.indices, self.is_padding))

  def to_arrays(self, *, padding_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices and mask as arrays, for your own gathers.

    A gather then fills rows of padding with the record at `padding_index`. So
    pass the mask to the clipped gradient as `is_padding_example`.

    >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
    >>> indices, is_padding = drawn.to_arrays(padding_index=0)
    >>> print(indices, is_padding)
    [2 0 0] [False False  True]

    Args:
      padding_index: the index that rows of padding get.

    Returns:
      Indices, int32 [max_batch_size], and the mask, bool [max_batch_size].
    """
    return self.indices.to_arrays(padding_index)


class Sampler(abc.ABC):
  """The interface of samplers that training and accounting use."""

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
    """The least number of steps between two batches with the same record."""
    return 1

  @property
  def knows_truncation(self) -> bool:
    """Whether `event` models truncation; if not, delta pays for it."""
    return True

  @property
  def group_size(self) -> int:
    """The most records of one unit of privacy, each drawn independently."""
    return 1

  @property
  def num_units(self) -> int | None:
    """The number of units that have a record; None: the number of records."""
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
      step: the number of the step, from 0, over all epochs: a step that is drawn
        twice is no independent draw. The batch depends on (seed, step) alone, so
        a resumed run draws the batches of an uninterrupted run, given the same
        version of NumPy.

    Returns:
      Indices of distinct records in random order, then padding.
    """

  def event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the `dp_accounting.DpEvent` of `steps` noisy sums."""
    return self.untruncated_event(noise_multiplier, steps)

  @abc.abstractmethod
  def untruncated_event(self, noise_multiplier: float, steps: int) -> Any:
    """Returns the event of batches that have room for all drawn records."""

  @abc.abstractmethod
  def uses(self, steps: int) -> dict[int, float]:
    """Bounds the expected number of steps in which a unit moves the sum.

    Returns:
      For k = 1, 2, ...: the expected steps in which a unit moves the sum by k
      sensitivities.
    """

  @abc.abstractmethod
  def overflow_delta(self, steps: int) -> float:
    """Returns the delta to add if `untruncated_event` is used."""

  def take(self, records: Mapping[str, Any], drawn: Batch) -> dict[str, Any]:
    """Reads the records of a batch and adds the mask, as the function `take`.

    Raises:
      TypeError: if a field is no array.
      ValueError: if a field has not `num_examples` rows.
    """
    for path, values in _flatten(records):
      if len(values) != self.num_examples:
        raise ValueError(
          f"expected num_examples={self.num_examples} rows in every field, got"
          f" {len(values)} in records{path}: make the sampler for the records"
          " that it draws"
        )
    return take(records, drawn)

  def check_relation(self, relation: Any) -> None:
    """Raises ValueError if nothing can be claimed for that relation."""
    checks.relation(relation)

  def check_noise(self, bands: int) -> None:
    """Refuses correlated noise without a known bound for these batches.

    Args:
      bands: the bands of `optim.banded` noise; 1: independent in every step.

    Raises:
      ValueError: if a record can come back within fewer steps than `bands`.
    """
    if not 1 <= bands <= self.min_separation:
      raise ValueError(
        f"expected noise_bands of at most {self.min_separation}, the least number"
        " of steps between two batches with one record, got noise_bands="
        f"{bands}: draw batches with sampling.CyclicPoisson"
      )


def check_sampler(sampler: Any) -> None:
  """Refuses samplers of other libraries, for which no accounting is known.

  Args:
    sampler: draws the batches.

  Raises:
    TypeError: unless it is a `Sampler`.
  """
  if not isinstance(sampler, Sampler):
    raise TypeError(
      "expected a sampler of synthq_jax.privacy.sampling, such as Poisson, got"
      f" {type(sampler).__name__}: no epsilon is known for its batches"
    )


def take(records: Mapping[str, Any], drawn: Batch) -> dict[str, Any]:
  """Reads the records of a batch and adds the padding mask.

  Rows of padding are zero. Clipped gradients find the field "is_padding_example"
  by themselves and leave these rows out. The mask travels in the mapping alone, so
  `grad_fn(params, batch["x"])` is refused. In a compiled function such a call
  cannot be detected and every row counts as a record, unless you pass
  `is_padding_example=batch["is_padding_example"]`.

  >>> drawn = Batch(np.array([2, 0, -1]), np.array([False, False, True]))
  >>> batch = take({"x": np.array([5.0, 6.0, 7.0])}, drawn)
  >>> print(batch["x"], batch["is_padding_example"])
  [7. 5. 0.] [False False  True]

  Args:
    records: arrays, or trees of arrays, with one row per record; for a token
      cache, its `columns`.
    drawn: a batch, as `Sampler.batch` returns it.

  Returns:
    The same fields with rows [max_batch_size, ...], and "is_padding_example",
    bool [max_batch_size].

  Raises:
    TypeError: if a field is no array.
    ValueError: if a field has too few rows for the records that were drawn.
  """
  import jax  # takes a while: only when needed

  rows, is_padding = drawn.to_arrays(padding_index=0)
  for path, values in _flatten(records):
    if len(values) <= rows.max(initial=0):  # JAX would read the last row
      raise ValueError(
        f"expected a row for every record, got {len(values)} in records{path},"
        " fewer than were drawn from: make the sampler for these records"
      )

  def read_rows(values: Any) -> Any:
    try:
      chosen = values[rows]  # a copy
    except TypeError as error:  # h5py, pyarrow, columns of `datasets`
      raise TypeError(
        f"expected arrays of NumPy or JAX as records, got {type(values).__name__}:"
        " read them into memory with numpy.asarray"
      ) from error
    if isinstance(chosen, jax.Array):
      chosen = chosen.at[is_padding].set(0)
    else:
      chosen[is_padding] = 0
    if is_padding.any():
      _note_padding(chosen)
    return chosen

  fields = {name: jax.tree.map(read_rows, x) for name, x in records.items()}
  return {**fields, IS_PADDING: is_padding}


def _flatten(records: Mapping[str, Any]) -> list[tuple[str, Any]]:
  """Returns path and array of every field; refuses lists and scalars."""
  import jax  # takes a while: only when needed

  if not isinstance(records, Mapping):
    raise TypeError(
      "expected records as a mapping from names to arrays, such as"
      ' {"x": x, "y": y}, got ' + type(records).__name__
    )
  if IS_PADDING in records:
    raise ValueError(
      f"expected records without a field {IS_PADDING}, which take writes, got one:"
      " leave out the records that it marks, and the field"
    )
  leaves, _ = jax.tree_util.tree_flatten_with_path(dict(records))
  fields = [(jax.tree_util.keystr(path), values) for path, values in leaves]
  for path, values in fields:
    if hasattr(values, "iloc"):  # pandas reads values[rows] by label
      raise TypeError(
        f"expected arrays, got records{path} of {type(values).__name__}, whose"
        " rows have labels of their own: pass its to_numpy()"
      )
    if isinstance(values, np.ma.MaskedArray):  # JAX drops the mask
      raise TypeError(
        f"expected arrays, got records{path} with a mask, which would not count:"
        " pass its filled(VALUE)"
      )
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
      raise TypeError(
        f"expected arrays with a row for each record, got records{path} of"
        f" {type(values).__name__}: make arrays of lists, and leave scalars out"
      )
  return fields


_PADDED_FIELDS: dict[int, weakref.ref] = {}


def _note_padding(values: Any) -> None:
  """Records that an array has rows of padding, for as long as it lives."""
  number = id(values)
  _PADDED_FIELDS[number] = weakref.ref(
    values, lambda _: _PADDED_FIELDS.pop(number, None)
  )


def is_padded_field(values: Any) -> bool:
  """Checks whether `take` returned this very array, with rows of padding.

  Arguments of a compiled function and copies are other objects: False.
  """
  note = _PADDED_FIELDS.get(id(values))
  return note is not None and note() is values


def split(drawn: Batch, parts: int) -> list[Batch]:
  """Divides ONE drawn batch into parts, for `optim.accumulate`.

  Formal guarantee: each record of the batch is in exactly one part, so the sum
  over all parts equals the sum over the batch.

  >>> drawn = Batch(np.array([2, 0, 5, -1]), np.array([0, 0, 0, 1], bool))
  >>> [part.indices[~part.is_padding].tolist() for part in split(drawn, 2)]
  [[2, 0], [5]]

  Args:
    drawn: a batch, as `Sampler.batch` returns it.
    parts: the number of parts, which must divide the batch's rows.

  Returns:
    Batches of (rows / parts) rows each.

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


def pad_batch(indices: np.ndarray, size: int) -> Batch:
  """Makes a batch of `size` rows: the records, then padding."""
  rows = np.full(size, -1, np.int32)
  rows[: len(indices)] = indices
  return Batch(rows, rows < 0)


def make_generator(
  seed: int | Sequence[int], tag: int, number: int
) -> np.random.Generator:
  """Makes the random generator of one step or epoch."""
  checks.count("step", number, 0)
  if seed is None or not np.size(seed):  # NumPy takes both
    raise ValueError(
      f"expected a secret integer, or several, as seed, got {seed!r}: with None"
      " a resumed run would draw other batches"
    )
  # A spawn key, because SeedSequence([s]) equals SeedSequence([s, 0]).
  sequence = np.random.SeedSequence(seed, spawn_key=(tag, number))
  return np.random.Generator(np.random.PCG64(sequence))


def choose_max_batch_size(
  *,
  count: int,
  probability: float,
  multiple_of: int,
  overflow: float,
  more: int = 0,
) -> int:
  """Computes the smallest row count that batches hardly ever exceed.

  Args:
    count: the number of records.
    probability: the probability that a step draws a given record, in (0, 1].
    multiple_of: the result is rounded up to a multiple of this.
    overflow: the largest acceptable probability that one batch is larger.
    more: additional rows, for a neighbour with several records more.

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
  tails = compute_binomial_tail(count, probability, sizes + 1)
  size = int(sizes[np.argmax(tails <= overflow)])
  # A neighbour with one record more (or `more`) has room for it, too.
  size = min(size, count) + (more or size >= count)
  return -(-size // multiple_of) * multiple_of


def compute_binomial_tail(
  count: int, probability: float, at: np.ndarray
) -> Any:
  """Computes P[binomial(count, probability) >= at] for each at >= 1."""
  from scipy import special

  # Beyond `count` the incomplete beta function is undefined; the tail is 0.
  inside = np.minimum(at, count)
  tail = special.betainc(inside, count - inside + 1, probability)
  return np.where(at > count, 0.0, tail)


def make_sampled_event(
  probability: float, noise_multiplier: float, times: int, group_size: int = 1
) -> Any:
  """Makes the `dp_accounting.DpEvent` of Poisson-sampled noisy sums.

  Args:
    probability: the probability that a step draws a given record, in (0, 1].
    noise_multiplier: noise standard deviation over sensitivity.
    times: the number of sums.
    group_size: the number of records that are added or removed together.
  """
  import dp_accounting
  from scipy import stats

  if group_size == 1:
    step = dp_accounting.PoissonSampledDpEvent(
      probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
  elif probability == 1:  # dp_accounting recurses without end for some of these
    step = dp_accounting.GaussianDpEvent(noise_multiplier / group_size)
  else:
    drawn = np.arange(group_size + 1)
    shares = stats.binom.pmf(drawn, group_size, probability)
    step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
      noise_multiplier, drawn.tolist(), (shares / shares.sum()).tolist()
    )
  return dp_accounting.SelfComposedDpEvent(step, times)
