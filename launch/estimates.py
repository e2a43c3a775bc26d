"""Gives a step's needs on a slice: memory that was compiled, time that is estimated.

Memory is never estimated. tests/benchmarks/tpu_v4.py compiles steps for TPU v4
ahead of time, its table lies in docs/data, and a job that needs at least what a
compiled step did not fit with does not fit, either.

Time is a roofline: matrix products at the peak rate of the chip, state read and
written once, sums and gathers over all links, one after the other. Nothing runs
as fast: it is a lower bound, half of which is good.

  python launch/estimates.py

prints the table for all chips.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
  "CHIPS",
  "Chip",
  "Step",
  "known",
  "main",
  "of_step",
  "refusal",
  "seconds",
]

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A private step as a job would take it, or as it was compiled."""

  model: str
  way: str  # of clipping
  remat: bool
  mesh: tuple[int, int, int]  # data, fsdp, tensor
  microbatch: int  # rows that a device processes at once
  rows: int  # of a batch

  @property
  def devices(self) -> int:
    """Number of devices that take part."""
    return math.prod(self.mesh)


def known() -> Iterator[tuple[Step, dict[str, Any]]]:
  """Yields what was compiled for TPU v4; of a step in several tables, the newest."""
  steps = {}
  for path in sorted(DATA.glob("*_tpu_v4*.json")):
    table = json.loads(path.read_text(encoding="utf-8"))
    for name, ways in table["cases"].items():
      case = table["settings"][name]
      for way, row in ways.items():
        step = Step(
          model=case["model"],
          way=way,
          remat=case["remat"],
          mesh=tuple(case["mesh"]),
          microbatch=case["microbatch"],
          rows=table["rows"],
        )
        steps[step] = row | {"limit_gib": table["limits"]["peak_gib"]}
  yield from steps.items()


def refusal(step: Step) -> str:
  """Says why a step does not fit into a chip of TPU v4, or "".

  Args:
    step: what a job would run.

  Returns:
    Words for one line; "" if nothing is known against it.
  """
  for other, row in known():
    same = ("model", "way", "remat")
    is_same = all(getattr(step, n) == getattr(other, n) for n in same)
    shards, more = (math.prod(compared.mesh[1:]) for compared in (step, other))
    fits = row.get("fits", True) and row.get("peak_gib", 0) <= row["limit_gib"]
    if (
      is_same
      and not fits
      and shards <= more
      and step.microbatch >= other.microbatch
    ):
      return (
        f"does not fit: {step.model} with {other.way},"
        f" {other.microbatch} rows a device and the model in {more} parts needs"
        f" more than the {row['limit_gib']} GiB of a chip (compiled ahead of"
        " time): raise MESH_FSDP"
      )
  return ""


def seconds(
  chip: Chip,
  *,
  tflop: float,
  state_gib: float = 0.0,
  collectives_mib: Mapping[str, float] = {},
  ways: int = 1,
) -> float:
  """Returns the least time of a step on one device.

  >>> round(seconds(CHIPS["v4"], tflop=27.5), 3)
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


def of_step(step: Step, chip: Chip) -> float | None:
  """Returns the least seconds of a step; None where no such step was counted.

  FLOPs grow with the rows of a device. What crosses devices is known for the
  compiled mesh alone, and left out on others.

  Args:
    step: what a job would run.
    chip: the device.
  """
  nearest = sorted(known(), key=lambda pair: pair[0].mesh != step.mesh)
  for other, row in nearest:
    same = ("model", "way", "remat")
    if any(getattr(step, n) != getattr(other, n) for n in same):
      continue
    scale = (step.rows / step.devices) / (other.rows / other.devices)
    is_same = step.mesh == other.mesh
    return seconds(
      chip,
      tflop=row["tflop_passes"] * scale,
      state_gib=row.get("arguments_gib", 0.0) if is_same else 0.0,
      collectives_mib=row.get("collectives_mib", {}) if is_same else {},
      ways=step.mesh[1],
    )
  return None


def main() -> int:
  """Prints the least seconds of each compiled step, on every chip."""
  print("least seconds of a step (a roofline, no measurement)")
  print(f"{'':58}{''.join(f'{name:>10}' for name in CHIPS)}")
  for step, _ in known():
    mesh = "x".join(map(str, step.mesh))
    words = f"{step.model}, {step.way}, {mesh}, {step.rows} rows"
    times = (of_step(step, chip) for chip in CHIPS.values())
    print(f"{words:58}{''.join(f'{time:10.3f}' for time in times)}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
