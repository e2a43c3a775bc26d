"""How numbers are written, where the pages of the studies still look for it."""

from synthq_jax.report.tables import claimed, duration, measure_name, p_value

__all__ = ["claimed", "duration", "measure_name", "p_value"]
