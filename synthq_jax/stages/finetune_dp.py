"""Fine-tunes a public T5 with DP to write a query for a document.

Formal guarantee:
  Unit: one query, with the one document that is kept for it. Neighbours: two
  sets of records that differ by one (add or remove). Each step sums clipped
  per-record gradients of a Poisson sample, adds Gaussian noise scaled to the
  sum's sensitivity and divides by a public constant; the accountant composes
  all steps. Or the unit is a user with at most K queries, and neighbours differ
  by all of them. Then a record is a user, whose mean gradient is clipped, or
  noise is for groups of at most K records. Public: the documents, the number of
  records, every setting here. Assumed: settings were not chosen on the private
  queries, and the secret of the working directory stays secret.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import field_kinds, optim
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.losses import seq2seq
from synthq_jax.models import (
  encodings,
  lora,
  scanned,
  t5,
  t5_checkpoints,
  t5_config,
)
from synthq_jax.optim import by_length, users
from synthq_jax.runtime import (
  model_files,
  prepared_files,
  private_training,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.stages import _encoded
from synthq_jax.training import dp_step, sharded_grad
from synthq_jax.training import mesh as mesh_lib

__all__ = [
  "STAGE",
  "Config",
  "Inputs",
  "encode_once",
  "grad_fn",
  "loss_fn",
  "run",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(private_training.Config):
  """Settings of private fine-tuning; every value here is public."""

  GONE: ClassVar[Mapping[str, Any]] = {"noise_bands": 1}

  prefix: str = "generate_query: "
  """Text before each document."""
  adapter: lora.LoRA | None = None
  """Adapter that is trained instead of parameters of the model. It is merged
  into them afterwards, so that the checkpoint is a plain one. None: `trained`
  parameters train."""
  dropout_rate: float = 0.0
  """Dropout rate in [0, 1), with a mask of its own for each record and step."""
  dtype: str | None = None
  """Data type of the computation, e.g. "bfloat16"; None: the checkpoint's."""
  strategy: str = field_kinds.speed_only("bookkeeping")
  """Strategy of gradient clipping, which changes only speed and memory."""
  remat: bool = field_kinds.speed_only(False)
  """Whether the backward pass computes layers again, to save memory."""
  scan_layers: bool = field_kinds.speed_only(False)
  """Whether layers are one loop, which compiles in a fraction of the time."""
  mesh: mesh_lib.Shape = field_kinds.speed_only(make=mesh_lib.Shape)
  """Division of the work among all devices of all processes."""

  def __post_init__(self):
    super().__post_init__()
    if self.adapter is not None and self.trained != ".*":
      raise ValueError(
        "finetune_dp.Config.trained must be '.*' with an adapter, which"
        f" trains alone, got trained={self.trained!r}: set TRAINED='.*'"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(private_training.Inputs):
  """Data and start of a generator's training, and its target epsilon."""

  start: pathlib.Path  # the folder of the public checkpoint
  epsilon: float  # the target; inf for no privacy
  canaries: Sequence[canaries_lib.Canary]
  """Canaries; the inserted ones are records, too."""


def plan_training(plan: rows.Plan, row: rows.Row) -> private_training.Planned:
  """Plans the training of one generator."""
  assert row.epsilon is not None
  return private_training.Planned(
    config=plan.config.finetune_dp,
    epsilon=row.epsilon,
    can_draw_users=True,
    is_counted=not plan.config.canaries.number,
  )


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the training of one generator."""
  planned = plan_training(run.plan, row)
  settings = planned.get_settings(run.prepared)
  return stage.Job(
    row=row,
    depends=(
      settings,
      planned.epsilon,
      run.config.canaries,
      *run.private_data(row),
    ),
    settings=settings,
    inputs=Inputs(
      prepared=run.prepared,
      start=run.start,
      epsilon=planned.epsilon,
      canaries=run.canaries,
    ),
  )


def _check_prefix(run: runner.Run) -> None:
  """Refuses documents that begin with the prefix, which would be read twice."""
  prefix = run.config.finetune_dp.prefix
  texts = prepared_files.document_texts(
    prepared_files.corpus(run.folders, run.documents)
  )
  if prefix.strip() and all(
    text.startswith(prefix.strip()) for text in itertools.islice(texts, 100)
  ):
    raise ValueError(
      f"expected documents without finetune_dp.Config.prefix={prefix!r},"
      " which is put before each, got documents that begin with it: take it out of"
      " the source, or set PREFIX='' if everybody reads it there"
    )


def check(run: runner.Run) -> None:
  """Refuses settings that the accountant and the checkpoint would refuse
  later."""
  run.check_vocabulary(run.start)
  config = run.config.finetune_dp
  _check_prefix(run)
  if run.config.rows.synthetic:
    config.check(run.prepared, draws_users=bool(run.prepared.queries_per_user))


def run(task: stage.Task[Config, Inputs]) -> results.Checkpoint:
  """Trains a generator for one epsilon.

  Args:
    task: with the working directory's secret.

  Returns:
    The checkpoint with its statement; under `private/` if epsilon is inf, or
    the row is only compared.

  Raises:
    ValueError: if the settings cannot be met or the checkpoint does not fit.
  """
  config, space, digest = task.settings, task.space, task.digest
  prepared, epsilon = task.inputs.prepared, task.inputs.epsilon
  records = _read_records(config, space, prepared)
  canaries, folder = task.inputs.canaries, task.inputs.start
  if any(canary.inserted for canary in canaries):
    vocabulary = prepared_files.vocabulary(space, prepared)
    records = _add_canaries(config, vocabulary, prepared, canaries, records)
  params, shape = model_files.load_public(folder, prepared)
  model_config = t5_config.require(shape, folder)
  params = t5_checkpoints.flatten(params)
  key = space.key(f"{task.result_path} start {digest}")
  start, public = _split(config, params, key)
  on_device, mesh, rows_multiple = _spread(config)
  if mesh is None:
    collection = functools.partial(_encode_collection, config, space, prepared)
    records |= encode_once(
      config, start, public, model_config, records, collection
    )
  owners = records.pop("users", None)
  if owners is not None:
    records = users.grouped(records, owners, prepared.queries_per_user)
  if config.dropout_rate > 0:  # masks belong to records, not to positions
    records["example_id"] = np.arange(len(records["targets"]))
  trained, fields = private_training.train(
    task,
    private_training.Settings(
      config=config,
      epsilon=epsilon,
      mechanism="generator",
      has_dropout=config.dropout_rate > 0,
    ),
    dp_step.Training(
      grad_fn=lambda public: _cut(
        grad_fn(on_device, public, model_config, of_users=owners is not None),
        config,
        records["targets"],
        mesh,
      ),
      public=public,
      params=start,
      records=records,
      mesh=mesh,
      rows_multiple=rows_multiple,
    ),
  )
  if config.adapter is None:
    params = {**public, **trained}
  else:
    params = config.adapter.merge(public, trained)
  return model_files.save_checkpoint(
    task,
    task.folder(private=math.isinf(epsilon)),
    t5_checkpoints.unflatten(params),
    model_config,
    kind="generator",
    prefix=config.prefix,
    **fields,
  )


def grad_fn(
  config: Config,
  public: Mapping[str, Any],
  model_config: t5_config.T5Config,
  *,
  of_users: bool = False,
) -> optim.ClippedGrad | scanned.ScannedGrad:
  """Builds the clipped gradient of the private step.

  Args:
    config: clip norm, adapter, and settings of the computation.
    public: fixed parameters by path; abstract ones suffice.
    model_config: shape of the T5.
    of_users: whether a record is a user with several queries (`users.grouped`).

  Returns:
    A function of (trained parameters by path, batch) to the clipped sum.
  """
  loss_of = functools.partial(
    loss_fn,
    public=scanned.stack(public) if config.scan_layers else public,
    model_config=dataclasses.replace(
      model_config,
      dropout_rate=config.dropout_rate,
      dtype=config.dtype or model_config.dtype,
      remat=config.remat,
      scan_layers=config.scan_layers,
    ),
    adapter=config.adapter,
    is_divided=config.mesh.tensor > 1,
  )
  clipped = optim.clipped_grad(
    users.mean_loss(loss_of) if of_users else loss_of,
    l2_clip_norm=config.clip_norm,
    strategy=config.strategy,
    microbatch_size=config.microbatch_size,
  )
  return scanned.ScannedGrad(stacked=clipped) if config.scan_layers else clipped


def _cut(clipped, config: Config, targets: np.ndarray, mesh) -> Any:
  """Returns the gradient that computes short queries at half the length, if it
  may."""
  if (
    config.microbatch_size is None  # a single microbatch has all lengths
    or config.dropout_rate > 0  # masks have the length of what they hide
    or mesh is not None  # devices wait for the one with the longest
    or targets.ndim > 2  # of users, each of several lengths
  ):
    return clipped
  length = targets.shape[1]
  lengths = tuple(sorted({max(1, length // 2), length}))
  return by_length.ByLength(
    gradient=clipped,
    field="targets",
    aligned_fields=("begun",),
    lengths=lengths,
  )


def loss_fn(
  trained,
  batch,
  key=None,
  *,
  public,
  model_config,
  adapter=None,
  is_divided=False,
) -> jax.Array:
  """Returns each record's mean cross-entropy per target token, [batch].

  Args:
    trained: parameters by path; gradients are taken of these.
    batch: inputs, [batch, document], and targets, [batch, query], of token ids;
      optionally the outputs of `encode_once` for both.
    key: key of dropout; None: no dropout.
    public: the other parameters, by path.
    model_config: shape of the T5.
    adapter: adapter that `trained` belongs to, if it is no part of the model.
    is_divided: whether devices hold different rows of the table of logits. Each
      device then makes the logits of its own rows; part by part, devices would
      have to exchange them.

  Returns:
    [batch], nats per token.
  """
  if adapter is None:
    collections = {"params": {**public, **trained}}
  else:
    collections = {"params": public, **adapter.variables(trained)}
  model: Callable[..., Any] = functools.partial(
    t5.Transformer(model_config).apply,
    {k: t5_checkpoints.unflatten(v) for k, v in collections.items()},
    enable_dropout=key is not None,
    rngs=None if key is None else {"dropout": key},
  )
  targets, encoded, begun = batch["targets"], batch.get("encoded"), None
  read = [batch["inputs"], t5.shift_right(targets)]
  if "begun" in batch:
    begun = t5.Begun(batch["begun"], encodings.num_begun(trained, model_config))
  # The name of the table's adapter begins with the table's name.
  name = t5.output_path(model_config).removesuffix("/kernel")
  if not is_divided and not any(path.startswith(name) for path in trained):
    outputs = model(*read, encoded, begun, method="outputs")
    table = t5.output_table(collections["params"], model_config)
    return seq2seq.cross_entropy_of_states(outputs, table, targets)
  if encoded is None:
    logits = model(*read)
  else:
    logits = model(encoded, *read, begun, method="decode")
  return seq2seq.cross_entropy(logits, targets)


def encode_once(
  config: Config,
  trained: Mapping[str, Any],
  public: Mapping[str, Any],
  model_config: t5_config.T5Config,
  records: Mapping[str, np.ndarray],
  collection: Callable[[Any, Any], encodings.Encodings | None] | None = None,
) -> dict[str, np.ndarray]:
  """Runs the layers that training does not change, once for all records.

  A record is drawn many times; these layers run once for it. Each output is of
  one record and public parameters, so that losses stay those of single records.
  Outputs are computed in blocks of one shape, so that one more record does not
  change the rounding of others.

  Args:
    config: settings of what is trained, and of the data type.
    trained: initial values of the trained parameters, by path.
    public: the other parameters, by path.
    model_config: shape of the T5.
    records: arrays with "inputs", [record, document], and "targets", [record,
      query].
    collection: function from parameters and shape to the encoded documents of
      the whole collection, cached for all generators; None: there is none.

  Returns:
    For `loss_fn`: "encoded", [record, document, dim], outputs of the encoder;
    and "begun", [record, query, dim], outputs of the first layers of the
    decoder, if these are not trained. Neither is returned if the encoder is
    trained or has dropout. Of the two, in this order, only as many are returned
    as 512 MiB hold.
  """
  dtype = jnp.dtype(config.dtype or model_config.dtype)
  shape = dataclasses.replace(model_config, dropout_rate=0.0, dtype=dtype.name)
  read, targets = records["inputs"], records["targets"]
  stays = (
    config.adapter is None
    and config.dropout_rate == 0
    and not any(path.startswith(encodings.PARTS) for path in trained)
  )
  if not stays or encodings.num_bytes(read.size, shape) > encodings.MOST_BYTES:
    return {}
  encoded = _encoded.encode_records(public, shape, read, collection)
  layers, size = encodings.num_begun(trained, shape), read.size + targets.size
  if (
    not layers
    or config.scan_layers
    or encodings.num_bytes(size, shape) > encodings.MOST_BYTES
  ):
    return {"encoded": encoded}
  begun = encodings.begin(public, shape, read, encoded, targets, layers=layers)
  return {"encoded": encoded, "begun": begun}


def _encode_collection(
  config: Config,
  space: workspace.Folders,
  prepared: results.PreparedData,
  params: Mapping[str, Any],
  shape: t5_config.T5Config,
) -> encodings.Encodings | None:
  """Encodes all documents, if the outputs fit into memory."""
  passages = prepared_files.document_tokens(space, prepared)
  return _encoded.encode_collection(
    params,
    shape,
    passages.cut_at(prepared.document_length),
    prepared_files.vocabulary(space, prepared),
    prefix=config.prefix,
  )


def _spread(config: Config):
  """Returns the settings of one device, the mesh of all, and rows of a step."""
  mesh = mesh_lib.of_all(config.mesh)
  if mesh is None:
    return config, None, 1
  size = config.microbatch_size
  if size is not None:  # per device, at most its share of the batch
    size = min(size, -(-config.batch_size // mesh_lib.batch_ways(mesh)))
    config = dataclasses.replace(config, microbatch_size=size)
  return config, mesh, sharded_grad.rows_multiple(mesh, size)


def _split(config: Config, params: Mapping[str, Any], key: jax.Array):
  """Returns the initial values of trained parameters and the fixed ones, by
  path."""
  if config.adapter is not None:
    return config.adapter.init(params, key), params
  return model_files.split_parameters(
    params, config.trained, "finetune_dp.trained"
  )


def _read_records(
  config: Config, space: workspace.Folders, prepared: results.PreparedData
) -> dict[str, np.ndarray]:
  """Reads the train pairs as inputs and targets of a generator; private.

  Args:
    config: settings with the prefix before each document.
    space: the working directory.
    prepared: the data.

  Returns:
    "inputs", [pair, document], and "targets", [pair, query], of token ids; and
    "users", [pair], if these are the unit.
  """
  collection = prepared_files.document_tokens(space, prepared)
  documents = collection.cut_at(prepared.document_length).tokens
  vocabulary = prepared_files.vocabulary(space, prepared)
  folder = space.root / prepared.private_directory
  pairs = prepared_files.arrays(space, prepared, folder / "train.npz")
  read = documents[pairs["passages"]]  # not the whole collection
  source = prepared_files.add_prefix(read, vocabulary, config.prefix)
  records = {"inputs": source, "targets": pairs["tokens"]}
  if prepared.queries_per_user:
    records["users"] = pairs["users"]
  return records


def _add_canaries(config, vocabulary, prepared, canaries, records):
  planted = canaries_lib.tokenize(
    canaries,
    vocabulary,
    prefix=config.prefix,
    document_length=prepared.document_length,
    query_length=prepared.query_length,
  )
  rows = canaries_lib.repeated(canaries)
  more = {name: values[rows] for name, values in planted.items()}
  if "users" in records:  # each of them is a user of its own
    more["users"] = records["users"].max() + 1 + np.arange(len(rows))
  return {k: np.concatenate([records[k], more[k]]) for k in records}


STAGE = stage.Stage(
  name="finetune_dp",
  result=results.Checkpoint,
  config=Config,
  check=check,
  plan=lambda plan: {row.queries: row for row in plan.generators},
  job=make_job,
  training=plan_training,
  run=run,
  needs=("prepare_data",),
  starts_from="checkpoint",
  needs_secret=True,
  together=True,
)
