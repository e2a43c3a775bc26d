"""What is promised, and the arithmetic behind it.

`sampling` draws the batches, `sensitivity` bounds what one record moves,
`accounting` turns noise into epsilon and back, `releases` are the entries of
the ledger, `statement` makes the claim, `joint` one about several results, and
`rounding` writes its numbers. None loads JAX, and dp_accounting is loaded by the
first call that needs it.
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
