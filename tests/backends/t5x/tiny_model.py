"""A small model of T5X's, its state and our trainer, built without gin."""

import functools

import jax
import numpy as np
import seqio
import tiny_task  # registers the task
from t5x import adafactor, models, partitioning, utils
from t5x.examples.t5 import network

from synthq_jax.backends.t5x import batches, dp_trainer, settings
from synthq_jax.backends.t5x import release as release_lib
from synthq_jax.data import feature_converters
from synthq_jax.privacy import sampling

LENGTHS = {"inputs": 16, "targets": 8}
ROWS = 16
SETTINGS = settings.Settings(
  num_examples=tiny_task.NUM_EXAMPLES,
  expected_batch_size=8,
  max_batch_size=ROWS,
  steps=5,
  epsilon=8.0,
  l2_clip_norm=0.1,
)


def make_release(folder, promised=SETTINGS, name="model"):
  return release_lib.Release(
    promised, model_dir=folder / name, secret_file=folder / "secret"
  )


def t5x_adafactor():
  return adafactor.Adafactor(
    logical_factor_rules=adafactor.standard_logical_factor_rules()
  )


def make_model(optimizer=None, dropout=0.0, **options):
  shape = network.T5Config(
    vocab_size=384,
    dtype="float32",
    emb_dim=8,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=3,
    mlp_dim=16,
    mlp_activations=("gelu", "linear"),
    dropout_rate=dropout,
    logits_via_embedding=False,
  )
  return models.EncoderDecoderModel(
    module=network.Transformer(config=shape),
    input_vocabulary=seqio.ByteVocabulary(),
    output_vocabulary=seqio.ByteVocabulary(),
    optimizer_def=optimizer or t5x_adafactor(),
    z_loss=1e-4,
    **options,
  )


@functools.cache
def make_records():
  return feature_converters.read_task(
    "synthq_tiny", "train", LENGTHS, seqio.EncDecFeatureConverter(pack=False)
  )


def make_batch(real=ROWS):
  """The first `real` examples and padding."""
  drawn = sampling.Batch(
    indices=np.where(np.arange(ROWS) < real, np.arange(ROWS), -1),
    is_padding=np.arange(ROWS) >= real,
  )
  records = batches.with_ids(make_records())
  return sampling.take(records, drawn)


def make_state(model, side=1):
  """A partitioner of side x side devices, the state at random, its axes."""
  if isinstance(model.optimizer_def, adafactor.Adafactor):
    return _adafactor_state(side)
  return _new_state(model, side)


@functools.cache
def _adafactor_state(side):
  return _new_state(make_model(), side)


def _new_state(model, side):
  partitioner = partitioning.PjitPartitioner(
    num_partitions=1,
    logical_axis_rules=partitioning.standard_logical_axis_rules(),
  )
  # On CPUs, T5X would spread the model over all devices.
  devices = np.array(jax.devices()[: side**2]).reshape(side, side)
  partitioner.mesh = jax.sharding.Mesh(devices, ("data", "model"))
  initializer = utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes={k: x.shape for k, x in make_batch().items()},
    partitioner=partitioner,
  )
  state = initializer.from_scratch(jax.random.PRNGKey(3))
  return partitioner, state, initializer.train_state_axes


def make_trainer(model, release, side=1, trainer_cls=None, **options):
  partitioner, state, axes = make_state(model, side)
  arguments = {
    "model": model,
    "train_state": state,
    "partitioner": partitioner,
    "eval_names": [],
    "summary_dir": None,
    "train_state_axes": axes,
    "rng": jax.random.PRNGKey(0),
    "learning_rate_fn": lambda step: 0.01 + 0.0 * step,
    "release": release,
    "strategy": "bookkeeping",
    **options,
  }
  return (trainer_cls or dp_trainer.DPTrainer)(**arguments)
