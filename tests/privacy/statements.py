"""Statements of trainings that never ran, for tests."""

from synthq_jax.privacy import claim, terms


def made(identifier, *, unit="query", **fields):
  """Returns the statement of a `claim.Claim` with these fields."""
  words = terms.QUERIES.but(unit=unit)
  return claim.Claim(words=words, **fields).statement(identifier)
