"""The studies that `synthq study` runs: whichever the gin files configure."""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any

from synthq_jax import _flags

__all__ = ["STUDIES", "run"]

STUDIES = (
  "synthq_jax.pipeline.federated_study",
  "synthq_jax.pipeline.image_study",
  "synthq_jax.pipeline.leakage_study",
)
"""Modules with a `Config` and a `run(config, workdir, *, progress, on_accepted)`
that returns what is printed. They are imported when a study is asked for."""


def run(
  configured: Callable[[type], tuple[Any, Callable[[], None]] | None],
  workdir: pathlib.Path,
  *,
  progress: bool,
) -> str:
  """Runs the first study that is configured.

  Args:
    configured: builds a configuration of that kind, and what is to be called
      once it is accepted; None where the gin files say nothing about it.
    workdir: of the study.
    progress: whether bars are shown.

  Returns:
    What is printed.

  Raises:
    UsageError: if no study is configured.
  """
  for name in STUDIES:
    study = importlib.import_module(name)
    found = configured(study.Config)
    if found is not None:
      config, on_accepted = found
      return study.run(
        config, workdir, progress=progress, on_accepted=on_accepted
      )
  raise _flags.UsageError(
    "the gin files configure no study: give one of gin_configs/studies"
  )
