"""The slices of Cloud TPU: how many chips, hosts and devices a type has.

The names do not count the same thing: v4-32 has 32 TensorCores on 16 chips,
v5litepod-32 has 32 chips. JAX sees one device for each TensorCore of v2 and v3,
and one for each chip of everything later.
"""

import dataclasses
import difflib
import re

__all__ = ["Slice", "describe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
  """What all slices of one generation have in common."""

  sizes: tuple[int, ...]
  runtime: str  # the image for JAX
  cores: int  # that the number in the name counts, of each chip
  devices: int  # that JAX sees, of each chip
  one_host: int  # chips that a single host can have; larger slices have 4 each


_POWERS = tuple(2**k for k in range(3, 13))
_BASE = "tpu-ubuntu2204-base"
_KINDS = {
  "v2": _Kind(
    sizes=(8, 32, 128, 256, 512), runtime=_BASE, cores=2, devices=2, one_host=4
  ),
  "v3": _Kind(
    sizes=(8, 32, 64, 128, 256, 512, 1024, 2048),
    runtime=_BASE,
    cores=2,
    devices=2,
    one_host=4,
  ),
  "v4": _Kind(sizes=_POWERS, runtime=_BASE, cores=2, devices=1, one_host=4),
  "v5litepod": _Kind(
    sizes=(1, 4, 8, 16, 32, 64, 128, 256),
    runtime="v2-alpha-tpuv5-lite",
    cores=1,
    devices=1,
    one_host=8,
  ),
  "v5p": _Kind(
    sizes=_POWERS, runtime="v2-alpha-tpuv5", cores=2, devices=1, one_host=4
  ),
  "v6e": _Kind(
    sizes=(1, 4, 8, 16, 32, 64, 128, 256),
    runtime="v2-alpha-tpuv6e",
    cores=1,
    devices=1,
    one_host=8,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """What one accelerator type consists of."""

  accelerator: str  # as gcloud knows it, e.g. "v4-32"
  generation: str  # e.g. "v4"
  chips: int
  hosts: int  # each runs one process
  devices: int  # that JAX sees in all
  runtime: str  # the image that gcloud boots


def describe(accelerator: str) -> Slice:
  """Returns what an accelerator type consists of.

  >>> (describe("v4-32").chips, describe("v4-32").hosts)
  (16, 4)

  Args:
    accelerator: e.g. "v4-8", "v4-32", "v5litepod-16".

  Returns:
    The slice.

  Raises:
    ValueError: if no such type is known here.
  """
  known = [f"{kind}-{size}" for kind in _KINDS for size in _KINDS[kind].sizes]
  if accelerator not in known:
    # v5e is what everybody says, v5litepod what gcloud takes.
    spelled = re.sub("^v5e-", "v5litepod-", accelerator.lower())
    close = difflib.get_close_matches(spelled, known, 1) or ["v4-8"]
    raise ValueError(
      "expected --accelerator to be a type of Cloud TPU such as"
      f" {close[0]}, got {accelerator!r}; did you mean {close[0]}?"
    )
  generation, _, size = accelerator.partition("-")
  kind = _KINDS[generation]
  chips = int(size) // kind.cores
  return Slice(
    accelerator=accelerator,
    generation=generation,
    chips=chips,
    hosts=1 if chips <= kind.one_host else chips // 4,
    devices=chips * kind.devices,
    runtime=kind.runtime,
  )
