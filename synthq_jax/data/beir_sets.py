"""The BEIR sets that TensorFlow Datasets knows, and how the papers group them.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021, Table 1.
"""

import dataclasses
from collections.abc import Mapping

__all__ = ["GROUPS", "SETS", "ZERO_SHOT", "BeirSet", "get"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeirSet:
  """A set of BEIR.

  Attributes:
    name: of the configuration in TFDS, as in "beir/fiqa".
    splits: with judgements, as TFDS calls them.
    scored: the split that is scored by convention: BEIR's MS MARCO is scored on
      its dev split.
    holds_queries: whether queries stand in the collection under their own ids,
      so that a query finds itself (ArguAna, Quora).
  """

  name: str
  splits: tuple[str, ...] = ("test",)
  scored: str = "test"
  holds_queries: bool = False

  @property
  def task(self) -> str:
    """The name of its SeqIO task.

    >>> get("cqadupstack.gis").task
    'beir_cqadupstack_gis'
    """
    return "beir_" + self.name.replace(".", "_")


_ALL = ("train", "validation", "test")
_FORUMS = (
  "android",
  "english",
  "gaming",
  "gis",
  "mathematica",
  "physics",
  "programmers",
  "stats",
  "tex",
  "unix",
  "webmasters",
  "wordpress",
)

SETS: tuple[BeirSet, ...] = (
  BeirSet(name="msmarco", splits=_ALL, scored="validation"),
  BeirSet(name="trec_covid"),
  BeirSet(name="nfcorpus", splits=_ALL),
  BeirSet(name="nq"),
  BeirSet(name="hotpotqa", splits=_ALL),
  BeirSet(name="fiqa", splits=_ALL),
  BeirSet(name="arguana", holds_queries=True),
  BeirSet(name="webis_touche2020"),
  *(BeirSet(name=f"cqadupstack.{forum}") for forum in _FORUMS),
  BeirSet(name="quora", splits=("validation", "test"), holds_queries=True),
  BeirSet(name="dbpedia_entity", splits=("validation", "test")),
  BeirSet(name="scidocs"),
  BeirSet(name="fever", splits=_ALL),
  BeirSet(name="climate_fever"),
  BeirSet(name="scifact", splits=("train", "test")),
)
"""All configurations of TFDS' beir, version 1.0.0, in its order."""

GROUPS: Mapping[str, tuple[str, ...]] = {
  "cqadupstack": tuple(f"cqadupstack.{forum}" for forum in _FORUMS)
}
"""Sets that count as one: the mean of their parts."""

ZERO_SHOT: tuple[str, ...] = (
  "arguana",
  "cqadupstack",
  "dbpedia_entity",
  "fiqa",
  "hotpotqa",
  "nfcorpus",
  "quora",
  "scidocs",
  "scifact",
  "trec_covid",
  "webis_touche2020",
)
"""The eleven columns of the papers' zero-shot tables, by set or group."""


def get(name: str) -> BeirSet:
  """Returns a set by its name in TFDS.

  Raises:
    ValueError: if TFDS has none of that name.
  """
  for each in SETS:
    if each.name == name:
      return each
  known = ", ".join(each.name for each in SETS)
  raise ValueError(f"expected a BEIR set of {known}; got name={name!r}")
