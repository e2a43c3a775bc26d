"""Real collections beside the project, or where SYNTHQ_SHARED_DATA says."""

import os
import pathlib

import pytest

_DEFAULT = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
PLACE = pathlib.Path(os.environ.get("SYNTHQ_SHARED_DATA", _DEFAULT))


def folder(name: str) -> pathlib.Path:
  """Returns a collection's folder, or skips the test that asks for it."""
  if not (PLACE / name).is_dir():
    pytest.skip(f"no shared data at {PLACE / name} (set SYNTHQ_SHARED_DATA)")
  return PLACE / name
