"""Retrieves documents and evaluates runs: search, BM25, TREC files, measures.

Import the modules you need: this package loads none of them by itself.
"""

__all__: list[str] = []
