"""Losses per example: sequence-to-sequence and contrastive."""

from synthq_jax.losses import contrastive, seq2seq

__all__ = ["contrastive", "seq2seq"]
