"""Private fine-tuning: which parameters move, and whose gradients are clipped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax import optim
from synthq_jax.losses import seq2seq
from synthq_jax.models import (
  device_rows,
  encodings,
  lora,
  t5,
  t5_checkpoints,
)
from synthq_jax.stages import finetune_dp
from synthq_jax.training import mesh as mesh_lib

CONFIG = random_t5.config(vocab_size=23, num_decoder_layers=2)
LAST_LAYER = r"decoder/(layers_1|decoder_norm)/.*"


def start():
  return t5_checkpoints.flatten(random_t5.params(CONFIG))


@pytest.fixture(name="params", scope="module")
def _params():
  return start()


def split(params, pattern):
  config = finetune_dp.Config(trained=pattern)
  return finetune_dp._split(config, params, jax.random.key(0))


def batch():
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 23, (6, 5)).astype(np.int32)
  targets = rng.integers(3, 23, (6, 4)).astype(np.int32)
  targets[2, 2:] = 0
  return {"inputs": jnp.asarray(inputs), "targets": jnp.asarray(targets)}


@functools.cache
def clipped(pattern, strategy):
  trained, public = split(start(), pattern)
  loss = functools.partial(
    finetune_dp.loss_fn, public=public, model_config=CONFIG
  )
  grad_fn = optim.clipped_grad(loss, l2_clip_norm=0.3, strategy=strategy)
  return jax.jit(grad_fn)(trained, batch())


@pytest.mark.parametrize("pattern", [".*", LAST_LAYER, ".*/(query|scale).*"])
def test_every_strategy_clips_the_trained_parameters_alone(params, pattern):
  expected, ours = clipped(pattern, "vmap")
  got, theirs = clipped(pattern, "bookkeeping")
  assert set(got) == set(expected)
  for name, value in expected.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5 * scale)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
  total = np.sqrt(sum(np.sum(np.square(v)) for v in got.values()))
  assert 0 < total <= 6 * 0.3 * 1.00001
  if pattern == LAST_LAYER:
    assert 0 < len(got) < len(params)
    assert all(name.startswith("decoder/") for name in got)


@pytest.mark.parametrize(
  ("trained", "tied"),
  [
    # The table of the logits is a constant.
    (LAST_LAYER, True),
    ("token_embedder/.*", False),
    # It is trained.
    ("token_embedder/.*", True),
    ("decoder/.*", False),
    (".*", True),
  ],
)
def test_losses_are_those_of_all_logits_whatever_is_trained(trained, tied):
  """Where the table is a constant, logits are not written: nobody can tell."""
  shape = dataclasses.replace(CONFIG, logits_via_embedding=tied)
  params = t5_checkpoints.flatten(random_t5.params(shape))
  config = finetune_dp.Config(trained=trained)
  own, public = finetune_dp._split(config, params, jax.random.key(0))

  def written(own):
    tree = t5_checkpoints.unflatten({**public, **own})
    logits = t5.Transformer(shape).apply(
      {"params": tree},
      batch()["inputs"],
      t5.shift_right(batch()["targets"]),
    )
    return seq2seq.cross_entropy(logits, batch()["targets"])

  loss = functools.partial(
    finetune_dp.loss_fn, public=public, model_config=shape
  )

  def losses_and_gradient(losses):
    def made(own):
      found, pull_back = jax.vjp(losses, own)
      return found, pull_back(jnp.ones_like(found))[0]

    return jax.jit(made)(own)

  ours, got = losses_and_gradient(lambda own: loss(own, batch()))
  theirs, expected = losses_and_gradient(written)
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)
  for path, value in expected.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(got[path], value, rtol=0, atol=1e-5 * scale)
  program = jax.make_jaxpr(loss)(own, batch())
  is_constant = t5.output_path(shape) not in own
  assert ("custom_vjp_call" in str(program)) == is_constant


@pytest.mark.parametrize("tensor", [1, 2])
def test_devices_that_divide_the_table_make_logits_of_their_own_rows(tensor):
  own, public = split(start(), LAST_LAYER)
  mesh = mesh_lib.Shape(tensor=tensor)
  config = finetune_dp.Config(trained=LAST_LAYER, mesh=mesh)
  made = finetune_dp.grad_fn(config, public, CONFIG)
  program = str(jax.make_jaxpr(made.loss_fn)(own, batch()))
  assert ("custom_vjp_call" in program) == (tensor == 1)


def encoded(params, records, pattern=LAST_LAYER, **changes):
  trained, public = split(params, pattern)
  config = finetune_dp.Config(trained=pattern, **changes)
  records = {k: np.asarray(v) for k, v in records.items()}
  return finetune_dp.encode_once(config, trained, public, CONFIG, records)


def flat(tree):
  return np.concatenate([np.ravel(tree[path]) for path in sorted(tree)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_layers_that_ran_once_give_the_same_gradients(params, dtype):
  trained, public = split(params, LAST_LAYER)
  config = finetune_dp.Config(clip_norm=0.3, dtype=dtype)
  grad_fn = jax.jit(finetune_dp.grad_fn(config, public, CONFIG))
  kept = encoded(params, batch(), dtype=dtype)
  shapes = {"encoded": (6, 5, CONFIG.emb_dim), "begun": (6, 4, CONFIG.emb_dim)}
  assert {name: values.shape for name, values in kept.items()} == shapes
  assert {values.dtype for values in kept.values()} == {jnp.dtype(dtype)}
  expected, theirs = grad_fn(trained, batch())
  got, ours = grad_fn(trained, batch() | kept)
  if dtype == "float32":
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
    for path, value in expected.items():
      scale = np.abs(value).max()
      np.testing.assert_allclose(got[path], value, rtol=0, atol=1e-5 * scale)
  else:  # as far from single precision as what is computed in one program
    exact = flat(clipped(LAST_LAYER, "bookkeeping")[0])
    off = np.linalg.norm(flat(expected) - exact)
    assert 0 < off < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(flat(got) - exact) < 1.5 * off
  for name, values in kept.items():  # and they are what is read
    moved = {**kept, name: values + np.asarray(0.1, dtype)}
    assert not np.allclose(
      grad_fn(trained, batch() | moved)[1].norms, ours.norms, rtol=0.01
    )


@pytest.mark.parametrize(
  "pattern, layers",
  [
    (LAST_LAYER, 1),
    ("decoder/layers_1/mlp/wo/kernel", 1),
    ("decoder/layers_0/mlp/wo/kernel", 0),
    ("decoder/(layers_1|relpos_bias)/.*", 0),  # every layer has it
  ],
)
def test_layers_begin_to_change_at_the_first_that_is_trained(
  params, pattern, layers
):
  assert encodings.num_begun(split(params, pattern)[0], CONFIG) == layers


def test_what_is_kept_of_a_document_is_of_that_document_alone(
  params, monkeypatch
):
  monkeypatch.setattr(device_rows, "CPU_ROWS", 4)
  kept = encoded(params, batch())
  assert set(kept) == {"encoded", "begun"}
  for row in range(6):
    others, one = (
      {name: np.asarray(values)[rows] for name, values in batch().items()}
      for rows in (np.delete(np.arange(6), row), slice(row, row + 1))
    )
    without, alone = encoded(params, others), encoded(params, one)
    for name, values in kept.items():
      np.testing.assert_array_equal(
        without[name], np.delete(values, row, axis=0)
      )
      np.testing.assert_array_equal(alone[name][0], values[row])


def test_records_get_what_was_made_of_the_whole_collection(params):
  """Those of canaries, whose documents are in none, are made besides."""
  records = {k: np.asarray(v) for k, v in batch().items()}
  tokens = np.concatenate([records["inputs"][[4, 0, 3, 1]], np.full((3, 5), 7)])
  tokens = tokens.astype(np.int32)
  asked = []

  class Known:
    def __init__(self, made):
      self.tokens, self._made = tokens, made

    def rows(self, places):
      asked.append(places.tolist())
      return self._made.rows(places)

  trained, public = split(params, LAST_LAYER)
  got = finetune_dp.encode_once(
    finetune_dp.Config(trained=LAST_LAYER),
    trained,
    public,
    CONFIG,
    records,
    lambda params, shape: Known(encodings.kept(params, shape, tokens)),
  )["encoded"]
  np.testing.assert_allclose(
    got, encoded(params, batch())["encoded"], atol=1e-5
  )
  assert asked == [list(range(7))]  # all, whoever was asked about


@pytest.mark.parametrize(
  "pattern, changes",
  [
    (".*", {}),
    ("(decoder|encoder/layers_0)/.*", {}),
    ("(decoder|token_embedder)/.*", {}),
    (LAST_LAYER, {"dropout_rate": 0.1}),
    (".*", {"adapter": lora.LoRA(rank=2, kernels="decoder/.*/kernel")}),
  ],
)
def test_an_encoder_that_training_changes_runs_in_each_step(
  params, pattern, changes
):
  assert not encoded(params, batch(), pattern, **changes)


def test_outputs_too_large_to_keep_are_computed_in_each_step(
  params, monkeypatch
):
  kept = encoded(params, batch())
  size, more = kept["encoded"].nbytes, kept["begun"].nbytes
  for most, names in (
    (size + more, {"encoded", "begun"}),
    (size + more - 1, {"encoded"}),
    (size, {"encoded"}),
    (size - 1, set()),
  ):
    monkeypatch.setattr(encodings, "MOST_BYTES", most)
    assert set(encoded(params, batch())) == names


@functools.partial(jax.jit, static_argnames="adapter")
def loss(trained, public, adapter=None):
  return finetune_dp.loss_fn(
    trained, batch(), public=public, model_config=CONFIG, adapter=adapter
  )


def test_the_loss_is_that_of_the_whole_model(params):
  trained, public = split(params, LAST_LAYER)
  whole, none = split(params, ".*")
  assert not none
  np.testing.assert_array_equal(
    loss(trained, public=public), loss(whole, public={})
  )


def test_a_pattern_that_matches_nothing_is_refused(params):
  with pytest.raises(ValueError, match="trained='decodr.*there are decoder/"):
    split(params, "decodr/.*")


LORA = lora.LoRA(rank=2, kernels=".*/kernel")


@functools.cache
def adapted(**changes):
  """The clipped sum of an adapter that has begun to move."""
  config = finetune_dp.Config(adapter=LORA, clip_norm=0.3)
  first, public = finetune_dp._split(config, start(), jax.random.key(0))
  rng = np.random.default_rng(0)
  moved = {k: v + rng.normal(size=v.shape) * 0.1 for k, v in first.items()}
  config = dataclasses.replace(config, **changes)
  grad_fn = jax.jit(finetune_dp.grad_fn(config, public, CONFIG))
  total, aux = grad_fn(moved, batch())
  assert set(total) == set(first)
  return total, aux


@pytest.mark.parametrize(
  "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_an_adapter_is_clipped_alone_and_in_every_form(params, scan_layers):
  expected, theirs = adapted(strategy="vmap")
  got, aux = adapted(scan_layers=scan_layers, remat=True)
  assert not set(got) & set(params)
  np.testing.assert_allclose(aux.norms, theirs.norms, rtol=1e-5)
  for path, value in expected.items():
    np.testing.assert_allclose(
      got[path], value, rtol=0, atol=1e-5 * np.abs(value).max()
    )


def test_training_starts_from_the_public_model_with_lora(params):
  config = finetune_dp.Config(adapter=LORA)
  start, public = finetune_dp._split(config, params, jax.random.key(0))
  np.testing.assert_allclose(
    loss(start, public, config.adapter), loss({}, public), rtol=1e-6
  )


def test_half_precision_and_dropout_reach_the_model(params):
  config = finetune_dp.Config(dtype="bfloat16", dropout_rate=0.2)
  start, public = finetune_dp._split(config, params, jax.random.key(0))
  made = finetune_dp.grad_fn(config, public, CONFIG).loss_fn
  assert made.keywords["model_config"].dtype == "bfloat16"
  computed = jax.jit(made)
  half = computed(start, batch())
  full = loss(start, public={})
  assert 0 < np.abs(half - full).max() < 0.05
  dropped = computed(start, batch(), jax.random.key(0))
  assert np.abs(dropped - half).max() > 0.05


@pytest.mark.parametrize(
  ("shape", "size", "rows", "multiple"),
  [
    ((8, 1, 1), 4, 4, 32),  # as many as on a machine of its own
    ((2, 1, 4), 4, 4, 8),
    ((8, 1, 1), 64, 8, 64),  # no more than a device has of 64
    ((8, 1, 1), None, None, 8),
  ],
)
def test_the_rows_at_once_are_those_of_each_device(shape, size, rows, multiple):
  mesh = mesh_lib.Shape(**dict(zip(mesh_lib.AXES, shape, strict=True)))
  config = finetune_dp.Config(batch_size=64, microbatch_size=size, mesh=mesh)
  on_device, _, padded = finetune_dp._spread(config)
  assert (on_device.microbatch_size, padded) == (rows, multiple)
