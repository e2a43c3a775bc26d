"""Clips and sums gradients of contrastive losses, whose examples are coupled."""

from synthq_jax.optim.contrastive.batch import Batch, batch_clipped_grad
from synthq_jax.optim.contrastive.gradient import (
  ContrastiveGrad,
  Loss,
  Method,
  contrastive_clipped_grad,
  logit_dp,
)
from synthq_jax.optim.contrastive.group import Group
from synthq_jax.optim.contrastive.logit import Logit
from synthq_jax.optim.contrastive.row import Row

__all__ = [
  "Batch",
  "ContrastiveGrad",
  "Group",
  "Logit",
  "Loss",
  "Method",
  "Row",
  "batch_clipped_grad",
  "contrastive_clipped_grad",
  "logit_dp",
]
