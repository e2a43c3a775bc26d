"""Simulates retrieval over clients that may not share their texts."""

__all__: list[str] = []
