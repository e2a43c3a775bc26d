"""Sequence-to-sequence, contrastive and listwise losses, one value a row."""

from synthq_jax.losses import contrastive, listwise, seq2seq

__all__ = ["contrastive", "listwise", "seq2seq"]
