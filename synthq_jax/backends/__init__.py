"""Runs this project's private steps in other trainers."""
