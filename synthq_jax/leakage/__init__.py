"""Leaks between sets of queries: found, built on purpose, and measured."""
