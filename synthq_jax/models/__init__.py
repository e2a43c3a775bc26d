"""Flax models: T5 as T5X names it, and the dual encoder on its encoder."""
