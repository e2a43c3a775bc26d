"""Trains privately inside T5X's own trainer (docs/t5x.md).

`settings`, `release`, `batches` and `gradients` need no T5X; `dp_trainer`,
`dp_dataset` and `dp_optimizers`, which gin files name, import it.
"""
