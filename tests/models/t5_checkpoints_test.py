import dataclasses

import checkpoint_trees
import jax
import numpy as np
import pytest
import safetensors.numpy

from synthq_jax.models import t5_checkpoints, t5_config

TINY = t5_config.get("tiny")


@pytest.fixture(scope="module")
def params():
  return checkpoint_trees.make(TINY)


@pytest.fixture
def saved(params, tmp_path):
  t5_checkpoints.save(tmp_path / "model", params, TINY)
  return tmp_path / "model"


def rewrite(directory, change):
  """Changes the dictionary of tensors in a saved file."""
  path = directory / "params.safetensors"
  flat = safetensors.numpy.load_file(path)
  change(flat)
  safetensors.numpy.save_file(flat, path)


def test_unusual_numbers_come_back_bit_for_bit(params, tmp_path):
  odd = np.array([-0.0, np.inf, np.nan, 1e-45], np.float32)
  odd = np.resize(odd, (TINY.emb_dim, TINY.vocab_size))
  changed = jax.tree.map(np.array, params)
  # column-major, as a transposed array lies in memory
  changed["token_embedder"]["embedding"] = odd.T
  t5_checkpoints.save(tmp_path, changed, TINY)
  loaded, _ = t5_checkpoints.load(tmp_path)
  back = loaded["token_embedder"]["embedding"]
  assert back.tobytes() == np.ascontiguousarray(odd.T).tobytes()


def test_every_field_of_the_shape_comes_back(tmp_path):
  config = dataclasses.replace(
    TINY,
    mlp_activations=("relu",),
    logits_via_embedding=True,
    dropout_rate=0.25,
    dtype="bfloat16",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
  )
  params = checkpoint_trees.make(config)
  t5_checkpoints.save(tmp_path, params, config)
  assert t5_checkpoints.load_config(tmp_path) == config
  assert t5_checkpoints.load(tmp_path)[1] == config


def test_a_missing_tensor_is_named(saved):
  name = "encoder/encoder_norm/scale"
  rewrite(saved, lambda flat: flat.pop(name))
  with pytest.raises(ValueError, match=f"tensor {name} .* got nothing"):
    t5_checkpoints.load(saved)


@pytest.mark.parametrize("name", ["params.safetensors", "config.json"])
def test_a_missing_file_is_named(saved, name):
  (saved / name).unlink()
  with pytest.raises(ValueError, match=f"got no file .*{name}"):
    t5_checkpoints.load(saved)


@pytest.mark.parametrize(
  "text, shape",
  [
    ("[1]", "T5 shape"),
    ('{"mlp_activations": ["relu"], "layers": 3}', "T5 shape"),
    ('{"kind": "static", "layers": 3}', "shape of static vectors"),
  ],
)
def test_a_configuration_that_is_no_shape_is_named(saved, text, shape):
  (saved / "config.json").write_text(text)
  with pytest.raises(ValueError, match=f"config.json: expected a {shape}, got"):
    t5_checkpoints.load_config(saved)
