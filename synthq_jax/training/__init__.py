"""Training loops and checkpoints."""
