"""What users call beside a run: exports, search, checks for leaks."""
