"""Computes L2 sensitivities: how far one record moves a clipped gradient.

`softmax`, `sigmoid` and `spreadout` are for sums of pair gradients, each clipped
to one norm. `row`, `group` and `batch` are for gradients that are clipped in
larger parts. All return the exact distance for the given relation. Under every
relation, noise is noise_multiplier times the value for ADD_OR_REMOVE_ONE or
REPLACE_SPECIAL. Under REPLACE_ONE the accountant doubles it by itself, and no
value here more than doubles. docs/sensitivities.md derives every formula.
"""

import math
import numbers
from typing import Any

from synthq_jax import checks

__all__ = [
  "batch",
  "group",
  "row",
  "sigmoid",
  "softmax",
  "spreadout",
]

_UNITS = ("pair", "query")


def softmax(
  *,
  max_batch_size: float,
  temperature: float,
  l2_clip_norm: float,
  relation: Any,
  unit: str,
  hard_negatives: int = 0,
  directions: int = 1,
  similarity_range: tuple[float, float] = (-1.0, 1.0),
) -> float:
  """Returns the sensitivity of the in-batch softmax with clipped pairs.

  The gradient is sum_ij w_ij g_ij. Here g_ij is the gradient of the similarity of
  query i and document j, clipped to norm B, and w_ij is the derivative of the
  summed loss. Let n be the number of pairs, each with h hard negatives, and let
  r = (hi - lo) / tau, c = n (1 + h) - 1, m(c) = c / (c + exp(-r)) and
  E = 1 / (1 + (n - 1) exp(-r)). One unit moves the gradient by

  ::

    | unit, directions | add, remove or zero out | replace |
    |---|---|---|
    | pair, 1 | m(c) + (n-1) E | 2 m(c) + (n-1) E |
    | query, 1 | m(c) | 2 m(c) |
    | pair, 2 | add m(n-1) + (n-1) E | add 2 m(n-1) + (n-1) E |
    | query, 2 | add m(n-1) + (n-1) E | add m(n-1) + (n-1) E |

  times 2 B / tau. The last two rows give the additional terms of the second
  direction, in which documents choose queries. They bring exp(r) back to the unit
  "query".

  Formal guarantee:
    Unit: "pair" is a query with its document and hard negatives; "query" is
    the query's text, while its document and hard negatives stay. Relation:
    ADD_OR_REMOVE_ONE and REPLACE_SPECIAL add, remove or zero out one unit. The
    row of a zeroed query leaves the sum, and its document stays a column.
    REPLACE_ONE exchanges the unit. The value holds for every batch of at most
    `max_batch_size` pairs, since it grows with n, and is attained. Assumed:
    similarities that enter w lie in the range; g_ij and w's masks for (i, j)
    depend on pairs i and j alone; a duplicate or missing hard negative keeps the
    constant exp(lo / tau) in the denominator, with gradient zero, and only
    padding is dropped; every pair has the same h. Public: the maximum batch,
    temperature, B, h, directions, range.

  >>> import math
  >>> round(softmax(max_batch_size=math.inf, temperature=1.0, l2_clip_norm=1.0,
  ...               relation="ADD_OR_REMOVE_ONE", unit="pair"), 2)
  16.78

  Args:
    max_batch_size: N, the largest number of pairs in a batch including
      padding, at least 1; math.inf gives the limit.
    temperature: tau, positive.
    l2_clip_norm: B, the largest norm of a pair's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    hard_negatives: h, the columns that each pair adds beside its document, at
      least 0. All rows may see them. For unit "query" they must not depend on
      the query's text.
    directions: 1 (queries choose documents) or 2 (also the reverse, without hard
      negatives).
    similarity_range: (lo, hi), bounds that the loss must enforce.

  Returns:
    The largest L2 norm by which one unit moves the sum; 0 for a softmax of one
    column, whose gradient is zero.

  Raises:
    ValueError: if an argument is out of range, or the limit is not finite.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, algorithm 1 (the
    mechanism).
  """
  replaces = _replaces(relation)
  _check_unit(unit)
  low, high = _check_range(similarity_range)
  scale = (
    2
    * _check_positive("l2_clip_norm", l2_clip_norm)
    / (_check_positive("temperature", temperature))
  )
  n = _check_batch_size("max_batch_size", max_batch_size)
  checks.count("hard_negatives", hard_negatives, 0)
  checks.count("directions", directions, 1, 2)
  gap = (high - low) / temperature
  own = _bound_negatives(n * (1 + hard_negatives) - 1, gap)
  moved = 2 * own if replaces else own
  if unit == "pair":
    moved += _bound_newcomer(n, gap)
  if directions == 2:
    own = _bound_negatives(n - 1, gap)
    twice = replaces and unit == "pair"
    moved += (2 * own if twice else own) + _bound_newcomer(n, gap)
  return scale * moved


def sigmoid(
  *,
  max_batch_size: float,
  temperature: float,
  l2_clip_norm: float,
  relation: Any,
  unit: str,
  bias: float = 0.0,
  hard_negatives: int = 0,
  declared_batch_size: float | None = None,
  similarity_range: tuple[float, float] = (-1.0, 1.0),
) -> float:
  """Returns the sensitivity of the balanced sigmoid loss with clipped pairs.

  A row's own document costs softplus(-s/tau - b). Each of its negatives costs
  softplus(s/tau + b) / (N0 (1 + h) - 1), for N0 declared pairs with h hard
  negatives each. The steepest slopes are P = 1 / (1 + exp(lo/tau + b)) and
  Q = 1 / (1 + exp(-hi/tau - b)). Adding or removing a pair moves the sum by

    B/tau [P + Q (n (1 + h) - 1 + (n - 1) (1 + h)) / (N0 (1 + h) - 1)]

  which is at most (P + 2 Q) B/tau and always below 3 B/tau. A query moves its row
  alone, by at most (P + Q) B/tau. Replacing doubles both. There is no exponential
  of 1/tau, and no growth with n beyond N0.

  Formal guarantee:
    Unit, relation and public values: as for `softmax`; N0 and b are public
    constants too, and b is not trained. The value holds for every batch of at
    most `max_batch_size` <= N0 pairs, and is attained. Assumed: similarities that
    enter the weights lie in the range; gradients and masks for (i, j) depend on
    pairs i and j alone. Masked negatives may be dropped, since negatives share no
    denominator.

  >>> round(sigmoid(max_batch_size=64, temperature=1.0, l2_clip_norm=1.0,
  ...               relation="ADD_OR_REMOVE_ONE", unit="pair"), 3)
  2.193

  Args:
    max_batch_size: the largest number of pairs in a batch including padding;
      math.inf gives the limit.
    temperature: tau, positive.
    l2_clip_norm: B, the largest norm of a pair's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    bias: b, added to similarity / tau, finite.
    hard_negatives: h, as for `softmax`.
    declared_batch_size: N0, which weighs the negatives; None for
      `max_batch_size`.
    similarity_range: (lo, hi), bounds that the loss must enforce.

  Returns:
    The largest L2 norm by which one unit moves the sum.

  Raises:
    ValueError: if an argument is out of range.
  """
  times = 2 if _replaces(relation) else 1
  _check_unit(unit)
  low, high = _check_range(similarity_range)
  scale = _check_positive("l2_clip_norm", l2_clip_norm) / (
    _check_positive("temperature", temperature)
  )
  _check_finite("bias", bias)
  n, declared = _check_batch_sizes(max_batch_size, declared_batch_size)
  checks.count("hard_negatives", hard_negatives, 0)
  columns = 1 + hard_negatives
  negatives = declared * columns - 1
  row_share = _divide(n * columns - 1, negatives)
  column_share = _divide((n - 1) * columns, negatives)
  positive = _logistic(-low / temperature - bias)
  negative = _logistic(high / temperature + bias)
  share = row_share + (column_share if unit == "pair" else 0.0)
  return times * scale * (positive + negative * share)


def spreadout(
  *,
  max_batch_size: float,
  l2_clip_norm: float,
  relation: Any,
  unit: str,
  declared_batch_size: float | None = None,
  similarity_range: tuple[float, float] = (-1.0, 1.0),
) -> float:
  """Returns the sensitivity of the spreadout loss with clipped pairs.

  The loss is sum_i sum_{j != i} s_ij^2 / (n - 1). With `D = max(|lo|, |hi|)`, a
  row and a column of negatives move the sum by up to 2 B D each. So adding or
  removing a pair costs 4 B D. It costs 2 B D more if the divisor changes for at
  least two other pairs. Replacing costs 8 B D. With the constant divisor N0 - 1
  these are 4 and 8 times B D (n - 1) / (N0 - 1). A query moves its row alone:
  2 B D if it is zeroed out, 4 B D if it is replaced.

  Formal guarantee:
    Unit and relation: as for `softmax`. The document of a zeroed query stays in
    the batch, so n does not change. The value holds for every batch of at most
    `max_batch_size` pairs, and is attained. Assumed: similarities that enter the
    weights lie in the range; gradients and masks for (i, j) depend on pairs i and
    j alone; masked negatives are dropped and still count in n. Public: the
    maximum batch, N0, B, range. The realised n is NOT public: the value includes
    the change of the divisor.

  >>> spreadout(max_batch_size=64, l2_clip_norm=1.0,
  ...           relation="ADD_OR_REMOVE_ONE", unit="pair")
  6.0

  Args:
    max_batch_size: the largest number of pairs in a batch including padding;
      math.inf gives the limit.
    l2_clip_norm: B, the largest norm of a pair's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    declared_batch_size: N0 of the constant divisor N0 - 1; None if the divisor
      is the realised n - 1.
    similarity_range: (lo, hi), bounds that the loss must enforce.

  Returns:
    The largest L2 norm by which one unit moves the sum; 0 for one pair.

  Raises:
    ValueError: if an argument is out of range.
  """
  replaces = _replaces(relation)
  _check_unit(unit)
  largest = max(abs(bound) for bound in _check_range(similarity_range))
  scale = 2 * _check_positive("l2_clip_norm", l2_clip_norm) * largest
  n = _check_batch_size("max_batch_size", max_batch_size)
  share = 1.0 if n > 1 else 0.0
  if declared_batch_size is not None:
    n, declared = _check_batch_sizes(max_batch_size, declared_batch_size)
    share = _divide(n - 1, declared - 1)
  lines = 2 if unit == "pair" else 1  # The row, and the column with "pair".
  moved = lines * share * (2 if replaces else 1)
  divisor_moves = unit == "pair" and not replaces
  if declared_batch_size is None and divisor_moves and n > 2:
    moved += 1
  return scale * moved


def row(
  *,
  l2_clip_norm: float,
  relation: Any,
  unit: str,
  negatives: str,
  max_batch_size: int | None = None,
) -> float:
  """Returns the sensitivity of a sum of rows' gradients, each clipped.

  A row is the loss of one query against its document and negatives. Its gradient
  is one vector of norm at most C, whatever the loss, temperature and number of
  columns. It moves the sum by C if it is added or removed, and by 2C if it is
  replaced. If the negatives are the batch's documents, an added or removed pair
  also changes the n - 1 other rows: (2n - 1) C, and 2n C for a replaced pair.
  That is the noise of per-example clipping, which grows with the batch.

  Formal guarantee:
    With `negatives="public"`, drawn independently of the private pairs: unit
    "pair" or "query"; a row depends on its own pair alone. With
    `negatives="batch"` and unit "pair": for every batch of at most
    `max_batch_size` pairs and any mask, and the value is attained. With
    `negatives="batch"` and unit "query", there are four conditions. The documents
    of the batch stay and are public. The set of documents with queries is public.
    The loss has one direction. Masks of (i, j) depend on documents and query i
    alone.

  >>> row(l2_clip_norm=0.1, relation="REPLACE_ONE", unit="query",
  ...     negatives="batch")
  0.2
  >>> row(l2_clip_norm=1.0, relation="ADD_OR_REMOVE_ONE", unit="pair",
  ...     negatives="batch", max_batch_size=32)
  63.0

  Args:
    l2_clip_norm: C, the largest norm of a row's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    negatives: "public" or "batch".
    max_batch_size: n, the largest number of pairs in a batch including padding,
      at least 1; used only for unit "pair" with negatives="batch".

  Returns:
    The largest L2 norm by which one unit moves the sum.

  Raises:
    ValueError: if an argument is out of range or missing.

  References:
    Carranza et al. (2023), arXiv:2305.05973, version 1, section 4.2 (that it
    grows with the batch).
  """
  norm = _check_positive("l2_clip_norm", l2_clip_norm)
  own = 2 * norm if _replaces(relation) else norm
  _check_unit(unit)
  if negatives not in ("public", "batch"):
    raise ValueError(
      f"expected negatives 'public' or 'batch', got {negatives=}"
    )
  if negatives == "public" or unit == "query":
    return own
  # A column that is added, removed or changed may reverse every other row.
  checks.count("max_batch_size", max_batch_size, 1)
  assert max_batch_size is not None
  return own + 2 * norm * (max_batch_size - 1)


def group(*, l2_clip_norm: float, relation: Any) -> float:
  """Returns the sensitivity of a sum of groups' gradients, each clipped.

  The batch is cut into disjoint groups, and the loss of a group sees that group
  alone. The gradient of each group is clipped to C. A record changes the gradient
  of its group arbitrarily within the ball: 2C. A replaced record may leave one
  group and enter another: 4C.

  Formal guarantee:
    Unit: the record that has the group key. Relation: any. Assumed: a record's
    group depends on its own key alone, never on its position in the batch. If
    groups were filled by position, one record would move all of them.

  >>> group(l2_clip_norm=0.1, relation="REPLACE_ONE")
  0.4

  Args:
    l2_clip_norm: C, the largest norm of a group's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    2C, or 4C under REPLACE_ONE, where a record may change its group.

  Raises:
    ValueError: if the norm is out of range or the relation is unknown.
  """
  norm = _check_positive("l2_clip_norm", l2_clip_norm)
  return 4 * norm if _replaces(relation) else 2 * norm


def batch(*, l2_clip_norm: float, relation: Any = "ADD_OR_REMOVE_ONE") -> float:
  """Returns the sensitivity of a whole-batch gradient clipped to one norm.

  This is the naive way to train a loss that couples its examples: take the
  gradient g of the whole batch and scale it down to norm C. Another record may
  change g entirely. But both clipped gradients lie in the ball of radius C, so
  they are at most 2C apart, whatever the relation; g and -g attain it.

  Formal guarantee: for every loss, adding, removing or replacing one record of
  a batch moves the clipped gradient by at most the returned value. This holds for
  one clipped gradient a step. With several microbatches, clip each, divide by
  their public number, and let a record affect only one of them. Noise is
  noise_multiplier times this value under every relation. Under REPLACE_ONE the
  accountant doubles once more by itself, which this loss does not need. The claim
  is then sound, and loose by a factor of two.

  >>> batch(l2_clip_norm=0.1)
  0.2

  Args:
    l2_clip_norm: C, the largest norm of the clipped gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    2C.

  Raises:
    ValueError: if the norm is not positive and finite, or the relation is
      unknown.
  """
  checks.relation(relation)
  return 2 * _check_positive("l2_clip_norm", l2_clip_norm)


def _bound_negatives(negatives: float, gap: float) -> float:
  """Returns the largest total probability of a row's negatives.

  `gap` is the width of the similarity range over the temperature.
  """
  if negatives == 0:
    return 0.0
  return 1.0 / (1.0 + math.exp(-gap) / negatives)


def _bound_newcomer(n: float, gap: float) -> float:
  """Returns the largest total probability that n - 1 rows give to a new pair."""
  if n == 1:
    return 0.0
  inverse = 1.0 / (n - 1) + math.exp(-gap)
  if inverse < 1e-300:
    raise ValueError(
      f"expected a finite limit, got max_batch_size={n} and a similarity range "
      f"of {gap:.0f} temperatures: give a finite max_batch_size"
    )
  return 1.0 / inverse


def _divide(count: float, total: float) -> float:
  """Returns count / total; 1 for an infinite count, 0 for a total of 0."""
  if math.isinf(count):
    return 1.0
  return count / total if total else 0.0


def _logistic(x: float) -> float:
  return (1.0 + math.tanh(x / 2)) / 2


def _replaces(relation: Any) -> bool:
  return checks.relation(relation) == "REPLACE_ONE"


def _check_unit(unit: str) -> None:
  if unit not in _UNITS:
    raise ValueError(f"expected a unit in {_UNITS}, got {unit=}")


def _check_finite(name: str, value: Any) -> None:
  if not isinstance(value, numbers.Real) or not math.isfinite(value):
    raise ValueError(f"expected a finite {name}, got {name}={value!r}")


def _check_positive(name: str, value: Any) -> float:
  if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
    raise ValueError(f"expected a positive finite {name}, got {name}={value!r}")
  return float(value)


def _check_batch_size(name: str, value: Any) -> float:
  """Returns a checked number of pairs: an integer from 1, or math.inf."""
  if value != math.inf:
    checks.count(name, value, 1)
  return value


def _check_batch_sizes(largest: Any, declared: Any) -> tuple[float, float]:
  """Returns the checked largest batch size and declared batch size."""
  largest = _check_batch_size("max_batch_size", largest)
  if declared is None:
    return largest, largest
  declared = _check_batch_size("declared_batch_size", declared)
  if largest > declared:
    raise ValueError(
      "expected max_batch_size of at most declared_batch_size, got "
      f"max_batch_size={largest} and declared_batch_size={declared}"
    )
  return largest, declared


def _check_range(bounds: Any) -> tuple[float, float]:
  """Returns the checked bounds (low, high), finite and in this order."""
  low, high = bounds
  _check_finite("similarity_range[0]", low)
  _check_finite("similarity_range[1]", high)
  if not low < high:
    raise ValueError(
      f"expected similarity_range (low, high), got similarity_range={bounds!r}"
    )
  return float(low), float(high)
