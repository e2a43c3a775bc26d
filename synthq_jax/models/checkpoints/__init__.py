"""Reads and writes formats of checkpoints, one tensor at a time."""
