"""Reads the command line, and says what commands have done."""
