"""Learns with DP a map of a public retriever's queries, for ranking.

To the weighted sum of scores (`learn_to_rank`) it adds query @ map @ document, of the
vectors of the retriever that the public model's queries trained, or of the untrained
one. The map starts as nothing and is trained as the weights are, on what BM25 and the
retriever find: documents that are hard to tell apart, where direct DP training of a
retriever (`direct_dp`) sees random ones.

Formal guarantee:
  That of `private_training.train`, for the map. Unit: one train query with its
  judgements, or the queries of one user, at most K. Relation: add or remove one. What
  is clipped is each query's gradient. Assumed: its features are a function of that
  query, of public documents and of the public retriever alone, to the last bit; the
  weights, which private queries taught before, are released: their claim is joined.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from synthq_jax import optim
from synthq_jax.models import vector_map
from synthq_jax.privacy import joint
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import best_passages, ranking
from synthq_jax.runtime import (
  private_training,
  results,
  runner,
  stage,
  system_results,
)
from synthq_jax.stages import _ranking, _search
from synthq_jax.storage import array_files
from synthq_jax.training import dp_step

__all__ = ["STAGE", "Config", "Inputs", "run"]

_NOTE = (
  "Beside the weights, a map of the public retriever's vectors was learned on the"
  " private queries {}."
)
_NAME = "map"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_ranking.Config):
  """How the map is learned; every value is public."""

  clip_norm: float = 0.3
  steps: int = 16
  learning_rate: float = 0.1
  microbatch_size: int | None = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(_ranking.Inputs):
  """What the map is learned on; the retriever is public."""

  learned: system_results.Ranking  # the weights
  epsilon: float  # the map's own; inf for no privacy


def jobs(run: runner.Run) -> Iterator[stage.Job[Inputs]]:
  """Yields a map for each epsilon."""
  config = run.config
  if run.for_audit:
    return
  settings = private_training.filled(config.learn_map, run.prepared)
  for epsilon in config.rows.mapped:
    name, first = stage.row_name(epsilon), config.rows.mapped_row
    retriever, learned = run.retrievers[first], run.rows("learn_to_rank")[first]
    vectors = run.vectors[first]
    row = f"{system_results.Ranking.SYSTEM}_{_NAME}_{name}"
    yield stage.Job(
      name=name,
      depends=(
        settings,
        float(epsilon),
        config.evaluate.drop_identical,
        *run.private_data(row),
        retriever.digest,
        learned.digest,
        vectors.digest,
      ),
      settings=settings,
      inputs=Inputs(
        prepared=run.prepared,
        epsilon=epsilon,
        retriever=retriever.value,
        learned=learned.value,
        vectors=vectors.value,
        drop_identical=config.evaluate.drop_identical,
      ),
      is_private=config.rows.is_compared(row),
    )


def check(run: runner.Run) -> None:
  """Refuses what the accountant would refuse later."""
  if run.config.rows.mapped and not run.for_audit:
    run.config.learn_map.check(run.prepared)


def run(task: stage.Task[Config, Inputs]) -> system_results.Ranking:
  """Learns the map beside a public retriever and the weights of its row.

  Args:
    task: with the working directory's secret.

  Returns:
    The weights with the map; under `private/` where epsilon is inf, the weights
    are, or the row is only compared.
  """
  learned, epsilon = task.inputs.learned, task.inputs.epsilon
  config, prepared = task.settings, task.inputs.prepared
  judged = _ranking.of_train(task)
  vectors = _search.collection(
    judged, task.folders.root / task.inputs.vectors.vectors
  )
  dim = vectors.shape[1]

  def grad_fn(public: Mapping[str, Any]) -> optim.ClippedGrad:
    return optim.clipped_grad(
      functools.partial(
        vector_map.get_losses, vectors=public["vectors"], temperature=1.0
      ),
      l2_clip_norm=config.clip_norm,
      microbatch_size=config.microbatch_size,
    )

  def make(rows: np.ndarray) -> dict[str, np.ndarray]:
    found = _ranking.found(task, judged, learned.depth, rows)
    return _records(found, learned, vectors)

  trained, fields = private_training.train(
    task,
    _ranking.settings(config, prepared, epsilon=epsilon, mechanism="map"),
    dp_step.Training(
      grad_fn=grad_fn,
      public={"vectors": vectors},
      params=vector_map.init(dim),
      records=dp_step.Drawn(len(judged.qrels), make),
    ),
  )
  is_private = math.isinf(epsilon) or results.is_private_path(learned.directory)
  directory = task.folder(private=is_private)
  matrix = np.asarray(trained[_NAME], np.float32)
  array_files.save(directory / system_results.Ranking.FILE, matrix)
  noise = "without noise" if math.isinf(epsilon) else "with DP"
  claim = joint.claim([learned.statement, fields["statement"]])
  assert claim is not None  # of two statements
  return dataclasses.replace(
    learned,
    directory=task.folders.relative(directory),
    name=f"{learned.SYSTEM}_{_NAME}_{task.name}",
    statement=statement_lib.inherit(claim, _NOTE.format(noise)),
    has_map=True,
    num_queries=len(judged.qrels),
    seconds=0.0,
  )


def _records(
  found: _ranking.Found, learned: system_results.Ranking, vectors
) -> dict[str, np.ndarray]:
  """Returns what the loss reads of each query."""
  records = _ranking.padded(found, learned.depth)
  scores = ranking.scored(records.pop("values"), learned.weights)
  places = [one.places for one in found.candidates.values()]
  rows = np.zeros(scores.shape, np.int32)
  chosen = best_passages.nearest(
    found.judged.passages, found.queries, places, vectors
  )
  for row, at in enumerate(chosen):
    rows[row, : len(at)] = at
  return {
    **records,
    "scores": scores.astype(np.float32),
    "queries": np.asarray(found.queries),
    "rows": rows,
  }


STAGE = stage.Stage(
  name="learn_map",
  result=system_results.Ranking,
  config=Config,
  check=check,
  jobs=jobs,
  run=run,
  needs=("learn_to_rank",),
  needs_secret=True,
)
