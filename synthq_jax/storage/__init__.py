"""Reads and writes the files of a run atomically, on disk or in a bucket."""
