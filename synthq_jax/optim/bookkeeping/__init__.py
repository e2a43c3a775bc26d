"""Gradients of single examples, kept in factors: traces, plans, rules."""

__all__: list[str] = []
