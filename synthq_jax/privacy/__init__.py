"""Computes privacy claims: sampling, sensitivities, accounting and statements.

`sampling` draws the batches and `sensitivity` bounds how far one record moves a
sum. `accounting` turns noise into epsilon and back. `releases` are the entries of
the ledger. `statement` holds the claim of one result, `joint` computes the claim
of several, and `rounding` writes the numbers. None of them loads JAX, and the
first call that needs dp_accounting loads it.
"""

from synthq_jax.privacy import (
  accounting,
  joint,
  releases,
  rounding,
  sampling,
  sensitivity,
  statement,
)

__all__ = [
  "accounting",
  "joint",
  "releases",
  "rounding",
  "sampling",
  "sensitivity",
  "statement",
]
