"""Where the checkpoint that comes with the package lies."""

import pathlib

__all__ = ["DIRECTORY", "EXTRA_IDS", "VOCABULARY"]

DIRECTORY = pathlib.Path(__file__).parents[1] / "assets" / "demo_t5"
"""params.safetensors, config.json, vocabulary.model and MODEL_CARD.md."""

VOCABULARY = DIRECTORY / "vocabulary.model"
"""Its SentencePiece vocabulary, trained on public text."""

EXTRA_IDS = 32
"""Sentinels behind the pieces of the vocabulary."""
