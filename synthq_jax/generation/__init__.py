"""Synthetic queries: decoding, filters, measures of the text."""
