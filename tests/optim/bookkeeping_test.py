"""Book-keeping and ghost clipping against jax_privacy, use by use."""

import logging

import hypothesis
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config
from synthq_jax.optim import clipping, strategies
from synthq_jax.optim.bookkeeping import plans, rules, use_sites

BATCH, LENGTH, DIM, VOCAB = 4, 5, 6, 11


def normal(seed, *shape):
  values = 0.5 * np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def ids(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape))


def run(function, *arguments, **named):
  """Calls a function compiled without optimization: that is most of the time."""
  lowered = jax.jit(function).lower(*arguments, **named)
  options = {"xla_backend_optimization_level": 0}
  return lowered.compile(compiler_options=options)(*arguments, **named)


def oracle(loss_fn, params, batch, clip):
  """jax_privacy's own sum of clipped gradients."""
  grad_fn = jax_privacy.clipped_grad(
    lambda p, b: loss_fn(p, b)[0],
    l2_clip_norm=clip,
    return_grad_norms=True,
    return_values=True,
  )
  total, aux = run(grad_fn, params, batch)
  return total, aux.values, aux.grad_norms


def assert_same(got, expected):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    scale = np.abs(b).max() or 0.1
    assert np.abs(a - b).max() <= 1e-5 * scale


def compare(loss_fn, params, batch, clip=0.3, strategy="bookkeeping"):
  expected, losses, norms = oracle(loss_fn, params, batch, clip)
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=clip, strategy=strategy)
  with pytest.MonkeyPatch.context() as patch:  # the allowance has its own tests
    patch.setattr(rules, "allowance", lambda uses, squares: 0.0)
    total, aux = run(grad_fn, params, batch)
  assert_same(total, expected)
  np.testing.assert_allclose(aux.losses, losses, rtol=1e-5)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)
  assert float(jnp.max(norms)) > 0
  return total


def total_square(x):
  return jnp.sum(jnp.tanh(x) ** 2, axis=tuple(range(1, x.ndim)))


def dense(p, b):
  return total_square(b["x"] @ p["w"])


def dense_with_bias(p, b):
  return total_square(b["x"] @ p["w"] + p["b"].reshape(1, 1, -1))


def used_twice(p, b):
  return total_square(jnp.tanh(b["x"] @ p["w"]) @ p["w"])


def used_transposed(p, b):
  return total_square(jnp.tanh(b["x"] @ p["w"]) @ p["w"].T)


def parameter_on_the_left(p, b):
  return total_square(jnp.einsum("dk,bld->bkl", p["w"], b["x"]))


def scaled(p, b):
  w = (-p["w"] * 3.0) / 2.0
  return total_square(b["x"] @ w) + total_square(b["x"] @ p["w"])


def split_into_heads(p, b):
  w = p["w"].reshape(DIM, 2, DIM // 2)
  q = jnp.einsum("bld,dhk->bhlk", b["x"], w)
  k = jnp.einsum("bld,dhk->bhlk", b["x"], jnp.flip(w, 0))
  del k  # The flipped use has gradient zero, but it is there.
  return total_square(jnp.einsum("bhlk,bhmk->bhlm", q, q))


def one_matrix_per_head(p, b):
  x = b["x"].reshape(BATCH if b["x"].shape[0] > 1 else 1, LENGTH, 2, -1)
  return total_square(jnp.einsum("blhk,hkm->blhm", x, p["h"]))


def contracted_over_different_axes(p, b):
  y = jnp.einsum("bld,hdk->blhk", b["x"][..., :3], p["h"])
  z = jnp.einsum("bhl,hdk->bldk", b["x"][..., :2].swapaxes(1, 2), p["h"])
  return total_square(y) + total_square(z)


def two_lookups(p, b):
  return total_square(p["e"][b["ids"]]) + total_square(
    jnp.tanh(jnp.take(p["e"], b["more"], axis=0)) * b["x"][:, :3]
  )


def lookup_along_the_last_axis(p, b):
  found = jnp.take(p["e"].T, b["ids"], axis=1)
  return total_square(jnp.moveaxis(found, 1, 0))


def one_hot_lookup(p, b):
  hot = jax.nn.one_hot(b["ids"], VOCAB) @ p["e"]
  return total_square(hot * b["x"]) + total_square(p["e"][b["more"]])


def lookup_out_of_bounds(p, b):
  far = jnp.where(b["ids"] > 7, VOCAB + 3, b["ids"])
  found = jnp.take(p["e"], far, axis=0, mode="fill", fill_value=0.0)
  return total_square(found * b["x"]) + total_square(
    jnp.take(p["e"], far, axis=0, mode="clip")
  )


def tied_logits(p, b):
  x = jnp.tanh(p["e"][b["ids"]] @ p["w"])
  y = p["e"][b["more"]] + jnp.mean(x, axis=1, keepdims=True)
  logits = (y / np.sqrt(DIM)) @ p["e"].T
  return seq2seq.cross_entropy(logits, b["more"])


def scaled_norm(p, b):
  x = b["x"] @ p["w"]
  x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
  return total_square(x * p["b"].reshape(1, 1, -1) @ p["w"])


def position_bias(p, b):
  q = jnp.einsum("bld,dhk->bhlk", b["x"], p["w"].reshape(DIM, 2, -1))
  offset = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
  bias = jnp.moveaxis(p["rel"][jnp.clip(offset + 3, 0, 6)], 2, 0)
  scores = jnp.einsum("bhlk,bhmk->bhlm", q, q) + bias[None]
  return total_square(jax.nn.softmax(scores) @ q)


def inside_a_scan(p, b):
  def body(x, _):
    return jnp.tanh(x @ p["w"]), None

  x, _ = jax.lax.scan(body, b["x"], None, length=3)
  return total_square(x @ p["w"])


def stacked_layers(p, b):
  def layer(x, each):
    w, offset = each
    x, more = jnp.tanh(x @ w) + offset.reshape(1, 1, -1), x @ w.T
    return x, jnp.sum(more, axis=(1, 2))

  x, sums = jax.lax.scan(layer, b["x"], (p["s"], p["sb"]), reverse=True)
  return total_square(x) + jnp.sum(sums, axis=0)


def scan_in_a_scan(p, b):
  def inner(x, w):
    return jnp.tanh(jnp.einsum("bld,dhk->blhk", x, w.reshape(DIM, 2, -1))), None

  def outer(x, pair):
    def flat(x, w):
      y, _ = inner(x, w)
      return y.reshape(x.shape) + jnp.tanh(x @ p["w"]), None

    return jax.lax.scan(flat, x, pair)

  layers = p["s"].reshape(2, 2, DIM, DIM)
  return total_square(jax.lax.scan(outer, b["x"], layers)[0])


def remat_in_a_scan(p, b):
  @jax.checkpoint
  def layer(x, w):
    return jnp.tanh(jax.checkpoint(jnp.dot)(x, w)) + x, None

  x, _ = jax.lax.scan(layer, b["x"] + p["e"][b["ids"]], p["s"])
  return total_square(x @ p["e"].T)


def scan_in_remat(p, b):
  @jax.checkpoint
  def layers(params, x):
    x, _ = jax.lax.scan(
      lambda x, w: (jnp.tanh(x @ w @ params["w"]), None), x, params["s"]
    )
    return x

  return total_square(layers({"s": p["s"], "w": p["w"]}, b["x"]))


def lookups_in_a_scan(p, b):
  def body(x, each):
    table, head = each
    found = table.reshape(DIM, DIM)[b["ids"] % DIM] + p["e"][b["ids"]]
    more = jnp.einsum("bld,hdk->blhk", x[..., :3], head[None])
    return jnp.tanh(x + found), jnp.sum(more**2, axis=(1, 2, 3))

  heads = jnp.concatenate([p["h"], p["h"]])
  x, sums = jax.lax.scan(body, b["x"], (p["s"], heads))
  return total_square(x) + jnp.sum(sums, axis=0)


def a_parameter_in_the_carry(p, b):
  def body(carry, w):
    x, kept = carry
    return (jnp.tanh(x @ w @ kept), 0.5 * kept), None

  (x, kept), _ = jax.lax.scan(body, (b["x"], p["w"]), p["s"])
  return total_square(x @ kept)


def slices_that_are_returned(p, b):
  x, slices = jax.lax.scan(lambda x, w: (x @ w, w), b["x"], p["s"])
  return total_square(x @ slices[0])


def one_iteration(p, b):
  x, _ = jax.lax.scan(lambda x, w: (x @ w, None), b["x"], p["s"][:1])
  y, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"][None])
  return total_square(y)


def inside_remat_and_jit(p, b):
  layer = jax.checkpoint(jax.jit(lambda w, x: jnp.tanh(x @ w)))
  return total_square(layer(p["w"], layer(p["w"], b["x"])))


@jax.custom_vjp
def _doubled(w):
  return w


_doubled.defvjp(lambda w: (w, None), lambda _, g: (2.0 * g,))


def with_a_derivative_of_its_own(p, b):
  return total_square(b["x"] @ _doubled(p["w"]))


def behind_stop_gradient(p, b):
  return total_square(b["x"] @ jax.lax.stop_gradient(p["w"]) @ p["w"])


def two_parameters_multiplied(p, b):
  return total_square(b["x"] @ (p["w"] @ p["w"]))


LOSSES = [
  dense,
  dense_with_bias,
  used_twice,
  used_transposed,
  parameter_on_the_left,
  scaled,
  split_into_heads,
  one_matrix_per_head,
  contracted_over_different_axes,
  two_lookups,
  lookup_along_the_last_axis,
  one_hot_lookup,
  lookup_out_of_bounds,
  tied_logits,
  scaled_norm,
  position_bias,
  inside_a_scan,
  stacked_layers,
  scan_in_a_scan,
  remat_in_a_scan,
  scan_in_remat,
  lookups_in_a_scan,
  a_parameter_in_the_carry,
  slices_that_are_returned,
  one_iteration,
  inside_remat_and_jit,
  with_a_derivative_of_its_own,
  behind_stop_gradient,
  two_parameters_multiplied,
]


def make_params():
  return {
    "w": normal(0, DIM, DIM),
    "b": 1.0 + normal(1, DIM),
    "e": normal(2, VOCAB, DIM),
    "h": normal(3, 2, 3, 4),
    "rel": normal(4, 7, 2),
    "s": normal(8, 4, DIM, DIM),
    "sb": normal(9, 4, DIM),
    "unused": jnp.ones(3),
  }


def make_batch():
  return {
    "x": normal(5, BATCH, LENGTH, DIM),
    "ids": ids(6, BATCH, LENGTH),
    "more": ids(7, BATCH, 3),
  }


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_gradients_kept_in_factors_agree_with_jax_privacy(
  loss_fn, strategy, monkeypatch
):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  compare(loss_fn, make_params(), make_batch(), strategy=strategy)


FORMED = {
  stacked_layers: {"sb"},
  scan_in_a_scan: set(),
  remat_in_a_scan: set(),
  scan_in_remat: set(),
  lookups_in_a_scan: {"h"},  # concatenated with itself first
  inside_a_scan: set(),
  inside_remat_and_jit: set(),
  one_iteration: {"s"},  # of which a slice is taken first
  a_parameter_in_the_carry: {"w"},
  slices_that_are_returned: {"s"},
}
"""Parameters whose gradient is formed though factors would do if they could."""


@pytest.mark.parametrize("loss_fn", FORMED, ids=lambda f: f.__name__)
def test_bodies_of_scans_and_remat_keep_their_factors(loss_fn):
  params = make_params()
  plan = plans.make(loss_fn, params, (make_batch(),), keep_ratio=0.0)
  assert {sorted(params)[index] for index in plan.formed} == FORMED[loss_fn]


def test_dropped_pairs_of_iterations_are_caught(monkeypatch):
  """A weight that all iterations share is not one weight for each."""
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  monkeypatch.setattr(
    rules, "_outer_outer",
    lambda a, b: sum(
      rules.sum_of_squares(rules._product("btp,btq->bpq", x, y))
      for x, y in zip(
        jnp.split(a.left[:, 0], a.left.shape[2], 1),
        jnp.split(b.right[:, 0], a.left.shape[2], 1),
        strict=True,
      )
    ) if a is b else 0.0,
  )  # fmt: skip
  with pytest.raises(AssertionError):
    compare(inside_a_scan, make_params(), make_batch())


def test_a_shared_weight_with_a_token_for_each_iteration_is_caught(monkeypatch):
  monkeypatch.setattr(use_sites.Repeated, "is_shared", False)

  def only_in_a_scan(p, b):
    x, _ = jax.lax.scan(
      lambda x, _: (jnp.tanh(x @ p["w"]), None), b["x"], None, length=3
    )
    return total_square(x)

  with pytest.raises(AssertionError):
    compare(only_in_a_scan, make_params(), make_batch(), strategy="ghost")
  monkeypatch.undo()
  compare(only_in_a_scan, make_params(), make_batch(), strategy="ghost")


def test_ghost_clipping_keeps_remat_and_bookkeeping_does_too():
  def count(strategy):
    grad_fn = clipping.clipped_grad(
      remat_in_a_scan, l2_clip_norm=1.0, strategy=strategy
    )
    jaxpr = jax.make_jaxpr(grad_fn)(make_params(), make_batch())
    return str(jaxpr).count("differentiated=True")

  assert count("ghost") >= 2
  assert count("bookkeeping") >= 1


def test_gradients_formed_per_example_agree_with_jax_privacy(monkeypatch):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 1e9)
  compare(tied_logits, make_params(), make_batch())


@hypothesis.settings(max_examples=3, deadline=None, derandomize=True)
@hypothesis.given(
  length=st.integers(1, 6),
  more=st.integers(1, 6),
  dim=st.integers(1, 9),
  clip=st.sampled_from([1e-3, 0.2, 50.0]),
  padded=st.integers(0, 3),
)
def test_any_shape_mask_and_clip_norm_agrees(length, more, dim, clip, padded):
  params = {"e": normal(2, VOCAB, dim), "w": normal(0, dim, dim)}
  batch = {"ids": ids(6, BATCH, length), "more": ids(7, BATCH, more)}
  batch["more"] = batch["more"].at[:, more - min(padded, more) :].set(0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
    expected, _, norms = oracle(tied_logits, params, batch, clip)
    grad_fn = clipping.clipped_grad(tied_logits, l2_clip_norm=clip)
    total, aux = run(grad_fn, params, batch)
  assert_same(total, expected)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_cross_term_of_the_tied_embedding_left_out_is_caught(
  part, monkeypatch
):
  whole = rules.cross_terms
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  monkeypatch.setattr(rules, "cross_terms", lambda uses: part * whole(uses))
  with pytest.raises(AssertionError):
    compare(tied_logits, make_params(), make_batch())


def transformer():
  config = t5_config.T5Config(
    vocab_size=40,
    emb_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=12,
    num_encoder_layers=1,
    num_decoder_layers=1,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=True,
    dropout_rate=0.3,
  )

  def loss_fn(params, batch, key=None):
    logits = t5.Transformer(config).apply(
      {"params": params},
      batch["inputs"],
      t5.shift_right(batch["targets"]),
      enable_dropout=key is not None,
      rngs=None if key is None else {"dropout": key},
    )
    return seq2seq.cross_entropy(logits, batch["targets"])

  shapes = jax.eval_shape(
    lambda key: t5.init_params(config, key), jax.random.key(0)
  )
  leaves, structure = jax.tree.flatten(shapes)
  leaves = [0.1 + normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
  batch = {
    "inputs": 1 + ids(0, 3, 6),
    "targets": (1 + ids(1, 3, 4)).at[1, 2:].set(0),
  }
  return loss_fn, jax.tree.unflatten(structure, leaves), batch


def test_a_t5_with_tied_logits_and_dropout_agrees_with_jax_privacy(
  monkeypatch,
):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.2)
  loss_fn, params, batch = transformer()
  key = jax.random.key(5)
  keys = jnp.stack([jax.random.fold_in(key, i) for i in range(3)])
  expected, losses, norms = oracle(
    lambda p, b: loss_fn(p, b[0], b[1][0]), params, (batch, keys), 0.1
  )
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=0.1)
  total, aux = run(grad_fn, params, batch, key=key)
  assert_same(total, expected)
  np.testing.assert_allclose(aux.losses, losses, rtol=1e-5)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)
  assert not np.allclose(losses, run(loss_fn, params, batch), rtol=1e-2)


def test_a_t5_keeps_its_kernels_and_its_embedding_in_factors(monkeypatch):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  loss_fn, params, batch = transformer()
  plan = plans.make(loss_fn, params, (batch,), keep_ratio=0.0)
  paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
  ]
  formed = {paths[index].split("'")[-2] for index in plan.formed}
  assert formed == {"scale"}
  embedding = paths.index("['token_embedder']['embedding']")
  assert len([s for s in plan.sites if s.leaf == embedding]) == 3


def test_a_parameter_cast_to_half_precision_agrees_to_its_rounding():
  def loss_fn(p, b):
    return total_square(b["x"].astype("bfloat16") @ p["w"].astype("bfloat16"))

  params, batch = {"w": normal(0, 40, 40)}, {"x": normal(1, BATCH, 2, 40)}
  expected, _, norms = oracle(loss_fn, params, batch, 0.3)
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=0.3)
  total, aux = run(grad_fn, params, batch)
  assert total["w"].dtype == jnp.float32
  np.testing.assert_allclose(aux.norms, norms, rtol=2e-2)
  np.testing.assert_allclose(total["w"], expected["w"], atol=2e-3)


def test_no_array_of_all_examples_gradients_of_a_large_table_is_formed():
  rows, dim = 5000, 8

  def loss_fn(p, b):
    x = p["e"][b["ids"]]
    return seq2seq.cross_entropy(x @ p["e"].T, b["ids"])

  params = {"e": jnp.zeros((rows, dim))}
  batch = {"ids": ids(0, BATCH, 3)}
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)
  jaxpr = str(jax.make_jaxpr(grad_fn)(params, batch))
  assert f"f32[{BATCH},3,{rows}]" in jaxpr.replace(f"{BATCH},1,", f"{BATCH},")
  assert f"f32[{BATCH},{rows},{dim}]" not in jaxpr
  assert f"f32[{BATCH},1,{rows},{dim}]" not in jaxpr


def test_a_large_parameter_used_in_an_odd_way_is_logged_once(caplog):
  def loss_fn(p, b):
    return jnp.sum(jnp.sin(p["odd"])) * b["x"]

  params = {"odd": jnp.zeros(plans.LARGE)}
  grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=1.0)
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      jax.eval_shape(grad_fn, params, {"x": jnp.ones(2)})
  (record,) = caplog.records
  assert "['odd']" in record.getMessage() and "'sin'" in record.getMessage()


def test_a_loss_averaged_over_the_batch_is_refused():
  grad_fn = clipping.clipped_grad(
    lambda p, b: jnp.mean(p * b["x"]), l2_clip_norm=1.0
  )
  with pytest.raises(ValueError, match="do not average"):
    grad_fn(jnp.array(1.0), {"x": jnp.ones(2)})


@pytest.mark.parametrize(("rows", "is_formed"), [(8, True), (5000, False)])
def test_a_small_table_that_is_looked_up_often_is_formed(rows, is_formed):
  """Or else a position bias is a product of all pairs of pairs of positions."""

  def loss_fn(p, b):
    return total_square(p["rel"][b["ids"]])

  params = {"rel": jnp.zeros((rows, 8))}
  batch = {"ids": jnp.zeros((BATCH, 50), int)}
  plan = plans.make(
    loss_fn, params, (batch,), keep_ratio=strategies.KEEP_RATIOS["ghost"]
  )
  assert (plan.formed == (0,)) == is_formed
