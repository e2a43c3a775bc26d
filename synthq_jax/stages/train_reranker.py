"""Trains a reranker on pairs, real or synthetic, without noise.

Each pair gets one document that is not its own, which BM25 ranks high.

Formal guarantee: post-processing where the queries are synthetic: a task then
holds these, the public documents and a public checkpoint, and the reranker has
the statement of the queries. The row `original` reads the private queries and
has no guarantee.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import building
from synthq_jax.leakage.rerankers import terms as terms_lib
from synthq_jax.pipeline import config_types, inputs, results, system_results
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.retrieval import trec
from synthq_jax.stages import _reranking, _search, stage
from synthq_jax.training import distributed
from synthq_jax.training import mesh as mesh_lib

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(building.Settings):
  """Which reranker, and how it is trained."""

  kind: str = "KNRM"
  """"monoT5", "monoBERT", "KNRM", "PACRR" or "Duet"."""
  bert: str | None = None
  """Folder of the Hugging Face BERT that monoBERT starts from; None: a new one."""
  most_pairs: int = 20_000
  """Pairs that are trained on, at most, drawn with the seed."""
  mining_depth: int = 100
  """Documents of BM25 that a negative is taken from."""
  mining_skip: int = 0
  """The best so many are passed over: they may answer the query, too."""
  mining_below: float = 0.95
  """A negative's score is below this share of that of the query's own document,
  in (0, 1]; a query whose own is not found gets one at random."""
  mesh: mesh_lib.Shape = artifacts.speed_only(make=mesh_lib.Shape)
  """How all devices of all processes share the training."""
  seed: int = 0
  """Of what starts at random, of pairs, their order and random negatives."""

  def __post_init__(self):
    config_types.one_of(self, "kind", building.KINDS)
    config_types.at_least(
      self, 1, "query_length", "document_length", "most_pairs", "mining_depth"
    )
    config_types.at_least(self, 0, "mining_skip", "seed")
    config_types.within(self, "(0, 1]", "mining_below")


def jobs(run):
  """Yields a reranker for each set of queries, where they are wanted."""
  config = run.config
  if not config.rows.reranked:
    return
  for name, (synthetic, source) in run.pair_sources.items():
    settings = run.seeded(config.train_reranker, name)
    yield stage.Job(
      name=name,
      depends=(settings, run.held_out, *run.t5_data, source),
      settings=settings,
      inputs={
        "documents": run.documents if synthetic else run.prepared,
        "synthetic": synthetic,
        "held_out": run.held_out,
      },
    )


def check(run) -> None:
  """Refuses a monoT5 that would start from no T5, before anything is trained."""
  config = run.config
  if config.rows.reranked and config.train_reranker.kind == "monoT5":
    inputs.check_t5(run.t5)


def run(task: stage.Task) -> system_results.Reranker:
  """Trains on synthetic queries, or on the real ones without privacy.

  Args:
    task: its inputs are "documents", the public collection, or for `original`
      the prepared data; "t5", the folder of a public checkpoint;
      "synthetic", the queries, or None for the real ones; and "held_out", the
      share of documents whose queries are left out.

  Returns:
    The reranker; under `private/` if the queries are.
  """
  config, folders = task.settings, task.folders
  documents, synthetic = task.inputs["documents"], task.inputs["synthetic"]
  private = synthetic is None or results.is_private_path(synthetic.directory)
  directory = task.folder(private=private)
  records = inputs.training_pairs(
    folders, documents, synthetic, task.inputs["held_out"]
  )
  total = len(records["rows"])
  drawn = np.random.default_rng([config.seed, 8]).permutation(total)
  drawn = np.sort(drawn[: config.most_pairs])
  records = {name: values[drawn] for name, values in records.items()}
  corpus, idf = inputs.corpus(folders, documents), None
  vocabulary = inputs.vocabulary(folders, documents)
  if config.kind in building.OF_TERMS:
    idf = terms_lib.inverse_document_frequencies(
      vocabulary, inputs.document_texts(corpus)
    )
  reranker = _reranking.build(
    config, task.inputs["t5"], documents, vocabulary, idf
  )
  state = directory / f"state_{task.digest}"
  params = rerankers.train(
    reranker,
    _triples(config, _read_queries(folders, documents, records), records),
    recipe=config.recipe,
    seed=config.seed,
    directory=state,
    progress=task.progress,
    mesh=mesh_lib.of_all(config.mesh),
  )
  if distributed.is_main():
    _reranking.save(directory, params, idf)
  return system_results.Reranker(
    directory=folders.relative(directory),
    name=task.name,
    kind=config.kind,
    statement=results.inherited(
      synthetic,
      real="A reranker was trained on the private queries without privacy.",
      synthetic="A reranker was trained on the synthetic queries: post-processing.",
    ),
    num_pairs=len(drawn),
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
  )


def _read_queries(
  folders: Any, documents: Any, records: dict[str, Any]
) -> _search.Judged:
  """Returns the queries of pairs, named by their numbers, and the collection."""
  vocabulary = inputs.vocabulary(folders, documents)
  texts = [queries_lib.decoded(vocabulary, row) for row in records["queries"]]
  return _search.Judged(
    split="train",
    qrels={str(i): {} for i in range(len(texts))},
    queries=texts,
    query_tokens=records["queries"],
    passages=inputs.document_tokens(folders, documents),
    corpus=inputs.corpus(folders, documents),
  )


def _choose_negatives(
  config: Config, judged: _search.Judged, own: np.ndarray
) -> np.ndarray:
  """Chooses a document for each pair that BM25 ranks high, and not its own.

  Where there is none, it is drawn.
  """
  ids = [str(i) for i in judged.passages.ids]
  position = {id_: i for i, id_ in enumerate(ids)}
  run = _search.lexical(judged, config.mining_depth)
  rng = np.random.default_rng([config.seed, 7])
  chosen = rng.integers(len(ids), size=len(own))
  chosen = np.where(chosen == own, (chosen + 1) % len(ids), chosen)
  for pair, row in enumerate(own.tolist()):
    scores = run.get(str(pair), {})
    best = scores.get(ids[row], -math.inf)
    others = [
      document
      for document in trec.ranking(scores)
      if document != ids[row]
      and scores[document] < best - (1 - config.mining_below) * abs(best)
    ]
    if others[config.mining_skip :]:
      chosen[pair] = position[others[config.mining_skip]]
  return chosen


def _triples(config, judged: _search.Judged, records) -> list[rerankers.Triple]:
  """Returns texts: of a query, of its own document, and of another."""
  own = records["rows"]
  others = _choose_negatives(config, judged, own)
  places = np.unique([own, others])  # to read the corpus once, in its order
  read = queries_lib.texts_of(judged.corpus, places)
  texts = dict(zip(places.tolist(), read, strict=True))
  return [
    rerankers.Triple(
      query=query,
      relevant=texts[relevant],
      non_relevant=texts[other],
    )
    for query, relevant, other in zip(
      judged.queries, own.tolist(), others.tolist(), strict=True
    )
  ]


STAGE = stage.of(
  __name__,
  needs=("vote_queries",),
  reads=("t5",),
  together=True,
)
