"""What a measurement says of where it was made."""

import pathlib
import subprocess

__all__ = ["commit"]


def commit() -> str:
  """Returns the commit of these scripts, wherever they were called from."""
  command = ["git", "describe", "--always", "--dirty"]
  done = subprocess.run(
    command,
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stdout.strip() or "unknown"
