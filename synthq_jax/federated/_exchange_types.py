"""Names of `messages` for modules that still import them from here."""

from synthq_jax.federated.messages import (
  COLLECTION_UNIT,
  QUESTION_UNIT,
  Promise,
)

__all__ = ["COLLECTION_UNIT", "QUESTION_UNIT", "Promise"]
