"""A name of `clients` for modules that still import it from here."""

from synthq_jax.federated.clients import seed_words as words

__all__ = ["words"]
