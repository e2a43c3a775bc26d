"""Training on meshes: the same run, whatever the shape."""

import dataclasses
import functools
import json
import pathlib

import hosts
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step, loop, mesh, sharded_grad

NUM, STEPS = 40, 4
FSDP = mesh.Shape(data=1, fsdp=8)
TENSOR = mesh.Shape(data=1, tensor=8)


VOCAB, DROPOUT = 144, 0.1
LEAVES = {
  "token_embedder/embedding": (VOCAB, 128),
  "encoder/layers_0/mlp/wi_0/kernel": (128, 136),
  "encoder/layers_0/mlp/wo/kernel": (136, 128),
  "encoder/encoder_norm/scale": (128,),
  "decoder/layers_0/encoder_decoder_attention/query/kernel": (128, 24),
  "decoder/layers_0/encoder_decoder_attention/key/kernel": (128, 24),
  "decoder/logits_dense/kernel": (128, VOCAB),
}


def loss_fn(params, batch, key=None):
  """A network whose parameters have names of T5's, by which they are split."""
  embedding, wi, wo, scale, query, keys, head = (params[x] for x in LEAVES)
  x = embedding[batch["inputs"]]
  h = jax.nn.gelu(x @ wi)
  if key is not None:
    kept = jax.random.bernoulli(key, 1 - DROPOUT, h.shape)
    h = jnp.where(kept, h / (1 - DROPOUT), 0.0)
  x = (x + h @ wo) * scale[None, None]
  x *= jax.lax.rsqrt(1e-6 + jnp.mean(x**2, axis=2, keepdims=True))
  y = embedding[t5.shift_right(batch["targets"])]
  scores = jnp.einsum("bqd,bkd->bqk", y @ query, x @ keys)
  y += jax.nn.softmax(scores) @ x
  return seq2seq.cross_entropy(y @ head, batch["targets"])


@functools.cache
def start():
  rng = np.random.default_rng(0)
  return {
    path: (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
    for path, shape in LEAVES.items()
  }


def make_records():
  rng = np.random.default_rng(0)
  return {
    name: rng.integers(2, VOCAB, (NUM, length), dtype=np.int32)
    for name, length in (("inputs", 10), ("targets", 6))
  }


class Stop(Exception):
  """Stands for the process being killed."""


@dataclasses.dataclass(frozen=True)
class Stopping:
  """A sampler whose process is killed when it should draw a batch."""

  sampler: sampling.Poisson
  stop_at: int
  expected_batch_size = property(lambda self: self.sampler.expected_batch_size)

  def batch(self, seed, step):
    if step == self.stop_at:
      raise Stop
    return self.sampler.batch(seed, step)


SAMPLER = sampling.Poisson(
  num_examples=NUM, expected_batch_size=12, max_batch_size=20
)


def train(root, shape, *, sampler=SAMPLER):
  """Returns trained parameters and the metrics of every step."""
  on = None if shape is None else mesh.make(shape)
  training = dp_step.Training(
    grad_fn=optim.clipped_grad(
      loss_fn, l2_clip_norm=0.5, strategy="bookkeeping", microbatch_size=2
    ),
    params=start(),
    records=make_records(),
    mesh=on,
    rows_multiple=1 if on is None else sharded_grad.rows_multiple(on, 2),
  )
  mechanism = dp_step.Mechanism(
    sampler=sampler,
    noise_multiplier=0.6,
    optimizer=dp_step.Optimizer(
      name="dp_adafactor", learning_rate=0.05, steps=STEPS
    ),
    batch_seed=(5, 6),
    noise_key=jax.random.key(3),
    dropout_key=jax.random.key(9),  # masks belong to rows, wherever they lie
  )
  files = loop.Files.below(root, "test")
  settings = loop.Settings(log_every=1, save_seconds=0.0)
  params = dp_step.train(training, mechanism, files, settings)
  return params, read_metrics(root)


def read_metrics(root):
  lines = (root / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def assert_same(found, expected):
  """Holds parameters and metrics together, to float32's rounding."""
  params, metrics = found
  expected_params, expected_metrics = expected
  for path, leaf in params.items():
    error = np.abs(leaf - expected_params[path]).max()
    assert error <= 1e-5 * np.abs(leaf).max(), path
  for one, other in zip(metrics, expected_metrics, strict=True):
    assert one == pytest.approx(other, rel=1e-5, abs=2e-6)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
  return train(tmp_path_factory.mktemp("one"), None)


@pytest.mark.parametrize(
  "shape", [mesh.Shape(), mesh.Shape(data=2, fsdp=2, tensor=2)]
)
def test_a_mesh_changes_neither_losses_nor_parameters(
  tmp_path, on_one_device, shape
):
  assert_same(train(tmp_path, shape), on_one_device)


def zeros():
  return {
    "encoder/layers_0/mlp/wi_0/kernel": np.zeros((520, 264), np.float32),
    "decoder/logits_dense/kernel": np.zeros((136, 328), np.float32),
    "encoder/encoder_norm/scale": np.zeros(1037, np.float32),
  }


def noise(shape, params):
  """Returns the noise of one step, and the program that made it."""
  transform = optim.privatize(
    l2_sensitivity=0.7,
    noise_multiplier=1.3,
    denominator=3.0,
    key=jax.random.key(5),
  )

  def make(total):
    return transform.update(total, transform.init(total))[0]

  where = None
  if shape is not None:
    where = mesh.shardings(params, params, mesh.make(shape))
    params = mesh.place(params, where)
  made = jax.jit(make, out_shardings=where).lower(params).compile()
  return made(params), made.as_text()


@pytest.fixture(scope="module")
def noise_on_one_device():
  return jax.tree.map(np.asarray, noise(None, zeros())[0])


@pytest.mark.parametrize("shape", [FSDP, TENSOR], ids=["fsdp", "tensor"])
def test_noise_is_the_same_to_the_bit_and_made_where_it_is_added(
  shape, noise_on_one_device
):
  found, program = noise(shape, zeros())
  for path, leaf in found.items():
    assert np.array_equal(np.asarray(leaf), noise_on_one_device[path])
    assert np.std(leaf) == pytest.approx(0.7 * 1.3 / 3, rel=0.1)
  assert "f32[520,264]" not in program
  assert "[136,328]" not in program


def test_a_killed_training_goes_on_in_two_processes_and_in_another_mesh(
  tmp_path, on_one_device, noise_on_one_device
):
  def steps():
    return [path.name for path in (tmp_path / "state").glob("step_*")]

  with pytest.raises(Stop):
    train(tmp_path, FSDP, sampler=Stopping(SAMPLER, 1))
  assert steps() == ["step_1"]
  script = pathlib.Path(__file__).with_name("mesh_script.py")
  hosts.ended(hosts.launch(script, tmp_path))
  with np.load(tmp_path / "noise.npz") as found:
    for path, leaf in found.items():
      assert np.array_equal(leaf, noise_on_one_device[path])
  assert steps() == ["step_3"]
  assert_same(train(tmp_path, TENSOR), on_one_device)


def test_parameters_and_moments_are_split_by_their_axes():
  shapes = {
    "token_embedder/embedding": (144, 128),
    "encoder/layers/mlp/wo/kernel": (3, 136, 128),
    "encoder/relpos_bias/rel_embedding": (6, 32),
    "encoder/layers_0/attention/query/a": (128, 4),
  }
  params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
  sampler = sampling.CyclicPoisson.with_margin(
    num_examples=100, expected_batch_size=5, cycle_length=3
  )
  noise = optim.banded(sampler=sampler, steps=8, bands=3)
  tx = optim.dp_adam(
    0.1, l2_sensitivity=1.0, noise_multiplier=1.0, denominator=1.0,
    key=jax.random.key(0), noise=noise,
  )  # fmt: skip
  state = jax.eval_shape(tx.init, params)
  on = mesh.make(mesh.Shape(data=1, fsdp=2, tensor=4))
  where = mesh.shardings(params, params, on)
  assert {path: tuple(one.spec) for path, one in where.items()} == {
    "token_embedder/embedding": ("tensor", "fsdp"),
    "encoder/layers/mlp/wo/kernel": (None, "tensor", "fsdp"),
    "encoder/relpos_bias/rel_embedding": (None, None),  # 6 heads, 4 devices
    "encoder/layers_0/attention/query/a": (None, None),
  }
  held = mesh.shardings(state, params, on)
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(held), strict=True)
  for leaf, sharding in pairs:
    sharding.shard_shape(leaf.shape)  # raises where it does not divide
    if leaf.shape[-2:] == (144, 128):
      assert tuple(sharding.spec)[-2:] == ("tensor", "fsdp")


@pytest.mark.parametrize(
  "sizes, said",
  [
    (dict(fsdp=3), "data=-1 x fsdp=3 x tensor=1: set MESH_DATA"),
    (dict(data=3, fsdp=4), "a mesh of 8 devices"),
    (dict(data=0), "mesh.Shape.data of 1 or more, or -1, got data=0"),
    (dict(tensor=-1), "mesh.Shape.tensor of 1 or more, got tensor=-1"),
  ],
)
def test_sizes_that_fit_no_devices_are_refused(sizes, said):
  with pytest.raises(ValueError, match=said):
    mesh.make(mesh.Shape(**sizes))


def test_one_process_may_leave_devices_idle():
  assert mesh.make(mesh.Shape(data=1, tensor=2)).size == 2


def test_a_process_reads_the_rows_that_its_devices_hold():
  asked = []

  class Records:
    shape = (40, 3)

    def __getitem__(self, rows):
      asked.append(np.asarray(rows).tolist())
      return np.repeat(rows[:, None], 3, axis=1)

  on = mesh.make(mesh.Shape(data=4, tensor=2))
  rows = np.arange(39, 31, -1)
  placed = mesh.place_rows(Records(), rows, mesh.batch_sharding(on))
  assert np.asarray(placed)[:, 0].tolist() == rows.tolist()
  assert all(len(one) == 2 for one in asked)
