"""Near-duplicates of test queries in training data, and what they change."""

__all__: list[str] = []
