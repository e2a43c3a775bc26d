"""The drawings, where the pages of the studies still look for them."""

from synthq_jax.report.plots import (
  against_epsilon,
  curves,
  in_rows,
  ranks,
  together,
)

__all__ = ["against_epsilon", "curves", "in_rows", "ranks", "together"]
