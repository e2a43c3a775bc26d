"""Sums of sequences that are cut to lengths of their own."""

import functools

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax import optim
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.optim import by_length
from synthq_jax.stages import finetune_dp

LENGTHS = (3, 6)
SHAPE = t5_config.T5Config(
  vocab_size=24, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8,
  num_encoder_layers=1, num_decoder_layers=1,
)  # fmt: skip
CLIP = 0.5


@functools.cache
def grads():
  """The loss of fine-tuning, whole and by length: compiled once."""
  whole = optim.clipped_grad(
    functools.partial(finetune_dp.loss_fn, public={}, model_config=SHAPE),
    l2_clip_norm=CLIP,
    strategy="bookkeeping",
    microbatch_size=4,
  )
  cut = by_length.ByLength(gradient=whole, field="targets", lengths=LENGTHS)
  return jax.jit(whole), jax.jit(cut)


@pytest.fixture(name="params", scope="module")
def _params():
  return t5_checkpoints.flatten(random_t5.params(SHAPE))


@pytest.fixture(name="batch", scope="module")
def _batch():
  """Twelve pairs in no order; one without a target, one with a 0 inside."""
  rng = np.random.default_rng(0)
  targets = rng.integers(2, 24, (12, 6))
  lengths = np.array([6, 2, 3, 4, 0, 1, 5, 3, 6, 2, 3, 4])
  targets[np.arange(6) >= lengths[:, None]] = 0
  targets[3, 1] = 0
  return {"inputs": rng.integers(1, 24, (12, 5)), "targets": targets}


def flat(tree):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_the_sum_and_the_values_are_those_of_whole_sequences(params, batch):
  whole, cut = grads()
  is_padding = np.arange(12) % 5 == 1
  expected, values = whole(params, batch, is_padding_example=is_padding)
  total, aux = cut(params, batch, is_padding_example=is_padding)
  np.testing.assert_allclose(flat(total), flat(expected), rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(aux.losses, values.losses, rtol=1e-5)
  np.testing.assert_allclose(aux.norms, values.norms, rtol=1e-5, atol=1e-9)
  assert (np.asarray(aux.norms)[~is_padding] > CLIP).sum() >= 5  # clipped


def test_an_example_moves_the_sum_by_its_clip_norm_and_leaves_the_others(
  params, batch
):
  """Formal guarantee: add or remove, for each length, whatever it is beside."""
  _, cut = grads()
  everyone, aux = cut(params, batch, is_padding_example=np.zeros(12, bool))
  for row in range(12):
    rest, _ = cut(params, batch, is_padding_example=np.arange(12) == row)
    alone, _ = cut(params, batch, is_padding_example=np.arange(12) != row)
    moved = flat(everyone) - flat(rest)
    np.testing.assert_allclose(moved, flat(alone), rtol=1e-3, atol=1e-6)
    norm = min(float(aux.norms[row]), CLIP)
    assert np.linalg.norm(moved) == pytest.approx(norm, rel=1e-4, abs=1e-6)


def test_an_example_that_is_no_number_contributes_zero(batch):
  """Of any length, and so that the others stay what they are."""
  loss = lambda w, b: w * b["factor"] * b["targets"].sum(axis=1)  # noqa: E731
  cut = by_length.ByLength(
    gradient=optim.clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=3),
    field="targets",
    lengths=LENGTHS,
  )
  call, factor = jax.jit(cut), np.ones(12, np.float32)
  for row in (0, 1):
    factor[row] = np.nan
    total, aux = call(1.0, batch | {"factor": factor})
    assert float(total) == 12 - 1 - (row + 1)  # one has no targets
    assert np.isnan(np.asarray(aux.norms)).tolist() == np.isnan(factor).tolist()


def test_what_does_not_fit_is_refused(params, batch):
  whole = optim.clipped_grad(lambda w, b: w * b["x"], l2_clip_norm=1.0)
  for lengths in ((), (6, 3), (0, 6), (3, 3)):
    with pytest.raises(ValueError, match="rising lengths"):
      by_length.ByLength(gradient=whole, field="x", lengths=lengths)
  beside = optim.clipped_grad(
    lambda w, b: (w * b["x"], b["x"]), l2_clip_norm=1.0, has_aux=True
  )
  with pytest.raises(ValueError, match="has_aux"):
    by_length.ByLength(gradient=beside, field="x", lengths=LENGTHS)
  pairs = optim.batch_clipped_grad(lambda w, b: w, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match="Batch"):
    by_length.ByLength(gradient=pairs, field="x", lengths=LENGTHS)
  _, cut = grads()
  with pytest.raises(ValueError, match=r"targets of shape \[batch, 6\]"):
    cut(params, batch | {"targets": batch["targets"][:, :5]})
  beside = by_length.ByLength(
    gradient=whole, field="t", aligned_fields=("x",), lengths=LENGTHS
  )
  for shape in ((12,), (12, 5), (12, 7, 2)):
    with pytest.raises(ValueError, match="x as long as t, 6"):
      beside(1.0, {"t": batch["targets"], "x": np.ones(shape, np.float32)})


def test_rows_that_are_missing_are_refused_and_not_read_again():
  """JAX takes the last row for one behind it: a record would count again."""
  whole = optim.clipped_grad(
    lambda w, b: w * b["x"] * (b["t"].sum(axis=1) > 0),
    l2_clip_norm=1.0,
    microbatch_size=2,
  )
  cut = by_length.ByLength(gradient=whole, field="t", lengths=(2, 4))
  tokens = np.ones((4, 4), np.int32)
  for rows in (1, 2, 8):
    with pytest.raises(ValueError, match="one common leading axis"):
      cut(1.0, {"x": np.ones(rows, np.float32), "t": tokens})
  fields = {"x": np.ones(4, np.float32), "t": tokens}
  for shape in ((), (1,), (3,), (4, 1)):
    with pytest.raises(ValueError, match=r"is_padding_example of shape \(4,\)"):
      cut(1.0, fields, is_padding_example=np.zeros(shape, bool))
  total, aux = cut(1.0, fields)
  assert float(total) == 4.0 and aux.norms.shape == (4,)


def test_its_sensitivity_is_that_of_the_whole():
  _, cut = grads()
  cut = cut.__wrapped__
  assert cut.l2_clip_norm == cut.sensitivity("ADD_OR_REMOVE_ONE") == CLIP
  assert cut.sensitivity("REPLACE_ONE") == 2 * CLIP
