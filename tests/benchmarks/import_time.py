"""What importing synthq_jax and its optim adds to jax, optax, jax_privacy.

Prints JSON. The bar is 0.3 s, median of 5 fresh processes:
  python tests/benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

import measuring

REPEATS = 5
LIMIT = 0.3
SCRIPT = """
import time
start = time.perf_counter()
import jax, optax, jax_privacy
between = time.perf_counter()
import synthq_jax, synthq_jax.optim
print(between - start, time.perf_counter() - between)
"""


def measure() -> tuple[float, float]:
  """Seconds of the dependencies, and of ours on top, in a fresh process."""
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT],
    cwd=measuring.ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  dependencies, ours = map(float, done.stdout.split())
  return dependencies, ours


def main() -> int:
  measure()  # writes the byte code
  runs = [measure() for _ in range(REPEATS)]
  dependencies, ours = zip(*runs, strict=True)
  median = statistics.median(ours)
  result = {
    "dependencies_s": round(statistics.median(dependencies), 3),
    "added_s": round(median, 3),
    "added_runs_s": [round(seconds, 3) for seconds in ours],
    "limit_s": LIMIT,
  }
  return measuring.finish("import_time", result, passed=median <= LIMIT)


if __name__ == "__main__":
  sys.exit(main())
