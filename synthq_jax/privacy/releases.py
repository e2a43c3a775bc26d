"""Defines the entries of a privacy ledger: the noisy releases of each run."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from synthq_jax import field_kinds
from synthq_jax.privacy import accounting, sampling

__all__ = [
  "Release",
  "check_identifiers",
  "get_sampler_fields",
  "group_by_part",
]


_SAMPLERS = {
  "poisson": sampling.Poisson,
  "cyclic_poisson": sampling.CyclicPoisson,
  "fixed_order": sampling.FixedOrder,
}
"""Samplers by their names in the ledger."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """Noisy sums over batches of private records."""

  IS_STRICT: ClassVar = True
  """Makes reading refuse an unknown stored field, which may raise the cost."""

  identifier: str
  """Unique name of the run, e.g. stage and fingerprint."""
  mechanism: str
  """The clipped and noised quantity: a name of sentences.toml, or words."""
  sampling: str
  """The kind of sampler: "poisson", "cyclic_poisson" or "fixed_order"."""
  num_examples: int
  """The number of private records."""
  expected_batch_size: int
  """The expected number of records in a batch, the public divisor."""
  max_batch_size: int
  """The most records of a batch; larger batches are truncated."""
  noise_multiplier: float
  """Noise standard deviation over l2_sensitivity."""
  l2_clip_norm: float
  """The norm that gradients are clipped to."""
  l2_sensitivity: float
  """L2 norm by which adding or removing one record of a batch moves the sum."""
  steps: int
  """The number of noisy sums."""
  cycle_length: int = 1
  """The number of groups of records from which batches are drawn in turn."""
  noise_bands: int = 1
  """Bands of `optim.banded` noise; 1: independent in every step."""
  part: str = ""
  """The part of the records that was read, as "DIVISION:PART"; several parts are
  joined by "+". The rule of a division looks at one record alone. Empty: any
  record may have been read."""
  group_size: int = field_kinds.later(1)
  """The most records of one unit, each drawn independently."""
  num_units: int | None = field_kinds.later(None)
  """The number of units that have a record; None: the number of records."""

  def __post_init__(self):
    """Refuses entries without an identifier and settings without accounting."""
    if self.part and not all(self.part.partition(":")):
      raise ValueError(
        f'expected a part as "DIVISION:PART", or none, got part={self.part!r}'
      )
    if not self.identifier:
      raise ValueError("expected an identifier of the run, got an empty one")
    if not all(
      0 < x < math.inf for x in (self.l2_clip_norm, self.l2_sensitivity)
    ):
      raise ValueError(
        "expected a positive, finite clip norm and sensitivity, got l2_clip_norm="
        f"{self.l2_clip_norm}, l2_sensitivity={self.l2_sensitivity}"
      )
    self.sampler().check_noise(self.noise_bands)

  def sampler(self) -> sampling.Sampler:
    """Makes the sampler that this entry describes."""
    kind = _SAMPLERS.get(self.sampling)
    if kind is None:
      raise ValueError(
        'expected "poisson", "cyclic_poisson" or "fixed_order", got'
        f" sampling={self.sampling!r}"
      )
    values = vars(self) | {"batch_size": self.max_batch_size}
    return kind(
      **{field.name: values[field.name] for field in dataclasses.fields(kind)}
    )

  def run(self) -> accounting.Run:
    """Makes the `accounting.Run` of this entry."""
    return accounting.Run(self.sampler(), self.noise_multiplier, self.steps)


def get_sampler_fields(sampler: sampling.Sampler) -> dict[str, Any]:
  """Returns the fields of a `Release` that describe its sampler.

  Args:
    sampler: a sampler of `synthq_jax.privacy.sampling`.

  Raises:
    ValueError: if the ledger has no name for the sampler's class.
  """
  names = [n for n, kind in _SAMPLERS.items() if type(sampler) is kind]
  if not names:
    raise ValueError(
      f"expected a sampler of synthq_jax.privacy.sampling, got {sampler!r}"
    )
  return {
    "sampling": names[0],
    "num_examples": int(sampler.num_examples),
    "expected_batch_size": int(sampler.expected_batch_size),
    "max_batch_size": int(sampler.max_batch_size),
    "cycle_length": int(getattr(sampler, "cycle_length", 1)),
    "group_size": int(sampler.group_size),
    "num_units": sampler.num_units,
  }


def group_by_part(releases: Sequence[Release]) -> list[tuple[Release, ...]]:
  """Groups releases into sets that can all read the same record.

  A record is in one part of each division. So it pays for the releases of one
  part only, which is the parallel composition of `statement.compose`.

  Args:
    releases: the releases of a ledger.

  Returns:
    A set for each choice of one part of every division, at least one set.
    Releases without a part are in every set.
  """
  divisions: dict[str, set[str]] = {}
  for release in releases:
    division, _, parts = release.part.partition(":")
    if release.part:
      divisions.setdefault(division, set()).update(parts.split("+"))
  choices = itertools.product(*map(sorted, divisions.values()))
  return [
    tuple(
      release
      for release in releases
      if _reads(release, dict(zip(divisions, choice, strict=True)))
    )
    for choice in choices
  ]


def _reads(release: Release, record_parts: dict[str, str]) -> bool:
  """Checks whether a release reads a record with these parts, by division."""
  division, _, parts = release.part.partition(":")
  return not release.part or record_parts[division] in parts.split("+")


def check_identifiers(releases: Sequence[Release]) -> None:
  """Raises ValueError if one identifier stands for two different releases."""
  by_name: dict[str, Release] = {}
  for release in releases:
    if by_name.setdefault(release.identifier, release) != release:
      raise ValueError(
        "expected one release per identifier, got two different ones for "
        f"identifier={release.identifier!r}: name runs by their fingerprint"
      )
