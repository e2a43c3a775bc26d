"""Private optimization: clipped gradients, noise, optimizers, schedules."""

from synthq_jax.optim import schedules
from synthq_jax.optim.accumulation import accumulate
from synthq_jax.optim.clipping import ClippedGrad, clipped_grad
from synthq_jax.optim.contrastive import (
  Batch,
  ContrastiveGrad,
  Group,
  Logit,
  Loss,
  Row,
  batch_clipped_grad,
  contrastive_clipped_grad,
  logit_dp,
)
from synthq_jax.optim.denoising import dp_dual_averaging
from synthq_jax.optim.dp_optimizers import (
  adafactor,
  dp_adafactor,
  dp_adam,
  dp_aggregate,
)
from synthq_jax.optim.independence import check_independence
from synthq_jax.optim.keys import secret_key
from synthq_jax.optim.noise import banded, iid
from synthq_jax.optim.privatize import privatize

__all__ = [
  "Batch",
  "ClippedGrad",
  "ContrastiveGrad",
  "Group",
  "Logit",
  "Loss",
  "Row",
  "accumulate",
  "adafactor",
  "banded",
  "batch_clipped_grad",
  "check_independence",
  "clipped_grad",
  "contrastive_clipped_grad",
  "dp_adafactor",
  "dp_adam",
  "dp_aggregate",
  "dp_dual_averaging",
  "iid",
  "logit_dp",
  "privatize",
  "schedules",
  "secret_key",
]
