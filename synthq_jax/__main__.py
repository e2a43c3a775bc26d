"""Starts `synthq`, or prints one line that names a missing extra."""

import gc
import sys

import synthq_jax
from synthq_jax import extras

__all__ = ["main"]


def main() -> int:
  """Runs the process's command and returns its exit code."""
  if sys.argv[1:] == ["--version"]:  # works without the extra
    print(f"synthq {synthq_jax.__version__}")
    return 0
  try:
    from synthq_jax.cli import main as command
  except extras.MissingExtraError as error:
    print(f"synthq: {error}", file=sys.stderr)
    return 2
  # Modules stay in memory, and millions of small objects may be alive: at Python's
  # default rate, garbage collection takes 6% of the time of the ranking rows.
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)
  return command.main()


if __name__ == "__main__":
  sys.exit(main())
