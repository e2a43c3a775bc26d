"""Our T5's numbers beside T5X's, in full and in half precision."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

pytest.importorskip("t5x", reason="T5X is an option")
import random_t5  # noqa: E402
from t5x.examples.t5 import network  # noqa: E402

from synthq_jax.models import t5, t5_config  # noqa: E402

SHAPES = ["tiny", pytest.param("t5_1_1_small", marks=pytest.mark.slow)]
_FIELDS = (
  "vocab_size emb_dim num_heads num_encoder_layers num_decoder_layers head_dim"
  " mlp_dim mlp_activations logits_via_embedding dtype"
).split()


@functools.cache
def logits(shape: str, dtype: str, whose: str) -> np.ndarray:
  """Of the same parameters, inputs and targets, [2, 24, vocab]."""
  config = dataclasses.replace(t5_config.get(shape), dtype=dtype)
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, config.vocab_size, (2, 48)).astype(np.int32)
  targets = rng.integers(2, config.vocab_size, (2, 24)).astype(np.int32)
  before = np.asarray(t5.shift_right(targets))
  params = {"params": random_t5.params(config)}
  if whose == "ours":
    made = jax.jit(t5.Transformer(config).apply)(params, inputs, before)
  else:
    fields = {name: getattr(config, name) for name in _FIELDS}
    module = network.Transformer(network.T5Config(**fields, dropout_rate=0.0))
    apply = functools.partial(module.apply, enable_dropout=False)
    made = jax.jit(apply)(params, inputs, before, targets)
  return np.asarray(made, np.float32)


def gap(one: np.ndarray, other: np.ndarray) -> float:
  """The largest difference, in standard deviations of the logits."""
  return float(abs(one - other).max() / other.std())


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_logits_are_t5xs(shape):
  ours, theirs = (logits(shape, "float32", who) for who in ("ours", "t5x"))
  assert gap(ours, theirs) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_ours_lie_no_further_from_float32_than_t5xs(shape):
  exact = logits(shape, "float32", "t5x")
  ours, theirs = (logits(shape, "bfloat16", who) for who in ("ours", "t5x"))
  gaps = {
    "ours beside T5X's": gap(ours, theirs),
    "ours beside float32": gap(ours, exact),
    "T5X's beside float32": gap(theirs, exact),
  }
  print({name: round(value, 4) for name, value in gaps.items()})
  assert gaps["ours beside float32"] < 1.5 * gaps["T5X's beside float32"]
  assert gaps["ours beside T5X's"] > 0
