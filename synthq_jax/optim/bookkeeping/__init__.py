"""Computes norms and sums of per-example gradients that are kept in factors."""

__all__: list[str] = []
