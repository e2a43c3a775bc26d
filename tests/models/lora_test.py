"""LoRA: starts as nothing, and merges into the kernels exactly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.models import lora, t5, t5_checkpoints, t5_config

CONFIG = t5_config.get("tiny")
LORA = lora.LoRA(rank=3, alpha=5.0)


@pytest.fixture(name="params", scope="module")
def _params():
  return t5_checkpoints.flatten(random_t5.params(CONFIG))


def trained(config, params):
  rng = np.random.default_rng(0)
  start = config.init(params, jax.random.key(1))
  return {
    k: v + 0.2 * rng.normal(size=v.shape).astype(np.float32)
    for k, v in start.items()
  }


def logits(collections):
  rng = np.random.default_rng(0)
  inputs = rng.integers(3, 128, (3, 7)).astype(np.int32)
  targets = rng.integers(3, 128, (3, 5)).astype(np.int32)
  given = {k: t5_checkpoints.unflatten(v) for k, v in collections.items()}
  apply = jax.jit(t5.Transformer(CONFIG).apply)
  return apply(given, inputs, t5.shift_right(jnp.asarray(targets)))


@pytest.mark.parametrize("kernels", [LORA.kernels, ".*/kernel", "decoder/.*wo/kernel"])  # fmt: skip
def test_the_merged_checkpoint_says_what_the_trained_model_said(
  params, kernels
):
  config = lora.LoRA(rank=3, alpha=5.0, kernels=kernels)
  adapters = trained(config, params)
  ours = logits({"params": params, **config.variables(adapters)})
  merged = config.merge(params, adapters)
  np.testing.assert_allclose(
    logits({"params": merged}), ours, rtol=1e-4, atol=1e-4
  )
  assert np.abs(ours - logits({"params": params})).max() > 1e-2
  changed = {k for k in params if not np.array_equal(merged[k], params[k])}
  assert changed == {k for k in params if re.fullmatch(kernels, k)}
  assert {k: v.shape for k, v in merged.items()} == {
    k: v.shape for k, v in params.items()
  }


def test_the_merged_kernel_is_the_formula(params):
  adapters = trained(LORA, params)
  module = "encoder/layers_1/attention/query/"
  merged = LORA.merge(params, adapters)[module + "kernel"]
  a, b = (np.asarray(adapters[module + name], np.float64) for name in "ab")
  expected = params[module + "kernel"] + 5.0 / 3 * a @ b
  np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-7)


def test_a_fresh_addition_is_zero_and_its_count_is_rank_times_both_sides(
  params,
):
  fresh = LORA.init(params, jax.random.key(1))
  merged = LORA.merge(params, fresh)
  for path, leaf in params.items():
    np.testing.assert_array_equal(merged[path], leaf)
  # 2 encoder and 2 x 2 decoder attentions, query and value of 16 x 16.
  assert sum(v.size for v in fresh.values()) == 6 * 2 * 3 * (16 + 16)
  a = np.concatenate([v.ravel() for k, v in fresh.items() if k.endswith("/a")])
  assert abs(a.std() - 1 / 4) < 0.03  # 1 / sqrt(16 inputs)


def test_no_two_kernels_start_alike(params):
  fresh = LORA.init(params, jax.random.key(1))
  starts = {v.tobytes() for k, v in fresh.items() if k.endswith("/a")}
  assert len(starts) == 12


@pytest.mark.parametrize("kernels", ["encodr/.*", ".*/scale"])
def test_a_pattern_without_kernels_is_refused(params, kernels):
  with pytest.raises(ValueError, match=r"LoRA.kernels must match kernels.*;"):
    lora.LoRA(kernels=kernels).init(params, jax.random.key(0))


@pytest.mark.parametrize("name, value", [("rank", 0), ("alpha", float("nan"))])
def test_numbers_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"expected {name} .*{name}={value}"):
    lora.LoRA(**{name: value})
