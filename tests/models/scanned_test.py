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
from synthq_jax.models import dual_encoder, scanned, t5, t5_checkpoints

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
def one_by_one(key=None, **options):
  """The sum of jax_privacy's way, which the others are to agree with."""
  keys = {} if key is None else {"key": jax.random.key(key)}
  return jax.jit(clipped("vmap", **options))(start(), batch(), **keys)


WAYS = [
  pytest.param(True, False, marks=pytest.mark.slow),
  pytest.param(False, True, marks=pytest.mark.slow),
  (True, True),
]


@pytest.mark.parametrize("remat, scan_layers", WAYS)
def test_recomputed_and_scanned_layers_give_the_same_logits(
  params, remat, scan_layers
):
  config = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers)
  given = scanned.stack(params) if scan_layers else params
  compute = jax.jit(logits_of, static_argnames="config")
  np.testing.assert_allclose(
    compute(given, batch(), config=config),
    compute(params, batch(), config=CONFIG),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize(
  "strategy, remat, scan_layers",
  [
    pytest.param("bookkeeping", False, True, marks=pytest.mark.slow),
    ("bookkeeping", True, True),
    pytest.param("ghost", True, True, marks=pytest.mark.slow),
  ],
)
def test_recomputed_and_scanned_layers_give_the_same_clipped_sum(
  params, strategy, remat, scan_layers
):
  expected, theirs = one_by_one()
  grad_fn = clipped(strategy, remat=remat, scan_layers=scan_layers)
  total, ours = jax.jit(grad_fn)(params, batch())
  assert set(total) == set(params)
  for path, value in expected.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(total[path], value, rtol=0, atol=1e-5 * scale)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
  assert grad_fn.sensitivity(RELATION) == 0.3


def test_norms_reach_over_all_layers_and_not_over_each(params):
  grad_fn = jax.jit(clipped("bookkeeping", scan_layers=True))
  _, aux = grad_fn(params, batch())
  one = jax.tree.map(lambda x: x[:1], batch())
  total = lambda p: loss_fn(p, one, config=CONFIG).sum()  # noqa: E731
  grads = jax.jit(jax.grad(total))(params)
  squares = sum(np.sum(np.square(g)) for g in grads.values())
  np.testing.assert_allclose(aux.norms[0], np.sqrt(squares), rtol=1e-5)
  assert aux.norms[0] > 0.3, "the clip norm is to bite"


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


def test_a_whole_layer_that_is_not_trained_is_refused(params):
  last = {k: v for k, v in params.items() if "layers_1/" in k}
  with pytest.raises(ValueError, match="scan_layers=False"):
    scanned.stack(last)


def test_fresh_parameters_have_the_tree_of_t5x_whatever_the_options():
  config = dataclasses.replace(CONFIG, remat=True, scan_layers=True)
  ours = t5.init_params(config, jax.random.key(1))
  plain = t5.init_params(CONFIG, jax.random.key(1))
  assert jax.tree.structure(ours) == jax.tree.structure(plain)


def test_decoding_with_stacked_layers_is_refused(params):
  config = dataclasses.replace(CONFIG, scan_layers=True)
  with pytest.raises(ValueError, match="scan_layers=False for decoding"):
    t5.Transformer(config).apply(
      {"params": t5_checkpoints.unflatten(scanned.stack(params))},
      batch()["inputs"],
      method="read",
    )


def test_the_dual_encoder_reads_stacked_layers_too(params):
  config = dataclasses.replace(CONFIG, scan_layers=True)
  encode = jax.jit(dual_encoder.encode, static_argnums=1)
  ours = encode(
    t5_checkpoints.unflatten(scanned.stack(params)), config, batch()["inputs"]
  )
  plain = encode(t5_checkpoints.unflatten(params), CONFIG, batch()["inputs"])
  np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_is_each_examples_own(params):
  options = dict(dropout_rate=0.3, remat=True, scan_layers=True)
  made = batch() | {"example_id": jnp.array([7, 1, 4, 2])}
  key = jax.random.key(5)
  grad_fn = jax.jit(clipped("bookkeeping", **options))
  total, aux = grad_fn(params, made, key=key)
  order = jnp.array([2, 0, 3, 1])
  moved, other = grad_fn(
    params, jax.tree.map(lambda x: x[order], made), key=key
  )
  np.testing.assert_allclose(aux.losses[order], other.losses, rtol=1e-5)
  np.testing.assert_allclose(aux.norms[order], other.norms, rtol=1e-5)
  for path, value in total.items():
    np.testing.assert_allclose(
      moved[path], value, rtol=0, atol=1e-5 * np.abs(value).max()
    )
  _, without = grad_fn(params, made)
  assert np.all(np.abs(aux.losses - without.losses) > 1e-4)
  _, next_step = grad_fn(params, made, key=jax.random.key(6))
  assert np.all(np.abs(aux.losses - next_step.losses) > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "strategy, remat, scan_layers",
  [
    ("bookkeeping", True, True),
    ("ghost", False, False),
    ("ghost", True, True),
  ],
)
def test_dropout_is_the_same_in_every_pass_of_a_strategy(
  params, strategy, remat, scan_layers
):
  # A backward pass or a second one with another mask would give another sum.
  options = dict(dropout_rate=0.3, remat=remat, scan_layers=scan_layers)
  key = jax.random.key(5)
  expected, theirs = one_by_one(5, **options)
  total, ours = jax.jit(clipped(strategy, **options))(params, batch(), key=key)
  np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
  for path, value in expected.items():
    np.testing.assert_allclose(
      total[path], value, rtol=0, atol=1e-5 * np.abs(value).max()
    )
