"""Whole studies: a frame that runs them, and one folder for each.

A study is a configuration and four functions (`frame.Study`): `prepare` reads
its data, `jobs` lists the results to be made, `result` puts them together and
`page` shows them. `synthq study` runs the one that the gin files configure.
"""

__all__ = ["NAMES"]

NAMES = (
  "images",
  "planted_leakage",
  "federated",
  "vectors",
)
"""Packages with a `STUDY`; they are imported when a study is asked for."""
