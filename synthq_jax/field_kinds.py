"""Marks fields of settings and results that files or fingerprints leave out.

`storage.artifacts` reads the marks; modules that set them need no storage.
"""

import dataclasses
from typing import Any

__all__ = ["later", "speed_only"]


def speed_only(default: Any = dataclasses.MISSING, *, make: Any = None) -> Any:
  """Makes a dataclass field on which no fingerprint depends.

  Args:
    default: default value of the field; or
    make: function that makes the default value.
  """
  options = {"default": default} if make is None else {"default_factory": make}
  return dataclasses.field(**options, metadata={"speed_only": True})


def later(default: Any) -> Any:
  """Makes a dataclass field that files and fingerprints omit at its default.

  Use it to add a field to a class that files hold already: their content and
  fingerprints stay valid.

  >>> Run = dataclasses.make_dataclass("Run", [("steps", int, later(1))])
  >>> from synthq_jax.storage import artifacts
  >>> artifacts.to_json(Run()), artifacts.to_json(Run(2))["steps"]
  ({'_type': 'Run'}, 2)

  Args:
    default: default value of the field.
  """
  return dataclasses.field(default=default, metadata={"later": True})
