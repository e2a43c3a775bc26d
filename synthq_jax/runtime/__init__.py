"""Runs stages: working directories, results, claims and releases; holds no
stage."""
