"""Near-duplicates of test queries in training data, and their effects."""

__all__: list[str] = []
