"""Trains a dual encoder on the real pairs with DP directly.

This is the alternative to synthetic queries. A contrastive loss couples the
pairs of a batch (`optim.contrastive_clipped_grad`). "example" is the direct
training of the paper on DP query synthesis: each example's gradient is clipped,
and the noise grows with the batch, since every other example has the pair among
its negatives. "batch" is the naive method of the Logit-DP paper, whose noise
does not shrink with the batch. "logit" is the method of that paper; "group" and
"row" are ours.

Formal guarantee:
  Stated with each result, since there are two units. For users of at most K
  queries (UNIT='user'), pairs are drawn as for "pair", with noise for groups of
  K. Each pair of a group moves the sum by the sensitivity at most, one after
  the other. Unit "pair": one query with its document; neighbours, add or remove
  one; Poisson batches; all methods except "row" with the negatives of its
  batch, which "example" covers with noise for all rows. Unit "query": the text of
  one query while its document stays; neighbours, the text is replaced by an
  empty one; batches in a fixed order, without amplification; all methods.
  Public: the documents, the number of records, every setting here, and the
  parameters that training starts from. Assumed: settings were not chosen on the
  private queries, and the secret of the working directory stays secret.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import field_kinds, optim, typing
from synthq_jax.data import passages as passages_lib
from synthq_jax.losses import contrastive
from synthq_jax.models import dual_encoder, encoders, t5_checkpoints
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  model_files,
  private_training,
  results,
  rows,
  runner,
  stage,
  training_pairs,
)
from synthq_jax.training import dp_step
from synthq_jax.training import mesh as mesh_lib

__all__ = [
  "LOSSES",
  "METHODS",
  "STAGE",
  "Config",
  "Inputs",
  "build",
  "comparison",
  "get_num_groups",
  "make_keys",
  "run",
]

METHODS = ("batch", "example", "group", "logit", "row")
LOSSES = ("softmax", "sigmoid", "spreadout")

_NEGATIVES = ("batch", "public")
_GRADIENTS = ("all", "pair", "query")
_UNITS = ("pair", "query")
_EMPTY = np.zeros((2, 2), np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(private_training.Config):
  """One method of direct DP training; every value is public."""

  label: str = ""
  """Part of the names of its rows, if a table compares several methods."""
  method: str = "batch"
  """Method of clipping: "batch", "group" or "logit" (every similarity);
  "example" (every query's loss against its batch, with noise for all that a
  pair moves); "row" (every query's loss, where a pair moves one row)."""
  loss: str = "softmax"
  """"softmax", "sigmoid" (balanced) or "spreadout"."""
  negatives: str = "public"
  """Negatives of "row": "public" documents, drawn anew for each step, or those
  of the "batch", for unit "query" alone."""
  unit: str = "pair"
  """Unit of privacy: the "pair" of a query and its document, or the text of a
  "query". For "query" the document stays and is known, and sampling amplifies
  nothing."""
  public_negatives: int = 128
  """Number of public negatives, the same for all rows of a batch."""
  gradients: str = "pair"
  """Gradients of "example" and "row" flow through "all" documents, those of its
  own "pair", or the "query" alone. The rest costs no noise and teaches
  nothing."""
  group_size: int = 16
  """Mean number of pairs of "group" that are each other's negatives."""
  norms: str = "exact"
  """Norms of "logit": "exact", or a "bound" that is cheaper."""
  batch_size: int = 32
  optimizer: str = "dp_adafactor"
  temperature: float = 0.05
  """Divisor of the cosines; the noise of "logit" with softmax grows as exp(2 /
  temperature)."""
  bias: float = 0.0
  """Term of the sigmoid loss that is added to similarity / temperature."""
  projection: bool = False
  """Whether a linear map follows the mean over tokens. It starts as the
  identity, and `trained` may match it."""
  seed: int = 0
  """Seed of the public negatives."""
  mesh: mesh_lib.Shape = field_kinds.speed_only(make=mesh_lib.Shape)
  """Division of the work among all devices of all processes."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "temperature")
    config_types.at_least(self, 1, "public_negatives")
    config_types.at_least(self, 2, "group_size")
    config_types.at_least(self, 0, "seed")
    config_types.one_of(self, "method", METHODS)
    config_types.one_of(self, "loss", LOSSES)
    config_types.one_of(self, "negatives", _NEGATIVES)
    config_types.one_of(self, "unit", _UNITS)
    if self.label and not config_types.is_file_name(self.label):
      raise ValueError(
        "direct_dp.Config.label must be letters, digits, '_' and '-', got"
        f" label={self.label!r}"
      )
    size = self.microbatch_size or 1
    if self.unit == "query" and self.batch_size % size:
      raise ValueError(
        "direct_dp.Config.batch_size must be a multiple of microbatch_size for"
        f" batches in a fixed order, got {self.batch_size} and {size}"
      )
    if (self.method, self.negatives, self.unit) == ("row", "batch", "pair"):
      raise ValueError(
        "direct_dp.Config.unit must be 'query' for rows against their batch, got"
        " unit='pair': a pair's document moves all rows, whose noise is that of"
        " method='example'; or take negatives='public'"
      )
    if (self.method, self.unit) == ("logit", "query") and self.batch_size == 1:
      raise ValueError(
        "direct_dp.Config.batch_size must be at least 2 for method='logit' and"
        " unit='query', got 1: a text without others moves nothing"
      )
    # Refuses settings that cannot be combined, before any data is read.
    built = build(self, max(2, self.batch_size), lambda *_: jnp.asarray(_EMPTY))
    built.sensitivity("ADD_OR_REMOVE_ONE")


def comparison(base: Config) -> tuple[Config, ...]:
  """Returns the methods of studies/direct_dp.gin: clipping, temperature, batch
  size.

  Args:
    base: settings that the methods have in common.
  """
  row = {"method": "row"}
  text = {**row, "negatives": "batch", "unit": "query"}
  pair = {**row, "gradients": "pair"}
  methods: dict[str, dict[str, Any]] = {
    "batch": {"method": "batch"},
    "example": {"method": "example", "gradients": "all"},
    "group": {"method": "group"},
    "logit_softmax": {"method": "logit"},
    "logit_sigmoid": {"method": "logit", "loss": "sigmoid"},
    **{f"row_{g}": {**row, "gradients": g} for g in _GRADIENTS},
    **{f"text_{g}": {**text, "gradients": g} for g in _GRADIENTS},
  }
  rows: dict[str, dict[str, Any]] = {
    f"{name}_{end}": {**changes, "temperature": temperature}
    for end, temperature in (("t05", 0.05), ("t1", 1.0))
    for name, changes in methods.items()
  }
  rows["logit_spreadout"] = {"method": "logit", "loss": "spreadout"}
  ends: dict[str, dict[str, Any]] = {
    "b32": {"batch_size": 32},
    "b1024": {"batch_size": 1024},
    "whole": {"trained": ".*", "learning_rate": 0.001},
  }
  for end, changes in ends.items():
    changes = {**changes, "temperature": 0.05}
    rows[f"batch_{end}"] = {"method": "batch", **changes}
    rows[f"row_{end}"] = {**pair, **changes}
  return tuple(
    dataclasses.replace(base, label=label, **changes)
    for label, changes in rows.items()
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(private_training.Inputs):
  """Data and start of a retriever's training, and its target epsilon."""

  encoder: encoder_start.EncoderStart
  epsilon: float  # the target, finite


def plan_training(plan: rows.Plan, row: rows.Row) -> private_training.Planned:
  """Plans the training of one retriever."""
  method = plan.direct[row]
  assert row.epsilon is not None
  return private_training.Planned(
    config=method, epsilon=row.epsilon, fixed_order=method.unit == "query"
  )


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the training of one retriever."""
  planned = plan_training(run.plan, row)
  settings = planned.get_settings(run.prepared)
  return stage.Job(
    row=row,
    depends=(
      settings,
      planned.epsilon,
      *run.private_data(row, run.encoder_data),
    ),
    settings=settings,
    inputs=Inputs(
      prepared=run.prepared, encoder=run.encoder, epsilon=planned.epsilon
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses another vocabulary, and settings that an accountant refuses later."""
  for method in run.plan.direct.values():
    method.check(run.prepared)
    if run.prepared.queries_per_user and method.unit == "query":
      raise ValueError(
        "direct_dp.Config.unit must be 'pair' for UNIT='user', got"
        f" unit={method.unit!r}: no claim covers a user and a text alone"
      )
  if run.plan.direct:
    run.check_encoder()


def run(task: stage.Task[Config, Inputs]) -> results.Checkpoint:
  """Trains on the real queries, calibrated before step 0.

  Args:
    task: with the working directory's secret.

  Returns:
    The encoder with its own statement; under `private/` if it is only compared.

  Raises:
    ValueError: if the settings cannot be met or the checkpoint does not fit.
  """
  config, space = task.settings, task.space
  prepared = task.inputs.prepared
  encoder = task.inputs.encoder
  params, model_config = encoder.load_public(prepared)
  start, public = _split(config, model_config, params)
  tokens = encoder.tokens()
  documents = encoder_start.open_passages(space, prepared, tokens)
  pairs = training_pairs.read_real(space, prepared, tokens)
  records = _records(config, pairs, documents)
  settings = dataclasses.replace(
    _settings(config, task.inputs.epsilon),
    num_users=prepared.num_users.get("train"),
  )
  declared = private_training.sampler(
    settings, len(records["queries"]), prepared.queries_per_user
  )

  def grad_fn(public: Mapping[str, Any]) -> optim.ContrastiveGrad:
    encode = _encoder(model_config, public)
    return build(config, declared.max_batch_size, encode)

  trained, fields = private_training.train(
    task,
    settings,
    dp_step.Training(
      grad_fn=grad_fn,
      public=public,
      params=start,
      records=records,
      extra_fn=_public_negatives(config, documents),
      mesh=mesh_lib.of_all(config.mesh),
    ),
  )
  return model_files.save_checkpoint(
    task,
    task.folder(private=False),
    t5_checkpoints.unflatten({**public, **trained}),
    model_config,
    save=encoder.save,
    kind="retriever",
    **fields,
  )


def _settings(config: Config, epsilon: float) -> private_training.Settings:
  """Returns the private settings of a training for its unit.

  Formal guarantee:
    Unit "pair" is claimed under Poisson sampling. For unit "query" the document
    stays, and if documents are negatives it moves the whole sum when its pair
    is drawn. The draw is then visible, and sampling amplifies nothing
    (docs/sensitivities.md). So batches are read in a fixed order, accounted as
    one release an epoch.
  """
  text_alone = config.unit == "query"
  against = f"_{config.negatives}" if config.method == "row" else ""
  divisors = {"batch": 1.0, "group": float(get_num_groups(config))}
  return private_training.Settings(
    config=config,
    epsilon=epsilon,
    mechanism=f"{config.method}{against}",
    denominator=divisors.get(config.method),
    unit=unit_lib.QUERY_TEXT if text_alone else unit_lib.QUERY,
    clips_records=config.method in ("example", "row"),
    relation="REPLACE_SPECIAL" if text_alone else "ADD_OR_REMOVE_ONE",
    fixed_order=text_alone,
    not_protected=("texts_alone",) if text_alone else (),
  )


def _split(config: Config, shape: Any, params: Any):
  """Splits parameters by path into trained and fixed ones."""
  encoder = encoders.of(shape)
  params = encoder.select(params)
  if config.projection:
    params = dual_encoder.with_projection(params, encoder.dim)
  return model_files.split_parameters(
    t5_checkpoints.flatten(params),
    config.trained,
    "direct_dp.Config.trained",
    " (and projection/kernel with projection=True)",
  )


def _records(
  config: Config,
  pairs: dict[str, np.ndarray],
  collection: passages_lib.Passages,
) -> dict[str, np.ndarray]:
  documents = pairs["documents"]
  if config.unit == "query":
    # The passage that fits a query best depends on its text, and would move the
    # columns of other queries: the first passage depends on the document alone.
    documents = collection.tokens[collection.of(pairs["rows"])[0]]
  return {
    "queries": pairs["queries"],
    "documents": documents,
    "document_ids": pairs["rows"],
    "example_id": make_keys(pairs, config.unit),
  }


def _public_negatives(
  config: Config, documents: passages_lib.Passages
) -> Callable[[int], dict[str, np.ndarray]] | None:
  """Returns the function that draws documents for a step, or None."""
  if config.method != "row" or config.negatives != "public":
    return None
  total = len(documents.owners)
  size = min(config.public_negatives, total)

  def draw(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([config.seed, step])
    rows = generator.choice(total, size, replace=False)
    return {
      "public_negatives": documents.tokens[rows],
      "public_negative_ids": documents.owners[rows],
    }

  return draw


def build(
  config: Any, max_batch_size: int, encode: typing.EncodeFn
) -> optim.ContrastiveGrad:
  """Builds the clipped gradient of a configuration, for its unit.

  Args:
    config: a `direct_dp.Config`.
    max_batch_size: maximum batch size of the sampler.
    encode: function from `(params, tokens)` to vectors, of queries and
      documents.

  Raises:
    ValueError: if method and loss cannot be combined.
  """
  fn = optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=_loss(config, max_batch_size),
    l2_clip_norm=config.clip_norm,
    method=_method(config, max_batch_size),
    max_batch_size=max_batch_size,
    microbatch_size=config.microbatch_size,
  )
  return dataclasses.replace(fn, unit=config.unit)


def _loss(config: Any, max_batch_size: int) -> Any:
  if config.loss == "softmax":
    return contrastive.Softmax(temperature=config.temperature)
  declared = max(2, max_batch_size)
  if config.loss == "sigmoid":
    return contrastive.Sigmoid(
      temperature=config.temperature,
      bias=config.bias,
      max_batch_size=declared,
    )
  return contrastive.Spreadout(max_batch_size=declared)


def _method(config: Any, max_batch_size: int) -> Any:
  if config.method == "logit":
    return optim.Logit(norms=config.norms)
  if config.method in ("example", "row"):
    is_row = config.method == "row"
    return optim.Row(
      negatives=config.negatives if is_row else "batch",
      gradients=config.gradients,
    )
  if config.method == "group":
    mean = config.group_size  # sizes are uneven: room for two deviations more
    size = min(mean + math.ceil(2 * math.sqrt(mean)), max_batch_size)
    return optim.Group(size=size, groups=get_num_groups(config))
  return optim.Batch()


def get_num_groups(config: Any) -> int:
  """Returns the public number of groups."""
  return max(1, config.batch_size // config.group_size)


def _encoder(
  model_config: t5_checkpoints.Shape, public: typing.Params
) -> Callable[..., jax.Array]:
  """Returns the encoder as a function of the trained parameters by path."""

  def encode(trained: typing.Params, tokens: jax.Array) -> jax.Array:
    params = t5_checkpoints.unflatten({**public, **trained})
    return encoders.of(model_config).encode(params, tokens)

  return encode


def make_keys(records: dict[str, np.ndarray], unit: str) -> np.ndarray:
  """Returns a number for each record that depends on its content alone.

  A group that depends on the record's position would change for all records
  after a removed one. For unit "query" the number is that of the document,
  which stays: a text that becomes empty must not take its pair to another
  group.

  Args:
    records: "queries" [record, length] and "rows" [record].
    unit: "pair" or "query".

  Returns:
    int32 [record].
  """
  names = ("queries", "rows") if unit == "pair" else ("rows",)
  parts = [
    np.ascontiguousarray(records[name]).astype(np.int32) for name in names
  ]
  digests = (
    functools.reduce(lambda d, x: zlib.crc32(x.tobytes(), d), record, 0)
    for record in zip(*parts, strict=True)
  )
  numbers = np.fromiter(digests, np.uint32, count=len(parts[0]))
  return numbers.view(np.int32)


STAGE = stage.Stage(
  name="direct_dp",
  result=results.Checkpoint,
  config=Config,
  check=check,
  plan=lambda plan: {str(row): row for row in plan.direct},
  job=make_job,
  training=plan_training,
  run=run,
  needs=("static_encoder",),
  starts_from="encoder",
  folder="train_retriever",
  needs_secret=True,
  together=True,
)
