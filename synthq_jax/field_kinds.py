"""Marks fields of settings and results that files leave out, or digests do.

`storage.artifacts` reads the marks; whoever sets them needs no storage.
"""

import dataclasses
from typing import Any

__all__ = ["later", "speed_only"]


def speed_only(default: Any = dataclasses.MISSING, *, make: Any = None) -> Any:
  """Returns a dataclass's field that no fingerprint depends on.

  Args:
    default: its value; or
    make: what makes it.
  """
  given = {"default": default} if make is None else {"default_factory": make}
  return dataclasses.field(**given, metadata={"speed_only": True})


def later(default: Any) -> Any:
  """Returns a dataclass's field that is not written while it has its default.

  For a field that came after others were on disk: what was written without it,
  fingerprints among it, stays as it is.

  >>> Run = dataclasses.make_dataclass("Run", [("steps", int, later(1))])
  >>> from synthq_jax.storage import artifacts
  >>> artifacts.to_json(Run()), artifacts.to_json(Run(2))["steps"]
  ({'_type': 'Run'}, 2)

  Args:
    default: its value.
  """
  return dataclasses.field(default=default, metadata={"later": True})
