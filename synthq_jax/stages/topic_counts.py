"""Counts what people ask about: train queries by cluster of documents, with noise.

The clusters are public: k-means over vectors of the public documents. `generate`
writes queries by these counts, and `filter_queries` draws by them, where their
settings say so; otherwise the stage is left out.

References:
  Tan et al. 2025, Synthesizing Privacy-Preserving Text Data via Finetuning
  without Finetuning Billion-Scale LLMs (CTCL), arXiv:2503.12347.
  Yu et al. 2024, Privacy-Preserving Instructions for Aligning Large Language
  Models, arXiv:2402.13659 (resampling by a noisy histogram).
"""

import dataclasses
import math

import numpy as np

from synthq_jax import array_files, artifacts
from synthq_jax.models import encoders
from synthq_jax.pipeline import config_types, inputs, noisy_sums, results
from synthq_jax.privacy import rounding, terms
from synthq_jax.retrieval import clusters as clusters_lib
from synthq_jax.retrieval import encode, vector_files
from synthq_jax.stages import stage

__all__ = ["STAGE", "Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How documents are grouped, and for which promise; every value is public."""

  epsilon: float = 0.5
  """Of the counts, beside what generators cost."""
  delta: float | None = None
  """Of the promise; None: 1 / (2n), n train queries or users."""
  clusters: int | None = None
  """Of documents; None: the square root of their number."""
  iterations: int = 20
  """Of k-means."""
  misplaced: float = 0.1
  """Share of the queries that noise may be expected to move to others' clusters,
  in (0, 1]; with more of it nothing is counted."""
  seed: int = 0
  """Of k-means; public."""
  batch_size: int = artifacts.speed_only(256)
  """Documents encoded at once."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta")
    config_types.within(self, "(0, 1]", "misplaced")
    config_types.at_least(self, 1, "clusters", "iterations", "batch_size")
    config_types.at_least(self, 0, "seed")
    if math.isinf(self.epsilon):
      raise ValueError("topic_counts.Config.epsilon must be finite, got inf")


def needs(config) -> tuple[str, ...]:
  """Returns the stages that it reads: the data's alone where nothing counts."""
  return STAGE.needs if is_wanted(config) else ("prepare_data",)


def jobs(run):
  """Yields the counts, where something is written or drawn by them."""
  if not is_wanted(run.config):
    return
  config = run.config.topic_counts
  yield stage.Job(depends=(config, *run.encoder_data), settings=config)


def is_wanted(config) -> bool:
  """Says whether a `plan.RunConfig` writes or draws anything by topics."""
  used = config.generate.topics or config.filter_queries.topics
  return bool(used and config.rows.synthetic)


def check(run) -> None:
  """Refuses counts that noise would hide, before anything is trained.

  Raises:
    ValueError: if there are too few queries, or they alone say which documents
      are written for.
  """
  if not is_wanted(run.config):
    return
  if run.prepared.num_asked:
    raise ValueError(
      "generate.Config.topics and filter_queries.Config.topics need queries for"
      " all documents, got WRITTEN_FOR='train', which publishes without noise"
      " what is asked about: set one or the other"
    )
  _check_noise(run.config.topic_counts, run.prepared)


def run(task: stage.Task) -> results.TopicCounts:
  """Clusters the documents, counts, and adds the noise.

  Formal guarantee:
    Unit: one train query with the document that was kept of it, or one user.
    Relation: ADD_OR_REMOVE_ONE, n public. The counts are one Gaussian mechanism
    with the vector of `noisy_sums.counted`, and satisfy the statement of the
    result, which the ledger holds before noise is drawn. The clusters are a
    function of public documents, a public encoder and settings.

  Args:
    task: with the working directory's secret; its inputs are "prepared", the
      data, and "encoder", the folder of a public checkpoint.

  Returns:
    The counts with their promise; they may be shared.

  Raises:
    ValueError: if the noise would hide the counts.
  """
  config, space, prepared = task.settings, task.folders, task.inputs["prepared"]
  _check_noise(config, prepared)
  folder = task.folder(private=False)
  clusters = _clusters(task, results.public_documents(prepared), folder)
  path = space.root / prepared.private_directory / "train.npz"
  pairs = inputs.arrays(space, prepared, path)
  number = _number(config, prepared)
  counts = noisy_sums.counted(
    clusters[pairs["documents"]], number, pairs.get("users")
  )
  promise = noisy_sums.of_split(
    config, prepared, "train", terms.TOPICS, how=terms.WEIGHED, space=space
  )
  statement, noisy = noisy_sums.draw(task, promise, counts)
  array_files.save_npz(
    folder / results.TOPICS_NAME, {"clusters": clusters, "counts": noisy}
  )
  return results.TopicCounts(
    directory=space.relative(folder),
    statement=statement,
    num_clusters=number,
    noise=promise.noise_multiplier * promise.l2_sensitivity,
    misplaced=_misplaced(config, number, prepared.units("train")),
  )


def _clusters(task, documents: results.PublicDocuments, folder) -> np.ndarray:
  """Returns the cluster of each document, [document]; reads nothing private."""
  config, state = task.settings, folder / f"state_{task.digest}"
  params, model_config = inputs.load_public(task.inputs["encoder"], documents)
  passages = inputs.document_tokens(task.folders, documents)
  tokens = passages.tokens
  if len(tokens) > len(passages.ids):  # a document is where it begins
    tokens = tokens[passages.of(np.arange(len(passages.ids)))[0]]
  encode.to_files(
    encoders.of(model_config).select(params),
    model_config,
    tokens,
    state,
    batch_size=config.batch_size,
  )
  return clusters_lib.assign(
    vector_files.open_vectors(state, len(tokens)),
    _number(config, documents),
    seed=config.seed,
    iterations=config.iterations,
  )


def _number(config: Config, documents: results.PublicDocuments) -> int:
  return config.clusters or clusters_lib.number_for(documents.num_documents)


def _misplaced(config: Config, number: int, units: int) -> float:
  """Bounds the expected total variation of noisy shares from the true ones.

  The sum of the noise's absolute values over n: clipping at 0 only helps, and the
  sum of the counts, by which they are divided, is off by as much at most.
  """
  made = noisy_sums.claim(
    epsilon=config.epsilon, delta=config.delta, units=units,
    l2_sensitivity=1.0, words=terms.TOPICS,
  )  # fmt: skip
  return number * made.noise_multiplier * math.sqrt(2 / math.pi) / units


def _check_noise(config: Config, prepared: results.PreparedData) -> None:
  """Refuses noise that would decide what is written about."""
  number, units = _number(config, prepared), prepared.units("train")
  found = _misplaced(config, number, units)
  if found <= config.misplaced:
    return

  def excess(units: int) -> float:
    delta = config.delta and min(config.delta, 1 / (2 * units))
    changed = dataclasses.replace(config, delta=delta)
    return _misplaced(changed, number, units) / config.misplaced

  what = "users" if prepared.num_users else "queries"
  raise ValueError(
    f"topic_counts: expected noise to misplace at most {config.misplaced:g} of"
    f" the queries, got {found:.2g}: {number} clusters, {units:,} train {what} at"
    f" epsilon {rounding.epsilon(config.epsilon)}, where"
    f" {noisy_sums.enough(excess, units):,} {what} would do; take fewer"
    " topic_counts.Config.clusters, raise its epsilon, or leave topics out"
  )


STAGE = stage.of(
  __name__,
  needs=("static_encoder",),
  narrowed=needs,
  reads=("prepared", "encoder"),
  needs_secret=True,
)
