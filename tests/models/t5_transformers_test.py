"""Our T5 against Hugging Face's, through folders that one writes for the other."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import random_t5
from hugging_face import torch, transformers

from synthq_jax.generation import decoding
from synthq_jax.models import t5, t5_checkpoints, t5_config

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch

SHAPE = {
  "vocab_size": 40,
  "d_model": 24,
  "d_kv": 4,
  "d_ff": 40,
  "num_layers": 2,
  "num_decoder_layers": 3,
  "num_heads": 5,
}
T5_1_0 = SHAPE
T5_1_1 = SHAPE | {"feed_forward_proj": "gated-gelu", "own_head": True}
KINDS = {
  "T5 1.0": T5_1_0,
  "T5 1.1": T5_1_1,
  # What transformers 5 makes of T5 1.1 unless the head is replaced.
  "T5 1.1 with the embedding as its head": T5_1_1 | {"own_head": "shared"},
  "one decoder layer, few buckets": T5_1_0
  | {"num_decoder_layers": 1, "relative_attention_num_buckets": 8}
  | {"relative_attention_max_distance": 20},
  "mT5": T5_1_1 | {"is_mt5": True},
}
TOLERANCE = 1e-4
_EOS = t5_config.get("tiny").token_ids.eos


def fill(model, seed=0, gain=1.0):
  """Random weights of the size that T5's initialisers draw, norms included.

  With more `gain` a layer weighs more than the token it was given, which T5 1.0
  would repeat otherwise.
  """
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      values = rng.normal(size=tuple(weight.shape))
      if "layer_norm" in name:
        values = 1 + 0.3 * values
      elif weight.ndim == 2 and "shared" not in name and "bias" not in name:
        values /= weight.shape[1] ** 0.5
        values /= SHAPE["d_kv"] ** 0.5 if ".q." in name else 1
        values *= gain if ".o." in name or ".wo." in name else 1
      weight.copy_(torch.tensor(values))
  return model.eval()


def make(kind, model=None):
  """A model of transformers with random weights."""
  kind = dict(kind)
  own_head = kind.pop("own_head", False)
  prefix = "MT5" if kind.pop("is_mt5", False) else "T5"
  name = f"{prefix}ForConditionalGeneration"
  model = model or getattr(transformers, name)
  config = getattr(transformers, f"{prefix}Config")(
    **kind, tie_word_embeddings=not own_head, decoder_start_token_id=0
  )
  made = model(config)
  if own_head is True and hasattr(made, "lm_head"):
    shape = (kind["vocab_size"], kind["d_model"])
    made.lm_head.weight = torch.nn.Parameter(torch.zeros(shape))
  return fill(made)


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
  """A model of transformers, and the folder it wrote."""
  model = make(KINDS[request.param])
  folder = tmp_path_factory.mktemp("written")
  model.save_pretrained(folder)
  return model, folder


def batch(rows=3, length=170, seed=1):
  """Rows of tokens with padding, longer than the farthest bucket begins."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, SHAPE["vocab_size"], (rows, length))
  for row in range(1, rows):
    tokens[row, length * (rows - row) // rows :] = 0
  return tokens.astype(np.int32)


def their_logits(model, tokens, targets):
  """Teacher-forced logits [batch, length, vocab] of transformers."""
  with torch.no_grad():
    return model(
      input_ids=torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(tokens > 0),
      decoder_input_ids=torch.tensor(targets, dtype=torch.long),
    ).logits.numpy()


@functools.partial(jax.jit, static_argnums=1)
def our_logits(params, config, tokens, targets):
  return t5.Transformer(config).apply({"params": params}, tokens, targets)


def test_logits_are_those_of_transformers(written):
  model, folder = written
  params, config = t5_checkpoints.load(folder)
  tokens, targets = batch(), batch(seed=2)
  targets[:, 0] = 0
  theirs = their_logits(model, tokens, targets)
  ours = our_logits(params, config, tokens, targets)
  assert np.std(theirs) > 0.1  # a model of zeros would agree with any
  np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
  "kind, eos",
  [("T5 1.0", 3), ("T5 1.1", _EOS)],
)
def test_greedy_generation_is_that_of_transformers_token_for_token(
  kind, eos, tmp_path
):
  """Also where the end of a text is not id 1."""
  # Stacks of equal height: transformers' cache goes by the encoder's.
  kind = KINDS[kind] | {"num_decoder_layers": 2, "eos_token_id": eos}
  model = make(kind)
  fill(model, seed=4, gain=4.0)
  model.shared.weight.data[eos] *= 2.5  # some sequences end, some not
  model.save_pretrained(tmp_path)
  params, config = t5_checkpoints.load(tmp_path)
  tokens = np.random.default_rng(3).integers(2, SHAPE["vocab_size"], (12, 45))
  lengths = np.arange(45, 33, -1)[:, None]
  tokens = np.where(np.arange(45) < lengths, tokens, 0).astype(np.int32)
  length = 30
  written = decoding.generate(
    params,
    config,
    tokens,
    ids=[f"d{row}" for row in range(len(tokens))],
    key=jax.random.key(0),
    sampler=decoding.Greedy(),
    max_length=length,
  )[:, 0]
  theirs = model.generate(
    input_ids=torch.tensor(tokens, dtype=torch.long),
    attention_mask=torch.tensor(tokens > 0),
    do_sample=False,
    num_beams=1,
    max_new_tokens=length,
    suppress_tokens=[decoding.PAD],  # ours never writes it either
    decoder_start_token_id=0,
  ).numpy()[:, 1:]
  ended = (written == eos).any(axis=1)
  assert ended.any() and not ended.all()
  assert len(np.unique(written)) > 5
  width = theirs.shape[1]
  np.testing.assert_array_equal(written[:, :width], theirs)
  assert not written[:, width:].any()


@pytest.mark.parametrize("kind", ["T5 1.0", "T5 1.1"])
def test_an_encoder_of_transformers_encodes_the_same(kind, tmp_path):
  model = make(KINDS[kind], transformers.T5EncoderModel)
  model.save_pretrained(tmp_path)
  params, config = t5_checkpoints.load(tmp_path)
  assert set(params) == {"token_embedder", "encoder"}
  tokens = batch()
  with torch.no_grad():
    theirs = model(
      input_ids=torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(tokens > 0),
    ).last_hidden_state.numpy()
  encode = functools.partial(t5.Transformer(config).apply, method="encode")
  ours = np.asarray(jax.jit(encode)({"params": params}, tokens))
  seen = tokens > 0
  np.testing.assert_allclose(ours[seen], theirs[seen], atol=TOLERANCE, rtol=0)


def raw(folder):
  """Every tensor of the files of a folder: type, shape, bytes."""
  found = {}
  for path in sorted(folder.glob("*.safetensors")):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
      first, last = (start + offset for offset in entry["data_offsets"])
      found[name] = entry["dtype"], entry["shape"], data[first:last]
  return found


@pytest.mark.parametrize(
  ("kind", "shard", "dtype"),
  [
    ("T5 1.0", "8KB", "bfloat16"),
    ("T5 1.1", "1GB", "float16"),
    ("encoder", "8KB", "float32"),
  ],
)
def test_from_transformers_and_back_the_files_hold_the_same_bits(
  kind, shard, dtype, tmp_path, monkeypatch
):
  encoder = kind == "encoder"
  cls = transformers.T5EncoderModel if encoder else None
  model = make(KINDS["T5 1.1" if encoder else kind], cls)
  model = model.to(getattr(torch, dtype))
  model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
  params, config = t5_checkpoints.load(tmp_path / "theirs", dtype=None)
  size = 10**9 if shard == "1GB" else 8000
  monkeypatch.setattr(t5_checkpoints, "_SHARD_SIZE", size)
  t5_checkpoints.save_huggingface(tmp_path / "ours", params, config)
  files = list((tmp_path / "ours").glob("model*.safetensors"))
  assert (len(files) > 1) == (shard == "8KB")
  assert all(path.stat().st_size < size + 8000 for path in files)
  assert raw(tmp_path / "ours") == raw(tmp_path / "theirs")


CONFIG = t5_config.T5Config(
  vocab_size=40,
  emb_dim=24,
  num_heads=3,
  head_dim=5,
  mlp_dim=32,
  num_encoder_layers=2,
  num_decoder_layers=1,
  dropout_rate=0.25,
  relative_attention_num_buckets=10,
  relative_attention_max_distance=40,
)


def ours(config):
  return random_t5.params(config, spread=0.3)


@pytest.mark.parametrize(
  "changes, shard_size",
  [
    ({"logits_via_embedding": True}, 10**9),  # the shipped checkpoint's mix
    ({"mlp_activations": ("gelu",)}, 5000),
    ({"mlp_activations": ("relu", "linear")}, 10**9),
  ],
  ids=str,
)
def test_transformers_computes_the_same_from_what_we_write(
  changes, shard_size, tmp_path, monkeypatch
):
  config = dataclasses.replace(CONFIG, **changes)
  params = ours(config)
  monkeypatch.setattr(t5_checkpoints, "_SHARD_SIZE", shard_size)
  t5_checkpoints.save_huggingface(tmp_path / "t5", params, config)
  model, loaded = transformers.T5ForConditionalGeneration.from_pretrained(
    tmp_path / "t5", output_loading_info=True
  )
  assert not any(loaded.values()), loaded
  assert model.config.dropout_rate == 0.25
  assert model.config.scale_decoder_outputs == config.logits_via_embedding
  assert model.generation_config.decoder_start_token_id == 0
  tokens, targets = batch(), batch(seed=2)
  np.testing.assert_allclose(
    our_logits(params, config, tokens, targets),
    their_logits(model.eval(), tokens, targets),
    atol=TOLERANCE,
    rtol=0,
  )
  assert t5_checkpoints.load_config(tmp_path / "t5") == config


def test_transformers_reads_an_encoder_that_we_write(tmp_path):
  params = {k: ours(CONFIG)[k] for k in ("token_embedder", "encoder")}
  t5_checkpoints.save_huggingface(tmp_path / "t5", params, CONFIG)
  model, loaded = transformers.T5EncoderModel.from_pretrained(
    tmp_path / "t5", output_loading_info=True
  )
  assert not any(loaded.values()), loaded
  np.testing.assert_array_equal(
    model.encoder.block[1].layer[0].SelfAttention.o.weight.detach().numpy().T,
    params["encoder"]["layers_1"]["attention"]["out"]["kernel"],
  )


def test_a_checkpoint_of_torch_alone_is_refused_with_the_way_out(tmp_path):
  model = make(T5_1_0)
  model.save_pretrained(tmp_path)
  (tmp_path / "model.safetensors").unlink()
  torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"pytorch_model.bin.*save_pretrained"):
    t5_checkpoints.load(tmp_path)
