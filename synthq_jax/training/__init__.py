"""Trains models: loops, private steps, meshes and checkpoints."""
