"""Hugging Face's packages, quiet, imported by the tests that use them.

Every worker collects every file: an import there would cost each of them 14 s.
"""

import functools
import logging
from types import ModuleType

import pytest


class Lazy:
  """A package that is imported at its first use; without it, a test is skipped."""

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str):
    if attribute.startswith(("_", "pytest")):  # pytest looks for marks
      raise AttributeError(attribute)
    return getattr(_load(self._name), attribute)


@functools.cache
def _load(name: str) -> ModuleType:
  module = pytest.importorskip(name)
  if name == "torch":
    module.set_num_threads(1)
  elif name == "transformers":
    module.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
  elif name == "sentence_transformers":
    logging.getLogger(name).setLevel(logging.ERROR)
  return module


torch = Lazy("torch")
transformers = Lazy("transformers")
tokenizers = Lazy("tokenizers")
sentence_transformers = Lazy("sentence_transformers")
sentence_models = Lazy("sentence_transformers.models")
