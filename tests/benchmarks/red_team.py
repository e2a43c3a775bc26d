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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8"
  + " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from synthq_jax.optim import bookkeeping, ghost  # noqa: E402
from tests.red_team import (  # noqa: E402
  attack,
  devices,
  losses,
  neighbours,
  sums,
)

BOUND, ALIGNED, DRIFTING, CLIMBED = 1 + 1e-4, 1 + 2e-3, 1 + 5e-3, 1 + 1e-3


SHORT = ("positions_that_cancel",)
"""Clipped too short, never too long, where factors are kept (pitfall 13)."""


class Attack(NamedTuple):
  """One row of the table."""

  name: str
  strategy: str
  dtype: str
  batch: int
  run: Callable[[], tuple[float, str]]
  """To the worst move in claims, and what is wrong beside it or ""."""
  bound: float
  refused: str = ""


def of_table() -> Iterator[Attack]:
  """Every loss: strategies as they choose, and made to keep or form factors."""
  for name, case in losses.CASES.items():
    for strategy in attack.STRATEGIES:
      for ratio in (None, 0.0, 1e9) if strategy != "vmap" else (None,):
        for size in (None, 1, 2) if ratio is None else (None,):

          def run(
            name=name, case=case, strategy=strategy, ratio=ratio, size=size
          ):
            with kept(ratio):
              off, *moved = attack.table(
                case, strategy, losses.ROWS, microbatch_size=size
              )
            short = ratio == 0 and name in SHORT
            limit = 1.0 if short else case.tolerance
            far = f"off by {off:.1e}" if off > limit else ""
            return max(moved), far

          how = "" if ratio is None else ", formed" if ratio else ", factors"
          how += "" if size is None else f", by {size}"
          dtype = "half" if case.half else "float32"
          yield Attack(
            name, strategy + how, dtype, losses.ROWS, run, BOUND, case.refused
          )


class kept:
  """Book-keeping and ghost clipping that form gradients up to this ratio."""

  def __init__(self, ratio: float | None):
    self._ratio = ratio

  def __enter__(self) -> None:
    self._before = bookkeeping.KEEP_RATIO, ghost.KEEP_RATIO
    if self._ratio is not None:
      bookkeeping.KEEP_RATIO = ghost.KEEP_RATIO = self._ratio

  def __exit__(self, *raised: Any) -> None:
    bookkeeping.KEEP_RATIO, ghost.KEEP_RATIO = self._before


def of_sweep() -> Iterator[Attack]:
  """Aligned examples, in every precision."""
  for strategy in attack.STRATEGIES:
    for dtype in sums.DTYPES:
      for size in sums.SIZES:
        run = lambda s=strategy, d=dtype, n=size: (sums.sweep(s, d, n), "")  # noqa: E731
        name = jnp.dtype(dtype).name
        yield Attack("aligned examples", strategy, name, size, run, ALIGNED)


def of_drift() -> Iterator[Attack]:
  """Sums that round against one example."""
  for strategy in attack.STRATEGIES:
    for size in (512, 1024, 4096, 8192):
      for name in sums.DRIFTS:
        for block in sorted({512, size}):
          if strategy == "vmap" and name == "lookup":
            continue  # gigabytes of gradients
          yield _drift(name, strategy, size, f"block {block}", block=block)
    for size, rows in ((512, 1), (8192, 1), (8192, 8), (8192, 64)):
      yield _drift(
        "summand", strategy, size, f"by {rows}", microbatch_size=rows
      )
    if strategy != "vmap":
      for size in (64, 256, 1024):
        yield _drift("lookup", strategy, size, "of 128", positions=128)


def _drift(
  name: str, strategy: str, size: int, how: str, **options: Any
) -> Attack:
  run = lambda: (sums.drift(name, strategy, size, **options), "")  # noqa: E731
  return Attack(
    f"drift: {name}, {how}", strategy, "float32", size, run, DRIFTING
  )


def of_ascent() -> Iterator[Attack]:
  """Records that gradient ascent finds."""
  for change in ("removed", "replaced"):
    for name in ("product_with_cotangents", "layer_norm", "straight_through"):
      run = lambda n=name, c=change: (  # noqa: E731
        max(neighbours.of_examples(n, c).values()),
        "",
      )
      label = f"ascent: {name}, {change}"
      yield Attack(label, "all", "float32", 3, run, CLIMBED)
    for name in neighbours.CONTRASTIVE:
      if (name, change) == ("group", "replaced"):
        continue  # the same group, as keys stay: half of the claim
      run = lambda n=name, c=change: (neighbours.of_pairs(n, c), "")  # noqa: E731
      size = neighbours.PAIRS
      yield Attack(f"ascent: {change}", name, "float32", size, run, CLIMBED)


def of_devices() -> Iterator[Attack]:
  """Rows of several devices."""
  names = (
    "dense", "attention", "convolution", "tied_through_a_scan",
    "embedding_tied_with_the_output", "normalises_its_cotangent",
    "shared_by_remat_and_scan", "bfloat16_of_float32",
  )  # fmt: skip
  for name in names:
    for strategy in attack.STRATEGIES:
      for count in (4, 8):
        for way in devices.WAYS:
          run = lambda n=name, s=strategy, c=count, w=way: (  # noqa: E731
            devices.move(n, s, c, w),
            "",
          )
          label = f"{count} devices, {way}: {name}"
          yield Attack(label, strategy, "", devices.ROWS, run, BOUND)


KINDS = {
  "table": of_table,
  "sweep": of_sweep,
  "drift": of_drift,
  "ascent": of_ascent,
  "devices": of_devices,
}


def judge(one: Attack) -> tuple[str, str]:
  """Returns the figure and the verdict."""
  try:
    moved, wrong = one.run()
  except Exception as error:  # a row of its own: the other attacks go on
    words = str(error).split("\n")[0]
    if one.refused and one.refused in str(error):
      return "", "refused"
    return "", f"FAILED {type(error).__name__}: {words[:60]}"
  if one.refused:
    return f"{moved:.4f}", "NOT REFUSED"
  if not moved <= one.bound:
    return f"{moved:.4f}", "EXCEEDS"
  return f"{moved:.4f}", f"WRONG {wrong}" if wrong else "holds"


def main() -> int:
  """Runs the attacks; returns 1 if one of them succeeds."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
  kinds = parser.parse_args().only
  counts: dict[str, int] = {}
  began = time.monotonic()
  print("| loss | strategy | dtype | batch | worst moved / C | verdict |")
  print("|---|---|---|---|---|---|")
  for kind in kinds:
    for number, one in enumerate(KINDS[kind]()):
      moved, verdict = judge(one)
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
