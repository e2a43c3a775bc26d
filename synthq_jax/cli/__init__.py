"""Parses the command line, runs commands and prints their results."""
