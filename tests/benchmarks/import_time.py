"""Measures what an import of the package adds to `import jax, optax`.

Prints JSON, median of 5 fresh processes each; the bar is 0.3 s for `optim`:
  python tests/benchmarks/import_time.py
"""

import statistics
import sys

import measuring

REPEATS = 5
LIMIT = 0.3
PARTS = ("privacy", "losses", "optim")
SCRIPT = """
import json, time
start = time.perf_counter()
import jax, optax
between = time.perf_counter()
import synthq_jax.{part}
print(json.dumps([between - start, time.perf_counter() - between]))
"""
HELP = """
import contextlib, io, json, time
start = time.perf_counter()
from synthq_jax.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
  main.main(["--help"])
print(json.dumps(time.perf_counter() - start))
"""


def seconds(script: str) -> list:
  """Runs a script in fresh processes, once more for the byte code."""
  return [measuring.fresh("-c", script) for _ in range(REPEATS + 1)][1:]


def main() -> int:
  found = {}
  for part in PARTS:
    before, added = zip(*seconds(SCRIPT.format(part=part)), strict=True)
    found[f"{part}_added_s"] = round(statistics.median(added), 3)
    found["jax_optax_s"] = round(statistics.median(before), 3)
  found["help_s"] = round(statistics.median(seconds(HELP)), 3)
  found["limit_s"] = LIMIT
  passed = found["optim_added_s"] <= LIMIT
  return measuring.finish("import_time", found, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
