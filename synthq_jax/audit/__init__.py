"""Empirical checks of privacy claims: canaries and what is remembered of them."""

__all__: list[str] = []
