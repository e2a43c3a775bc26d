"""Draws results: blocks, tables, plots, and pages of them. Computes nothing."""
