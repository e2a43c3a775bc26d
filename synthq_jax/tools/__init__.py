"""Runs the commands outside of a pipeline: exports, search, leakage checks."""
