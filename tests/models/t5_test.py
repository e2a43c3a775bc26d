import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.models import t5, t5_config, t5_layers

_CONFIG = t5_config.get("tiny")
_RNG = np.random.default_rng(0)
_INPUTS = _RNG.integers(2, 128, (3, 9)).astype(np.int32)
_TARGETS = _RNG.integers(2, 128, (3, 7)).astype(np.int32)
_BLOCK = ("key/kernel", "out/kernel", "query/kernel", "value/kernel")
_MLP = ("mlp/wi_0/kernel", "mlp/wi_1/kernel", "mlp/wo/kernel")


def _params(config=_CONFIG):
  return random_t5.params(config)


@functools.cache
def _apply(config):
  return jax.jit(t5.Transformer(config).apply)


def _logits(inputs, targets, config=_CONFIG):
  targets = t5.shift_right(jnp.asarray(targets))
  return np.asarray(
    _apply(config)({"params": _params(config)}, inputs, targets)
  )


def _stack(name, layers, attentions):
  norms = [f"pre_{attention}_layer_norm" for attention in attentions]
  if "encoder_decoder_attention" in attentions:
    norms = ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm"]
  leaves = [
    f"{attention}/{leaf}" for attention in attentions for leaf in _BLOCK
  ]
  leaves += [f"{norm}/scale" for norm in [*norms, "pre_mlp_layer_norm"]]
  leaves += _MLP
  paths = {
    f"{name}/layers_{layer}/{leaf}"
    for layer in range(layers)
    for leaf in leaves
  }
  return paths | {
    f"{name}/relpos_bias/rel_embedding",
    f"{name}/{name}_norm/scale",
  }


def test_t5_1_1_small_has_the_parameters_of_t5x():
  shapes = t5.shapes(t5_config.get("t5_1_1_small"))
  assert sum(math.prod(shape) for shape in shapes.values()) == 76_961_152
  attentions = ["self_attention", "encoder_decoder_attention"]
  assert set(shapes) == (
    {"token_embedder/embedding", "decoder/logits_dense/kernel"}
    | _stack("encoder", 8, ["attention"])
    | _stack("decoder", 8, attentions)
  )
  assert shapes["token_embedder/embedding"] == (32128, 512)
  assert shapes["decoder/logits_dense/kernel"] == (512, 32128)
  assert shapes["encoder/relpos_bias/rel_embedding"] == (6, 32)
  assert shapes["encoder/layers_0/attention/query/kernel"] == (512, 384)
  assert shapes["encoder/layers_0/attention/out/kernel"] == (384, 512)


def test_query_kernels_carry_the_scale_that_attention_leaves_out():
  config = dataclasses.replace(_CONFIG, emb_dim=64, num_heads=8, head_dim=32)
  layer = t5_layers.Attention(config)
  x = jnp.zeros((1, 1, 64))

  def run(module):
    return module(x, module.keys_values(x), jnp.ones((1, 1, 1, 1), bool))

  params = layer.init(jax.random.key(3), method=run)["params"]
  stds = {name: np.std(leaf["kernel"]) for name, leaf in params.items()}
  assert stds["query"] == pytest.approx((64 * 32) ** -0.5, rel=0.03)
  assert stds["key"] == pytest.approx(64**-0.5, rel=0.03)
  assert stds["out"] == pytest.approx((8 * 32) ** -0.5, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
def test_decode_steps_equal_the_full_forward_pass(tied):
  config = dataclasses.replace(_CONFIG, logits_via_embedding=tied)
  model = t5.Transformer(config)
  variables = {"params": _params(config)}
  inputs = _INPUTS.copy()
  inputs[0, 5:] = 0
  expected = _logits(inputs, _TARGETS, config)
  # A longer cache than needed: empty places must not count.
  read = model.apply(variables, inputs, method="read")
  cache = t5.empty_cache(config, read, 10)
  fed = np.asarray(t5.shift_right(jnp.asarray(_TARGETS)))
  step = jax.jit(
    functools.partial(model.apply, variables, method="decode_step")
  )
  for position in range(_TARGETS.shape[1]):
    logits, cache = step(fed[:, position], cache, position)
    np.testing.assert_allclose(
      logits, expected[:, position], rtol=1e-4, atol=1e-5
    )


def test_samples_of_a_document_share_its_input_in_decode_steps():
  model = t5.Transformer(_CONFIG)
  variables = {"params": _params(_CONFIG)}
  written = np.random.default_rng(1).integers(2, 128, (6, 4)).astype(np.int32)
  expected = _logits(np.repeat(_INPUTS, 2, axis=0), written)
  read = model.apply(variables, _INPUTS, method="read")
  cache = t5.empty_cache(_CONFIG, read, 4, 2)
  assert cache.inputs.mask.shape[0] == 3  # once per document
  fed = np.asarray(t5.shift_right(jnp.asarray(written)))
  step = jax.jit(
    functools.partial(model.apply, variables, method="decode_step")
  )
  for position in range(4):
    logits, cache = step(fed[:, position], cache, position)
    np.testing.assert_allclose(
      logits, expected[:, position], rtol=1e-4, atol=1e-5
    )


def test_an_example_does_not_depend_on_the_others_in_its_batch():
  alone = _logits(_INPUTS[:1], _TARGETS[:1])
  np.testing.assert_allclose(alone, _logits(_INPUTS, _TARGETS)[:1], atol=1e-5)


def test_dropout_reaches_whatever_t5_drops():
  config = dataclasses.replace(_CONFIG, dropout_rate=0.5)
  drawn = []
  bernoulli = jax.random.bernoulli

  def watched(key, p, shape):
    drawn.append(tuple(shape))
    return bernoulli(key, p, shape)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.random, "bernoulli", watched)
    jax.eval_shape(  # which is enough to see what is drawn
      functools.partial(t5.Transformer(config).apply, enable_dropout=True),
      {"params": _params()},
      _INPUTS,
      t5.shift_right(jnp.asarray(_TARGETS)),
      rngs={"dropout": jax.random.key(4)},
    )
  batch, length = _INPUTS.shape
  layers = config.num_encoder_layers + config.num_decoder_layers
  # Input, output of each stack; two blocks and a hidden layer, or three.
  assert len([s for s in drawn if len(s) == 3]) == (
    4 + 3 * config.num_encoder_layers + 4 * config.num_decoder_layers
  )
  # One mask for all queries of a head: self-attention, and the decoder's other.
  weights = [s for s in drawn if len(s) == 4]
  assert len(weights) == layers + config.num_decoder_layers
  assert set(weights) <= {
    (batch, config.num_heads, 1, length),
    (batch, config.num_heads, 1, _TARGETS.shape[1]),
  }


def test_bfloat16_keeps_float32_parameters_and_logits():
  config = dataclasses.replace(_CONFIG, dtype="bfloat16")
  init = functools.partial(t5.init_params, config)
  shapes = jax.eval_shape(init, jax.random.key(0))
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {
    jnp.dtype("float32")
  }
  logits = _logits(_INPUTS, _TARGETS, config)
  assert logits.dtype == np.float32
  error = np.abs(logits - _logits(_INPUTS, _TARGETS))
  assert 0 < error.mean() < 0.05


def test_gradients_of_kernels_are_products_of_two_lists_of_rows():
  """Sums over two axes make XLA copy both factors on CPUs."""
  tokens, apply = jnp.ones((3, 5), jnp.int32), t5.Transformer(_CONFIG).apply
  params = jax.eval_shape(lambda: t5.init_params(_CONFIG, jax.random.key(0)))
  jaxpr = jax.make_jaxpr(
    jax.grad(lambda p: jnp.sum(apply({"params": p}, tokens, tokens)))
  )(params)
  kernels = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
  kernels |= {shape[::-1] for shape in kernels}
  made = [
    equation.params["dimension_numbers"][0][0]
    for equation in jaxpr.jaxpr.eqns
    if equation.primitive.name == "dot_general"
    and equation.outvars[0].aval.shape in kernels
    and equation.invars[0].aval.shape[0] == tokens.size
  ]
  assert len(made) >= 10 and all(len(axes) == 1 for axes in made)


def test_sizes_are_known_by_name_and_bad_shapes_are_refused():
  with pytest.raises(ValueError, match="'huge'"):
    t5_config.get("huge")
  for change, message in [
    ({"num_heads": 0}, "integer num_heads in .1, 2147483647., got num_heads=0"),
    ({"dropout_rate": 1.0}, "dropout_rate=1.0"),
    ({"mlp_activations": ("swish",)}, r"got \['swish'\]"),
    ({"dtype": "float99"}, "got 'float99'"),
    ({"dtype": None}, "got None"),
  ]:
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(_CONFIG, **change)
  for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")):
    assert dataclasses.replace(_CONFIG, dtype=dtype).dtype == dtype
