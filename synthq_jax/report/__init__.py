"""Builds report pages from results: blocks, tables, plots. Computes nothing."""
