"""Retrieval and its evaluation: exact search, BM25, TREC files, measures.

Import the modules you need: this package loads none of them by itself.
"""

__all__: list[str] = []
