"""Hugging Face folders as they are found in the wild, and damaged ones."""

import dataclasses
import json
import re

import checkpoint_trees
import numpy as np
import pytest
import safetensors.numpy

from synthq_jax.models import t5_checkpoints, t5_config, token_ids
from synthq_jax.runtime import fingerprints

T5_1_1 = t5_config.get("tiny")
T5_1_0 = dataclasses.replace(
  T5_1_1, mlp_activations=("relu",), logits_via_embedding=True
)
WO = "decoder.block.1.layer.2.DenseReluDense.wo.weight"


def folder_of(path, config, shard_size=10**9):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(t5_checkpoints, "_SHARD_SIZE", shard_size)
    t5_checkpoints.save_huggingface(path, checkpoint_trees.make(config), config)
  return path


@pytest.fixture
def folder(tmp_path):
  return folder_of(tmp_path / "t5", T5_1_1)


@pytest.fixture
def tied(tmp_path):
  return folder_of(tmp_path / "t5", T5_1_0)


@pytest.fixture
def sharded(tmp_path):
  return folder_of(tmp_path / "t5", T5_1_1, 20_000)


def edit(folder, change, file="model.safetensors"):
  """Changes the tensors of a file, through the library."""
  tensors = safetensors.numpy.load_file(folder / file)
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / file, {"format": "pt"})


def configure(folder, drop=(), **fields):
  path = folder / "config.json"
  kept = json.loads(path.read_text())
  for name in drop:
    del kept[name]
  path.write_text(json.dumps(kept | fields))


def refuse(folder, *words):
  with pytest.raises(ValueError) as caught:
    t5_checkpoints.load(folder)
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert re.search(word, message), (word, message)


# What versions of transformers made of config.json.


def test_fields_that_old_versions_did_not_write_have_their_defaults(tied):
  configure(
    tied,
    drop=(
      "num_decoder_layers",
      "feed_forward_proj",
      "relative_attention_max_distance",
      "relative_attention_num_buckets",
      "dropout_rate",
      "layer_norm_epsilon",
      "scale_decoder_outputs",
      "tie_word_embeddings",
      "architectures",
      "is_encoder_decoder",
    ),
  )
  assert t5_checkpoints.load(tied)[1] == dataclasses.replace(
    T5_1_0, dropout_rate=0.1
  )


@pytest.mark.parametrize(
  "written, found",
  [
    ({"feed_forward_proj": "gated-gelu"}, ("gelu", "linear")),
    ({"feed_forward_proj": "gelu_new"}, ("gelu",)),
    (
      {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"},
      ("relu", "linear"),
    ),
    ({"feed_forward_proj": "relu", "is_gated_act": True}, ("relu", "linear")),
  ],
)
def test_activations_are_translated(folder, written, found):
  configure(folder, **written)
  assert t5_checkpoints.load_config(folder).mlp_activations == found


@pytest.mark.parametrize(
  "fields, drop, tied",
  [
    ({"tie_word_embeddings": False}, ["scale_decoder_outputs"], False),
    ({}, ["scale_decoder_outputs", "tie_word_embeddings"], True),
    (
      {"tie_word_embeddings": True, "scale_decoder_outputs": False},
      [],
      False,
    ),
    ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, [], True),
  ],
)
def test_logits_are_tied_as_each_version_of_transformers_says(
  folder, fields, drop, tied
):
  configure(folder, drop=drop, **fields)
  config = t5_checkpoints.load_config(folder)
  assert config.logits_via_embedding == tied


@pytest.mark.parametrize(
  "drop, fields, words",
  [
    ([], {"feed_forward_proj": "gelu"}, "feed_forward_proj=gelu"),
    ([], {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon=1e-06.*=1e-05"),
    ([], {"model_type": "umt5"}, "model_type=t5 or mt5, got model_type=umt5"),
    (["d_kv"], {}, "expected a T5 shape, got no d_kv"),
    ([], {"num_heads": True}, "expected a T5 shape, got .* num_heads=True"),
  ],
)
def test_a_model_that_we_do_not_compute_is_refused(folder, drop, fields, words):
  configure(folder, drop, **fields)
  refuse(folder, f"config.json: .*{words}")


def test_a_damaged_configuration_is_named(folder):
  (folder / "config.json").write_text('["model_type"]')
  refuse(folder, "config.json: expected JSON")


# One embedding under several names.


def test_copies_of_the_embedding_are_taken_for_one(folder):
  def copy(tensors):
    for stack in ("encoder", "decoder"):
      tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"]

  edit(folder, copy)
  checkpoint_trees.assert_same_bits(
    t5_checkpoints.load_huggingface(folder)[0], checkpoint_trees.make(T5_1_1)
  )
  edit(folder, lambda tensors: tensors.pop("shared.weight"))
  checkpoint_trees.assert_same_bits(
    t5_checkpoints.load_huggingface(folder)[0], checkpoint_trees.make(T5_1_1)
  )


def test_embeddings_that_differ_are_refused(folder):
  def copy(tensors):
    tensors["decoder.embed_tokens.weight"] = 1 + tensors["shared.weight"]

  edit(folder, copy)
  refuse(folder, "shared.weight and decoder.embed_tokens.weight")


def test_a_head_that_is_the_embedding_is_dropped_where_logits_are_tied(tied):
  def copy(tensors):
    tensors["lm_head.weight"] = tensors["shared.weight"]

  edit(tied, copy)
  loaded, config = t5_checkpoints.load(tied)
  assert config == T5_1_0
  checkpoint_trees.assert_same_bits(loaded, checkpoint_trees.make(T5_1_0))


def test_a_head_of_its_own_is_refused_where_logits_are_tied(tied):
  def add(tensors):
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1

  edit(tied, add)
  refuse(tied, "lm_head.weight that differs .*scale_decoder_outputs")


def test_the_embedding_is_the_head_where_it_is_shared_unscaled(folder):
  edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
  refuse(folder, "lm_head.weight .* got nothing")
  configure(folder, tie_word_embeddings=True, scale_decoder_outputs=False)
  params, _ = t5_checkpoints.load(folder)
  kernel = params["decoder"]["logits_dense"]["kernel"]
  np.testing.assert_array_equal(kernel, params["token_embedder"]["embedding"].T)


def test_what_old_conversions_hold_and_no_t5_uses_is_skipped(folder):
  name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias"

  def add(tensors):
    tensors[f"{name}.weight"] = np.ones((32, 2), np.float32)

  edit(folder, add)
  checkpoint_trees.assert_same_bits(
    t5_checkpoints.load(folder)[0], checkpoint_trees.make(T5_1_1)
  )


@pytest.mark.parametrize(
  "fields",
  [{"is_encoder_decoder": False}, {"architectures": ["T5EncoderModel"]}],
)
def test_an_encoder_alone_is_known_by_either_field(folder, fields):
  def drop(tensors):
    for name in list(tensors):
      if name.startswith(("decoder", "lm_head")):
        del tensors[name]

  edit(folder, drop)
  refuse(folder, "tensor decoder.block.0.* got nothing")
  configure(folder, **fields)
  loaded, _ = t5_checkpoints.load(folder)
  assert set(loaded) == {"token_embedder", "encoder"}


# Damage.


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda t: t.pop(WO), rf"{WO} of shape \(16, 32\), got nothing"),
    (
      lambda t: t.update({"encoder.a.weight": np.ones((2, 3), np.float32)}),
      r"encoder.a.weight of shape nothing, got \(2, 3\)",
    ),
    (
      lambda t: t.update({WO: np.ones((16, 32), np.int32)}),
      f"{WO} of a floating-point type, got int32",
    ),
  ],
  ids=["missing", "unknown", "integers"],
)
def test_a_wrong_tensor_is_named_as_the_file_names_it(folder, change, words):
  edit(folder, change)
  refuse(folder, f"tensor {words}")


def with_header(data, change):
  length = int.from_bytes(data[:8], "little")
  header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
  change(header)
  text = json.dumps(header).encode()
  return len(text).to_bytes(8, "little") + text + rest


def test_a_type_that_holds_no_weights_of_ours_is_not_called_damage(folder):
  path = folder / "model.safetensors"
  data = with_header(path.read_bytes(), lambda h: h[WO].update(dtype="U32"))
  path.write_bytes(data)
  refuse(folder, f"model.safetensors: expected tensors of .* {WO} of type U32")


def test_a_missing_part_is_named(sharded):
  next(sharded.glob("model-00002*")).unlink()
  refuse(sharded, "got no file .*model-00002")


def test_a_part_with_a_tensor_that_the_index_lacks_is_named(sharded):
  file = next(sharded.glob("model-00002*")).name
  extra = {"extra": np.ones(3, np.float32)}
  edit(sharded, lambda tensors: tensors.update(extra), file)
  refuse(sharded, file, "got extra, listed in None")


@pytest.mark.parametrize(
  "text",
  [
    *("[]", '{"weight_map": {"a": "../a"}}'),
    '{"weight_map": {"a": 3, "b": "b"}}',
  ],
)
def test_an_index_that_leads_nowhere_is_refused(sharded, text):
  (sharded / "model.safetensors.index.json").write_text(text)
  refuse(sharded, "index.json|got no file")


def test_an_adapter_beside_a_model_is_not_passed_over(folder):
  """transformers adds it to the model; alone, it is no model."""
  (folder / "adapter_config.json").write_text("{}")
  with pytest.raises(ValueError, match="adapter_config.json beside it.*merge"):
    t5_checkpoints.load(folder)
  (folder / "config.json").unlink()
  (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
  with pytest.raises(
    ValueError, match="got no file.*merge this adapter of PEFT"
  ):
    fingerprints.check_checkpoint(folder)


def test_a_layer_behind_the_model_is_not_passed_over(folder):
  """Public sentence-t5 and gtr-t5 have one: without it, vectors would differ."""
  head = "sentence_transformers.models."
  modules = [{"type": head + "Transformer", "path": ""}]
  (folder / "modules.json").write_text(json.dumps(modules))
  t5_checkpoints.load(folder)
  modules.append({"type": head + "Pooling", "path": "1_Pooling"})
  modules.append({"type": head + "Dense", "path": "2_Dense"})
  (folder / "modules.json").write_text(json.dumps(modules))
  contents = {
    "1_Pooling": {"pooling_mode": "mean"},
    "2_Dense": {
      "in_features": 8,
      "out_features": 8,
      "activation_function": "torch.nn.modules.linear.Identity",
    },
  }
  for name, content in contents.items():
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(content))
  refuse(folder, "modules.json", "a Dense layer")


def test_a_folder_without_weights_or_configuration_is_named(folder):
  (folder / "model.safetensors").unlink()
  refuse(folder, "got no file .*model.safetensors")
  (folder / "config.json").unlink()
  refuse(folder, "got no file .*config.json")


# Writing.


def test_a_folder_is_never_written_over(folder):
  before = (folder / "model.safetensors").read_bytes()
  with pytest.raises(ValueError, match="taken"):
    folder_of(folder, T5_1_0)
  assert (folder / "model.safetensors").read_bytes() == before


def test_a_shape_that_transformers_lacks_is_not_written(tmp_path):
  config = dataclasses.replace(T5_1_1, mlp_activations=("gelu", "relu"))
  with pytest.raises(ValueError, match="no T5 with mlp_activations"):
    t5_checkpoints.save_huggingface(
      tmp_path / "t5", checkpoint_trees.make(config), config
    )
  assert not list(tmp_path.iterdir())


RUT5 = token_ids.TokenIds(eos=2, unk=3)


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_special_ids_travel_with_a_model(tmp_path, form):
  config = dataclasses.replace(T5_1_1, token_ids=token_ids.TokenIds(eos=2))
  folder = folder_of(tmp_path / "t5", config)
  for name in ("config.json", "generation_config.json"):
    fields = json.loads((folder / name).read_text())
    assert (fields["eos_token_id"], fields["pad_token_id"]) == (2, 0)
  again = t5_checkpoints.convert(folder, tmp_path / "again", format=form)
  assert t5_checkpoints.load(again)[1] == config
  assert t5_checkpoints.load(again, token_ids=RUT5)[1].token_ids == RUT5


def test_ids_of_formats_without_any_are_those_of_the_vocabulary(tmp_path):
  t5_checkpoints.save(tmp_path / "ours", checkpoint_trees.make(T5_1_1), T5_1_1)
  assert "token_ids" not in (tmp_path / "ours/config.json").read_text()
  place = t5_checkpoints.convert(tmp_path / "ours", tmp_path, format="t5x")
  for source in (tmp_path / "ours", place):
    assert t5_checkpoints.load(source)[1].token_ids == token_ids.TokenIds()
    assert t5_checkpoints.load(source, token_ids=RUT5)[1].token_ids == RUT5
    to = tmp_path / f"{source.name}_hf"
    t5_checkpoints.convert(source, to, format="huggingface", token_ids=RUT5)
    assert t5_checkpoints.load_config(to).token_ids.eos == 2


def test_another_end_of_text_than_the_vocabulary_has_is_refused(folder):
  with pytest.raises(
    ValueError, match="id 2, got eos_token_id=1: .*config.json"
  ):
    t5_checkpoints.load(folder, token_ids=RUT5)


@pytest.mark.parametrize(
  "drop, fields, generation, ids",
  [
    (["eos_token_id"], {}, {"eos_token_id": [2, 7]}, (0, 2)),
    ([], {"eos_token_id": None}, {"eos_token_id": 2}, (0, 2)),
    ([], {"eos_token_id": 2, "pad_token_id": 1}, None, (1, 2)),
  ],
)
def test_special_ids_are_read_where_transformers_writes_them(
  folder, drop, fields, generation, ids
):
  configure(folder, drop, **fields)
  beside = folder / "generation_config.json"
  beside.write_text(json.dumps(generation or {}))
  found = t5_checkpoints.load(folder)[1].token_ids
  assert (found.pad, found.eos) == ids


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"pad_token_id": None}, "pad_token_id=null"),
    ({"eos_token_id": 2}, "eos_token_id=2 there and 1 in generation_config"),
    ({"decoder_start_token_id": 2}, "decoder_start_token_id=2"),
    ({"eos_token_id": "</s>"}, "eos_token_id=</s>|eos='</s>'"),
  ],
)
def test_ids_that_cannot_be_used_are_refused(folder, fields, words):
  beside = folder / "generation_config.json"
  if "2 there" not in words:
    beside.unlink()
  configure(folder, **fields)
  refuse(folder, f"config.json: expected a T5 shape, got .*({words})")


def test_an_encoder_needs_no_start(tmp_path):
  tree = checkpoint_trees.make(T5_1_1)
  del tree["decoder"]
  t5_checkpoints.save_huggingface(tmp_path / "t5", tree, T5_1_1)
  configure(tmp_path / "t5", decoder_start_token_id=None, eos_token_id=None)
  assert t5_checkpoints.load(tmp_path / "t5")[1] == T5_1_1


@pytest.mark.parametrize(
  "drop, tied", [((), False), (("feed_forward_proj",), True)]
)
def test_mt5_is_a_t5_1_1_with_logits_of_its_own(folder, drop, tied):
  """Files of transformers 4 say tie_word_embeddings=false, those of 5 true."""
  configure(
    folder,
    ["scale_decoder_outputs", *drop],
    model_type="mt5",
    architectures=["MT5ForConditionalGeneration"],
    tie_word_embeddings=tied,
  )
  loaded, found = t5_checkpoints.load(folder)
  assert found == T5_1_1
  checkpoint_trees.assert_same_bits(loaded, checkpoint_trees.make(T5_1_1))


@pytest.mark.parametrize(
  "name, content, words",
  [
    (
      "config_sentence_transformers.json",
      {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
      "got a default prompt of sentence-transformers",
    ),
    (
      "sentence_bert_config.json",
      {"do_lower_case": True},
      "got do_lower_case=true of sentence-transformers",
    ),
  ],
)
def test_settings_of_texts_that_nobody_reads_are_refused(
  folder, name, content, words
):
  """Texts of a T5 are tokenized before it is read."""
  (folder / name).write_text(json.dumps({"prompts": {}, "max_seq_length": 99}))
  assert t5_checkpoints.load(folder)
  (folder / name).write_text(json.dumps(content))
  refuse(folder, words)
