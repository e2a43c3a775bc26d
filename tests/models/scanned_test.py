"""Options that change speed only, and layers that are one loop."""

import dataclasses
import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax import optim
from synthq_jax.losses import seq2seq
from synthq_jax.models import scanned, t5, t5_checkpoints

CONFIG = random_t5.config(
  vocab_size=23,
  num_encoder_layers=2,
  num_decoder_layers=2,
  logits_via_embedding=False,
)
RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@pytest.fixture(name="params", scope="module")
def _params():
  return start()


def start():
  return t5_checkpoints.flatten(random_t5.params(CONFIG))


def batch():
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 23, (4, 6)).astype(np.int32)
  targets = rng.integers(3, 23, (4, 5)).astype(np.int32)
  inputs[1, 4:] = targets[2, 2:] = 0
  return {"inputs": jnp.asarray(inputs), "targets": jnp.asarray(targets)}


def logits_of(params, batch, key=None, *, config):
  return t5.Transformer(config).apply(
    {"params": t5_checkpoints.unflatten(params)},
    batch["inputs"],
    t5.shift_right(batch["targets"]),
    enable_dropout=key is not None,
    rngs=None if key is None else {"dropout": key},
  )


def loss_fn(params, batch, key=None, *, config):
  logits = logits_of(params, batch, key, config=config)
  return seq2seq.cross_entropy(logits, batch["targets"])


def clipped(strategy, **options):
  config = dataclasses.replace(CONFIG, **options)
  grad_fn = optim.clipped_grad(
    functools.partial(loss_fn, config=config),
    l2_clip_norm=0.3,
    strategy=strategy,
  )
  if config.scan_layers:
    return scanned.ScannedGrad(stacked=grad_fn)
  return grad_fn


@functools.cache
def one_by_one():
  """The sum of jax_privacy's way, which the others are to agree with."""
  return jax.jit(clipped("vmap"))(start(), batch())


def assert_same(found, expected):
  (total, ours), (wanted, theirs) = found, expected
  np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
  assert set(total) == set(wanted)
  for path, value in wanted.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(total[path], value, rtol=0, atol=1e-5 * scale)


def test_recomputed_and_scanned_layers_give_the_same_logits(params):
  config = dataclasses.replace(CONFIG, remat=True, scan_layers=True)
  given = scanned.stack(params)
  compute = jax.jit(logits_of, static_argnames="config")
  np.testing.assert_allclose(
    compute(given, batch(), config=config),
    compute(params, batch(), config=CONFIG),
    rtol=1e-5,
    atol=1e-5,
  )


def test_recomputed_and_scanned_layers_give_the_same_clipped_sum(params):
  """Norms reach over all layers, and not over each."""
  grad_fn = clipped("bookkeeping", remat=True, scan_layers=True)
  total, aux = jax.jit(grad_fn)(params, batch())
  assert_same((total, aux), one_by_one())
  assert set(total) == set(params)
  assert aux.norms[0] > 0.3, "the clip norm is to bite"
  assert grad_fn.sensitivity(RELATION) == 0.3


def test_stacking_and_taking_apart_are_inverse(params):
  back = scanned.unstack(scanned.stack(params))
  assert set(back) == set(params)
  for path, leaf in params.items():
    np.testing.assert_array_equal(back[path], leaf)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_parameter_that_one_layer_lacks_is_refused(params, layer):
  lacking = dict(params)
  del lacking[f"decoder/layers_{layer}/mlp/wo/kernel"]
  with pytest.raises(ValueError, match="decoder/layers/mlp/wo/kernel in each"):
    scanned.stack(lacking)


def test_fresh_parameters_have_the_tree_of_t5x_whatever_the_options():
  config = dataclasses.replace(CONFIG, remat=True, scan_layers=True)
  ours, plain = (
    jax.eval_shape(functools.partial(t5.init_params, one), jax.random.key(1))
    for one in (config, CONFIG)
  )
  assert jax.tree.structure(ours) == jax.tree.structure(plain)


def test_decoding_with_stacked_layers_is_refused(params):
  config = dataclasses.replace(CONFIG, scan_layers=True)
  with pytest.raises(ValueError, match="scan_layers=False for decoding"):
    t5.Transformer(config).apply(
      {"params": t5_checkpoints.unflatten(scanned.stack(params))},
      batch()["inputs"],
      method="read",
    )


@functools.cache
def dropping(strategy):
  options = dict(dropout_rate=0.3, remat=True, scan_layers=True)
  return jax.jit(clipped(strategy, **options))


def named():
  return batch() | {"example_id": jnp.array([7, 1, 4, 2])}


@pytest.mark.slow
def test_dropout_is_the_same_in_every_pass_of_a_strategy(params):
  # A backward pass or a second one with another mask would give another sum.
  found, expected = (
    dropping(way)(params, named(), key=jax.random.key(5))
    for way in ("ghost", "vmap")
  )
  assert_same(found, expected)


@pytest.mark.slow
def test_dropout_is_each_examples_own(params):
  made, key = named(), jax.random.key(5)
  grad_fn = dropping("bookkeeping")
  total, aux = grad_fn(params, made, key=key)
  order = np.array([2, 0, 3, 1])
  moved, other = grad_fn(
    params, jax.tree.map(lambda x: x[order], made), key=key
  )
  in_order = jax.tree.map(lambda x: x[order], aux)
  assert_same((moved, other), (total, in_order))
  plain = jax.jit(functools.partial(loss_fn, config=CONFIG))
  assert np.all(np.abs(aux.losses - plain(params, made)) > 1e-4)
  _, next_step = grad_fn(params, made, key=jax.random.key(6))
  assert np.all(np.abs(aux.losses - next_step.losses) > 1e-4)
