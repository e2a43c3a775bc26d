import dataclasses
import json

import checkpoint_trees
import jax
import numpy as np
import pytest
import safetensors.numpy

from synthq_jax.models import dual_encoder, t5_checkpoints, t5_config

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


def test_names_are_joined_paths_and_come_apart_again(params):
  flat = t5_checkpoints.flatten(params)
  assert "encoder/layers_1/attention/query/kernel" in flat
  assert flat["token_embedder/embedding"].shape == (128, 16)
  assert len(flat) == len(jax.tree.leaves(params))
  back = t5_checkpoints.unflatten(flat)
  jax.tree.map(np.testing.assert_array_equal, back, dict(params))


def test_a_file_with_the_encoder_alone_loads_and_encodes(params, tmp_path):
  encoder = {k: v for k, v in params.items() if k != "decoder"}
  t5_checkpoints.save(tmp_path, encoder, TINY)
  loaded, config = t5_checkpoints.load(tmp_path)
  assert set(loaded) == {"encoder", "token_embedder"}
  tokens = np.array([[5, 6, 1], [7, 1, 0]], np.int32)
  encode = jax.jit(dual_encoder.encode, static_argnums=1)
  np.testing.assert_array_equal(
    encode(loaded, config, tokens),
    encode({k: params[k] for k in loaded}, TINY, tokens),
  )


@pytest.mark.parametrize(
  "name",
  ["encoder/encoder_norm/scale", "decoder/layers_0/mlp/wo/kernel"],
)
def test_a_missing_tensor_is_named(saved, name):
  rewrite(saved, lambda flat: flat.pop(name))
  with pytest.raises(ValueError, match=f"tensor {name} .* got nothing"):
    t5_checkpoints.load(saved)


def test_parameters_of_another_shape_than_the_configurations_are_refused(saved):
  fields = json.loads((saved / "config.json").read_text())
  (saved / "config.json").write_text(json.dumps(fields | {"vocab_size": 256}))
  with pytest.raises(ValueError, match=r"\(16, 256\), got \(16, 128\)"):
    t5_checkpoints.load(saved)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_damaged_file_is_named(saved, kept):
  path = saved / "params.safetensors"
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match="params.safetensors: .*damaged"):
    t5_checkpoints.load(saved)


@pytest.mark.parametrize("name", ["params.safetensors", "config.json"])
def test_a_missing_file_is_named(saved, name):
  (saved / name).unlink()
  with pytest.raises(ValueError, match=f"got no file .*{name}"):
    t5_checkpoints.load(saved)


@pytest.mark.parametrize(
  "text, shape",
  [
    *((text, "T5 shape") for text in ("{", "[1]", "{}")),
    ('{"mlp_activations": ["relu"], "layers": 3}', "T5 shape"),
    ('{"kind": "static", "layers": 3}', "shape of static vectors"),
    ('{"kind": "static", "vocab_size": "4", "emb_dim": 2}', "shape of .*"),
  ],
)
def test_a_configuration_that_is_no_shape_is_named(saved, text, shape):
  (saved / "config.json").write_text(text)
  with pytest.raises(ValueError, match=f"config.json: expected a {shape}, got"):
    t5_checkpoints.load_config(saved)


def test_saving_again_replaces_the_files_and_leaves_no_other(saved, params):
  doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
  t5_checkpoints.save(saved, doubled, TINY)
  loaded, _ = t5_checkpoints.load(saved)
  jax.tree.map(np.testing.assert_array_equal, loaded, doubled)
  names = {path.name for path in saved.iterdir()}
  assert names == {"params.safetensors", "config.json"}
