"""Defines Flax models: T5 with T5X's names, encoders of texts, and dual
encoders."""
