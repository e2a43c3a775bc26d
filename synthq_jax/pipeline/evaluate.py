"""Scores a retriever, or BM25, on a set of test queries.

Two sets: "test", the private test queries, whose scores are private, and
"public", sentences taken out of public documents, whose scores may be shared
for every retriever that may be.
"""

import dataclasses
import json
import time

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import beir
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import config_types, inputs, results, workspace
from synthq_jax.retrieval import (
  bm25,
  encode,
  index,
  measures,
  significance,
  trec,
)

__all__ = ["Config", "run"]

TEST_SETS = ("test", "public")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is measured."""

  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Names of ir-measures."""
  drop_identical: bool = True
  """Whether a result whose id equals the query's is dropped (ArguAna, Quora);
  False for MS MARCO's numeric ids, where it is chance."""
  depth: int = 100
  """Documents of a run for each query."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind the 95% intervals."""
  seed: int = 0
  """Of the bootstrap."""
  batch_size: int = dataclasses.field(
    default=256, metadata={"speed_only": True}
  )
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(self, 1, "depth", "bootstrap_samples", "batch_size")
    config_types.at_least(self, 0, "seed")


def run(
  config: Config,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  retriever: results.Checkpoint | None,
  name: str,
  label: str,
  test_set: str,
) -> results.Evaluation:
  """Retrieves for every judged query and averages over all of them.

  Args:
    config: what is measured.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: documents, and the private test queries.
    retriever: an encoder; None: BM25.
    name: the row of the table.
    label: the row in words.
    test_set: "test" (private) or "public".

  Returns:
    Means with intervals; under `private/` unless queries and retriever are
    fit to be shared.
  """
  start = time.monotonic()
  private = test_set == "test" or (
    retriever is not None and inputs.is_private(retriever.directory)
  )
  place = space.private if private else space.public
  directory = place(f"evaluate/{test_set}/{name}")
  directory.mkdir(parents=True, exist_ok=True)
  data, qrels, documents, queries = _load(space, prepared, test_set)
  run_ = (
    _bm25(data, qrels, config.depth)
    if retriever is None
    else _dense(config, space, retriever, data, qrels, documents, queries)
  )
  trec.write_run(directory / "run.trec", run_, tag=name)
  scores = measures.evaluate(
    qrels, run_, config.measures, drop_identical=config.drop_identical
  )
  artifacts.write_atomically(
    directory / "per_query.json", json.dumps(scores.per_query, sort_keys=True)
  )
  statement = retriever.statement if retriever is not None else None
  result = results.Evaluation(
    directory=space.relative(directory),
    name=name,
    label=label,
    test_set=test_set,
    private=private,
    epsilon=statement.epsilon if statement and statement.epsilon else None,
    delta=statement.delta if statement and statement.epsilon else None,
    measures={
      measure: _interval(config, values)
      for measure, values in scores.per_query.items()
    },
    num_queries=len(qrels),
    traps=_traps(scores, len(qrels)),
    seconds=time.monotonic() - start,
  )
  artifacts.save(directory, result, digest)
  return result


def _load(space, prepared, test_set: str):
  """Returns the collection and the tokens of its documents and queries."""
  if test_set == "public":
    folder = space.root / prepared.directory
    arrays = np.load(folder / "public_test.npz")
    data = beir.read_beir(folder / "public_test")
    return data, data.qrels["test"], arrays["tokens"], arrays["query_tokens"]
  if test_set != "test":
    raise ValueError(
      f"evaluate.test_set must be one of {TEST_SETS}, got {test_set!r}"
    )
  folder = space.root / prepared.private_directory
  arrays = np.load(folder / f"{prepared.test_split}.npz")
  _, documents, _ = inputs.documents(space, prepared)
  data = beir.read_beir(folder)
  qrels = _judged(data.qrels[prepared.test_split], arrays["ids"])
  return data, qrels, documents, arrays["tokens"]


def _judged(qrels, ids):
  """Returns the judgements of the queries that have a relevant document."""
  return {str(query): qrels[str(query)] for query in ids}


def _bm25(data, qrels, depth: int) -> trec.Run:
  """Runs BM25 over whole documents, not cut at the encoder's length."""
  texts = data.query_by_id()
  built = bm25.BM25().build(
    [d.id for d in data.documents], [d.contents for d in data.documents]
  )
  return built.search_run(
    list(qrels), [texts[query].text for query in qrels], depth
  )


def _dense(
  config, space, retriever, data, qrels, documents, queries
) -> trec.Run:
  """Runs the dual encoder with faiss' exact inner product."""
  params, model_config = t5_checkpoints.load(space.root / retriever.directory)
  vectors = [
    encode.encode(params, model_config, tokens, batch_size=config.batch_size)
    for tokens in (documents, queries)
  ]
  depth = min(config.depth, len(documents))
  scores, positions = index.exact(vectors[0]).search(vectors[1], depth)
  return trec.to_run(
    list(qrels), [d.id for d in data.documents], scores, positions
  )


def _interval(config: Config, values: dict[str, float]) -> results.Measure:
  interval = significance.bootstrap_interval(
    values, samples=config.bootstrap_samples, seed=config.seed
  )
  return results.Measure(
    mean=interval.mean, low=interval.low, high=interval.high
  )


def _traps(scores, num_queries: int) -> tuple[str, ...]:
  """Names the choices that other evaluations make differently."""
  return (
    f"Averages are over all {num_queries} judged queries: those without results"
    " count 0.",
    f"{scores.num_dropped} results with the query's own id were dropped.",
    "Ties are broken before scoring: a run is strictly ordered.",
    "BM25 reads whole documents, the encoders their first tokens.",
  )
