"""Generates synthetic queries: decoding, filters and measures of the texts."""
