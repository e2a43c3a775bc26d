"""Tools beside a run: exports, search, checks for leaks."""
