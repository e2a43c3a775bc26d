"""Text in and out: readers of collections, vocabulary, tasks and batches.

Import the modules you need: this package loads none of them by itself, because
some load TensorFlow, which takes seconds. `collection`, `beir`, `msmarco`,
`jsonl`, `splits` and `files` need the standard library, NumPy and SciPy only.
"""

__all__: list[str] = []
