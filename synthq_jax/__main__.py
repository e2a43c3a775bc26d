"""Starts `synthq`; without the extra it needs, one line says so."""

import gc
import sys

import synthq_jax
from synthq_jax import extras

__all__ = ["main"]


def main() -> int:
  """Runs the process's command; returns the exit code, as `main.main` does."""
  if sys.argv[1:] == ["--version"]:  # also without the extra
    print(f"synthq {synthq_jax.__version__}")
    return 0
  try:
    from synthq_jax.cli import main as command
  except extras.MissingExtraError as error:
    print(f"synthq: {error}", file=sys.stderr)
    return 2
  # What is imported stays, and millions of small objects are alive at times: looking
  # through them for cycles as often as Python does took 6% of the ranking rows.
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)
  return command.main()


if __name__ == "__main__":
  sys.exit(main())
