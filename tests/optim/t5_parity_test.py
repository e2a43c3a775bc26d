"""Every strategy against jax_privacy on T5s of all shapes, and on T5X's own."""

import dataclasses

import jax
import jax.numpy as jnp
import jax_privacy_oracle as oracle
import numpy as np
import pytest
import random_t5

from synthq_jax.losses import seq2seq
from synthq_jax.models import t5
from synthq_jax.optim import clipping, strategies
from synthq_jax.optim.bookkeeping import plans

VOCAB, BATCH = 23, 3
WAYS = ("bookkeeping", "ghost")


def config_of(tied, encoders, decoders, activations, heads=2):
  return random_t5.config(
    vocab_size=VOCAB,
    emb_dim=6,
    num_heads=heads,
    mlp_dim=10,
    num_encoder_layers=encoders,
    num_decoder_layers=decoders,
    mlp_activations=activations,
    logits_via_embedding=tied,
  )


def problem(config, inputs, targets, padded):
  """A loss, parameters none of which is special, and a batch with padding."""

  def loss_fn(params, batch, key=None):
    logits = t5.Transformer(config).apply(
      {"params": params},
      batch["inputs"],
      t5.shift_right(batch["targets"]),
      enable_dropout=key is not None,
      rngs=None if key is None else {"dropout": key},
    )
    return seq2seq.cross_entropy(logits, batch["targets"])

  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(0.1 + 0.5 * rng.normal(size=x.shape), jnp.float32),
    random_t5.params(config),
  )
  batch = {
    "inputs": rng.integers(1, VOCAB, (BATCH, inputs)),
    "targets": rng.integers(1, VOCAB, (BATCH, targets)),
  }
  batch["inputs"][0, max(1, inputs - padded) :] = 0
  batch["targets"][1, max(1, targets - padded) :] = 0
  return loss_fn, params, jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
  ("tied", "encoders", "decoders", "activations", "heads", "clip", "ratio"),
  [
    (True, 1, 1, ("gelu", "linear"), 3, 0.3, 0.0),
    (False, 1, 1, ("relu",), 1, 1e-3, 1e9),
  ],
)
def test_all_shapes_masks_and_clip_norms_agree_with_jax_privacy(
  tied, encoders, decoders, activations, heads, clip, ratio, monkeypatch
):
  config = config_of(tied, encoders, decoders, activations, heads)
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", ratio)
  monkeypatch.setitem(strategies.KEEP_RATIOS, "ghost", min(ratio, 1.0))
  oracle.compare(*problem(config, 7, 5, 3), clip, WAYS)


TIED = config_of(True, 1, 1, ("gelu", "linear"))


def test_a_t5_with_tied_logits_and_dropout_agrees_with_jax_privacy(monkeypatch):
  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.2)
  config = dataclasses.replace(TIED, dropout_rate=0.3)
  loss_fn, params, batch = problem(config, 6, 4, 2)
  key = jax.random.key(5)
  oracle.compare(loss_fn, params, batch, 0.1, ["bookkeeping"], key=key)
  losses = jax.jit(loss_fn)
  with_key, without = losses(params, batch, key), losses(params, batch)
  assert not np.allclose(with_key, without, rtol=1e-2)


def test_a_t5_keeps_its_kernels_and_its_embedding_in_factors():
  loss_fn, params, batch = problem(TIED, 6, 4, 2)
  plan = plans.make(loss_fn, params, (batch,), keep_ratio=0.0)
  paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
  ]
  formed = {paths[index].split("'")[-2] for index in plan.formed}
  assert formed == {"scale"}
  embedding = paths.index("['token_embedder']['embedding']")
  assert len([s for s in plan.sites if s.leaf == embedding]) == 3


def half():
  return problem(dataclasses.replace(TIED, dtype=jnp.bfloat16), 6, 5, 2)


def test_half_precision_agrees_to_its_rounding(monkeypatch):
  loss_fn, params, batch = half()
  full, _, _ = problem(TIED, 6, 5, 2)
  exact = clipping.clipped_grad(full, l2_clip_norm=0.3, strategy="vmap")
  expected, wide = jax.jit(exact)(params, batch)
  errors = {}
  for way, ratio in (
    ("vmap", 0.0), ("ghost", 0.0), ("bookkeeping", 0.0), ("bookkeeping", 1e9),
  ):  # fmt: skip
    monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", ratio)
    grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=0.3, strategy=way)
    total, aux = jax.jit(grad_fn)(params, batch)
    assert aux.norms.dtype == jnp.float32
    np.testing.assert_allclose(aux.norms, wide.norms, rtol=5e-2)
    errors[way, ratio] = distance(total, expected)
    leaves = zip(*map(jax.tree.leaves, (total, expected)), strict=True)
    for a, b in leaves:  # roundings of 0.4% add up over two layers
      assert distance(a, b) <= 0.05
  # As far from the float32 gradient as jax_privacy's own is.
  least = errors["vmap", 0.0]
  assert 1e-4 < least < 0.05
  assert max(errors.values()) <= 1.5 * least, errors


def distance(a, b):
  """The norm of the difference over the norm of the second, of all leaves."""
  gap = jax.tree.map(lambda x, y: np.sum((x - y) ** 2), a, b)
  size = jax.tree.map(lambda y: np.sum(y**2), b)
  return np.sqrt(sum(jax.tree.leaves(gap)) / sum(jax.tree.leaves(size)))


def test_positions_that_cancel_in_half_precision_stay_within_the_clip_norm(
  monkeypatch,
):
  """What is summed is rounded to less than the clip norm allows for."""
  positions, rows, columns, clip = 64, 16, 16, 1.0
  rng = np.random.default_rng(0)
  x = np.repeat(rng.normal(size=(1, 1, rows)), positions, axis=1)
  signs = np.resize([1.0, -1.0], positions)[None, :, None]
  target = 100.0 * signs * rng.normal(size=(1, 1, columns))
  target += rng.normal(size=target.shape)
  batch = {
    "x": jnp.asarray(x, jnp.bfloat16),
    "target": jnp.asarray(target, jnp.bfloat16),
  }

  def loss_fn(params, batch):
    y = batch["x"] @ params["w"].astype(jnp.bfloat16)
    return jnp.sum((y * batch["target"]).astype(jnp.float32), axis=(1, 2))

  monkeypatch.setitem(strategies.KEEP_RATIOS, "bookkeeping", 0.0)
  grad_fn = clipping.clipped_grad(
    loss_fn, l2_clip_norm=clip, strategy="bookkeeping"
  )
  total, _ = jax.jit(grad_fn)({"w": jnp.zeros((rows, columns))}, batch)
  assert 0.5 * clip < np.linalg.norm(total["w"]) <= clip * (1 + 1e-5)
