"""Closed-form L2 sensitivities: how far one record moves a clipped gradient.

`softmax`, `sigmoid` and `spreadout` are about sums of pair gradients that are
each clipped to one norm, `row`, `group` and `batch` about gradients that are
clipped in larger parts. All return what the relation really moves. Noise is
noise_multiplier times the value for ADD_OR_REMOVE_ONE or REPLACE_SPECIAL under
every relation: the accountant doubles it by itself under REPLACE_ONE, and no
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

  The gradient is sum_ij w_ij g_ij, where g_ij is the gradient of the
  similarity of query i and document j, clipped to norm B, and w_ij the
  derivative of the summed loss. With n pairs, the gap r = (hi - lo) / tau, the
  c = n (1 + h) - 1 negatives of a row with h hard ones,
  m(c) = c / (c + exp(-r)) and E = 1 / (1 + (n - 1) exp(-r)) it moves by

  ::

    | unit, directions | add, remove or zero out | replace |
    |---|---|---|
    | pair, 1 | m(c) + (n-1) E | 2 m(c) + (n-1) E |
    | query, 1 | m(c) | 2 m(c) |
    | pair, 2 | add m(n-1) + (n-1) E | add 2 m(n-1) + (n-1) E |
    | query, 2 | add m(n-1) + (n-1) E | add m(n-1) + (n-1) E |

  times 2 B / tau. The rows with two directions say what the second direction,
  that of the documents, adds; it brings exp(r) back to the unit "query".

  Formal guarantee:
    Unit: "pair" is a query with its document and hard negatives; "query" is
    the query's text, while its document and hard negatives stay. Relation:
    ADD_OR_REMOVE_ONE and REPLACE_SPECIAL add, remove or zero out one unit (a
    zeroed query's row leaves the sum, its document stays a column);
    REPLACE_ONE exchanges it. Holds for every batch of at most
    `max_batch_size` pairs, since the value grows with n, and is attained.
    Assumed: similarities that enter w lie in the range; g_ij and w's masks
    for (i, j) depend on pairs i and j alone; a duplicate or missing hard
    negative keeps the constant exp(lo / tau) in the denominator, with
    gradient zero, and only padding is dropped; every pair has the same h.
    Public: the maximum batch, temperature, B, h, directions, range.

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
    directions: 1 (queries choose documents) or 2 (also the reverse, in which
      hard negatives have no part).
    similarity_range: (lo, hi), which is enforced.

  Returns:
    The L2 norm by which one unit moves the sum, at most; 0 for a softmax of
    one column, whose gradient is zero.

  Raises:
    ValueError: if an argument is out of range, or the limit is not finite.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, algorithm 1 (the
    mechanism).
  """
  replaces = _replaces(relation)
  _check_unit(unit)
  low, high = _similarity_range(similarity_range)
  scale = (
    2
    * _positive("l2_clip_norm", l2_clip_norm)
    / (_positive("temperature", temperature))
  )
  n = _batch_size("max_batch_size", max_batch_size)
  checks.count("hard_negatives", hard_negatives, 0)
  checks.count("directions", directions, 1, 2)
  gap = (high - low) / temperature
  own = _mass_of_negatives(n * (1 + hard_negatives) - 1, gap)
  moved = 2 * own if replaces else own
  if unit == "pair":
    moved += _mass_on_newcomer(n, gap)
  if directions == 2:
    own = _mass_of_negatives(n - 1, gap)
    twice = replaces and unit == "pair"
    moved += (2 * own if twice else own) + _mass_on_newcomer(n, gap)
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

  A row's own document costs softplus(-s/tau - b), each of its negatives
  softplus(s/tau + b) / (N0 (1 + h) - 1), for N0 declared pairs with h hard
  negatives each. With P = 1 / (1 + exp(lo/tau + b)) and
  Q = 1 / (1 + exp(-hi/tau - b)), the steepest slopes, adding or removing a
  pair moves the sum by

    B/tau [P + Q (n (1 + h) - 1 + (n - 1) (1 + h)) / (N0 (1 + h) - 1)]

  which is at most (P + 2 Q) B/tau and always below 3 B/tau; a query moves its
  row alone, at most (P + Q) B/tau; replacing doubles both. No exponential of
  1/tau, and no growth with n beyond N0.

  Formal guarantee:
    Unit, relation and what is public: as for `softmax`; N0 and b are public
    constants too, and b is not trained. Holds for every batch of at most
    `max_batch_size` <= N0 pairs, and is attained. Assumed: similarities that
    enter the weights lie in the range; gradients and masks for (i, j) depend
    on pairs i and j alone. Masked negatives may be dropped: there is no
    denominator that they share.

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
    similarity_range: (lo, hi), which is enforced.

  Returns:
    The L2 norm by which one unit moves the sum, at most.

  Raises:
    ValueError: if an argument is out of range.
  """
  times = 2 if _replaces(relation) else 1
  _check_unit(unit)
  low, high = _similarity_range(similarity_range)
  scale = _positive("l2_clip_norm", l2_clip_norm) / (
    _positive("temperature", temperature)
  )
  _check_finite("bias", bias)
  n, declared = _batch_sizes(max_batch_size, declared_batch_size)
  checks.count("hard_negatives", hard_negatives, 0)
  columns = 1 + hard_negatives
  negatives = declared * columns - 1
  row_share = _share(n * columns - 1, negatives)
  column_share = _share((n - 1) * columns, negatives)
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

  The loss is sum_i sum_{j != i} s_ij^2 / (n - 1). With `D = max(|lo|, |hi|)` a
  row or column of negatives moves the sum by up to 2 B D each, so that adding
  or removing a pair costs 4 B D, and 2 B D more where its divisor changes for
  all others (at least two of them); replacing costs 8 B D. With the constant
  divisor N0 - 1 it is 4 and 8 times B D (n - 1) / (N0 - 1). A query moves its
  row alone: 2 B D when it is zeroed out, 4 B D when replaced.

  Formal guarantee:
    Unit and relation: as for `softmax`. Where a query is zeroed out its
    document stays in the batch, so that n does not change. Holds for every
    batch of at most `max_batch_size` pairs, and is attained. Assumed:
    similarities that enter the weights lie in the range; gradients and masks
    for (i, j) depend on pairs i and j alone; masked negatives are dropped and
    still count in n. Public: the maximum batch, N0, B, range. The realised n
    is NOT public: that it is divided by is part of the value.

  >>> spreadout(max_batch_size=64, l2_clip_norm=1.0,
  ...           relation="ADD_OR_REMOVE_ONE", unit="pair")
  6.0

  Args:
    max_batch_size: the largest number of pairs in a batch including padding;
      math.inf gives the limit.
    l2_clip_norm: B, the largest norm of a pair's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    declared_batch_size: N0 of the constant divisor N0 - 1; None where the
      divisor is the realised n - 1.
    similarity_range: (lo, hi), which is enforced.

  Returns:
    The L2 norm by which one unit moves the sum, at most; 0 for one pair.

  Raises:
    ValueError: if an argument is out of range.
  """
  replaces = _replaces(relation)
  _check_unit(unit)
  largest = max(abs(bound) for bound in _similarity_range(similarity_range))
  scale = 2 * _positive("l2_clip_norm", l2_clip_norm) * largest
  n = _batch_size("max_batch_size", max_batch_size)
  share = 1.0 if n > 1 else 0.0
  if declared_batch_size is not None:
    n, declared = _batch_sizes(max_batch_size, declared_batch_size)
    share = _share(n - 1, declared - 1)
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

  A row is the loss of one query against its document and negatives. It is one
  vector of norm at most C, whatever the loss, temperature and number of
  columns: C when it comes or goes, 2C when it is exchanged. Where the negatives
  are the batch's, a pair that comes or goes exchanges the n - 1 other rows, too:
  (2n - 1) C, and 2n C when it is replaced. That is the noise of per-example
  clipping, which grows with the batch.

  Formal guarantee:
    With `negatives="public"`, drawn independently of the private pairs: unit
    "pair" or "query"; a row depends on its own pair alone. With
    `negatives="batch"`: unit "pair" for every batch of at most
    `max_batch_size` pairs and any mask, which is attained; unit "query" where
    the documents of the batch stay and are public, and so is which documents
    have queries, the loss has one direction, and masks of (i, j) depend on
    documents and query i alone.

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
      at least 1; needed for pairs with negatives of the batch alone.

  Returns:
    The L2 norm by which one unit moves the sum, at most.

  Raises:
    ValueError: if an argument is out of range or missing.

  References:
    Carranza et al. (2023), arXiv:2305.05973, section 4.2 (that it grows with the
    batch).
  """
  norm = _positive("l2_clip_norm", l2_clip_norm)
  own = 2 * norm if _replaces(relation) else norm
  _check_unit(unit)
  if negatives not in ("public", "batch"):
    raise ValueError(
      f"expected negatives 'public' or 'batch', got {negatives=}"
    )
  if negatives == "public" or unit == "query":
    return own
  # A column that comes, goes or changes may turn every other row around.
  checks.count("max_batch_size", max_batch_size, 1)
  assert max_batch_size is not None
  return own + 2 * norm * (max_batch_size - 1)


def group(*, l2_clip_norm: float, relation: Any, keeps_group: bool) -> float:
  """Returns the sensitivity of a sum of groups' gradients, each clipped.

  The batch is cut into disjoint groups, which are their own batches; each
  group's gradient is clipped to C. A record changes its group's gradient
  arbitrarily within the ball: 2C. One that is replaced may leave one group and
  enter another: 4C.

  Formal guarantee:
    Unit: whatever a group key belongs to. Relation: any. Assumed: a record's
    group depends on its own key alone, never on its place in the batch: where
    groups are filled by position, one record moves all of them.

  >>> group(l2_clip_norm=0.1, relation="REPLACE_ONE", keeps_group=False)
  0.4

  Args:
    l2_clip_norm: C, the largest norm of a group's gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    keeps_group: whether a replaced record stays in its group, because the key
      is no part of what is replaced (an index, or the document of a query).

  Returns:
    2C, or 4C under REPLACE_ONE where a replaced record may change its group.

  Raises:
    ValueError: if the norm is out of range or the relation is unknown.
  """
  norm = _positive("l2_clip_norm", l2_clip_norm)
  moves = _replaces(relation) and not keeps_group
  return 4 * norm if moves else 2 * norm


def batch(*, l2_clip_norm: float, relation: Any = "ADD_OR_REMOVE_ONE") -> float:
  """Returns the sensitivity of a whole-batch gradient clipped to one norm.

  This is the naive way to train a loss that couples its examples: take the
  gradient g of the whole batch and scale it down to norm C. Another record
  may change g entirely, but both clipped gradients lie in the ball of radius
  C, so they are at most 2C apart, whatever the relation; g and -g attain it.

  Formal guarantee: for every loss, adding, removing or replacing one record of
  a batch moves the sum of one clipped gradient by at most the returned value.
  It holds for one clipped gradient a step: with several (microbatches), clip
  each, divide by their number, which is public, and let a record touch one.
  Noise is noise_multiplier times this value under every relation. Under
  REPLACE_ONE the accountant doubles once more by itself, which this loss does
  not need: sound, and loose by a factor of two.

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
  return 2 * _positive("l2_clip_norm", l2_clip_norm)


def _mass_of_negatives(negatives: float, gap: float) -> float:
  """Returns the largest probability that a row's negatives have together.

  `gap` is the width of the similarity range over the temperature.
  """
  if negatives == 0:
    return 0.0
  return 1.0 / (1.0 + math.exp(-gap) / negatives)


def _mass_on_newcomer(n: float, gap: float) -> float:
  """Returns the most that n - 1 rows together give to the n-th pair's columns."""
  if n == 1:
    return 0.0
  inverse = 1.0 / (n - 1) + math.exp(-gap)
  if inverse < 1e-300:
    raise ValueError(
      f"expected a finite limit, got max_batch_size={n} and a similarity range "
      f"of {gap:.0f} temperatures: give a finite max_batch_size"
    )
  return 1.0 / inverse


def _share(count: float, total: float) -> float:
  """Returns count / total, its limit 1, or 0 where there is nothing."""
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


def _positive(name: str, value: Any) -> float:
  if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
    raise ValueError(f"expected a positive finite {name}, got {name}={value!r}")
  return float(value)


def _batch_size(name: str, value: Any) -> float:
  """Returns a number of pairs: an integer of at least 1, or math.inf."""
  if value != math.inf:
    checks.count(name, value, 1)
  return value


def _batch_sizes(largest: Any, declared: Any) -> tuple[float, float]:
  """Returns the largest batch and the one that weights are made for."""
  largest = _batch_size("max_batch_size", largest)
  if declared is None:
    return largest, largest
  declared = _batch_size("declared_batch_size", declared)
  if largest > declared:
    raise ValueError(
      "expected max_batch_size of at most declared_batch_size, got "
      f"max_batch_size={largest} and declared_batch_size={declared}"
    )
  return largest, declared


def _similarity_range(bounds: Any) -> tuple[float, float]:
  """Returns (low, high), which are finite and in this order."""
  low, high = bounds
  _check_finite("similarity_range[0]", low)
  _check_finite("similarity_range[1]", high)
  if not low < high:
    raise ValueError(
      f"expected similarity_range (low, high), got similarity_range={bounds!r}"
    )
  return float(low), float(high)
