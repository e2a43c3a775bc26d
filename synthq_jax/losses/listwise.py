"""Listwise loss for learning to rank: cross-entropy over a query's candidates."""

import jax
import jax.numpy as jnp

__all__ = ["cross_entropy"]


def cross_entropy(
  scores: jax.Array,  # [query, candidate]
  relevant: jax.Array,  # [query, candidate]
  is_candidate: jax.Array,  # [query, candidate]
) -> jax.Array:  # [query]
  """Returns each query's cross-entropy over its own candidates, in nats.

  The loss is minus the mean of log softmax(scores) over the relevant
  candidates. No query's loss depends on another query, as per-example clipping
  requires.

  >>> import jax.numpy as jnp
  >>> scores, relevant = jnp.zeros((1, 3)), jnp.array([[True, False, False]])
  >>> print(jnp.exp(cross_entropy(scores, relevant, jnp.array([[1, 1, 0]]) > 0)))
  [2.]

  Args:
    scores: [query, candidate], any floating dtype; computed in float32.
    relevant: bool [query, candidate].
    is_candidate: bool [query, candidate]; False marks padding, which is never
      relevant and whose score is ignored.

  Returns:
    float32 [query]; 0 for a query without candidates or without relevant ones.

  References:
    Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach",
    ICML 2007, equation 5 for the top-one probability, with relevance judgements
    as its target.
  """
  counted = (relevant & is_candidate).astype(jnp.float32)
  scores = jnp.where(is_candidate, scores.astype(jnp.float32), -jnp.inf)
  # Without a candidate all scores are -inf, whose softmax is NaN: take zeros.
  scores = jnp.where(is_candidate.any(axis=1, keepdims=True), scores, 0.0)
  chosen = jnp.sum(jnp.where(is_candidate, scores, 0.0) * counted, axis=1)
  number = jnp.sum(counted, axis=1)
  losses = number * jax.nn.logsumexp(scores, axis=1) - chosen
  return losses / jnp.maximum(number, 1.0)
