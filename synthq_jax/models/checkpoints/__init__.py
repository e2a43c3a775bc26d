"""Formats of checkpoints: tensors described first, and read one at a time."""
