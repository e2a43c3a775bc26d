"""Retrieval over clients that may not share their texts, simulated."""

__all__: list[str] = []
