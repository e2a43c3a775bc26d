"""Private fine-tuning: which parameters move, and whose gradients are clipped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from synthq_jax import optim
from synthq_jax.models import t5, t5_config
from synthq_jax.pipeline import finetune_dp

CONFIG = t5_config.T5Config(
  vocab_size=23,
  emb_dim=8,
  num_heads=2,
  head_dim=4,
  mlp_dim=12,
  num_encoder_layers=1,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  logits_via_embedding=True,
)
LAST_LAYER = r"decoder/(layers_1|decoder_norm)/.*"


@pytest.fixture(name="params", scope="module")
def _params():
  tokens = jnp.ones((1, 3), jnp.int32)
  init = t5.Transformer(CONFIG).init(jax.random.key(0), tokens, tokens)
  return init["params"]


def batch():
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 23, (6, 5)).astype(np.int32)
  targets = rng.integers(3, 23, (6, 4)).astype(np.int32)
  targets[2, 2:] = 0
  return {"inputs": jnp.asarray(inputs), "targets": jnp.asarray(targets)}


def clipped(params, pattern, strategy):
  trained, public = finetune_dp._split(params, pattern)
  loss = functools.partial(
    finetune_dp.loss_fn, public=public, model_config=CONFIG
  )
  grad_fn = optim.clipped_grad(loss, l2_clip_norm=0.3, strategy=strategy)
  return jax.jit(grad_fn)(trained, batch())


@pytest.mark.parametrize("pattern", [".*", LAST_LAYER, ".*/(query|scale).*"])
def test_every_strategy_clips_the_trained_parameters_alone(params, pattern):
  expected, ours = clipped(params, pattern, "vmap")
  got, theirs = clipped(params, pattern, "bookkeeping")
  assert set(got) == set(expected)
  for name, value in expected.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5 * scale)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
  flat = traverse_util.flatten_dict(params, sep="/")
  total = np.sqrt(sum(np.sum(np.square(v)) for v in got.values()))
  assert 0 < total <= 6 * 0.3 * 1.00001
  if pattern == LAST_LAYER:
    assert 0 < len(got) < len(flat)
    assert all(name.startswith("decoder/") for name in got)


def test_norms_of_fewer_parameters_are_smaller(params):
  _, every = clipped(params, ".*", "bookkeeping")
  _, last = clipped(params, LAST_LAYER, "bookkeeping")
  assert np.all(last.norms < every.norms)


def test_the_loss_is_that_of_the_whole_model(params):
  trained, public = finetune_dp._split(params, LAST_LAYER)
  whole, none = finetune_dp._split(params, ".*")
  assert not none
  losses = finetune_dp.loss_fn(
    trained, batch(), public=public, model_config=CONFIG
  )
  expected = finetune_dp.loss_fn(whole, batch(), public={}, model_config=CONFIG)
  np.testing.assert_array_equal(losses, expected)


def test_a_pattern_that_matches_nothing_is_refused(params):
  with pytest.raises(ValueError, match="trained='decodr.*there are decoder/"):
    finetune_dp._split(params, "decodr/.*")
