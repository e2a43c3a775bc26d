"""Losses per example: sequence-to-sequence, contrastive, of a ranked list."""

from synthq_jax.losses import contrastive, listwise, seq2seq

__all__ = ["contrastive", "listwise", "seq2seq"]
