"""The attacks on clipped sums: how far one record moves them, beside the claim.

All that `tests/benchmarks/red_team.py` tries; some of them are tests.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from synthq_jax.optim import strategies
from tests.red_team import attack, devices, losses, neighbours, sums

BOUND, ALIGNED, CLIMBED = 1 + 1e-4, 1 + 2e-3, 1 + 1e-3
DRIFTING = 1 + 5e-3  # blocks of 512 that processors add up one by one


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
    self._before = dict(strategies.KEEP_RATIOS)
    if self._ratio is not None:
      strategies.KEEP_RATIOS.update(bookkeeping=self._ratio, ghost=self._ratio)

  def __exit__(self, *raised: Any) -> None:
    strategies.KEEP_RATIOS.update(self._before)


def of_sweep() -> Iterator[Attack]:
  """Aligned examples, in every precision.

  Ghost clipping moved 4 clip norms where it summed in bfloat16.
  """
  for strategy in attack.STRATEGIES:
    for dtype in sums.DTYPES:
      for size in sums.SIZES:
        run = lambda s=strategy, d=dtype, n=size: (sums.sweep(s, d, n), "")  # noqa: E731
        name = jnp.dtype(dtype).name
        yield Attack("aligned examples", strategy, name, size, run, ALIGNED)


def of_drift() -> Iterator[Attack]:
  """Sums that round against one example.

  Lookups, and microbatches, that were added up one by one in float32 moved 2
  clip norms at 8,192; with 128 positions of each example 3 at 1,024.
  """
  for strategy in attack.STRATEGIES:
    for size in (512, 1024, 4096, 8192):
      for name in sums.DRIFTS:
        for block in sorted({512, size}):
          if strategy == "vmap" and name == "lookup":
            continue  # gigabytes of gradients
          yield _drift(name, strategy, size, f"block {block}", block=block)
    for size, rows in ((256, 1), (512, 1), (8192, 1), (8192, 8), (8192, 64)):
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
