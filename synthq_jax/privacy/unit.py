"""Defines the unit of privacy: the records whose change a claim hides."""

import dataclasses

from synthq_jax import checks, field_kinds

__all__ = ["CLIENT", "EXAMPLE", "IMAGE_PAIR", "QUERY", "QUERY_TEXT", "WHO", "Unit"]  # fmt: skip

WHO = "client"
"""The default column of user ids, which a unit's name leaves out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
  """The records that are added, removed or replaced together.

  >>> str(Unit(kind="query")), str(user(1)), str(user(4, "device"))
  ('query', 'user with one query', 'user (device) with up to 4 queries')
  """

  kind: str
  """"query", "query text", "user", "client", "example", or a word of yours."""
  max_records: int = field_kinds.later(1)
  """The most queries that are read of one user."""
  user_field: str = field_kinds.later("")
  """The column of user ids, for users alone. Users by another column are another
  unit."""
  part_of: str = field_kinds.later("")
  """The kind of the record that this unit is a part of; empty: a whole record."""

  def __post_init__(self):
    """Refuses a unit without a kind, and several records except for users."""
    checks.count("max_records", self.max_records, 1)
    if not self.kind or (self.max_records > 1 and not self.is_user):
      raise ValueError(
        "expected a kind of unit, with several records of a user alone, got"
        f" kind={self.kind!r}, max_records={self.max_records}"
      )

  @property
  def is_user(self) -> bool:
    """Whether all queries of one user are one unit."""
    return bool(self.user_field)

  @property
  def whole(self) -> "Unit":
    """The unit of the whole record: the one this is a part of, or itself."""
    return Unit(kind=self.part_of) if self.part_of else self

  def __str__(self) -> str:
    """Returns the name of the unit, for display only; no code parses it."""
    if not self.is_user:
      return self.kind
    by = "" if self.user_field == WHO else f" ({self.user_field})"
    most = self.max_records
    return (
      f"user{by} with {'one query' if most == 1 else f'up to {most} queries'}"
    )


def user(max_records: int, user_field: str = WHO) -> Unit:
  """Returns the unit of a user with up to `max_records` queries that are read."""
  return Unit(kind="user", max_records=max_records, user_field=user_field)


CLIENT = Unit(kind="client")
EXAMPLE = Unit(kind="example")
IMAGE_PAIR = Unit(kind="pair of images")
QUERY = Unit(kind="query")
QUERY_TEXT = Unit(kind="query text", part_of="query")
