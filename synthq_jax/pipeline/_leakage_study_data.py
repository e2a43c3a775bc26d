"""The study's data: test queries, what leaks them, and what surely does not."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import ir_datasets_sets
from synthq_jax.leakage import (
  near_duplicates,
  reformulations,
  relations,
  splits,
)
from synthq_jax.pipeline import _leakage_study_results, _sources
from synthq_jax.retrieval import bm25, trec

__all__ = ["NEAR", "Data", "build", "source"]

NEAR = ("siblings", "reformulations", "train_source")
"""Where near-duplicates of test queries come from: other judged queries of the
same document; rules; or near-duplicates in another collection to train on, with
documents of their own, as in Fröbe et al."""

_REFORMULATIONS = 4  # of one test query, at most
_IR_DATASETS = "ir_datasets:"
_TRAIN = "train:"  # before ids of another collection that is trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """All that trainings read.

  Attributes:
    queries: test query id -> text.
    qrels: their judgements.
    candidates: BM25's best documents for each.
    fillers: one for each seed, as long as the largest set.
    leaked: kind of leakage -> leaked instances of each seed.
    documents: document id -> text, of all that anything above names.
    facts: counts for the report.
    digest: of the sources and of what was chosen.
  """

  queries: Mapping[str, str]
  qrels: trec.Qrels
  candidates: trec.Run
  fillers: tuple[tuple[splits.Instance, ...], ...]
  leaked: Mapping[str, tuple[tuple[splits.Instance, ...], ...]]
  documents: Mapping[str, str]
  facts: _leakage_study_results.Facts
  digest: str

  def split(self, name: str, size: int, seed: int) -> splits.Split:
    """Returns one of the training sets."""
    leaks = self.leaked[name][seed] if name in self.leaked else ()
    return splits.build(name, self.fillers[seed], leaks, size=size, seed=seed)


def source(text: str, setting: str, *, seed: int = 0) -> Any:
  """Reads a setting: any source of a run, or ir_datasets:ID.

  Args:
    text: such as "beir:DIR".
    setting: its name, for the message.
    seed: of splits, where the source has none.

  Raises:
    ValueError: if it is of no such kind.
  """
  if text.startswith(_IR_DATASETS):
    return _IrDatasets(text.removeprefix(_IR_DATASETS))
  return _sources.parse(text, setting, seed=seed)


@dataclasses.dataclass(frozen=True)
class _IrDatasets:
  name: str

  def read(self) -> collection_lib.Collection:
    return ir_datasets_sets.read(self.name)

  def digest(self) -> str:
    return self.name  # the package checks its downloads


@dataclasses.dataclass(frozen=True)
class _Searchable:
  """A collection and its BM25 index; ids get a prefix."""

  data: collection_lib.Collection
  prefix: str = ""

  @functools.cached_property
  def texts(self) -> dict[str, str]:
    return {query.id: query.text for query in self.data.queries}

  @functools.cached_property
  def _index(self) -> bm25.Index:
    return bm25.BM25().build(
      [f"{self.prefix}{id_}" for id_ in self.data.document_ids()],
      (document.contents for document in self.data.documents),
    )

  def judgements(self, split: str) -> trec.Qrels:
    found = collection_lib.join_splits(self.data, split).judgements(split)
    return {
      query: {f"{self.prefix}{id_}": grade for id_, grade in grades.items()}
      for query, grades in found.items()
    }

  def search(self, queries: Mapping[str, str], depth: int) -> trec.Run:
    return self._index.search_run(list(queries), list(queries.values()), depth)

  def contents(self, wanted: set[str]) -> dict[str, str]:
    return {
      name: document.contents
      for document in self.data.documents
      if (name := f"{self.prefix}{document.id}") in wanted
    }


def build(config: Any) -> Data:
  """Reads the sources, chooses test queries and draws all instances.

  Args:
    config: a `leakage_study.Config`.

  Raises:
    ValueError: if a source cannot be read, or has too few queries.
  """
  read = source(config.source, "leakage_study.Config.source", seed=config.seed)
  test, train = _Searchable(read.read()), None
  digests = [read.digest()]
  if config.train_source is not None:
    other = source(config.train_source, "leakage_study.Config.train_source")
    train = _Searchable(other.read(), _TRAIN)
    digests.append(other.digest())
  judged = test.judgements(config.test_split)
  pool = _pool_queries(config, train or test)
  near = _near(config, test, judged, pool)
  chosen = _chosen(config, judged, near)
  targets = {query: test.texts[query] for query in chosen}
  candidates = test.search(targets, config.depth)
  judged = {query: judged[query] for query in chosen}
  forbidden = frozenset(_relevant(judged.values()))
  own = splits.negatives_of(candidates, judged, forbidden)
  leaks = {
    splits.NAMES[1]: _near_leaks(config, train, near, judged, own),
    splits.NAMES[2]: [
      _leak(query, query, targets[query], judged, own) for query in chosen
    ],
  }
  texts = {*targets.values(), *(leak.query for leak in leaks[splits.NAMES[1]])}
  kept = _without_leaks(config, pool, sorted(texts), chosen)
  searched = train or test
  drawn_from = splits.Pool(
    queries=kept,
    qrels=searched.judgements(config.train_split),
    search=lambda ids: searched.search({q: kept[q] for q in ids}, config.depth),
    forbidden=frozenset() if train else forbidden,
  )
  seeds = range(max(model.seeds for model in config.models))
  fillers = tuple(
    splits.filler(drawn_from, max(config.sizes), seed=seed) for seed in seeds
  )
  leaked = {
    name: tuple(
      splits.leaked(each, config.num_leaked, seed=seed) for seed in seeds
    )
    for name, each in leaks.items()
  }
  wanted = _named(candidates, (*fillers, *(i for e in leaked.values() for i in e)))
  documents = test.contents(wanted) | (train.contents(wanted) if train else {})
  return Data(
    queries=targets,
    qrels=judged,
    candidates=candidates,
    fillers=fillers,
    leaked=leaked,
    documents=documents,
    facts=_facts(config, test, judged, candidates, pool, kept, leaks, leaked),
    digest=artifacts.fingerprint(
      digests, targets, candidates, [_keys(each) for each in fillers],
      {name: [_keys(i) for i in each] for name, each in leaked.items()},
    ),
  )  # fmt: skip
