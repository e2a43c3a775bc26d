"""Prints the least seconds of private steps that were compiled for TPU v4.

Time is a roofline: matrix products at the peak rate of the chip, state read and
written once, sums and gathers over all links, one after the other. Nothing runs
as fast: it is a lower bound, half of which is good. tests/benchmarks/tpu_v4.py
compiles steps ahead of time, and its tables lie in docs/data.

  python launch/estimates.py
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["CHIPS", "Chip", "known", "main", "seconds"]

DATA = pathlib.Path(__file__).resolve().parents[1] / "docs/data"
_COPIES = {"all-reduce": 2.0, "all-gather": 1.0}  # of a result, over the links


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Peak rates of one device, as its maker states them."""

  tflops: float  # bfloat16, dense, a second
  memory_gb: float  # GB a second
  links_gb: float  # GB a second, out of one chip over all of its links


CHIPS = {
  # cloud.google.com/tpu/docs/v4: all-reduce bandwidth of a pod over its chips.
  "v4": Chip(tflops=275, memory_gb=1200, links_gb=268),
  "v5litepod": Chip(tflops=197, memory_gb=819, links_gb=200),
  "v5p": Chip(tflops=459, memory_gb=2765, links_gb=600),
  "v6e": Chip(tflops=918, memory_gb=1638, links_gb=400),
  # SXM, beside each other under NVLink.
  "H100": Chip(tflops=989, memory_gb=3350, links_gb=450),
  "H200": Chip(tflops=989, memory_gb=4800, links_gb=450),
}


def known() -> dict[str, tuple[dict[str, Any], int]]:
  """Reads the steps compiled for TPU v4, by name; of several tables, the newest.

  Returns:
    The row of a step in its table, and the number of parts of its model.
  """
  steps = {}
  for path in sorted(DATA.glob("*_tpu_v4*.json")):
    table = json.loads(path.read_text(encoding="utf-8"))
    for name, ways in table["cases"].items():
      case = table["settings"][name]
      kind = f"{', remat' * case['remat']}, {case['microbatch']} at once"
      for way, row in ways.items():
        mesh = "x".join(map(str, case["mesh"]))
        words = f"{case['model']}, {way}{kind}, {mesh}, {table['rows']} rows"
        steps[words] = row, case["mesh"][1]
  return steps


def seconds(
  chip: Chip,
  *,
  tflop: float,
  state_gib: float,
  collectives_mib: Mapping[str, float],
  ways: int,
) -> float:
  """Returns the least time of a step on one device.

  >>> chip, rest = CHIPS["v4"], {"collectives_mib": {}, "ways": 1}
  >>> round(seconds(chip, tflop=27.5, state_gib=0.0, **rest), 3)
  0.1

  Args:
    chip: the device.
    tflop: of matrix products, weighted by their passes.
    state_gib: GiB that are read and written once.
    collectives_mib: MiB of the results of each kind of collective.
    ways: devices that a scattered sum is divided among.

  Returns:
    Seconds.
  """
  sent = sum(
    size * _COPIES.get(kind, ways if kind == "reduce-scatter" else 1.0)
    for kind, size in collectives_mib.items()
  )
  return (
    tflop / chip.tflops
    + 2 * state_gib * 2**30 / (chip.memory_gb * 1e9)
    + sent * 2**20 / (chip.links_gb * 1e9)
  )


def main() -> int:
  """Prints the least seconds of each compiled step, on every chip."""
  print("least seconds of a step (a roofline, no measurement)")
  print(f"{'':66}{''.join(f'{name:>10}' for name in CHIPS)}")
  for words, (row, ways) in known().items():
    needs = {
      "tflop": row["tflop_passes"],
      "state_gib": row.get("arguments_gib", 0.0),
      "collectives_mib": row.get("collectives_mib", {}),
      "ways": ways,
    }
    times = (seconds(chip, **needs) for chip in CHIPS.values())
    print(f"{words:66}{''.join(f'{time:10.3f}' for time in times)}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
