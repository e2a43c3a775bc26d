"""Statements of trainings that never ran, for tests."""

from synthq_jax.privacy import claim, terms
from synthq_jax.privacy import unit as unit_lib


def made(identifier, *, unit=unit_lib.QUERY, **fields):
  """Returns the statement of a `claim.Claim` with these fields."""
  words = terms.QUERIES.but(unit=unit)
  return claim.Claim(words=words, **fields).statement(identifier)
