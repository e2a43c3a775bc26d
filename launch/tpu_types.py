"""The slices of Cloud TPU: how many chips, hosts and devices a type has.

The names do not count the same thing: v4-32 has 32 TensorCores on 16 chips,
v5litepod-32 has 32 chips. JAX sees one device for each TensorCore of v2 and v3,
and one for each chip of everything later. Of v4 and v5p there are other shapes,
which are named by their sides: v4-4x4x12.
"""

import dataclasses
import difflib
import math
import re

__all__ = ["Slice", "describe"]

_BASE = "tpu-ubuntu2204-base"
_SQUARES = {
  1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16",
  256: "16x16",
}  # fmt: skip
_CUBES = {
  4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8",
  256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
  """Facts that all slices of one generation share."""

  topologies: dict[int, str]  # by the number of chips; "" where none is needed
  runtime: str = _BASE  # the image for JAX
  cores: int = 1  # that the number in the name counts, of each chip
  devices: int = 1  # that JAX sees, of each chip
  one_host: int  # chips that a single host can have; larger slices have 4 each
  most: int = 0  # chips of a slice of any other shape; 0: there is none
  gke: str = ""  # the accelerator's name in Kubernetes


_KINDS = {
  "v2": _Kind(
    topologies=dict.fromkeys((4, 16, 64, 128, 256), ""),
    cores=2,
    devices=2,
    one_host=4,
  ),
  "v3": _Kind(
    topologies=dict.fromkeys((4, 16, 32, 64, 128, 256, 512, 1024), ""),
    cores=2,
    devices=2,
    one_host=4,
  ),
  "v4": _Kind(
    topologies=_CUBES,
    cores=2,
    one_host=4,
    most=4096,
    gke="tpu-v4-podslice",
  ),
  "v5litepod": _Kind(
    topologies=_SQUARES,
    runtime="v2-alpha-tpuv5-lite",
    one_host=8,
    gke="tpu-v5-lite-podslice",
  ),
  "v5p": _Kind(
    topologies={**_CUBES, 4096: "16x16x16", 6144: "16x16x24"},
    runtime="v2-alpha-tpuv5",
    cores=2,
    one_host=4,
    most=6144,
    gke="tpu-v5p-slice",
  ),
  "v6e": _Kind(
    topologies=_SQUARES,
    runtime="v2-alpha-tpuv6e",
    one_host=8,
    gke="tpu-v6e-slice",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """Chips and hosts of one accelerator type."""

  accelerator: str  # as the user names it, e.g. "v4-32" or "v4-4x4x12"
  generation: str  # e.g. "v4"
  topology: str  # e.g. "2x2x4"; "" for v2 and v3
  chips: int
  hosts: int  # each runs one process
  devices: int  # that JAX sees in all
  runtime: str  # the image that gcloud boots
  gke: str  # the accelerator's name in Kubernetes; "" where it is not known

  @property
  def flags(self) -> tuple[str, ...]:
    """Flags that tell gcloud which one to make."""
    if self.accelerator.endswith(f"-{self.topology}"):
      return (f"--type={self.generation}", f"--topology={self.topology}")
    return (f"--accelerator-type={self.accelerator}",)


def describe(accelerator: str) -> Slice:
  """Returns the chips and hosts of an accelerator type.

  >>> (describe("v4-32").chips, describe("v4-32").hosts)
  (16, 4)
  >>> (describe("v5p-4x4x12").chips, describe("v5p-4x4x12").flags)
  (192, ('--type=v5p', '--topology=4x4x12'))

  Args:
    accelerator: e.g. "v4-8", "v5litepod-16", or "v4-4x4x12" of chips.

  Returns:
    The slice.

  Raises:
    ValueError: if no such type is known here.
  """
  shapes = {
    f"{name}-{chips * kind.cores}": (kind, chips, topology)
    for name, kind in _KINDS.items()
    for chips, topology in kind.topologies.items()
  }
  generation, _, size = accelerator.partition("-")
  if re.fullmatch(r"\d+x\d+x\d+", size):
    kind, chips, topology = _of_sides(accelerator)
  elif accelerator in shapes:
    kind, chips, topology = shapes[accelerator]
  else:
    # v5e is what everybody says, v5litepod what gcloud takes.
    spelled = re.sub("^v5e-", "v5litepod-", accelerator.lower())
    close = difflib.get_close_matches(spelled, shapes, 1) or ["v4-8"]
    raise ValueError(
      "expected --accelerator to be a type of Cloud TPU such as"
      f" {close[0]}, got {accelerator!r}; did you mean {close[0]}?"
    )
  return Slice(
    accelerator=accelerator,
    generation=generation,
    topology=topology,
    chips=chips,
    hosts=1 if chips <= kind.one_host else chips // 4,
    devices=chips * kind.devices,
    runtime=kind.runtime,
    gke=kind.gke,
  )


def _of_sides(accelerator: str) -> tuple[_Kind, int, str]:
  """Returns the kind, the chips and the topology of a slice of any shape."""
  generation, _, topology = accelerator.partition("-")
  sides = [int(side) for side in topology.split("x")]
  kind, chips = _KINDS.get(generation), math.prod(sides)
  if kind is None or not kind.most:
    some = ", ".join(name for name, each in _KINDS.items() if each.most)
    raise ValueError(
      f"--accelerator={accelerator}: only {some} come in shapes: name the type"
      " by its size"
    )
  is_small = topology in kind.topologies.values()
  is_whole = min(sides) > 0 and not any(side % 4 for side in sides)
  if not (is_small or is_whole) or sides != sorted(sides) and not is_small:
    raise ValueError(
      f"--accelerator={accelerator}: expected sides that are multiples of 4, in"
      f" rising order, such as {generation}-4x4x12"
    )
  if chips > kind.most:
    raise ValueError(
      f"--accelerator={accelerator}: expected at most {kind.most} chips, got"
      f" {chips}"
    )
  return kind, chips, topology
