"""Contrastive losses on a matrix of similarities.

These losses COUPLE the examples: each row's loss depends on the other rows'
documents. They are not for `optim.clipped_grad`, whose guarantee needs losses
of single examples; `optim.batch_clipped_grad` clips a coupled gradient.
"""

import jax
import jax.numpy as jnp

__all__ = ["softmax"]


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

  Every row depends on every document of the batch, so clipping per example
  does not bound what one pair does to the sum. `duplicate_mask` drops columns
  from denominators, which is right for training without privacy and breaks
  the sensitivity bounds of losses whose pairs are clipped.

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
  if not temperature > 0:
    raise ValueError(f"expected temperature > 0, got {temperature=}")
  batch, documents = _check_shape(similarity)
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
  if is_padding_example is not None:
    losses = jnp.where(is_padding_example, 0.0, losses)
  return losses


def _check_shape(similarity: jax.Array) -> tuple[int, int]:
  """Returns the numbers of queries and documents."""
  if similarity.ndim != 2 or similarity.shape[1] < similarity.shape[0]:
    raise ValueError(
      "expected similarity [batch, batch + hard], got shape="
      f"{similarity.shape}: give every query a column for its own document"
    )
  return similarity.shape
