"""Whole studies: a frame that runs them, and one folder for each.

A study is a configuration and four functions (`frame.Study`): `prepare` reads
its data, `jobs` lists the results to make, `result` combines them and `page`
shows them. `synthq study` runs the study that the gin files configure.
"""

__all__ = ["NAMES"]

NAMES = (
  "images",
  "planted_leakage",
  "federated",
  "vectors",
)
"""Packages with a `STUDY`, each imported when its study runs."""
