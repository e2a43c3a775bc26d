"""Measures what an import of the package adds to `import jax, optax`.

Prints JSON, median of 5 fresh processes each, in seconds of the clock and of the
processor, which other work on the machine changes less: the bar is 0.3 of those
for `optim`.
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
def now():
  return time.perf_counter(), time.process_time()
start = now()
import jax, optax
between = now()
import synthq_jax.{part}
end = now()
print(json.dumps([b - a for a, b in zip((*start, *between), (*between, *end))]))
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
    names = [
      f"{what}_{unit}"
      for what in ("jax_optax", f"{part}_added")
      for unit in ("s", "processor_s")
    ]
    columns = zip(*seconds(SCRIPT.format(part=part)), strict=True)
    for name, column in zip(names, columns, strict=True):
      found[name] = round(statistics.median(column), 3)
  found["help_s"] = round(statistics.median(seconds(HELP)), 3)
  found["limit_s"] = LIMIT
  passed = found["optim_added_processor_s"] <= LIMIT
  return measuring.finish("import_time", found, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
