"""Our BERT against Hugging Face's, through folders that it writes."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hugging_face import torch, transformers

from synthq_jax.models import bert

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch

SHAPE = {
  "vocab_size": 40,
  "hidden_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "intermediate_size": 36,
  "max_position_embeddings": 16,
}
TOKENS = np.array(
  [[2, 7, 9, 3, 12, 3], [2, 5, 3, 0, 0, 0], [2, 39, 1, 8, 3, 0]]
)
SEGMENTS = np.array(
  [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
)


def write(folder, kind="BertForSequenceClassification", **fields):
  """A model of transformers with random weights, and its folder."""
  options = {"add_pooling_layer": False} if fields.pop("bare", False) else {}
  config = transformers.BertConfig(**(SHAPE | fields))
  model = getattr(transformers, kind)(config, **options)
  rng = np.random.default_rng(0)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      values = 0.3 * rng.normal(size=tuple(weight.shape))
      is_scale = name.endswith("LayerNorm.weight")
      weight.copy_(torch.tensor(1 + values if is_scale else values))
  model.eval().save_pretrained(folder)
  return model


def theirs(model):
  with torch.no_grad():
    return model(
      input_ids=torch.tensor(TOKENS),
      token_type_ids=torch.tensor(SEGMENTS),
      attention_mask=torch.tensor((TOKENS > 0).astype(np.int64)),
    )


@functools.cache
def applied(config):
  return jax.jit(bert.Bert(config).apply)


def ours(params, config, tokens=TOKENS, segments=SEGMENTS):
  return applied(config)(
    {"params": params}, jnp.array(tokens), jnp.array(segments)
  )


@pytest.mark.parametrize(
  "fields",
  [{"num_labels": 1}, {"hidden_act": "gelu_new"}],
  ids=["one label", "gelu by tanh"],
)
def test_labels_have_the_logits_of_transformers(tmp_path, fields):
  expected = theirs(write(tmp_path, **fields)).logits.numpy()
  params, config = bert.load(tmp_path)
  assert config.num_labels == expected.shape[1]
  _, found = ours(params, config)
  np.testing.assert_allclose(found, expected, atol=1e-4)
  assert np.ptp(expected) > 0.1


@pytest.mark.parametrize("bare", [False, True], ids=["with pooler", "without"])
def test_states_are_those_of_transformers(tmp_path, bare):
  expected = theirs(write(tmp_path, "BertModel", bare=bare)).last_hidden_state
  params, config = bert.load(tmp_path)
  assert (config.num_labels, config.has_pooler) == (0, not bare)
  found, logits = ours(params, config)
  stands = TOKENS > 0
  np.testing.assert_allclose(found[stands], expected.numpy()[stands], atol=1e-4)
  assert logits.shape == (3, 0)


def test_a_fresh_model_has_the_parameters_that_are_loaded(tmp_path):
  write(tmp_path)
  params, config = bert.load(tmp_path)
  fresh = bert.init_params(config, jax.random.key(0))
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (fresh, params)]
  assert shapes[0] == shapes[1]
  assert abs(float(jnp.std(fresh["word_embedding"])) - 0.02) < 0.002


def rewrite(folder, change):
  """Lets a function change the tensors of a folder."""
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  safetensors.numpy.save_file(change(tensors), path)


def test_names_of_old_files_and_heads_of_pre_training_are_understood(tmp_path):
  expected = theirs(write(tmp_path)).logits.numpy()

  def age(tensors):
    old = {}
    for name, tensor in tensors.items():
      if "LayerNorm" in name:
        name = name.replace("weight", "gamma").replace("bias", "beta")
      old[name] = tensor
    old["bert.embeddings.position_ids"] = np.arange(16)[None]
    old["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    return old

  rewrite(tmp_path, age)
  _, found = ours(*bert.load(tmp_path))
  np.testing.assert_allclose(found, expected, atol=1e-4)


def changed_config(folder, **fields):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
  "spoil,message",
  [
    (lambda d: (d / "config.json").unlink(), "got no file"),
    (lambda d: (d / "config.json").write_text("{"), "expected a BERT, got"),
    (lambda d: changed_config(d, model_type="t5"), "got model_type='t5'"),
    (lambda d: changed_config(d, is_decoder=True), "got is_decoder=true"),
    (
      lambda d: changed_config(d, position_embedding_type="relative_key"),
      "position_embedding_type='relative_key'",
    ),
    (lambda d: changed_config(d, hidden_act="silu"), "got 'silu'"),
    (
      lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
      "got pytorch_model.bin: save the model as one file",
    ),
    (
      lambda d: rewrite(
        d, lambda t: {k: v for k, v in t.items() if "1.output.dense.b" not in k}
      ),
      "encoder.layer.1.output.dense.bias of shape (24,), got nothing",
    ),
  ],
)
def test_a_folder_that_is_no_bert_is_refused(tmp_path, spoil, message):
  write(tmp_path)
  spoil(tmp_path)
  with pytest.raises(ValueError, match=re.escape(message)):
    bert.load(tmp_path)


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"num_layers": 0}, "num_layers in [1, 1000], got num_layers=0"),
    ({"emb_dim": 10}, "multiple of num_heads, got emb_dim=10, num_heads=4"),
    ({"dropout_rate": 1.0}, "dropout_rate=1.0"),
    ({"num_labels": 2, "has_pooler": False}, "needs has_pooler=True"),
  ],
)
def test_shapes_out_of_range_are_refused(fields, message):
  shape = {"vocab_size": 9, "emb_dim": 8, "num_heads": 4, "mlp_dim": 8}
  with pytest.raises(ValueError, match=re.escape(message)):
    bert.BertConfig(**({"num_layers": 1} | shape | fields))
