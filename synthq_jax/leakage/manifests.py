"""What a training set holds, in counts and digests instead of texts."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping

from synthq_jax.leakage import splits

__all__ = ["Manifest", "of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a training set holds, without its texts.

  Attributes:
    name: one of `NAMES`.
    size: the number of instances.
    seed: of the draw.
    num_leaked: instances that give a test query away.
    num_queries: different queries, leaked ones included.
    num_leaked_queries: different queries among the leaked instances.
    num_targets: test queries that are given away.
    digest: of all instances in their order, with the texts of their documents.
    filler_digest: of the filler alone; sets that share their filler have
      fillers of different lengths where one of them leaks.
    leaked_digest: of the leaked instances alone.
  """

  name: str
  size: int
  seed: int
  num_leaked: int
  num_queries: int
  num_leaked_queries: int
  num_targets: int
  digest: str
  filler_digest: str
  leaked_digest: str


def of(split: splits.Split, documents: Mapping[str, str]) -> Manifest:
  """Returns counts and digests of a training set.

  Args:
    split: the set.
    documents: document id -> text, of all that it holds.
  """
  return Manifest(
    name=split.name,
    size=split.size,
    seed=split.seed,
    num_leaked=split.num_leaked,
    num_queries=len({each.query_id for each in split.instances}),
    num_leaked_queries=len({each.query_id for each in split.leaked}),
    num_targets=len({each.target for each in split.leaked}),
    digest=_digest(split.instances, documents),
    filler_digest=_digest(split.filler, documents),
    leaked_digest=_digest(split.leaked, documents),
  )


def _digest(
  instances: Iterable[splits.Instance], documents: Mapping[str, str]
) -> str:
  state = hashlib.sha256()
  for each in instances:
    parts = [
      *dataclasses.astuple(each),
      documents[each.relevant_id],
      documents[each.non_relevant_id],
    ]
    state.update(json.dumps(parts).encode() + b"\n")
  return state.hexdigest()
