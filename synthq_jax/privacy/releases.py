"""The entries of a privacy ledger: what was released, with which noise."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar, TypedDict

from synthq_jax import field_kinds
from synthq_jax.privacy import accounting, sampling

__all__ = [
  "Release",
  "check_identifiers",
  "of_one_record",
  "sampler_fields",
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
  """Refuses a stored field that this version lacks: it may raise the cost."""

  identifier: str
  """Tells two runs of equal settings apart, e.g. stage and fingerprint."""
  mechanism: str
  """What was clipped and noised: a name of sentences.toml, or words."""
  sampling: str
  """How batches were drawn: "poisson", "cyclic_poisson" or "fixed_order"."""
  num_examples: int
  """The number of private records."""
  expected_batch_size: int
  """The public divisor."""
  max_batch_size: int
  """Where batches are truncated."""
  noise_multiplier: float
  """Noise standard deviation over l2_sensitivity."""
  l2_clip_norm: float
  """The norm that gradients are clipped to."""
  l2_sensitivity: float
  """How far adding or removing one record of a batch moves the sum."""
  steps: int
  """The number of noisy sums."""
  cycle_length: int = 1
  """Groups of the records that batches go through."""
  noise_bands: int = 1
  """Bands of `optim.banded` noise; 1: independent in every step."""
  part: str = ""
  """Which records were read, as "DIVISION:PART": the part of a division by a
  rule that looks at one record alone, or several parts joined by "+". Empty: it
  may have been any record."""
  group_size: int = field_kinds.later(1)
  """The most records of one unit, each drawn by its own coin."""
  num_units: int | None = field_kinds.later(None)
  """Units with a record; None: as many as records."""

  def __post_init__(self):
    """Refuses an entry that cannot be told apart or accounted for."""
    if self.part and not all(self.part.partition(":")):
      raise ValueError(
        f'expected a part as "DIVISION:PART", or none, got part={self.part!r}'
      )
    if not self.identifier:
      raise ValueError("expected an identifier of the run, got an empty one")
    if not self.l2_clip_norm > 0 or not self.l2_sensitivity > 0:
      raise ValueError(
        "expected a positive clip norm and sensitivity, got l2_clip_norm="
        f"{self.l2_clip_norm}, l2_sensitivity={self.l2_sensitivity}"
      )
    self.sampler().check_noise(self.noise_bands)

  def sampler(self) -> sampling.Sampler:
    """Returns the sampler that this entry describes."""
    kind = _SAMPLERS.get(self.sampling)
    if kind is None:
      raise ValueError(
        'expected "poisson", "cyclic_poisson" or "fixed_order", got'
        f" sampling={self.sampling!r}"
      )
    values = vars(self) | {"batch_size": self.max_batch_size}
    return kind(
      **{one.name: values[one.name] for one in dataclasses.fields(kind)}
    )

  def run(self) -> accounting.Run:
    """Returns what accounting needs to know of this entry."""
    return accounting.Run(self.sampler(), self.noise_multiplier, self.steps)


class SamplerFields(TypedDict):
  """The fields of a `Release` that describe its sampler."""

  sampling: str
  num_examples: int
  expected_batch_size: int
  max_batch_size: int
  cycle_length: int
  group_size: int
  num_units: int | None


def sampler_fields(
  sampler: sampling.Sampler,
) -> SamplerFields:
  """Returns the fields of a `Release` that describe its sampler.

  Args:
    sampler: one of `synthq_jax.privacy.sampling`.

  Returns:
    Values for `sampling`, `num_examples`, the two batch sizes, `cycle_length`,
    `group_size` and `num_units`.

  Raises:
    ValueError: if the ledger knows no name for it.
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


def of_one_record(releases: Sequence[Release]) -> list[tuple[Release, ...]]:
  """Returns the sets of releases of which one record can be in all.

  A record is in one part of each division: of releases of different parts it
  is in one alone, which is the parallel composition of `statement.compose`.

  Args:
    releases: of a ledger.

  Returns:
    A set for each choice of a part of every division, at least one; releases
    without a part are in each of them.
  """
  divisions: dict[str, set[str]] = {}
  for one in releases:
    division, _, parts = one.part.partition(":")
    if one.part:
      divisions.setdefault(division, set()).update(parts.split("+"))
  choices = itertools.product(*map(sorted, divisions.values()))
  return [
    tuple(
      one
      for one in releases
      if _is_in(one, dict(zip(divisions, c, strict=True)))
    )
    for c in choices
  ]


def _is_in(one: Release, places: dict[str, str]) -> bool:
  """Says whether a record with one place in each division was read."""
  division, _, parts = one.part.partition(":")
  return not one.part or places[division] in parts.split("+")


def check_identifiers(releases: Sequence[Release]) -> None:
  """Raises ValueError if one identifier stands for two different releases."""
  by_name: dict[str, Release] = {}
  for release in releases:
    if by_name.setdefault(release.identifier, release) != release:
      raise ValueError(
        "expected one release per identifier, got two different ones for "
        f"identifier={release.identifier!r}: name runs by their fingerprint"
      )
