"""Reads and writes collections, vocabularies, SeqIO tasks and token caches.

Import the modules you need: the package itself loads none of them, because some
load TensorFlow, which takes seconds. `collection`, `beir`, `msmarco`, `jsonl`,
`splits` and `files` need only the standard library, NumPy and SciPy.
"""

__all__: list[str] = []
