"""Random parameters of a T5, for tests that train nothing."""

import dataclasses
import functools
import pathlib
import shutil

import jax
import numpy as np
import optax

from synthq_jax.data import shipped
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.runtime import model_files


def config(**changes):
  """Returns the smallest T5 that has every part, but for these changes."""
  sizes = {
    "vocab_size": 40,
    "emb_dim": 8,
    "num_heads": 2,
    "head_dim": 4,
    "mlp_dim": 12,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "logits_via_embedding": True,
  }
  return t5_config.T5Config(**(sizes | changes))


@functools.cache
def params(config, *, spread=0.1, seed=0):
  """Without the initialisers, which compile slowly; `spread` is of scales."""
  shapes = jax.eval_shape(
    functools.partial(t5.init_params, config), jax.random.key(0)
  )
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    noise = rng.normal(size=leaf.shape).astype(np.float32)
    if path[-1].key == "kernel":
      return noise / leaf.shape[0] ** 0.5
    return 1 + spread * noise if path[-1].key == "scale" else noise

  return jax.tree.map_with_path(fill, shapes)


def trained(loss, params, steps, rate=1e-2):
  """Takes steps of Adam."""
  tx = optax.adam(rate)

  @jax.jit
  def step(params, opt):
    updates, opt = tx.update(jax.grad(loss)(params), opt)
    return optax.apply_updates(params, updates), opt

  opt = tx.init(params)
  for _ in range(steps):
    params, opt = step(params, opt)
  return params


def save(folder: pathlib.Path) -> str:
  """Saves a T5 that reads the shipped vocabulary; returns where.

  Most of a tiny run's time is compiling: this one takes half of the shipped's.
  """
  shape = dataclasses.replace(
    t5_checkpoints.load_config(shipped.DIRECTORY),
    emb_dim=16, num_heads=2, head_dim=8, mlp_dim=16,
    num_encoder_layers=1, num_decoder_layers=1,
  )  # fmt: skip
  t5_checkpoints.save(folder, params(shape), shape)
  shutil.copy(shipped.VOCABULARY, folder / model_files.VOCABULARY_NAME)
  return str(folder)
