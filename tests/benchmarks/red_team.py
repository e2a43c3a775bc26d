"""Attacks on clipped sums: how far one record moves them, beside the claim.

A table of adversarial losses beside a float64 oracle, sums of up to 8,192
examples whose rounding depends on one of them, records that climb the gradient
of what they move, and rows of several devices. Prints a table and then counts;
ends with 1 if anything exceeds its claim.

  python tests/benchmarks/red_team.py
  python tests/benchmarks/red_team.py --only drift ascent
"""

import argparse
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/shared")]

import quick_xla  # noqa: E402

os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    *quick_xla.FLAGS,
  )
)
os.environ.setdefault("NPROC", "32")  # threads: see tests/conftest.py

import jax  # noqa: E402

from tests.red_team import attacks  # noqa: E402


def main() -> int:
  """Runs the attacks; returns 1 if one of them succeeds."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", nargs="+", choices=attacks.KINDS)
  kinds = parser.parse_args().only or list(attacks.KINDS)
  counts: dict[str, int] = {}
  began = time.monotonic()
  print("| loss | strategy | dtype | batch | worst moved / C | verdict |")
  print("|---|---|---|---|---|---|")
  for kind in kinds:
    for number, one in enumerate(attacks.KINDS[kind]()):
      moved, verdict = attacks.judge(one)
      row = (one.name, one.strategy, one.dtype, one.batch, moved, verdict)
      print("|", " | ".join(map(str, row)), "|", flush=True)
      first = verdict.split()[0]
      counts[first] = counts.get(first, 0) + 1
      if number % 20 == 19:
        jax.clear_caches()
  said = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
  print(f"{said} in {time.monotonic() - began:.0f} s")
  return int(bool(counts.keys() - {"holds", "refused"}))


if __name__ == "__main__":
  sys.exit(main())
