"""A name of `clients` for modules that still import it from here."""

from synthq_jax.federated.clients import first_equal

__all__ = ["first_equal"]
