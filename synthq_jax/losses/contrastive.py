"""Contrastive losses on a matrix of similarities.

These losses COUPLE the examples: each row's loss depends on the other rows'
documents. They are not for `optim.clipped_grad`, whose guarantee needs losses
of single examples; `optim.batch_clipped_grad` clips a coupled gradient.

`softmax` is the loss of training without privacy. `Softmax`, `Sigmoid` and
`Spreadout` are losses for `optim.batch_clipped_grad`. For `optim.Logit`, which
clips the gradient of each similarity, they compute the derivatives that weight
those gradients, mask no more than their bound allows, and report how far one
record then moves the sum.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from synthq_jax import checks
from synthq_jax.losses import pairs
from synthq_jax.privacy import sensitivity

__all__ = ["Sigmoid", "Softmax", "Spreadout", "softmax"]


def softmax(
  similarity: jax.Array,  # [batch, batch + hard]
  *,
  temperature: float,
  is_padding_example: jax.Array | None = None,  # [batch]
  duplicate_mask: jax.Array | None = None,  # [batch, batch + hard]
) -> jax.Array:  # [batch]
  """Returns the in-batch softmax loss of each query, in nats.

  Row i is a query, column i its own document, the other columns are negatives:
  the other rows' documents and then any hard negatives. The loss of row i is
  -s[i, i]/temperature + log sum_j exp(s[i, j]/temperature).

  Every row depends on every document of the batch. Per-example clipping
  therefore bounds the effect of one pair on the sum only by 2 * batch clip
  norms. `duplicate_mask` drops columns from denominators. That is right for
  training without privacy, and breaks the sensitivity bounds of losses with
  clipped pairs.

  >>> import jax.numpy as jnp
  >>> print(softmax(jnp.zeros((2, 2)), temperature=1.0) / jnp.log(2.0))
  [1. 1.]

  Args:
    similarity: [batch, batch + hard]; cosines are in [-1, 1].
    temperature: above 0; divides the similarities.
    is_padding_example: bool [batch]; True gives a row loss 0 and drops its own
      column from all other rows.
    duplicate_mask: bool [batch, batch + hard]; True where a column's document
      equals the row's own, which drops the column from that row. The row's own
      column always stays.

  Returns:
    float32 [batch].

  Raises:
    ValueError: if the temperature is not above 0 or a shape is wrong.

  References:
    Henderson et al. (2017), arXiv:1705.00652, section 4.3 (in-batch softmax).
  """
  checks.within("(0, inf)", temperature=temperature)
  batch, documents = pairs.check_shape(similarity)
  dropped = jnp.zeros((batch, documents), bool)
  if is_padding_example is not None:
    extra = jnp.zeros(documents - batch, bool)
    dropped |= jnp.concatenate([is_padding_example, extra])[None, :]
  if duplicate_mask is not None:
    dropped |= duplicate_mask
  dropped &= ~jnp.eye(batch, documents, dtype=bool)
  logits = similarity.astype(jnp.float32) / temperature
  total = jax.nn.logsumexp(jnp.where(dropped, -jnp.inf, logits), axis=1)
  return pairs.zero_padding(total - jnp.diagonal(logits), is_padding_example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(pairs.PairLoss):
  """In-batch softmax loss for DP training that clips the gradient of each pair.

  Unlike in `softmax`, a duplicate stays in its row's denominator as the
  constant exp(low / temperature), with gradient zero. If columns could be
  dropped, one new document could move a row much further.

  Formal guarantee: that of `privacy.sensitivity.softmax`, for every similarity
  passed to `weights`, if `is_duplicate[i, j]` depends on pairs i and j alone.

  >>> import jax.numpy as jnp
  >>> print(Softmax(temperature=1.0).weights(jnp.zeros((2, 2))))
  [[-0.5  0.5]
   [ 0.5 -0.5]]

  Attributes:
    temperature: above 0.
    directions: 1, or 2 to add the softmax of each document over the queries.
  """

  max_batch_size: ClassVar[None] = None
  temperature: float
  directions: int = 1

  _sensitivity = staticmethod(sensitivity.softmax)

  def _losses(self, similarity, is_padding_example, is_duplicate):
    batch = len(similarity)
    if is_duplicate is not None:
      masked = is_duplicate & ~jnp.eye(*similarity.shape, dtype=bool)
      low = self.similarity_range[0]
      similarity = jnp.where(masked, low, similarity)
    dropped = None
    if is_padding_example is not None:
      dropped = pairs.repeat_padding(is_padding_example, self.hard_negatives)
      dropped = dropped[None, :]
    loss = functools.partial(
      softmax,
      temperature=self.temperature,
      is_padding_example=is_padding_example,
    )
    losses = loss(similarity, duplicate_mask=dropped)
    if self.directions == 2:
      losses += loss(similarity[:, :batch].T)
    return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sigmoid(pairs.PairLoss):
  """Balanced sigmoid loss, a binary classification of every pair.

  With z = similarity / temperature + bias the loss of row i is softplus(-z_ii)
  plus the weighted sum of softplus(z_ij) over its negatives j. The weight is
  the constant 1 / (N0 (1 + h) - 1), whatever batch is sampled. All negatives of
  a row together weigh no more than its own document. Duplicates are dropped:
  the terms of a row share no denominator.

  Formal guarantee: that of `privacy.sensitivity.sigmoid`, for every similarity
  passed to `weights`, if `is_duplicate[i, j]` depends on pairs i and j alone.

  >>> import jax.numpy as jnp
  >>> loss = Sigmoid(temperature=1.0, max_batch_size=3)
  >>> print(loss.losses(jnp.zeros((2, 2))) / jnp.log(2.0))
  [1.5 1.5]

  Attributes:
    temperature: above 0.
    max_batch_size: N0, the declared largest batch, at least 2.
    bias: public constant, added to every similarity / temperature.

  References:
    Zhai et al. (2023), arXiv:2303.15343, section 3.2 (without the balance).
  """

  temperature: float
  bias: float = 0.0

  _sensitivity = staticmethod(sensitivity.sigmoid)

  def _losses(self, similarity, is_padding_example, is_duplicate):
    dropped = pairs.make_drop_mask(similarity, is_padding_example, is_duplicate)
    logits = similarity.astype(jnp.float32) / self.temperature + self.bias
    costs = jnp.where(dropped, 0.0, jax.nn.softplus(logits))
    negatives = self.max_batch_size * (1 + self.hard_negatives) - 1
    losses = jax.nn.softplus(-jnp.diagonal(logits))
    losses += jnp.sum(costs, axis=1) / negatives
    return pairs.zero_padding(losses, is_padding_example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spreadout(pairs.PairLoss):
  """Spreadout loss, which pushes different pairs towards orthogonality.

  The loss of row i is the sum of similarity_ij^2 over j != i, divided by n - 1
  or by a declared N0 - 1. Here n counts the real pairs. The loss ignores a
  row's own column: use it as a regulariser, or alone if pairs agree without
  training. Duplicates are dropped and still count in n.

  Formal guarantee: that of `privacy.sensitivity.spreadout`, for every
  similarity passed to `weights`, if `is_duplicate[i, j]` depends on pairs i and
  j alone.

  >>> import jax.numpy as jnp
  >>> print(Spreadout().losses(jnp.ones((3, 3))))
  [1. 1. 1.]

  Attributes:
    max_batch_size: N0, at least 2: the divisor is N0 - 1, which needs less
      noise. None: the divisor is the realised n - 1.

  References:
    Zhang et al. (2017), arXiv:1708.06320 (the second moment of negatives).
  """

  hard_negatives: ClassVar[int] = 0
  max_batch_size: int | None = None

  _sensitivity = staticmethod(sensitivity.spreadout)

  def _losses(self, similarity, is_padding_example, is_duplicate):
    n = len(similarity)
    if self.max_batch_size is not None:
      n = self.max_batch_size
    elif is_padding_example is not None:
      n = jnp.sum(~is_padding_example)
    dropped = pairs.make_drop_mask(similarity, is_padding_example, is_duplicate)
    squares = jnp.square(similarity.astype(jnp.float32))
    total = jnp.sum(jnp.where(dropped, 0.0, squares), axis=1)
    losses = total / jnp.maximum(n - 1, 1)
    return pairs.zero_padding(losses, is_padding_example)
