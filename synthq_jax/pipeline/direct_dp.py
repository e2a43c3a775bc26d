"""Trains a dual encoder on the real pairs with DP directly.

The alternative to synthetic queries. A contrastive loss couples the pairs of a
batch, so that clipping each example says nothing; the methods clip other
things (`optim.contrastive_clipped_grad`). "batch" is the papers' baseline, whose
noise does not shrink with the batch.

Formal guarantee:
  Stated with each result, since there are two units. "pair": one query with its
  document; neighbours, add or remove one; Poisson batches; all methods but
  "row" with the negatives of its batch. "query": the text of one query while its
  document stays; neighbours, the text is replaced by an empty one; batches in a
  fixed order, without amplification; all methods. Public: the documents, the
  number of records, every setting here. Assumed: settings were not chosen on
  the private queries, and the secret of the working directory stays secret.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from synthq_jax.models import dual_encoder, t5_checkpoints
from synthq_jax.pipeline import (
  _checkpoints,
  _direct_methods,
  config_types,
  inputs,
  private_training,
  results,
  workspace,
)
from synthq_jax.training import dp_step, loop

__all__ = ["Config", "run"]

_NEGATIVES = ("batch", "public")
_UNITS = ("pair", "query")
_EMPTY = np.zeros((2, 2), np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One method of direct DP training; every value is public."""

  label: str = ""
  """In the names of its rows, where a table compares several."""
  method: str = "batch"
  """What is clipped: "batch", "group", "logit" (every similarity) or "row"
  (every query's loss)."""
  loss: str = "softmax"
  """"softmax", "sigmoid" (balanced) or "spreadout"."""
  negatives: str = "public"
  """Of "row": "public" documents, drawn anew for each step, or those of the
  "batch", for unit "query" alone."""
  unit: str = "pair"
  """What is protected: the "pair" of a query and its document, or the text of a
  "query" while its document stays, is known, and sampling amplifies nothing."""
  public_negatives: int = 128
  """How many of them, the same for all rows of a batch."""
  gradients: str = "pair"
  """Of "row": through "all" documents, those of its own "pair", or the "query"
  alone. What is left out costs nothing and is not learnt from."""
  group_size: int = 16
  """Of "group": how many pairs are each other's negatives, in the mean."""
  norms: str = "exact"
  """Of "logit": "exact", or a "bound" that is cheaper."""
  delta: float | None = None
  """Target; None: 1 / (2n)."""
  clip_norm: float = 0.1
  """L2 clip norm of whatever the method clips."""
  batch_size: int = 32
  """Expected records of a batch."""
  steps: int = 100
  """Optimizer steps."""
  optimizer: str = "dp_adafactor"
  """"dp_adam" or "dp_adafactor"."""
  learning_rate: float = 1e-3
  """Peak; warm-up over a tenth of the steps, then linear decay."""
  temperature: float = 0.05
  """Divides the cosines; the noise of "logit" with softmax grows as
  exp(2 / temperature)."""
  bias: float = 0.0
  """Of the sigmoid loss, added to similarity / temperature."""
  projection: bool = False
  """Whether a linear map follows the mean over tokens; it starts as the
  identity and is part of what `trained` may match."""
  trained: str = ".*"
  """Regular expression that the paths of trained parameters match in full, e.g.
  "projection/.*"; the others stay the public ones."""
  microbatch_size: int | None = None
  """Records encoded at once, to save memory; None: the whole batch."""
  seed: int = 0
  """Of the public negatives."""
  settings: loop.Settings = dataclasses.field(
    default_factory=loop.Settings, metadata={"speed_only": True}
  )
  """Saving and reporting."""

  def __post_init__(self):
    config_types.positive(
      self, "temperature", "learning_rate", "clip_norm", "delta"
    )
    config_types.at_least(
      self, 1, "batch_size", "steps", "microbatch_size", "public_negatives"
    )
    config_types.at_least(self, 2, "group_size")
    config_types.at_least(self, 0, "seed")
    config_types.one_of(self, "method", _direct_methods.METHODS)
    config_types.one_of(self, "loss", _direct_methods.LOSSES)
    config_types.one_of(self, "negatives", _NEGATIVES)
    config_types.one_of(self, "unit", _UNITS)
    config_types.one_of(self, "optimizer", dp_step.OPTIMIZERS)
    if self.label and not config_types.is_file_name(self.label):
      raise ValueError(
        "direct_dp.Config.label must be letters, digits, '_' and '-', got"
        f" label={self.label!r}"
      )
    self._check_fixed_order()
    # Refuses what does not go together, before anything is read.
    built = _direct_methods.build(
      self, max(2, self.batch_size), lambda params, tokens: _EMPTY
    )
    built.sensitivity("ADD_OR_REMOVE_ONE")

  def _check_fixed_order(self) -> None:
    size = self.microbatch_size
    if _direct_methods.claim(self).fixed_order and self.batch_size % (
      size or 1
    ):
      raise ValueError(
        "direct_dp.Config.batch_size must be a multiple of microbatch_size for"
        f" batches in a fixed order, got {self.batch_size} and {size}"
      )


def run(
  config: Config,
  space: workspace.Workspace,
  digest: str,
  *,
  prepared: results.PreparedData,
  start_from: pathlib.Path,
  epsilon: float,
  name: str,
) -> results.Checkpoint:
  """Trains on the real queries, calibrated before step 0.

  Args:
    config: the method, delta, optimizer, length of training.
    space: the working directory.
    digest: fingerprint to save the result under.
    prepared: documents and private train queries.
    start_from: a public checkpoint.
    epsilon: the target, finite.
    name: the row of the table.

  Returns:
    The encoder with its own statement.

  Raises:
    ValueError: if the settings cannot be met or the checkpoint does not fit.
  """
  began = time.monotonic()
  stage = f"train_retriever/{name}"
  params, model_config = inputs.load_public(start_from, prepared)
  start, public = _split(config, dual_encoder.encoder_params(params))
  metrics_path = space.private(stage, f"metrics_{digest}.jsonl")
  records = _records(config, space, prepared)
  settings = _settings(config, epsilon)
  declared = private_training.sampler(settings, len(records["queries"]))

  def grad_fn(public: Mapping[str, Any]) -> _direct_methods.Clipped:
    encode = _direct_methods.encoder(model_config, public)
    return _direct_methods.build(config, declared.max_batch_size, encode)

  trained, statement = private_training.train(
    settings,
    space,
    stage,
    digest,
    grad_fn=grad_fn,
    public=public,
    params=start,
    records=records,
    prepared=prepared,
    metrics_path=metrics_path,
    config=config,
    loop_settings=config.settings,
    extra_fn=_public_negatives(config, space, prepared),
  )
  return _checkpoints.save(
    space,
    stage,
    digest,
    space.public(stage),
    t5_checkpoints.unflatten({**public, **trained}),
    model_config,
    began=began,
    kind="retriever",
    name=name,
    statement=statement,
    steps=config.steps,
    batch_size=config.batch_size,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(trained)),
    metrics=space.relative(metrics_path),
  )


def _settings(config: Config, epsilon: float) -> private_training.Settings:
  claim = _direct_methods.claim(config)
  return private_training.Settings(
    epsilon=epsilon,
    delta=config.delta,
    batch_size=config.batch_size,
    multiple_of=config.microbatch_size or 8,
    steps=config.steps,
    optimizer=config.optimizer,
    learning_rate=config.learning_rate,
    mechanism=claim.mechanism,
    denominator=_direct_methods.denominator(config),
    unit=claim.record,
    relation=claim.relation,
    fixed_order=claim.fixed_order,
    not_protected=claim.not_protected,
  )


def _split(config: Config, params: Any):
  """Parts parameters into what is trained and what stays, by path."""
  if config.projection:
    params = dual_encoder.with_projection(params)
  return _checkpoints.split(
    t5_checkpoints.flatten(params),
    config.trained,
    "direct_dp.Config.trained",
    " (and projection/kernel with projection=True)",
  )


def _records(
  config: Config, space: workspace.Workspace, prepared: results.PreparedData
) -> dict[str, np.ndarray]:
  """Returns the pairs, with the names that clipped gradients know."""
  pairs = inputs.real_pairs(space, prepared)
  return {
    "queries": pairs["queries"],
    "documents": pairs["documents"],
    "document_ids": pairs["rows"],
    "example_id": _direct_methods.keys(pairs, config.unit),
  }


def _public_negatives(
  config: Config, space: workspace.Workspace, prepared: results.PreparedData
) -> Callable[[int], dict[str, np.ndarray]] | None:
  """Returns the function that draws documents for a step, or None."""
  if not _direct_methods.has_public_negatives(config):
    return None
  ids, documents = inputs.document_tokens(space, prepared)
  size = min(config.public_negatives, len(ids))

  def draw(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([config.seed, step])
    rows = generator.choice(len(ids), size, replace=False)
    return {
      "public_negatives": documents[rows],
      "public_negative_ids": rows.astype(np.int32),
    }

  return draw
