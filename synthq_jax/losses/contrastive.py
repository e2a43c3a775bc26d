"""Contrastive losses on a matrix of similarities.

These losses COUPLE the examples: each row's loss depends on the other rows'
documents. They are not for `optim.clipped_grad`, whose guarantee needs losses
of single examples; `optim.batch_clipped_grad` clips a coupled gradient.

`softmax` is the usual loss. `Softmax`, `Sigmoid` and `Spreadout` are losses for
training with DP, where the gradient of each similarity is clipped: they also
know the derivatives by which those gradients are weighted, what may be masked,
and how far one record then moves the sum.
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
  weights: jax.Array | None = None,  # [batch]
  is_padding_example: jax.Array | None = None,  # [batch]
  is_padding_document: jax.Array | None = None,  # [batch + hard]
  duplicate_mask: jax.Array | None = None,  # [batch, batch + hard]
) -> jax.Array:  # [batch]
  """Returns the in-batch softmax loss of each query, in nats.

  Row i is a query, column i its own document, the other columns are negatives:
  the other rows' documents and then any hard negatives. The loss of row i is
  -s[i, i]/temperature + log sum_j exp(s[i, j]/temperature).

  Every row depends on every document of the batch, so that clipping per example
  bounds what one pair does to the sum by twice the batch. `duplicate_mask` drops
  columns from denominators, which is right for training without privacy and
  breaks the sensitivity bounds of losses whose pairs are clipped.

  >>> import jax.numpy as jnp
  >>> print(softmax(jnp.zeros((2, 2)), temperature=1.0) / jnp.log(2.0))
  [1. 1.]

  Args:
    similarity: [batch, batch + hard], for cosines in [-1, 1].
    temperature: above 0; similarities are divided by it.
    weights: factor for each row's loss [batch], or None for ones.
    is_padding_example: bool [batch]; such rows get loss 0, and their own
      columns are dropped.
    is_padding_document: bool [batch + hard]; such columns are dropped.
    duplicate_mask: bool [batch, batch + hard]; True where a column's document
      equals the row's own, such columns are dropped from that row. The row's
      own column always stays.

  Returns:
    float32 [batch].

  Raises:
    ValueError: if the temperature is not above 0 or a shape is wrong.

  References:
    Henderson et al. (2017), arXiv:1705.00652, section 4.3 (in-batch softmax).
  """
  checks.within("(0, inf]", temperature=temperature)
  batch, documents = pairs.check_shape(similarity)
  dropped = jnp.zeros((batch, documents), bool)
  if is_padding_document is not None:
    dropped |= is_padding_document[None, :]
  if is_padding_example is not None:
    extra = jnp.zeros(documents - batch, bool)
    dropped |= jnp.concatenate([is_padding_example, extra])[None, :]
  if duplicate_mask is not None:
    dropped |= duplicate_mask
  dropped &= ~jnp.eye(batch, documents, dtype=bool)
  logits = similarity.astype(jnp.float32) / temperature
  total = jax.nn.logsumexp(jnp.where(dropped, -jnp.inf, logits), axis=1)
  losses = total - jnp.diagonal(logits)  # [batch]
  if weights is not None:
    losses *= weights
  return pairs.without_padding(losses, is_padding_example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(pairs.PairLoss):
  """The in-batch softmax for gradients of pairs that are clipped.

  Unlike in `softmax`, a duplicate stays in its row's denominator, as the
  constant exp(low / temperature) with gradient zero: a row whose columns may be
  dropped can be moved much further by one new document.

  Formal guarantee: that of `privacy.sensitivity.softmax`, for any similarity
  given to `weights`, if `is_duplicate[i, j]` depends on pairs i and j alone.

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
    columns = None
    if is_padding_example is not None:
      columns = pairs.padding_columns(is_padding_example, self.hard_negatives)
    loss = functools.partial(
      softmax,
      temperature=self.temperature,
      is_padding_example=is_padding_example,
    )
    losses = loss(similarity, is_padding_document=columns)
    if self.directions == 2:
      losses += loss(similarity[:, :batch].T)
    return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sigmoid(pairs.PairLoss):
  """The balanced sigmoid loss, where every pair is a question of its own.

  With z = similarity / temperature + bias the loss of row i is softplus(-z_ii)
  and the sum of softplus(z_ij) over its negatives j, each weighted by
  1 / (N0 (1 + h) - 1). All negatives of a row together weigh no more than its
  own document, and no weight depends on the batch that came. Duplicates are
  dropped: there is no denominator that they share.

  Formal guarantee: that of `privacy.sensitivity.sigmoid`, for any similarity
  given to `weights`, if `is_duplicate[i, j]` depends on pairs i and j alone.

  >>> import jax.numpy as jnp
  >>> loss = Sigmoid(temperature=1.0, max_batch_size=3)
  >>> print(loss.losses(jnp.zeros((2, 2))) / jnp.log(2.0))
  [1.5 1.5]

  Attributes:
    temperature: above 0.
    max_batch_size: N0, the declared largest batch, at least 2.
    bias: added to every similarity / temperature, a public constant.

  References:
    Zhai et al. (2023), arXiv:2303.15343, section 3.2 (without the balance).
  """

  temperature: float
  bias: float = 0.0

  _sensitivity = staticmethod(sensitivity.sigmoid)

  def _losses(self, similarity, is_padding_example, is_duplicate):
    dropped = pairs.dropped(similarity, is_padding_example, is_duplicate)
    logits = similarity.astype(jnp.float32) / self.temperature + self.bias
    costs = jnp.where(dropped, 0.0, jax.nn.softplus(logits))
    negatives = self.max_batch_size * (1 + self.hard_negatives) - 1
    losses = jax.nn.softplus(-jnp.diagonal(logits))
    losses += jnp.sum(costs, axis=1) / negatives
    return pairs.without_padding(losses, is_padding_example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spreadout(pairs.PairLoss):
  """The spreadout loss: how far different pairs are from orthogonal.

  The loss of row i is the sum of similarity_ij^2 over j != i, divided by n - 1
  for the n real pairs, or by a declared N0 - 1. It does not look at a row's own
  column: a regulariser, or a loss where pairs agree without training.
  Duplicates are dropped, and count in n.

  Formal guarantee: that of `privacy.sensitivity.spreadout`, for any similarity
  given to `weights`, if `is_duplicate[i, j]` depends on pairs i and j alone.

  >>> import jax.numpy as jnp
  >>> print(Spreadout().losses(jnp.ones((3, 3))))
  [1. 1. 1.]

  Attributes:
    max_batch_size: N0, at least 2, to divide by N0 - 1, which needs less noise;
      None to divide by the realised n - 1.

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
    dropped = pairs.dropped(similarity, is_padding_example, is_duplicate)
    squares = jnp.square(similarity.astype(jnp.float32))
    total = jnp.sum(jnp.where(dropped, 0.0, squares), axis=1)
    losses = total / jnp.maximum(n - 1, 1)
    return pairs.without_padding(losses, is_padding_example)
