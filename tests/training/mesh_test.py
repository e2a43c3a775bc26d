"""Training on meshes: the same run, whatever the shape."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop, mesh, sharded_grad

CONFIG = t5_config.T5Config(
  vocab_size=144,
  emb_dim=128,
  num_heads=6,
  head_dim=4,
  mlp_dim=136,
  num_encoder_layers=1,
  num_decoder_layers=1,
  mlp_activations=("gelu", "linear"),
  logits_via_embedding=False,
)
NUM, STEPS = 40, 5
SHAPES = {
  "data": mesh.Shape(),
  "fsdp": mesh.Shape(data=1, fsdp=8),
  "tensor": mesh.Shape(data=1, tensor=8),
  "all": mesh.Shape(data=2, fsdp=2, tensor=2),
}


def loss_fn(params, batch, key=None):
  logits = t5.Transformer(CONFIG).apply(
    {"params": t5_checkpoints.unflatten(params)},
    batch["inputs"],
    t5.shift_right(batch["targets"]),
    enable_dropout=key is not None,
    rngs=None if key is None else {"dropout": key},
  )
  return seq2seq.cross_entropy(logits, batch["targets"])


@functools.cache
def start():
  return t5_checkpoints.flatten(t5.init_params(CONFIG, jax.random.key(0)))


def make_records():
  rng = np.random.default_rng(0)
  return {
    name: rng.integers(2, CONFIG.vocab_size, (NUM, length), dtype=np.int32)
    for name, length in (("inputs", 10), ("targets", 6))
  }


def train(root, shape, *, steps=STEPS, **changes):
  """Returns trained parameters and the metrics of every step."""
  on = None if shape is None else mesh.make(shape)
  options = dict(optimizer="dp_adafactor", learning_rate=0.05) | changes
  params = dp_step.train(
    optim.clipped_grad(
      loss_fn, l2_clip_norm=0.5, strategy="bookkeeping", microbatch_size=2
    ),
    start(),
    make_records(),
    sampler=sampling.Poisson(
      num_examples=NUM, expected_batch_size=12, max_batch_size=20
    ),
    noise_multiplier=0.6,
    steps=steps,
    batch_seed=(5, 6),
    noise_key=jax.random.key(3),
    directory=root / "state",
    metrics_path=root / "metrics.jsonl",
    description="test",
    settings=loop.Settings(log_every=1, progress=False),
    mesh=on,
    rows_multiple=1 if on is None else sharded_grad.rows_multiple(on, 2),
    **options,
  )
  lines = (root / "metrics.jsonl").read_text().splitlines()
  return params, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
  return train(tmp_path_factory.mktemp("one"), None)


@pytest.mark.parametrize("name", SHAPES)
def test_a_mesh_changes_neither_losses_nor_parameters(
  tmp_path, on_one_device, name
):
  params, metrics = train(tmp_path, SHAPES[name])
  expected, expected_metrics = on_one_device
  for path, leaf in params.items():
    assert np.abs(leaf - expected[path]).max() <= 1e-5 * np.abs(leaf).max(), (
      path
    )
  for one, other in zip(metrics, expected_metrics, strict=True):
    assert one == pytest.approx(other, rel=1e-5, abs=2e-6)
